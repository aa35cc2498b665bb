"""Gated linear attention: a state that forgets per key channel, and token by token per value channel too.

Per sequence and head, with a state S [K, V]:

    S_t = diag(exp(gk_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T        o_t = scale S_t^T q_t

The recurrence and its chunk form are those of ``linear.py``, without erase. Value gates have no chunk form here.
"""

from facade.reference import linear, simple_gla


def recurrent(
    q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None, compute_dtype=None,
):  # fmt: skip
    """``linear.recurrent``: the oracle. ``gk`` [B, T, H, K], ``gv`` [B, T, H, V]."""
    return linear.recurrent(
        q, k, v, gk, None, gv, erase=False, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, reverse=reverse, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
        compute_dtype=compute_dtype,
    )  # fmt: skip


def chunk(
    function, q, k, v, g=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    """``linear.chunk``; ``function`` is who asks, for messages."""
    return simple_gla.chunk(
        function, q, k, v, g, None, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
    )


def tokens(
    function, q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    """``recurrent``; for gradients ``chunk``, or with value gates the recurrence again."""
    options = output_final_state, reverse, state_v_first, cu_seqlens

    def walk(q, k, v, gk, gv, initial_state):
        return recurrent(q, k, v, gk, gv, scale, initial_state, *options)

    def in_chunks(q, k, v, gk, gv, initial_state):
        return chunk(function, q, k, v, gk, scale, initial_state, *options)

    inputs = q, k, v, gk, gv, initial_state
    rows = len(inputs) if cu_seqlens is None else None
    return linear.by_token(function, walk, inputs, in_chunks if gv is None else None, rows)
