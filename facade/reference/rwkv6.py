"""RWKV-6: a token reads the state before its own forgetting, and itself by a bonus per head and key channel.

Per sequence and head, with a state S [K, V]:

    o_t = scale (S_{t-1} + (u k_t) v_t^T)^T r_t        S_t = diag(exp(w_t)) S_{t-1} + k_t v_t^T

The recurrence and its chunk form are those of ``linear.py``, with a bonus.
"""

from facade.reference import linear


def recurrent(
    r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None,
    compute_dtype=None,
):  # fmt: skip
    """``linear.recurrent``: the oracle. ``w`` [B, T, H, K], ``u`` [H, K]."""
    return linear.recurrent(
        r, k, v, w, erase=False, bonus=u, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, reverse=reverse, cu_seqlens=cu_seqlens, compute_dtype=compute_dtype,
    )  # fmt: skip


def chunk(
    function, r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None,
    chunk_size=64,
):  # fmt: skip
    """``linear.chunk``; ``function`` is who asks, for messages."""
    options = linear.Options(
        function, erase=False, scale=r.shape[-1] ** -0.5 if scale is None else scale, final=output_final_state,
        tile=min(linear.TILE, chunk_size), reverse=reverse,
    )  # fmt: skip
    return linear.chunk(options, r, k, v, w, initial_state=initial_state, cu_seqlens=cu_seqlens, bonus=u)


def tokens(
    function, r, k, v, w, u, scale=None, initial_state=None, output_final_state=False, reverse=False, cu_seqlens=None
):
    """``recurrent``, and ``chunk`` for gradients."""
    options = output_final_state, reverse, cu_seqlens

    def walk(r, k, v, w, u, initial_state):
        return recurrent(r, k, v, w, u, scale, initial_state, *options)

    def in_chunks(r, k, v, w, u, initial_state):
        return chunk(function, r, k, v, w, u, scale, initial_state, *options)

    return linear.by_token(function, walk, (r, k, v, w, u, initial_state), in_chunks)
