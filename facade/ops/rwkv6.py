"""RWKV-6: linear attention with a decay per key channel, whose token reads the state before it writes, and itself by a
bonus.

Peng et al., "Eagle and Finch: RWKV with Matrix-Valued States and Dynamic Recurrence", arXiv:2404.05892.
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops import simple_gla
from facade.ops.simple_gla import CHUNK_SIZE, DECODING, SHAPES
from fla_dispatch import Result, dispatch

__all__ = ["chunk_rwkv6", "fused_recurrent_rwkv6"]

RETURNS = simple_gla.RETURNS | {"o": Result("B T H V", "r")}


@dispatch(
    "rwkv6", returns=RETURNS, rules=(CHUNK_SIZE,), derive={"scale": "K ** -0.5"}, same_dtype=[("r", "k", "v")],
    chunk_size="chunk_size", tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def chunk_rwkv6(
    r: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    w: Float[Tensor, "B T H K"],
    u: Float[Tensor, "H K"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
    *,
    chunk_size: int = 64,
):
    r"""RWKV-6 over whole sequences, in chunks: for training and prefill.

    Per sequence and head, with a state S [K, V]::

        o_t = scale * (S_{t-1} + (u * k_t) v_t^T)^T r_t
        S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T

    A token reads the state as the token before it left it: its own decay is not in what it reads.

    Args:
        r, k: receptances (queries) and keys [B, T, H, K].
        v: values [B, T, H, V]; o has their shape and r's dtype.
        w: decay [B, T, H, K] in log space (natural logarithm, normally <= 0): the state is multiplied by exp(w).
        u: bonus [H, K], by which a token reads itself, in any float dtype.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, H, K, V] in any float dtype; zeros if None. N is the batch, or the number of packed
            sequences.
        output_final_state: return the state after the last token of each sequence, float32.
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Empty sequences are
            allowed. Tokens past the last entry belong to no sequence: their outputs and gradients are 0.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_size: a power of two; the result does not depend on it beyond rounding.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] or None). Differentiable in r, k, v, w, u and initial_state, also
        through final_state, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> r, k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)
        >>> w, u = -torch.exp(torch.randn(1, 100, 2, 32)), torch.randn(2, 32)
        >>> o, state = fla_ops.chunk_rwkv6(r, k, v, w, u, output_final_state=True)
        >>> o.shape, state.shape, state.dtype
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 32, 64]), torch.float32)
    """
    return reference.rwkv6.chunk(
        "chunk_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, False,
        cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, chunk_size,
    )  # fmt: skip


@dispatch(
    "rwkv6", returns=RETURNS, derive={"scale": "K ** -0.5"}, same_dtype=[("r", "k", "v")], tolerance="linear",
    shapes=SHAPES | DECODING,
)  # fmt: skip
def fused_recurrent_rwkv6(
    r: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    w: Float[Tensor, "B T H K"],
    u: Float[Tensor, "H K"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""RWKV-6 token by token: for decoding and short sequences.

    Gradients come from the chunk form: the same function, the same values.

    Args:
        r, k, v, w, u, scale, initial_state, output_final_state, cu_seqlens: as for ``chunk_rwkv6``.
        reverse: from the last token of each sequence to the first: o_t reads S_{t+1}.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> state, u = torch.zeros(2, 2, 8, 16), torch.randn(2, 8)
        >>> for _ in range(3):
        ...     r, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 16)
        ...     o, state = fla_ops.fused_recurrent_rwkv6(
        ...         r, k, v, -torch.rand(2, 1, 2, 8), u, initial_state=state, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 16]), torch.Size([2, 2, 8, 16]))

    Where this differs from ``fla.ops.fused_recurrent_rwkv6``: gradients also come through final_state.
    """
    return reference.rwkv6.tokens(
        "fused_recurrent_rwkv6", r, k, v, w, u, scale, initial_state, output_final_state, reverse, cu_seqlens
    )
