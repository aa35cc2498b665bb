"""A cell is one subject (an operator, or a few close ones) on one backend. Every cell that exists is listed here."""

import os
from dataclasses import dataclass

import torch

# (subject, backend, hardware): what //tests declares as <subject>_<backend>; a test holds the two equal.
CELLS = (
    ("chunk_kda", "reference", "cpu"),
    ("fused_recurrent_kda", "reference", "cpu"),
    ("kda_gate", "reference", "cpu"),
)


@dataclass(frozen=True)
class Cell:
    subject: str
    backend: str
    device: torch.device

    def __str__(self):
        return f"{self.subject}-{self.backend}"


def selected() -> list[Cell]:
    """All cells, or the one that FLA_TEST_OP and FLA_TEST_BACKEND name; on FLA_TEST_DEVICE, by default the CPU."""
    device = torch.device(os.environ.get("FLA_TEST_DEVICE", "cpu"))
    subject, backend = os.environ.get("FLA_TEST_OP"), os.environ.get("FLA_TEST_BACKEND")
    pairs = dict.fromkeys((s, b) for s, b, _ in CELLS)
    cells = [Cell(s, b, device) for s, b in pairs if subject in (None, s) and backend in (None, b)]
    if not cells:
        raise ValueError(f"no cell {subject}_{backend}; there are {', '.join(f'{s}_{b}' for s, b in pairs)}")
    return cells
