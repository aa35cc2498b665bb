"""Means over chunks of tokens."""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops.utils.cumsum import SHAPES
from fla_dispatch import Result, Rule, dispatch

__all__ = ["mean_pooling"]


@dispatch(
    "pooling", returns=Result("B NT H K", "x"), rules=(Rule("chunk_size > 0", "`chunk_size` must be positive"),),
    chunk_size="chunk_size", tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def mean_pooling(
    x: Float[Tensor, "B T H K"],
    chunk_size: int,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""The mean of the tokens of each chunk of a sequence.

    Per sequence, chunk c and channel, with n_c = chunk_size tokens, or those that the last chunk has::

        y_c = (1 / n_c) * sum of x_t over the tokens t of the chunk

    Args:
        x: [B, T, H, K].
        chunk_size: any positive number of tokens; chunks count from the start of each sequence.
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. An empty sequence has no
            chunk; tokens past the last entry belong to none, and their gradients are 0.

    Returns:
        The means [B, NT, H, K] in x's dtype, NT = ceil(T / chunk_size); of packed sequences [1, NT, H, K], one sequence
        after another, NT being the sum over them. Differentiable in x, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import mean_pooling
        >>> mean_pooling(torch.arange(5.0).view(1, 5, 1, 1), 2)[0, :, 0, 0].tolist()
        [0.5, 2.5, 4.0]
    """
    return reference.chunks.mean("mean_pooling", x, chunk_size, cu_seqlens)
