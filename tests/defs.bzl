"""Test macros of this folder."""

load("//tools/pytest:defs.bzl", _fla_py_test = "fla_py_test")

# Where a cell runs: torch's name of the device, the lane's tag, and the accelerator that its machine must have.
_HARDWARE = {
    "cpu": struct(device = "cpu", lane = None, accelerator = None),
    "h200": struct(device = "cuda", lane = "gpu", accelerator = "//tools/lanes:cuda_sm90"),
    "ascend": struct(device = "npu", lane = "npu", accelerator = "//tools/lanes:ascend_910b"),
}

# Toolchains whose kernels run in an interpreter on the CPU.
_INTERPRETED = {
    "triton": struct(
        env = {
            "OPENBLAS_NUM_THREADS": "1",
            "TRITON_INTERPRET": "1",
        },
        deps = ["//tools/pip:numpy"],
    ),
}

def fla_py_test(name, deps = [], timeout = "long", **kwargs):
    """A test of this repository: pytest with the settings and fixtures of //tests, which limit each case to a minute."""
    _fla_py_test(
        name = name,
        timeout = timeout,
        deps = deps + [Label("//tests:support")],
        **kwargs
    )

def kernel_test(op, backend, hardware, deps = [], tags = [], env = {}, **kwargs):
    """The one test body on one cell: //tests:<op>_<backend>, and //tests:<op>_<backend>_<hardware> off the CPU.

    Args:
      op: public operator, "chunk_kda".
      backend: "reference", "triton" …
      hardware: lane that runs the cell: "cpu", "h200" or "ascend".
      deps: the kernel tree.
      tags: further tags.
      env: further environment.
      **kwargs: for py_test.
    """
    if hardware not in _HARDWARE:
        fail("hardware = %r: must be one of %s" % (hardware, ", ".join(_HARDWARE)))
    machine = _HARDWARE[hardware]
    interpreter = _INTERPRETED.get(backend) if machine.device == "cpu" else None
    fla_py_test(
        name = "%s_%s" % (op, backend) + ("_" + hardware if machine.lane else ""),
        srcs = ["op_test.py"],
        env = {
            "FLA_TEST_BACKEND": backend,
            "FLA_TEST_DEVICE": machine.device,
            "FLA_TEST_OP": op,
        } | (interpreter.env if interpreter else {}) | env,
        tags = tags + [
            "op=" + op,
            "backend=" + backend,
            "hardware=" + hardware,
        ] + ([machine.lane, "exclusive", "manual"] if machine.lane else []),
        target_compatible_with = [Label(machine.accelerator)] if machine.accelerator else [],
        deps = deps + [Label("//facade")] + [Label(dep) for dep in (interpreter.deps if interpreter else [])],
        **kwargs
    )

def lane_suite(name, tag):
    """Suite of the tests above it that carry `tag`, "manual" ones included. Without any, bazel test says so and fails."""
    native.test_suite(
        name = name,
        tags = [tag],
        tests = [test for test, rule in native.existing_rules().items() if tag in rule["tags"]],
    )
