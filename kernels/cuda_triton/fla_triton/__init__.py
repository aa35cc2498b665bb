"""Kernels in Triton: the portable backend of NVIDIA and AMD GPUs. Importing this package imports no toolchain."""

OPERATIONS = {"kda": "fla_triton.kda"}
