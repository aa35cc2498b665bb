"""fla_py_test: pytest under bazel test."""

load("@rules_python//python:defs.bzl", "py_test")

def fla_py_test(name, srcs, deps = [], args = [], env = {}, tags = [], **kwargs):
    """Runs `srcs` with pytest. A test sees what it depends on and nothing else of any Python environment.

    Args:
      name: target name.
      srcs: test files.
      deps: what they import; pytest itself is added.
      args: further arguments of pytest.
      env: environment of the test.
      tags: a test tagged "exclusive" runs alone and gets all cores; any other gets one thread.
      **kwargs: for py_test.
    """
    threads = {} if "exclusive" in tags else {"OMP_NUM_THREADS": "1"}
    py_test(
        name = name,
        srcs = srcs + [Label("//tools/pytest:main.py")],
        main = Label("//tools/pytest:main.py"),
        args = args + ["$(rootpath %s)" % src for src in srcs],
        env = threads | env,
        legacy_create_init = False,
        tags = tags,
        deps = deps + [Label("//tools/pip:pytest")],
        **kwargs
    )
