"""Lightning attention: simple GLA with a constant decay per head.

Qin et al., "Lightning Attention-2", arXiv:2401.04658.
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops.simple_gla import CHUNK_SIZE, DECODING, RETURNS, SHAPES
from fla_dispatch import dispatch

__all__ = ["chunk_lightning_attn", "fused_recurrent_lightning_attn"]


@dispatch(
    "lightning_attn", returns=RETURNS, rules=(CHUNK_SIZE,), derive={"scale": "K ** -0.5"},
    same_dtype=[("q", "k", "v")], chunk_size="chunk_size", tolerance="linear", shapes=SHAPES,
)  # fmt: skip
def chunk_lightning_attn(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    *,
    chunk_size: int = 64,
):
    r"""Lightning attention over whole sequences, in chunks: simple GLA with a constant decay per head and layer.

    Head h decays by -(8 / H) (1 - layer_idx / num_layers) h a token, so head 0 forgets nothing.

    Args:
        q, k, v, scale, initial_state, output_final_state, cu_seqlens, chunk_size: as for
            ``chunk_simple_gla``.
        layer_idx, num_layers: which layer of how many this is; later layers forget less.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None). Differentiable in q, k, v and initial_state.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.chunk_lightning_attn(q, k, v, layer_idx=1, num_layers=12)
        >>> o.shape
        torch.Size([1, 9, 2, 16])
    """
    return reference.simple_gla.chunk(
        "chunk_lightning_attn", q, k, v, None,
        reference.simple_gla.lightning_rates(q.shape[2], layer_idx, num_layers, q.device),
        scale, initial_state, output_final_state, cu_seqlens=cu_seqlens, chunk_size=chunk_size,
    )  # fmt: skip


@dispatch(
    "lightning_attn", returns=RETURNS, derive={"scale": "K ** -0.5"}, same_dtype=[("q", "k", "v")], tolerance="linear",
    shapes=SHAPES | DECODING,
)  # fmt: skip
def fused_recurrent_lightning_attn(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    layer_idx: int,
    num_layers: int,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Lightning attention token by token: simple GLA with a constant decay per head and layer.

    Head h decays by -(8 / H) (1 - layer_idx / num_layers) h a token, so head 0 forgets nothing.

    Args:
        q, k, v, scale, initial_state, output_final_state, reverse, cu_seqlens: as for
            ``fused_recurrent_simple_gla``.
        layer_idx, num_layers: which layer of how many this is; later layers forget less.

    Returns:
        (o [B, T, H, V], final_state [N, H, K, V] float32 or None). Differentiable in q, k, v and initial_state.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 8), torch.randn(1, 9, 2, 16)
        >>> o, _ = fla_ops.fused_recurrent_lightning_attn(q, k, v, layer_idx=1, num_layers=12)
        >>> o.shape
        torch.Size([1, 9, 2, 16])
    """
    return reference.simple_gla.tokens(
        "fused_recurrent_lightning_attn", q, k, v, None,
        reference.simple_gla.lightning_rates(q.shape[2], layer_idx, num_layers, q.device),
        scale, initial_state, output_final_state, reverse=reverse, cu_seqlens=cu_seqlens,
    )  # fmt: skip
