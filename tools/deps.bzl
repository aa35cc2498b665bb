"""What the workspace fetches. WORKSPACE files call it; extensions.bzl calls it for bzlmod."""

load("//tools/pip:pip_repository.bzl", "pip_repository")
load("//tools/python:local_python.bzl", "local_python")

def fla_dependencies():
    """Declares fla_python and the environments fla_pip_*. Nothing is fetched before a target asks for it."""
    local_python(name = "fla_python")

    # Of its own, so that compiling the registry does not fetch torch.
    pip_repository(
        name = "fla_pip_build",
        locks = [Label("//tools/pip:build.lock")],
    )
    pip_repository(
        name = "fla_pip_torch",
        choose = "torch",
        choose_env = "FLA_TORCH",
        locks = [
            Label("//tools/pip:cpu.lock"),
            Label("//tools/pip:cuda.lock"),
        ],
    )

    # The other Triton that kernels must compile with.
    pip_repository(
        name = "fla_pip_triton_next",
        locks = [Label("//tools/pip:triton_next.lock")],
    )
