"""Inverses of the unit lower triangular tiles of a chunked operator."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from fla_dispatch import Result, Rule, dispatch

__all__ = ["solve_tril"]

SHAPES = {
    "ci": dict(B=1, T=63, H=2, C=16),
    "train_8k": dict(B=1, T=8192, H=32, C=64),
    "packed_32k": dict(B=1, T=32768, N=16, H=16, C=64),
}


@dispatch(
    "solve_tril", returns=Result("B T H C", ("output_dtype", "A")),
    rules=(Rule("C > 0 and C & (C - 1) == 0", "a tile has a power of two of columns"),), tolerance="linear",
    shapes=SHAPES,
)  # fmt: skip
def solve_tril(
    A: Float[Tensor, "B T H C"],
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    chunk_indices: object | None = None,
    output_dtype: torch.dtype | None = torch.float,
):
    r"""The inverse (I + A)^-1 of every tile of a chunked operator.

    Chunks of C tokens, counted from the start of each sequence, have one tile [C, C] per head: row i of it is
    A[:, t], where t is token i of the chunk.

    Args:
        A: rows of the tiles [B, T, H, C]. Only what lies strictly below the diagonal of a tile is read.
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Tokens past the last
            entry give 0.
        chunk_indices: what ``fla.ops`` would otherwise compute from cu_seqlens; nothing here needs it.
        output_dtype: of the result; None: that of A. The arithmetic is float32 (float64 for float64 input).

    Returns:
        Rows of the inverses [B, T, H, C], lower triangular; columns of tokens that a short last chunk does not have are
        0. Differentiable in A, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import solve_tril
        >>> A = torch.tensor([[0.0, 0.0], [3.0, 0.0]]).view(1, 2, 1, 2)
        >>> solve_tril(A)[0, :, 0].tolist()
        [[1.0, 0.0], [-3.0, 1.0]]

    Where this differs from ``fla.ops.utils.solve_tril``: it has a gradient, takes any power of two as C (16, 32 or 64
    there), and refuses others by ``ValueError``.
    """
    return reference.chunks.unit_lower("solve_tril", A, cu_seqlens, output_dtype)
