"""Simple gated linear attention: a state that forgets by one number per head.

Sun et al., "Retentive Network", arXiv:2307.08621 (constant decay); Dao and Gu, "Transformers are SSMs",
arXiv:2405.21060, and Yang et al., "Gated Linear Attention", arXiv:2312.06635 (data-dependent decay).
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from fla_dispatch import ACCUMULATOR, Result, Rule, dispatch

__all__ = ["chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla", "parallel_simple_gla"]

LAYOUTS = {"state_v_first": ("H K V", "H V K")}
RETURNS = {
    "o": Result("B T H V", "q"),
    "final_state": Result("N H K V", ACCUMULATOR, when="output_final_state"),
}
ATTENTIONS = {"o": RETURNS["o"], "attentions": Result("B H T T", "q", when="output_attentions")}
ONE_DECAY = Rule("g is None or g_gamma is None", "`g` and `g_gamma` are two forms of one decay: give one of them")
CHUNK_SIZE = Rule("chunk_size > 0 and chunk_size & (chunk_size - 1) == 0", "`chunk_size` must be a power of two")
DENSE_ATTENTIONS = Rule(
    "cu_seqlens is None", "`output_attentions` is for dense input: packed sequences have no one matrix",
    when="output_attentions",
)  # fmt: skip
SHAPES = {
    "ci": dict(B=1, T=63, H=2, K=24, V=40),
    "train_8k": dict(B=1, T=8192, H=32, K=128, V=128),
    "batch_2k": dict(B=8, T=2048, H=16, K=128, V=128),
    "long_64k": dict(B=1, T=65536, H=8, K=128, V=128),
    "packed_32k": dict(B=1, T=32768, N=16, H=16, K=128, V=128),
}
DECODING = {f"decode_{B}": dict(B=B, T=1, H=32, K=128, V=128) for B in (1, 8, 64, 256)}


@dispatch(
    "simple_gla", returns=RETURNS, rules=(ONE_DECAY, CHUNK_SIZE), derive={"scale": "K ** -0.5"}, layouts=LAYOUTS,
    same_dtype=[("q", "k", "v")], constants=("g_gamma",), chunk_size="chunk_size", tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def chunk_simple_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"] | None = None,
    g_gamma: Float[Tensor, "H"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
    *,
    chunk_size: int = 64,
):
    r"""Linear attention with one decay per head over whole sequences, in chunks: for training and prefill.

    Per sequence and head, with a state S [K, V] and gamma_t = g_t, or g_gamma for every token, or 0::

        S_t = exp(gamma_t) S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, H, V]; o has their shape and q's dtype.
        g: decay [B, T, H] in log space (natural logarithm, normally <= 0): the state is multiplied by exp(g).
        g_gamma: one decay [H] in log space for all tokens, instead of g. It has no gradient.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, H, K, V] in any float dtype ([N, H, V, K] with state_v_first); zeros if None. N is the
            batch, or the number of packed sequences.
        output_final_state: return the state after the last token of each sequence, float32.
        state_v_first: states are [.., V, K] instead of [.., K, V].
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Empty sequences are
            allowed. Tokens past the last entry belong to no sequence: their outputs and gradients are 0.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_size: a power of two; the result does not depend on it beyond rounding.

    Returns:
        (o [B, T, H, V], final_state or None). Differentiable in q, k, v, g and initial_state, also through final_state,
        once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them. g and g_gamma together too.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 64)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(1, 100, 2))
        >>> o, state = fla_ops.chunk_simple_gla(q, k, v, g, output_final_state=True)
        >>> o.shape, state.shape, state.dtype
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 32, 64]), torch.float32)
    """
    return reference.simple_gla.chunk(
        "chunk_simple_gla", q, k, v, g, g_gamma, scale, initial_state, output_final_state, False, state_v_first,
        cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, chunk_size,
    )  # fmt: skip


@dispatch(
    "simple_gla", returns=RETURNS, rules=(ONE_DECAY,), derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")],
    constants=("g_gamma",), tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def fused_chunk_simple_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"] | None = None,
    g_gamma: Float[Tensor, "H"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""``chunk_simple_gla`` under the name of its single-pass form: the same function, the same values.

    Args:
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens: as for ``chunk_simple_gla``.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.fused_chunk_simple_gla(q, k, v, g_gamma=torch.tensor([-0.1, -0.01]))
        >>> o.shape
        torch.Size([1, 9, 2, 16])
    """
    return reference.simple_gla.chunk(
        "fused_chunk_simple_gla", q, k, v, g, g_gamma, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


@dispatch(
    "simple_gla", returns=RETURNS, rules=(ONE_DECAY,), derive={"scale": "K ** -0.5"}, layouts=LAYOUTS,
    same_dtype=[("q", "k", "v")], constants=("g_gamma",), tolerance="linear", shapes=SHAPES | DECODING,
)  # fmt: skip
def fused_recurrent_simple_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"] | None = None,
    g_gamma: Float[Tensor, "H"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Linear attention with one decay per head, token by token: for decoding and short sequences.

    Gradients come from the chunk form: the same function, the same values.

    Args:
        q, k, v, g, g_gamma, scale, initial_state, output_final_state, state_v_first, cu_seqlens: as for
            ``chunk_simple_gla``.
        reverse: from the last token of each sequence to the first: S_t = exp(gamma_t) S_{t+1} + k_t v_t^T.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> state = torch.zeros(2, 2, 8, 16)
        >>> for _ in range(3):
        ...     q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 16)
        ...     o, state = fla_ops.fused_recurrent_simple_gla(
        ...         q, k, v, -torch.rand(2, 1, 2), initial_state=state, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 16]), torch.Size([2, 2, 8, 16]))
    """
    return reference.simple_gla.tokens(
        "fused_recurrent_simple_gla", q, k, v, g, g_gamma, scale, initial_state, output_final_state, reverse,
        state_v_first, cu_seqlens,
    )  # fmt: skip


@dispatch(
    "simple_gla", returns=ATTENTIONS, rules=(DENSE_ATTENTIONS,), derive={"scale": "K ** -0.5"},
    same_dtype=[("q", "k", "v")], tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def parallel_simple_gla(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H"] | None = None,
    scale: float | None = None,
    output_attentions: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
):
    r"""Simple GLA from no state, as attention: for training, and for looking at who reads whom.

    Per sequence and head, with G the sum of g from the first token through each::

        P_ij = scale * (q_i . k_j) * exp(G_i - G_j) for j <= i, else 0
        o_i  = sum_j P_ij v_j

    Args:
        q, k, v, g, scale, cu_seqlens, cu_seqlens_cpu: as for ``chunk_simple_gla``.
        output_attentions: return P too. Not with cu_seqlens.

    Returns:
        (o [B, T, H, V], P [B, H, T, T] in q's dtype or None). o is differentiable in q, k, v and g, once; P carries no
        gradient.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them. output_attentions with cu_seqlens too.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, attentions = fla_ops.parallel_simple_gla(q, k, v, -torch.rand(1, 9, 2), output_attentions=True)
        >>> o.shape, attentions.shape
        (torch.Size([1, 9, 2, 16]), torch.Size([1, 2, 9, 9]))
        >>> torch.allclose(o, torch.einsum("bhij,bjhv->bihv", attentions, v), atol=1e-5)
        True
    """
    return reference.simple_gla.parallel(
        "parallel_simple_gla", q, k, v, g, None, scale, output_attentions,
        cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
    )  # fmt: skip
