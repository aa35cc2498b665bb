"""Linear attention: a state that forgets nothing, and, to normalise, the sum of all keys.

Katharopoulos et al., "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention", arXiv:2006.16236.
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops.simple_gla import DECODING, RETURNS, SHAPES
from fla_dispatch import dispatch

__all__ = ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"]

NORMALISED = {"normalize": reference.linear_attn.normalised}


@dispatch(
    "linear_attn", returns=RETURNS, derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")], composed=NORMALISED,
    tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def chunk_linear_attn(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Linear attention over whole sequences, in chunks: for training and prefill.

    Per sequence and head, with a state S [K, V] and, with normalize, the sum of keys z [K]::

        S_t = S_{t-1} + k_t v_t^T            z_t = z_{t-1} + k_t
        o_t = scale * S_t^T q_t              with normalize: o_t / (scale * z_t . q_t + 1e-10)

    Args:
        q, k: queries and keys [B, T, H, K]. With normalize they should be the values of a positive feature map: else
            the sum that o is divided by can come close to 0.
        v: values [B, T, H, V]; o has their shape and q's dtype.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, H, K, V] in any float dtype; zeros if None. N is the batch, or the number of packed
            sequences. With normalize also a pair (S [N, H, K, V], z [N, 1, H, K]), each of which may be None; z is 0
            where it is not given.
        output_final_state: return the state after the last token of each sequence, float32.
        normalize: divide what is read by the weights it was read with. 16-bit inputs are then computed in float32.
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Empty sequences are
            allowed. Tokens past the last entry belong to no sequence: their outputs and gradients are 0.

    Returns:
        (o [B, T, H, V], final_state or None). With normalize (o, (final_state or None, z)), with z [N, 1, H, K] float32
        after the last token of each sequence in any case. Differentiable in q, k, v and initial_state, both of the
        pair, also through final_state and z, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.rand(1, 100, 2, 32), torch.rand(1, 100, 2, 32), torch.randn(1, 100, 2, 64)
        >>> o, (state, z) = fla_ops.chunk_linear_attn(q, k, v, output_final_state=True)
        >>> o.shape, state.shape, z.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 32, 64]), torch.Size([1, 1, 2, 32]))
        >>> o, state = fla_ops.chunk_linear_attn(q, k, v, normalize=False, output_final_state=True)

    Where this differs from ``fla.ops.chunk_linear_attn``: z is summed and returned in float32; an initial_state that is
    not a pair is taken with normalize too.
    """
    return reference.simple_gla.chunk(
        "chunk_linear_attn", q, k, v, None, None, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


@dispatch(
    "linear_attn", returns=RETURNS, derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")], composed=NORMALISED,
    tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def fused_chunk_linear_attn(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""``chunk_linear_attn`` under the name of its single-pass form: the same function, the same values.

    Args:
        q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens: as for ``chunk_linear_attn``.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None); with normalize (o, (final_state, z)).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.rand(1, 9, 2, 8), torch.rand(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, (_, z) = fla_ops.fused_chunk_linear_attn(q, k, v)
        >>> o.shape, z.shape
        (torch.Size([1, 9, 2, 16]), torch.Size([1, 1, 2, 8]))
    """
    return reference.simple_gla.chunk(
        "fused_chunk_linear_attn", q, k, v, None, None, scale, initial_state, output_final_state, cu_seqlens=cu_seqlens
    )


@dispatch(
    "linear_attn", returns=RETURNS, derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")], composed=NORMALISED,
    tolerance="linear", shapes=SHAPES | DECODING,
)  # fmt: skip
def fused_recurrent_linear_attn(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    normalize: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Linear attention token by token: for decoding and short sequences. Not normalised unless asked.

    Gradients come from the chunk form: the same function, the same values.

    Args:
        q, k, v, scale, initial_state, output_final_state, normalize, cu_seqlens: as for ``chunk_linear_attn``, except
            that normalize is False by default.
        reverse: from the last token of each sequence to the first: S_t = S_{t+1} + k_t v_t^T, and z likewise.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None); with normalize (o, (final_state, z)).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> state = torch.zeros(2, 2, 8, 16), torch.zeros(2, 1, 2, 8)
        >>> for _ in range(3):
        ...     q, k, v = torch.rand(2, 1, 2, 8), torch.rand(2, 1, 2, 8), torch.randn(2, 1, 2, 16)
        ...     o, state = fla_ops.fused_recurrent_linear_attn(
        ...         q, k, v, initial_state=state, output_final_state=True, normalize=True)
        >>> o.shape, [x.shape for x in state]
        (torch.Size([2, 1, 2, 16]), [torch.Size([2, 2, 8, 16]), torch.Size([2, 1, 2, 8])])
    """
    return reference.simple_gla.tokens(
        "fused_recurrent_linear_attn", q, k, v, None, None, scale, initial_state, output_final_state, reverse,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
