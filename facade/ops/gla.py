"""Gated linear attention (GLA): a state that forgets per key channel.

Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", arXiv:2312.06635.
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops.simple_gla import DECODING, LAYOUTS, RETURNS, SHAPES
from fla_dispatch import dispatch

__all__ = ["chunk_gla", "fused_chunk_gla", "fused_recurrent_gla"]


@dispatch(
    "gla", returns=RETURNS, derive={"scale": "K ** -0.5"}, layouts=LAYOUTS, same_dtype=[("q", "k", "v")],
    tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def chunk_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
):
    r"""Gated linear attention over whole sequences, in chunks: for training and prefill.

    Per sequence and head, with a state S [K, V]::

        S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, H, V]; o has their shape and q's dtype.
        g: decay [B, T, H, K] in log space (natural logarithm, normally <= 0): the state is multiplied by exp(g).
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, H, K, V] in any float dtype ([N, H, V, K] with state_v_first); zeros if None. N is the
            batch, or the number of packed sequences.
        output_final_state: return the state after the last token of each sequence, float32.
        state_v_first: states are [.., V, K] instead of [.., K, V].
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Empty sequences are
            allowed. Tokens past the last entry belong to no sequence: their outputs and gradients are 0.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.

    Returns:
        (o [B, T, H, V], final_state or None). Differentiable in q, k, v, g and initial_state, also through final_state,
        once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(1, 100, 2, 32))
        >>> o, state = fla_ops.chunk_gla(q, k, v, g, output_final_state=True)
        >>> o.shape, state.shape, state.dtype
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 32, 64]), torch.float32)

    Where this differs from ``fla.ops.chunk_gla``: initial_state may have any float dtype.
    """
    return reference.gla.chunk(
        "chunk_gla", q, k, v, g, scale, initial_state, output_final_state, False, state_v_first,
        cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
    )  # fmt: skip


@dispatch(
    "gla", returns=RETURNS, derive={"scale": "K ** -0.5"}, layouts=LAYOUTS, same_dtype=[("q", "k", "v")],
    tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def fused_chunk_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H K"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
):
    r"""``chunk_gla`` under the name of its single-pass form: the same function, the same values.

    Args:
        q, k, v, g, scale, initial_state, output_final_state, state_v_first, cu_seqlens, cu_seqlens_cpu: as for
            ``chunk_gla``.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.fused_chunk_gla(q, k, v, -torch.rand(1, 9, 2, 8))
        >>> o.shape
        torch.Size([1, 9, 2, 16])

    Where this differs from ``fla.ops.fused_chunk_gla``: that one always raises.
    """
    return reference.gla.chunk(
        "fused_chunk_gla", q, k, v, g, scale, initial_state, output_final_state, False, state_v_first,
        cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
    )  # fmt: skip


@dispatch(
    "gla", returns=RETURNS, derive={"scale": "K ** -0.5"}, layouts=LAYOUTS, same_dtype=[("q", "k", "v")],
    tolerance="linear", shapes=SHAPES | DECODING,
)  # fmt: skip
def fused_recurrent_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    gk: Float[Tensor, "B T H K"] | None = None,
    gv: Float[Tensor, "B T H V"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Gated linear attention token by token: for decoding and short sequences.

    Per sequence and head, with a state S [K, V]::

        S_t = diag(exp(gk_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens: as for ``chunk_gla``.
        gk: decay [B, T, H, K] of key channels in log space; none if None.
        gv: decay [B, T, H, V] of value channels in log space; none if None.
        reverse: from the last token of each sequence to the first.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None). Differentiable in q, k, v, gk, gv and initial_state.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> state = torch.zeros(2, 2, 8, 16)
        >>> for _ in range(3):
        ...     q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 16)
        ...     o, state = fla_ops.fused_recurrent_gla(
        ...         q, k, v, -torch.rand(2, 1, 2, 8), initial_state=state, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 16]), torch.Size([2, 2, 8, 16]))
    """
    return reference.gla.tokens(
        "fused_recurrent_gla", q, k, v, gk, gv, scale, initial_state, output_final_state, reverse, state_v_first,
        cu_seqlens,
    )  # fmt: skip
