"""The same values laid out in memory as real programs lay them out. What lies between the values is NaN."""

import math

import torch

SPARE = 4096  # elements behind a prefix


def _nan(shape, x):
    return torch.full(shape, math.nan, dtype=x.dtype, device=x.device)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Every other element of something wider: no stride is what it seems."""
    if x.dim() == 0:
        return x
    wide = _nan((*x.shape[:-1], 2 * x.shape[-1] + 3), x)
    wide[..., 1 : 2 * x.shape[-1] + 1 : 2] = x
    return wide[..., 1 : 2 * x.shape[-1] + 1 : 2]


def pitched(x: torch.Tensor) -> torch.Tensor:
    """A column slice of a fused projection: rows are further apart than they are long."""
    if x.dim() == 0:
        return x
    wide = _nan((*x.shape[:-1], x.shape[-1] + 8), x)
    wide[..., 5 : 5 + x.shape[-1]] = x
    return wide[..., 5 : 5 + x.shape[-1]]


def transposed(x: torch.Tensor) -> torch.Tensor:
    """Stored with the last two axes exchanged, as a transpose of [B, H, T, D] leaves it."""
    if x.dim() < 2:
        return strided(x)
    turned = _nan((*x.shape[:-2], x.shape[-1], x.shape[-2]), x)
    turned[...] = x.transpose(-1, -2)
    return turned.transpose(-1, -2)


def prefix(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, at the head of a larger buffer: whoever reads past the end reads NaN."""
    buffer = _nan((x.numel() + SPARE,), x)
    buffer[: x.numel()] = x.flatten()
    return buffer[: x.numel()].view(x.shape)


def odd(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, one element behind the head of a larger buffer: at a multiple of no 16 bytes."""
    buffer = _nan((x.numel() + SPARE,), x)
    buffer[1 : 1 + x.numel()] = x.flatten()
    return buffer[1 : 1 + x.numel()].view(x.shape)


LAYOUTS = {"strided": strided, "pitched": pitched, "transposed": transposed, "prefix": prefix, "odd": odd}
