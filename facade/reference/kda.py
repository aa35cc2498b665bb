"""Kimi Delta Attention: a delta rule with a gate per key channel, computed here or given.

Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv 2510.26692. The recurrence and its chunk form are
those of ``linear.py``, with erase.
"""

import torch

from facade.reference import gates, linear
from facade.reference.arithmetic import no_autocast, sigmoid

gate, gate_chunk_cumsum = gates.gate, gates.gate_chunk_cumsum


def recurrent(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, compute_dtype=None,
):  # fmt: skip
    """``linear.recurrent`` with the options of ``facade.ops.fused_recurrent_kda``: the oracle."""
    wide = torch.float64 if torch.float64 in (q.dtype, compute_dtype) else torch.float32
    end = q.shape[1] if cu_seqlens is None else int(cu_seqlens[-1])  # rows behind it are never read
    with no_autocast(q):
        if use_gate_in_kernel:
            g = gates.activation(g[:, :end].to(wide), A_log, dt_bias, lower_bound)
        if use_beta_sigmoid_in_kernel:
            beta = sigmoid(beta[:, :end].to(wide)) * (2 if allow_neg_eigval else 1)
    return linear.recurrent(
        q, k, v, g, beta, erase=True, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
        norm=use_qk_l2norm_in_kernel, state_v_first=state_v_first, cu_seqlens=cu_seqlens, compute_dtype=compute_dtype,
    )  # fmt: skip


def chunk(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    *, A_log=None, dt_bias=None, chunk_size=64,
):  # fmt: skip
    """``linear.chunk`` with the options of ``facade.ops.chunk_kda``; exact for any gate, with safe_gate or without."""
    options = linear.Options(
        "chunk_kda", erase=True, scale=q.shape[-1] ** -0.5 if scale is None else scale, norm=use_qk_l2norm_in_kernel,
        gate=use_gate_in_kernel, lower_bound=lower_bound, sigmoid=use_beta_sigmoid_in_kernel,
        beta_max=2 if allow_neg_eigval else 1, final=output_final_state, v_first=state_v_first,
        every=chunk_size if return_intermediate_states else None, keep=disable_recompute,
        tile=min(linear.TILE, chunk_size),
    )  # fmt: skip
    return linear.chunk(options, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)


def tokens(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None,
):  # fmt: skip
    """``recurrent``, and ``chunk`` for gradients."""
    options = dict(
        scale=scale, output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel, use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval, lower_bound=lower_bound, state_v_first=state_v_first, cu_seqlens=cu_seqlens,
    )  # fmt: skip

    def form(run):
        return lambda *x: run(*x[:5], A_log=x[5], dt_bias=x[6], initial_state=x[7], **options)

    inputs = q, k, v, g, beta, A_log, dt_bias, initial_state
    return linear.by_token("fused_recurrent_kda", form(recurrent), inputs, form(chunk))
