"""The delta rule, with one decay per head (gated) or none.

Per sequence and value head, with a state S [K, V]:

    S   <- exp(g_t) diag(exp(gk_t)) S diag(exp(gv_t))
    S   <- S + beta_t k_t (v_t - S^T k_t)^T        o_t = scale S^T q_t

The recurrence and its chunk form are those of ``linear.py``, with erase. Value gates, and two forms of key gates
together, have no chunk form here.
"""

import torch

from facade.reference import gates, linear
from facade.reference.arithmetic import no_autocast, sigmoid


def recurrent(
    q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, compute_dtype=None,
):  # fmt: skip
    """``linear.recurrent`` with the options of ``facade.ops.fused_recurrent_gated_delta_rule``: the oracle."""
    wide = torch.float64 if torch.float64 in (q.dtype, compute_dtype) else torch.float32
    end = q.shape[1] if cu_seqlens is None else int(cu_seqlens[-1])  # rows behind it are never read
    with no_autocast(q):
        if g is not None:
            g = g[:, :end, :, None].to(wide)
            g = gates.activation(g, A_log, dt_bias, None) if use_gate_in_kernel else g
        if gk is not None:
            gk = gk[:, :end].to(wide)
            g = gk if g is None else g + gk
        if beta is None:
            beta = torch.ones(v.shape[:3], dtype=wide, device=v.device)
        if use_beta_sigmoid_in_kernel:
            beta = sigmoid(beta[:, :end].to(wide)) * (2 if allow_neg_eigval else 1)
    return linear.recurrent(
        q, k, v, g, beta, gv, erase=True, scale=scale, initial_state=initial_state,
        output_final_state=output_final_state, norm=use_qk_l2norm_in_kernel, state_v_first=state_v_first,
        cu_seqlens=cu_seqlens, compute_dtype=compute_dtype,
    )  # fmt: skip


def chunk(
    function, q, k, v, g=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, chunk_size=64,
):  # fmt: skip
    """``linear.chunk``; ``g`` [B, T, HV], or per key channel. ``function`` is who asks, for messages."""
    if beta is None:
        beta = torch.ones(v.shape[:3], dtype=v.dtype, device=v.device)
    options = linear.Options(
        function, erase=True, scale=q.shape[-1] ** -0.5 if scale is None else scale, norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel, sigmoid=use_beta_sigmoid_in_kernel, beta_max=2 if allow_neg_eigval else 1,
        final=output_final_state, v_first=state_v_first, tile=min(linear.TILE, chunk_size),
    )  # fmt: skip
    return linear.chunk(options, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)


def parallel(function, q, k, v, beta, scale=None, output_attentions=False):
    """``chunk`` from no state, and P [B, H, T, T] with o = P v, or None."""
    o, _ = chunk(function, q, k, v, None, beta, scale)
    if not output_attentions:
        return o, None
    options = linear.Options(function, erase=True, scale=q.shape[-1] ** -0.5 if scale is None else scale)
    return o, linear.attention(options, q, k, v, None, beta)


def tokens(
    function, q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    """``recurrent``; for gradients ``chunk``, or with more gates than it has the recurrence again."""
    norm, gate, sigmoids = use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel

    def walk(q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias):
        return recurrent(
            q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state, norm, gate, A_log, dt_bias, sigmoids,
            allow_neg_eigval, state_v_first, cu_seqlens,
        )  # fmt: skip

    def in_chunks(q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias):
        return chunk(
            function, q, k, v, gk if g is None else g, beta, scale, initial_state, output_final_state, norm, gate,
            A_log, dt_bias, sigmoids, allow_neg_eigval, state_v_first, cu_seqlens,
        )  # fmt: skip

    inputs = q, k, v, g, gk, gv, beta, initial_state, A_log, dt_bias
    one_gate = gv is None and (g is None or gk is None)
    rows = len(inputs) - 2 if cu_seqlens is None else None  # A_log and dt_bias have none
    return linear.by_token(function, walk, inputs, in_chunks if one_gate else None, rows)
