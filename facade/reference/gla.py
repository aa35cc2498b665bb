"""Gated linear attention: a state that forgets per key channel, and token by token per value channel too.

Per sequence and head, with a state S [K, V]:

    S_t = diag(exp(gk_t)) S_{t-1} diag(exp(gv_t)) + k_t v_t^T        o_t = scale S_t^T q_t

The recurrence and its chunk form are those of ``linear.py``, without erase. Value gates have no chunk form here.
"""

import torch

from facade.reference import linear


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
    options = linear.Options(
        function, erase=False, scale=q.shape[-1] ** -0.5 if scale is None else scale, final=output_final_state,
        v_first=state_v_first, reverse=reverse,
    )  # fmt: skip
    return linear.chunk(options, q, k, v, g, initial_state=initial_state, cu_seqlens=cu_seqlens)


def tokens(
    function, q, k, v, gk=None, gv=None, scale=None, initial_state=None, output_final_state=False, reverse=False,
    state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    """``recurrent``; where a gradient may be asked for in chunks, or with value gates by running it again."""

    def run(*inputs):
        q, k, v, gk, gv, initial_state = inputs
        return recurrent(
            q, k, v, gk, gv, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
        )

    inputs = q, k, v, gk, gv, initial_state
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return run(*inputs)
    if gv is None:
        return chunk(
            function, q, k, v, gk, scale, initial_state, output_final_state, reverse, state_v_first, cu_seqlens
        )
    return linear.tokenwise(function, run, *inputs, rows=len(inputs) if cu_seqlens is None else None)
