"""The delta rule: what is written corrects what the state says of a key.

Yang et al., "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", arXiv:2406.06484.
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops.kda import KEY_CHANNELS
from facade.ops.simple_gla import ATTENTIONS, DECODING, RETURNS, SHAPES
from fla_dispatch import Rule, dispatch

__all__ = ["chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule", "parallel_delta_rule"]

CHUNK_SIZE = Rule("chunk_size in (16, 32, 64)", "`chunk_size` must be 16, 32 or 64")


@dispatch(
    "delta_rule", returns=RETURNS, rules=(KEY_CHANNELS, CHUNK_SIZE), derive={"scale": "K ** -0.5"},
    same_dtype=[("q", "k", "v")], chunk_size="chunk_size", tolerance="delta_rule", shapes=SHAPES,
)  # fmt: skip
def chunk_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
    *,
    chunk_size: int = 64,
):
    r"""The delta rule over whole sequences, in chunks: for training and prefill.

    Per sequence and head, with a state S [K, V]::

        S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: queries and keys [B, T, H, K]. Unless use_qk_l2norm_in_kernel is set, keep beta * |k|^2 below 2: beyond
            that the recurrence itself grows without bound.
        v: values [B, T, H, V]; o has their shape and q's dtype.
        beta: step size [B, T, H], normally in [0, 1], or [0, 2] for negative eigenvalues.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, H, K, V] in any float dtype; zeros if None. N is the batch, or the number of packed
            sequences.
        output_final_state: return the state after the last token of each sequence, float32.
        use_qk_l2norm_in_kernel: q and k are first divided by sqrt(sum of squares + 1e-6).
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Empty sequences are
            allowed. Tokens past the last entry belong to no sequence: their outputs and gradients are 0.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_size: 16, 32 or 64; the result does not depend on it beyond rounding.

    Returns:
        (o [B, T, H, V], final_state or None). Differentiable in q, k, v, beta and initial_state, also through
        final_state, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)
        >>> o, state = fla_ops.chunk_delta_rule(
        ...     q, k, v, torch.rand(1, 100, 2), use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape, state.dtype
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 32, 64]), torch.float32)

    Where this differs from ``fla.ops.chunk_delta_rule``: float32 inputs are taken.
    """
    return reference.delta_rule.chunk(
        "chunk_delta_rule", q, k, v, None, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, chunk_size=chunk_size,
    )  # fmt: skip


@dispatch(
    "delta_rule", returns=RETURNS, rules=(KEY_CHANNELS, CHUNK_SIZE), derive={"scale": "K ** -0.5"},
    same_dtype=[("q", "k", "v")], chunk_size="chunk_size", tolerance="delta_rule", shapes=SHAPES,
)  # fmt: skip
def fused_chunk_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
    *,
    chunk_size: int = 64,
):
    r"""``chunk_delta_rule`` under the name of its single-pass form: the same function, the same values.

    Args:
        q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, cu_seqlens_cpu,
            chunk_size: as for ``chunk_delta_rule``.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.fused_chunk_delta_rule(q, k, v, torch.rand(1, 9, 2), use_qk_l2norm_in_kernel=True)
        >>> o.shape
        torch.Size([1, 9, 2, 16])

    Where this differs from ``fla.ops.fused_chunk_delta_rule``: that one always raises.
    """
    return reference.delta_rule.chunk(
        "fused_chunk_delta_rule", q, k, v, None, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
        chunk_size=chunk_size,
    )  # fmt: skip


@dispatch(
    "delta_rule", returns=RETURNS, rules=(KEY_CHANNELS,), derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")],
    tolerance="delta_rule", shapes=SHAPES | DECODING,
)  # fmt: skip
def fused_recurrent_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"] | Float[Tensor, "B T H V"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""The delta rule token by token: for decoding and short sequences.

    Gradients come from the chunk form: the same function, the same values.

    Args:
        q, k, v, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as for
            ``chunk_delta_rule``.
        beta: step size [B, T, H], or [B, T, H, V] with one for every value channel; 1 if None.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> state = torch.zeros(2, 2, 8, 16)
        >>> for _ in range(3):
        ...     q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 16)
        ...     o, state = fla_ops.fused_recurrent_delta_rule(
        ...         q, k, v, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 16]), torch.Size([2, 2, 8, 16]))
    """
    return reference.delta_rule.tokens(
        "fused_recurrent_delta_rule", q, k, v, None, None, None, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, cu_seqlens=cu_seqlens,
    )  # fmt: skip


@dispatch(
    "delta_rule", returns=ATTENTIONS, rules=(KEY_CHANNELS,), derive={"scale": "K ** -0.5"},
    same_dtype=[("q", "k", "v")], tolerance="delta_rule", shapes=SHAPES,
)  # fmt: skip
def parallel_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    scale: float | None = None,
    output_attentions: bool = False,
):
    r"""The delta rule from no state, as attention: for looking at who reads whom.

    Per sequence and head, with the rows of Q, K and V the tokens::

        P = scale * tril(Q K^T) (I + tril(diag(beta) K K^T, -1))^-1 diag(beta)
        O = P V

    Args:
        q, k, v, beta, scale: as for ``chunk_delta_rule``.
        output_attentions: return P too.

    Returns:
        (o [B, T, H, V], P [B, H, T, T] in q's dtype or None). o is differentiable in q, k, v and beta, once; P carries
        no gradient.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.delta_rule import parallel_delta_rule
        >>> q, v, beta = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16), torch.rand(1, 9, 2)
        >>> k = torch.nn.functional.normalize(torch.randn(1, 9, 2, 8), dim=-1)
        >>> o, attentions = parallel_delta_rule(q, k, v, beta, output_attentions=True)
        >>> torch.allclose(o, torch.einsum("bhij,bjhv->bihv", attentions, v), atol=1e-5)
        True

    Where this differs from ``fla.ops.delta_rule.parallel_delta_rule``: inputs are [B, T, H, ...] as everywhere, and
    scale may be None.
    """
    return reference.delta_rule.parallel("parallel_delta_rule", q, k, v, beta, scale, output_attentions)
