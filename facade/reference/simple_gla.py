"""Linear attention with one decay per head: data-dependent (simple GLA), constant (retention, lightning), or none.

Per sequence and head, with a state S [K, V] and gamma_t = g_t, or g_gamma for every token, or 0:

    S_t = exp(gamma_t) S_{t-1} + k_t v_t^T        o_t = scale S_t^T q_t

The recurrence and its chunk form are those of ``linear.py``, without erase.
"""

import torch

from facade.reference import linear


def recurrent(
    q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None, compute_dtype=None,
):  # fmt: skip
    """``linear.recurrent``: the oracle. ``g`` [B, T, H] or ``g_gamma`` [H]."""
    return linear.recurrent(
        q, k, v, g_gamma if g is None else g, erase=False, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        compute_dtype=compute_dtype,
    )  # fmt: skip


def _options(function, q, scale, **options):
    return linear.Options(function, erase=False, scale=q.shape[-1] ** -0.5 if scale is None else scale, **options)


def chunk(
    function, q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None, chunk_size=64,
):  # fmt: skip
    """``linear.chunk``; ``function`` is who asks, for messages."""
    options = _options(
        function, q, scale, final=output_final_state, v_first=state_v_first, tile=min(linear.TILE, chunk_size),
        reverse=reverse,
    )  # fmt: skip
    return linear.chunk(
        options, q, k, v, g_gamma if g is None else g, initial_state=initial_state, cu_seqlens=cu_seqlens
    )


def tokens(
    function, q, k, v, g=None, g_gamma=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    """``recurrent``, and ``chunk`` for gradients."""
    options = output_final_state, reverse, state_v_first, cu_seqlens

    def walk(q, k, v, g, initial_state):
        return recurrent(q, k, v, g, g_gamma, scale, initial_state, *options)

    def in_chunks(q, k, v, g, initial_state):
        return chunk(function, q, k, v, g, g_gamma, scale, initial_state, *options)

    return linear.by_token(function, walk, (q, k, v, g, initial_state), in_chunks)


def parallel(function, q, k, v, g=None, g_gamma=None, scale=None, output_attentions=False, cu_seqlens=None):
    """``chunk`` from no state, and P [B, H, T, T] with o = P v, or None."""
    o, _ = chunk(function, q, k, v, g, g_gamma, scale, cu_seqlens=cu_seqlens)
    if not output_attentions:
        return o, None
    return o, linear.attention(_options(function, q, scale), q, k, v, g_gamma if g is None else g)


def retention_rates(H: int, device) -> torch.Tensor:
    """g_gamma [H] of retention: ln(1 - 2^(-5 - h))."""
    return torch.log1p(-torch.exp2(-5 - torch.arange(H, dtype=torch.float32, device=device)))


def lightning_rates(H: int, layer_idx: int, num_layers: int, device) -> torch.Tensor:
    """g_gamma [H] of lightning attention: -(8 / H) (1 - layer_idx / num_layers) h."""
    return -(8 / H) * (1 - layer_idx / num_layers) * torch.arange(H, dtype=torch.float32, device=device)
