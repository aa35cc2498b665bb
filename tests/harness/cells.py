"""A cell is one subject (an operator, or a few close ones) on one backend. Every cell that exists is listed here."""

import os
from dataclasses import dataclass

import torch

# (subject, backend, hardware): what //tests declares as <subject>_<backend>; a test holds the two equal.
CELLS = (
    ("chunk_kda", "reference", "cpu"),
    ("fused_recurrent_kda", "reference", "cpu"),
    ("kda_gate", "reference", "cpu"),
    ("simple_gla", "reference", "cpu"),
    ("retention", "reference", "cpu"),
    ("lightning_attn", "reference", "cpu"),
    ("gla", "reference", "cpu"),
    ("delta_rule", "reference", "cpu"),
    ("gated_delta_rule", "reference", "cpu"),
    ("cumsum", "reference", "cpu"),
    ("mean_pooling", "reference", "cpu"),
    ("solve_tril", "reference", "cpu"),
    ("softmax", "reference", "cpu"),
    ("sinkhorn", "reference", "cpu"),
    ("linear_attn", "reference", "cpu"),
    ("rwkv6", "reference", "cpu"),
    ("chunk_kda", "triton", "cpu"),
    ("fused_recurrent_kda", "triton", "cpu"),
    ("kda_gate", "triton", "cpu"),
    ("chunk_kda", "triton", "h200"),
    ("fused_recurrent_kda", "triton", "h200"),
    ("kda_gate", "triton", "h200"),
)

# Toolchains whose kernels run in an interpreter on the CPU, a thousand times slower than anywhere else.
INTERPRETED = ("triton",)


@dataclass(frozen=True)
class Cell:
    subject: str
    backend: str
    device: torch.device

    @property
    def interpreted(self) -> bool:
        return self.backend in INTERPRETED and self.device.type == "cpu"

    def __str__(self):
        return f"{self.subject}-{self.backend}"


def selected() -> list[Cell]:
    """All cells, or the one that FLA_TEST_OP and FLA_TEST_BACKEND name.

    FLA_TEST_DEVICE (a lane sets it) is where cells run that are declared for other hardware than the CPU.
    """
    accelerator = os.environ.get("FLA_TEST_DEVICE", "cpu")
    subject, backend = os.environ.get("FLA_TEST_OP"), os.environ.get("FLA_TEST_BACKEND")
    hardware: dict[tuple[str, str], set[str]] = {}
    for s, b, where in CELLS:
        hardware.setdefault((s, b), set()).add(where)
    cells = [
        Cell(s, b, torch.device("cpu" if where == {"cpu"} else accelerator))
        for (s, b), where in hardware.items()
        if subject in (None, s) and backend in (None, b)
    ]
    if not cells:
        raise ValueError(f"no cell {subject}_{backend}; there are {', '.join(f'{s}_{b}' for s, b in hardware)}")
    return cells
