"""Operators on the named shapes of their declarations: inputs, the bytes and FLOPs they cannot do without.

A named shape that gives N is packed: N uneven sequences in one row.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

import facade.ops  # noqa: F401  declares the operators
from fla_dispatch import Operator, operator_of

BANDWIDTH, RATE = 4.3e12, 790e12  # bytes/s of a copy and bf16 FLOP/s of a product, as measured on an H200
CHUNK = 64
# Uneven lengths, of which N neighbours, scaled, make a packed shape.
UNEVEN = (97, 4001, 256, 1023, 7168, 513, 64, 2048, 3333, 1500, 37, 5120, 811, 1777, 2200, 2820)

GATED = ("A_log", "dt_bias")
# What a call is given beyond its required tensors: optional ones, and options.
OPTIONAL = {"fused_recurrent_kda": ("initial_state",), "fused_kda_gate": GATED, "kda_gate_chunk_cumsum": GATED}
OPTIONS = {
    "chunk_kda": {"use_qk_l2norm_in_kernel": True, "safe_gate": True, "lower_bound": -5.0},
    "fused_recurrent_kda": {"use_qk_l2norm_in_kernel": True, "output_final_state": True},
    "kda_gate_chunk_cumsum": {"chunk_size": CHUNK},
}
KEPT_IN_FP32 = ("initial_state", *GATED)


def lengths(N: int, T: int) -> tuple[int, ...]:
    """``N`` uneven lengths that add up to ``T``."""
    raw = [UNEVEN[i % len(UNEVEN)] for i in range(N)]
    scaled = [max(1, x * T // sum(raw)) for x in raw]
    scaled[-1] += T - sum(scaled)
    if scaled[-1] < 1:
        raise ValueError(f"{T} tokens are too few for {N} uneven sequences")
    return tuple(scaled)


@dataclass(frozen=True)
class Workload:
    """An operator on one shape."""

    name: str  # of the operator
    shape: str
    sizes: Mapping[str, int]
    dtype: torch.dtype = torch.bfloat16

    @cached_property
    def operator(self) -> Operator:
        return operator_of(self.name)

    @property
    def key(self) -> str:
        return f"{self.name}/{self.shape}"

    @property
    def offsets(self) -> list[int] | None:
        """Boundaries of packed sequences."""
        if "N" not in self.sizes or "cu_seqlens" not in self.operator.declaration.names:
            return None
        return [0, *itertools.accumulate(lengths(self.sizes["N"], self.sizes["T"]))]

    @property
    def options(self) -> dict[str, object]:
        return dict(OPTIONS.get(self.name, {}))

    @property
    def tensors(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every floating-point input."""
        sizes = {"N": self.sizes["B"], **self.sizes}
        return {
            p.name: (
                tuple(dim.size(sizes) for dim in p.shapes[0]),
                torch.float32 if p.name in KEPT_IN_FP32 else self.dtype,
            )
            for p in self.operator.declaration.tensors
            if p.differentiable and (not p.optional or p.name in OPTIONAL.get(self.name, ()))
        }

    def inputs(self, device: str = "cuda") -> dict[str, torch.Tensor]:
        """New random inputs, as a layer could have them: normalised keys, gates of at least -5, beta in (0, 1)."""
        made = {name: self._values(name, shape, device).to(dtype) for name, (shape, dtype) in self.tensors.items()}
        if self.offsets is not None:
            made["cu_seqlens"] = torch.tensor(self.offsets, device=device)
        return made

    def _values(self, name, shape, device):
        x = torch.randn(shape, device=device)
        if name == "k":
            return torch.nn.functional.normalize(x, dim=-1)
        if name == "g" and "A_log" not in self.tensors:
            return torch.nn.functional.logsigmoid(x).clamp_min(-5)
        if name == "beta":
            return x.sigmoid()
        return torch.rand(shape, device=device) if name in GATED else x

    # --- what it cannot do without ---

    @property
    def input_bytes(self) -> int:
        return sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in self.tensors.values())

    @property
    def output_bytes(self) -> int:
        B, T, HV = (self.sizes[letter] for letter in ("B", "T", "HV"))
        if "v" not in self.tensors:
            return B * T * HV * self.sizes["K"] * 4
        states = 4 * torch.Size(self.tensors["initial_state"][0]).numel() if "initial_state" in self.tensors else 0
        return B * T * HV * self.sizes["V"] * self.dtype.itemsize + states

    def bytes(self, training: bool) -> int:
        """Inputs read and outputs written once; backward reads both again and writes a gradient of every input."""
        forward = self.input_bytes + self.output_bytes
        return 2 * forward + self.input_bytes if training else forward

    def flops(self, training: bool) -> float:
        """Of the algorithm in chunks of 64 with full tiles; backward counts twice as much as forward."""
        if "v" not in self.tensors:
            return 0.0
        B, T, HV, K, V = (self.sizes[letter] for letter in ("B", "T", "HV", "K", "V"))
        # q k^T, k k^T, w = R k; R v, A u; the inverse R; w h, (q exp) h, k^T u.
        products = 3 * CHUNK * K + 2 * CHUNK * V + CHUNK**2 / 3 + 3 * K * V if T > 1 else 3 * K * V
        return 2 * products * B * T * HV * (3 if training else 1)

    def floor(self, training: bool) -> float:
        """Milliseconds below which no version runs on an H200."""
        return 1e3 * max(self.bytes(training) / BANDWIDTH, self.flops(training) / RATE)
