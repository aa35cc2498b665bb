"""local_python: a Python toolchain from an interpreter of the host, isolated from its site-packages by an empty venv."""

# Tested first; the others are declared.
_VERSIONS = ["3.11", "3.12", "3.13"]

_BUILD = """\
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "{root}/env/bin/python",
    python_version = "PY3",
    stub_shebang = "#!/usr/bin/env python3",
)

py_runtime_pair(name = "pair", py3_runtime = ":runtime")

toolchain(name = "toolchain", toolchain = ":pair", toolchain_type = "@bazel_tools//tools/python:toolchain_type")

cc_library(name = "headers", hdrs = glob(["include/**/*.h"]), includes = ["include"])
"""

_PROBE = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_path('include'), sys.executable, sep='\\n')"

def _probe(ctx, python):
    """(version, include folder, executable) of an interpreter, or None where it does not run (a pyenv shim, say)."""
    result = ctx.execute([python, "-I", "-c", _PROBE])
    return None if result.return_code else result.stdout.splitlines()

def _find(ctx):
    chosen = ctx.os.environ.get("FLA_PYTHON")
    names = [chosen] if chosen else ["python" + version for version in _VERSIONS] + ["python3"]
    for name in names:
        python = name if "/" in name else ctx.which(name)
        found = _probe(ctx, python) if python else None
        if found and found[0] in _VERSIONS:
            return found
    if chosen:
        fail("FLA_PYTHON=%s is no working Python %s." % (chosen, ", ".join(_VERSIONS)))
    fail("No working Python %s is on PATH: install one, or name one with FLA_PYTHON=/path/to/python." % ", ".join(_VERSIONS))

def _local_python_impl(ctx):
    version, include, executable = _find(ctx)
    result = ctx.execute([executable, "-I", "-m", "venv", "env"])
    if result.return_code:
        fail("%s cannot make a virtual environment: install its venv module (Debian: python%s-venv).\n%s%s" %
             (executable, version, result.stdout, result.stderr))
    if not ctx.path(include + "/Python.h").exists:
        fail("%s has no C headers in %s: install them (Debian: python%s-dev)." % (executable, include, version))
    ctx.symlink(include, "include")
    ctx.file("BUILD.bazel", _BUILD.format(root = ctx.path("")))

local_python = repository_rule(
    implementation = _local_python_impl,
    environ = ["FLA_PYTHON"],
    configure = True,
)
