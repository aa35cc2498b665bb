"""Sums of tokens, inside chunks and over whole sequences."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops.simple_gla import CHUNK_SIZE
from fla_dispatch import Result, dispatch

__all__ = [
    "chunk_global_cumsum",
    "chunk_global_cumsum_scalar",
    "chunk_global_cumsum_vector",
    "chunk_local_cumsum",
    "chunk_local_cumsum_scalar",
    "chunk_local_cumsum_vector",
]

SHAPES = {
    "ci": dict(B=1, T=63, H=2, K=24),
    "train_8k": dict(B=1, T=8192, H=32, K=128),
    "packed_32k": dict(B=1, T=32768, N=16, H=16, K=128),
}


@dispatch(
    "cumsum", returns=Result("B T H | B T H K", ("output_dtype", "g")), rules=(CHUNK_SIZE,), tolerance="linear",
    shapes=SHAPES,
)  # fmt: skip
def chunk_local_cumsum(
    g: Float[Tensor, "B T H"] | Float[Tensor, "B T H K"],
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: object | None = None,
    use_graph: bool = False,
):
    r"""Sums from the start of each chunk of a sequence through each token.

    Per sequence and channel, c being the first token of the chunk that holds t (multiples of chunk_size)::

        y_t = scale * (g_c + ... + g_t)         reverse:  y_t = scale * (g_t + ... + g_{last token of the chunk})

    Args:
        g: what is summed, [B, T, H] or [B, T, H, K]; for a decay in log space, its sums are exponents too.
        chunk_size: a power of two; sums start anew every chunk_size tokens and at the start of every sequence.
        reverse: from each token through the end of its chunk.
        scale: factor on the result; 1 / ln(2) turns natural into binary logarithms. None: 1.
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Tokens past the last
            entry give 0.
        output_dtype: of the result; None: that of g. The arithmetic is float32 (float64 where one of both is).
        chunk_indices: what ``fla.ops`` would otherwise compute from cu_seqlens; nothing here needs it.
        use_graph: the caller pads cu_seqlens for a CUDA graph; the result does not depend on it.

    Returns:
        The sums, of g's shape. Differentiable in g, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import chunk_local_cumsum
        >>> chunk_local_cumsum(torch.ones(1, 6, 1), 4)[0, :, 0].tolist()
        [1.0, 2.0, 3.0, 4.0, 1.0, 2.0]

    Where this differs from ``fla.ops.utils.chunk_local_cumsum``: it has a gradient; tokens past the last boundary give
    0 with use_graph or without; what is an assertion there is a ``ValueError``.
    """
    return reference.chunks.cumsum("chunk_local_cumsum", g, chunk_size, reverse, scale, cu_seqlens, output_dtype)


@dispatch("cumsum", returns=Result("B T H | B T H K", ("output_dtype", "s")), tolerance="linear", shapes=SHAPES)
def chunk_global_cumsum(
    s: Float[Tensor, "B T H"] | Float[Tensor, "B T H K"],
    reverse: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
):
    r"""Sums from the start of each sequence through each token.

    Per sequence and channel::

        y_t = scale * (s_0 + ... + s_t)         reverse:  y_t = scale * (s_t + ... + s_{T-1})

    Args:
        s: what is summed, [B, T, H] or [B, T, H, K].
        reverse: from each token through the end of its sequence. Summed in that order: nothing is taken from a total.
        cu_seqlens, scale, output_dtype: as for ``chunk_local_cumsum``.

    Returns:
        The sums, of s's shape. Differentiable in s, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import chunk_global_cumsum
        >>> boundaries = torch.tensor([0, 2, 2, 5])
        >>> chunk_global_cumsum(torch.ones(1, 6, 1), reverse=True, cu_seqlens=boundaries)[0, :, 0].tolist()
        [2.0, 1.0, 3.0, 2.0, 1.0, 0.0]

    Where this differs from ``fla.ops.utils.chunk_global_cumsum``: it has a gradient; tokens past the last boundary give
    0; what is an assertion there is a ``ValueError``.
    """
    return reference.chunks.cumsum("chunk_global_cumsum", s, None, reverse, scale, cu_seqlens, output_dtype)


def _of_rank(function, name, x, rank):
    if isinstance(x, Tensor) and x.dim() != rank:
        shape = "[B, T, H, K]"[: 3 * rank - 1] + "]"
        raise ValueError(f"{function}: `{name}` is {shape}, but a tensor of shape {list(x.shape)} was given")
    return x


def chunk_local_cumsum_scalar(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: object | None = None,
    use_graph: bool = False,
) -> Tensor:
    """``chunk_local_cumsum`` of one number per head.

    Args:
        g: [B, T, H].
        chunk_size, reverse, scale, cu_seqlens, output_dtype, chunk_indices, use_graph: as for ``chunk_local_cumsum``.

    Returns:
        The sums [B, T, H].

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import chunk_local_cumsum_scalar
        >>> chunk_local_cumsum_scalar(torch.ones(1, 3, 1), 2, reverse=True)[0, :, 0].tolist()
        [2.0, 1.0, 1.0]
    """
    g = _of_rank("chunk_local_cumsum_scalar", "g", g, 3)
    return chunk_local_cumsum(g, chunk_size, reverse, scale, cu_seqlens, output_dtype, chunk_indices, use_graph)


def chunk_local_cumsum_vector(
    g: Tensor,
    chunk_size: int,
    reverse: bool = False,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    output_dtype: torch.dtype | None = torch.float,
    chunk_indices: object | None = None,
    use_graph: bool = False,
) -> Tensor:
    """``chunk_local_cumsum`` of one number per channel.

    Args:
        g: [B, T, H, K].
        chunk_size, reverse, scale, cu_seqlens, output_dtype, chunk_indices, use_graph: as for ``chunk_local_cumsum``.

    Returns:
        The sums [B, T, H, K].

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import chunk_local_cumsum_vector
        >>> chunk_local_cumsum_vector(torch.ones(1, 3, 1, 8), 2).shape
        torch.Size([1, 3, 1, 8])
    """
    g = _of_rank("chunk_local_cumsum_vector", "g", g, 4)
    return chunk_local_cumsum(g, chunk_size, reverse, scale, cu_seqlens, output_dtype, chunk_indices, use_graph)


def chunk_global_cumsum_scalar(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """``chunk_global_cumsum`` of one number per head.

    Args:
        s: [B, T, H].
        reverse, cu_seqlens, scale, output_dtype: as for ``chunk_global_cumsum``.

    Returns:
        The sums [B, T, H].

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import chunk_global_cumsum_scalar
        >>> chunk_global_cumsum_scalar(torch.ones(1, 3, 1))[0, :, 0].tolist()
        [1.0, 2.0, 3.0]
    """
    s = _of_rank("chunk_global_cumsum_scalar", "s", s, 3)
    return chunk_global_cumsum(s, reverse, cu_seqlens, scale, output_dtype)


def chunk_global_cumsum_vector(
    s: Tensor,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    output_dtype: torch.dtype | None = torch.float,
) -> Tensor:
    """``chunk_global_cumsum`` of one number per channel.

    Args:
        s: [B, T, H, K].
        reverse, cu_seqlens, scale, output_dtype: as for ``chunk_global_cumsum``.

    Returns:
        The sums [B, T, H, K].

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import chunk_global_cumsum_vector
        >>> chunk_global_cumsum_vector(torch.ones(1, 3, 1, 8)).shape
        torch.Size([1, 3, 1, 8])
    """
    s = _of_rank("chunk_global_cumsum_vector", "s", s, 4)
    return chunk_global_cumsum(s, reverse, cu_seqlens, scale, output_dtype)
