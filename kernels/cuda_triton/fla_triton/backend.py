"""What every Triton backend has in common."""

import torch

from fla_dispatch import Backend
from fla_triton.launch import INTERPRETED

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class TritonBackend(Backend):
    name = "triton"
    priority = 20
    package = "triton"
    env = "FLA_TRITON"

    @property
    def limits(self):
        if INTERPRETED:
            return {"device": ("cuda", "cpu"), "dtype": FLOATS}
        return {"device": ("cuda",), "arch": ("sm80+", "gfx90a+"), "dtype": FLOATS}
