"""Retention: simple GLA with a constant decay per head.

Sun et al., "Retentive Network: A Successor to Transformer for Large Language Models", arXiv:2307.08621.
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops.simple_gla import ATTENTIONS, CHUNK_SIZE, DECODING, DENSE_ATTENTIONS, LAYOUTS, RETURNS, SHAPES
from fla_dispatch import dispatch

__all__ = ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention", "parallel_retention"]


@dispatch(
    "retention", returns=RETURNS, rules=(CHUNK_SIZE,), derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")],
    chunk_size="chunk_size", tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def chunk_retention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    *,
    chunk_size: int = 64,
):
    r"""Retention over whole sequences, in chunks: simple GLA whose head h decays by ln(1 - 2^(-5 - h)) a token.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens, chunk_size: as for
            ``chunk_simple_gla``.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None). Differentiable in q, k, v and initial_state.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.chunk_retention(q, k, v)
        >>> o.shape
        torch.Size([1, 9, 2, 16])
    """
    return reference.simple_gla.chunk(
        "chunk_retention", q, k, v, None, reference.simple_gla.retention_rates(q.shape[2], q.device),
        scale, initial_state, output_final_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip


@dispatch(
    "retention", returns=RETURNS, derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")], tolerance="linear",
    shapes=SHAPES,
)  # fmt: skip
def fused_chunk_retention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Retention under the name of its single-pass form: simple GLA whose head h decays by ln(1 - 2^(-5 - h)) a token.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens: as for
            ``chunk_simple_gla``.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None). Differentiable in q, k, v and initial_state.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.fused_chunk_retention(q, k, v)
        >>> o.shape
        torch.Size([1, 9, 2, 16])
    """
    return reference.simple_gla.chunk(
        "fused_chunk_retention", q, k, v, None, reference.simple_gla.retention_rates(q.shape[2], q.device),
        scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
    )  # fmt: skip


@dispatch(
    "retention", returns=RETURNS, derive={"scale": "K ** -0.5"}, layouts=LAYOUTS, same_dtype=[("q", "k", "v")],
    tolerance="linear", shapes=SHAPES | DECODING,
)  # fmt: skip
def fused_recurrent_retention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Retention token by token: simple GLA whose head h decays by ln(1 - 2^(-5 - h)) a token.

    Args:
        q, k, v, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens: as for
            ``fused_recurrent_simple_gla``.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None). Differentiable in q, k, v and initial_state.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.fused_recurrent_retention(q, k, v)
        >>> o.shape
        torch.Size([1, 9, 2, 16])
    """
    return reference.simple_gla.tokens(
        "fused_recurrent_retention", q, k, v, None, reference.simple_gla.retention_rates(q.shape[2], q.device),
        scale, initial_state, output_final_state, reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip


@dispatch(
    "retention", returns=ATTENTIONS, rules=(DENSE_ATTENTIONS,), derive={"scale": "K ** -0.5"},
    same_dtype=[("q", "k", "v")], tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def parallel_retention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Retention from no state, as attention: parallel simple GLA whose head h decays by ln(1 - 2^(-5 - h)) a token.

    Args:
        q, k, v, scale, output_attentions, cu_seqlens: as for ``parallel_simple_gla``.

    Returns:
        (o [B, T, H, V], P [B, H, T, T] in q's dtype or None). o is differentiable in q, k and v, once; P carries no
        gradient.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them. output_attentions with cu_seqlens too.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, attentions = fla_ops.parallel_retention(q, k, v, output_attentions=True)
        >>> o.shape, attentions.shape
        (torch.Size([1, 9, 2, 16]), torch.Size([1, 2, 9, 9]))
    """
    return reference.simple_gla.parallel(
        "parallel_retention", q, k, v, None, reference.simple_gla.retention_rates(q.shape[2], q.device), scale,
        output_attentions, cu_seqlens,
    )  # fmt: skip
