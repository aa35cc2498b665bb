"""How a kernel is tiled: candidates in order of preference, and what was measured on a device.

Nothing is timed when a kernel runs. The configuration is the one ``configs/<device>.json`` holds for the kernel and the
problem (tools/tune writes it), else the kernel's first candidate; one that does not fit the device's shared memory
makes way for the next.
"""

import functools
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True, slots=True)
class Problem:
    """All that a configuration may depend on: never a number of tokens, sequences or heads."""

    K: int
    V: int
    bits: int  # of a number that the matrix units multiply: 16 (bf16) or 32
    C: int = 64  # tokens per chunk

    def __str__(self):
        return f"K{self.K} V{self.V} {self.bits}bit C{self.C}"


@dataclass(frozen=True, slots=True)
class Config:
    """Tile widths (None where a kernel has no such tile) and what the compiler is told."""

    BK: int | None = None
    BV: int | None = None
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None

    @property
    def tiles(self) -> dict[str, int]:
        return {name: size for name in ("BK", "BV") if (size := getattr(self, name)) is not None}

    @property
    def options(self) -> dict[str, int]:
        """What the compiler is told. It may not contract a * b + c by itself: which of two products it takes depends on
        what else is in a kernel, and bits on that."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": False}
        return options if self.maxnreg is None else options | {"maxnreg": self.maxnreg}

    def __str__(self):
        return " ".join(f"{name}={value}" for name, value in asdict(self).items() if value is not None)


def preferred(kernel: str, problem: Problem, device: str, candidates: tuple[Config, ...]) -> tuple[Config, ...]:
    """``candidates`` with the measured one of ``device`` in front."""
    measured = _measured(device).get(kernel, {}).get(str(problem))
    if measured is None:
        return candidates
    best = Config(**measured)
    return best, *(c for c in candidates if c != best)


@functools.cache
def _measured(device: str) -> dict:
    file = FOLDER / f"{device}.json"
    if not file.exists():
        return {}
    try:
        return json.loads(file.read_text())["kernels"]
    except (ValueError, KeyError) as fault:
        warnings.warn(
            f"{file.name} is broken ({fault}) and ignored: write it anew with tools/tune",
            stacklevel=2,
        )
        return {}
