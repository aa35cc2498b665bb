"""Inputs that anyone can build again from a formula, for numbers that are written down."""

import math

import torch


def wave(shape, phase: float, amplitude: float = 1.0, offset: float = 0.0) -> torch.Tensor:
    """offset + amplitude * sin(0.37 i + phase) over the flat index i, rounded to fp32, as fp64."""
    i = torch.arange(math.prod(shape), dtype=torch.float64)
    return (offset + amplitude * torch.sin(0.37 * i + phase)).reshape(shape).float().double()


def layer(B, T, H, HV, K, V, N, vector_gate):
    """q, k, v, g, beta, initial_state of a gated delta rule; without ``vector_gate`` one gate per head, for all K."""
    g = -wave((B, T, HV, K) if vector_gate else (B, T, HV), 0.5, 2).abs()
    return {"q": wave((B, T, H, K), 0.1), "k": wave((B, T, H, K), 0.2), "v": wave((B, T, HV, V), 0.3),
            "g": g if vector_gate else g[..., None].expand(B, T, HV, K), "beta": wave((B, T, HV), 0.4, 0.45, 0.5),
            "initial_state": wave((N, HV, K, V), 0.6, 0.1)}


def close(found: float, documented: float) -> bool:
    """Equal in all nine digits that were written down."""
    return math.isclose(found, documented, rel_tol=1e-8)
