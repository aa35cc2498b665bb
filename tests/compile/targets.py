"""The GPUs that kernels are compiled for, as Triton's compiler and launcher see them. None of them is there."""

import itertools
from dataclasses import dataclass

import torch

KB = 1024


@dataclass(frozen=True)
class Target:
    backend: str
    arch: int | str
    warp_size: int
    shared: int  # bytes of shared memory that a program may take
    device: str = ""  # whose measured configurations are used: a file of configs/


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 163 * KB, "nvidia_a100"),
    "sm_90": Target("cuda", 90, 32, 227 * KB, "nvidia_h200"),
    "sm_100": Target("cuda", 100, 32, 227 * KB, "nvidia_b200"),
    "gfx942": Target("hip", "gfx942", 64, 64 * KB, "amd_instinct_mi300x"),
}

_numbers = itertools.count()


class PaperDriver:
    """What Triton asks a driver for when it compiles. Each has a device number of its own: compiled kernels and limits
    are remembered by it."""

    def __init__(self, target: Target, shared: int | None = None):
        self.target, self.shared, self.number = target, shared or target.shared, next(_numbers)
        self.utils = self

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.target.backend, self.target.arch, self.target.warp_size)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device=None) -> int:
        return 0

    def get_device_properties(self, device) -> dict:
        return {"max_shared_mem": self.shared, "multiprocessor_count": 1, "warpSize": self.target.warp_size}

    def get_active_torch_device(self):
        return torch.device("cpu")

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def map_python_to_cpp_type(ty: str) -> str:
        return ty
