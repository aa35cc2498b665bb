"""pybind_extension: a pybind11 module that Python imports from its package."""

load("@rules_cc//cc:defs.bzl", "cc_binary")
load("@rules_python//python:defs.bzl", "py_library")

def pybind_extension(name, module, srcs, **kwargs):
    """Compiles `srcs` into the shared object of `module` and wraps it as a py_library called `name`.

    Args:
      name: target of the py_library.
      module: path of the module below the BUILD file, without suffix: "fla_dispatch/_registry".
      srcs: C++ sources and headers.
      **kwargs: for both targets (visibility, tags ...).
    """
    cc_binary(
        name = module + ".so",
        srcs = srcs,
        copts = [
            "-O2",
            "-std=c++17",
            "-fexceptions",
            "-fvisibility=hidden",
        ],
        linkshared = True,
        deps = [
            Label("//tools/pip:pybind11_headers"),
            Label("//tools/python:headers"),
        ],
        **kwargs
    )
    py_library(
        name = name,
        data = [":%s.so" % module],
        **kwargs
    )
