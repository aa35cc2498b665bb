"""Gates of a decay in log space, activated and summed inside chunks."""

import torch

from facade.reference.arithmetic import no_autocast, running_sum, sigmoid, softplus, working_dtype
from facade.reference.sequences import sequences
from fla_dispatch import refuse_double_backward

SPAN = 1 << 18  # elements of one tensor of a span, so that what a span works on stays in cache


def gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """Log-space gate of raw ``g [B, T, HV, K]``; ``A_log [HV]``, ``dt_bias [HV*K]``; differentiable in all three.

    lower_bound None:   -exp(A_log) * softplus(g + dt_bias)
    otherwise:          lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), A_log None counting as 0

    Computed in fp32 (fp64 for fp64 ``g``), returned as ``output_dtype``.
    """
    return _Gate.apply(g, A_log, dt_bias, lower_bound, output_dtype, None)


def gate_chunk_cumsum(
    g, A_log=None, chunk_size=64, scale=None, dt_bias=None, cu_seqlens=None, output_dtype=torch.float32,
    lower_bound=None,
):  # fmt: skip
    """``gate`` summed from the start of each chunk of a sequence through each token, times ``scale``.

    Tokens behind the last sequence of ``cu_seqlens`` give 0.
    """
    sums = sequences(g, cu_seqlens, chunk_size, SPAN), 1 if scale is None else scale
    return _Gate.apply(g, A_log, dt_bias, lower_bound, output_dtype, sums)


class _Gate(torch.autograd.Function):
    """``sums`` is (the walk over the chunks to sum in, factor), or None for the gate itself."""

    @staticmethod
    def forward(ctx, g, A_log, dt_bias, lower_bound, output_dtype, sums):
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound, ctx.sums = lower_bound, sums
        dtype = working_dtype(g)
        with no_autocast(g):
            if sums is None:
                return activation(g.to(dtype), A_log, dt_bias, lower_bound).to(output_dtype)
            walk, factor = sums
            out = walk.new(g, *g.shape[2:], dtype=output_dtype)
            for span in walk.spans:
                rows = span.gather(g, dtype).transpose(1, 2)
                rows = running_sum(activation(rows, A_log, dt_bias, lower_bound), 1).mul_(factor)
                span.scatter(rows.transpose(1, 2), out)
            return out

    @staticmethod
    def backward(ctx, d):
        g, A_log, dt_bias = ctx.saved_tensors
        dtype = working_dtype(g)
        with torch.no_grad(), no_autocast(g):
            if ctx.sums is None:
                dg, *parameters = activation_backward(g.to(dtype), A_log, dt_bias, ctx.lower_bound, d.to(dtype))
                parts = [parameters]
            else:
                walk, factor = ctx.sums
                dg, parts = walk.new(g, *g.shape[2:], dtype=dtype), []
                for span in walk.spans:
                    rows, drows = (span.gather(x, dtype).transpose(1, 2) for x in (g, d))
                    drows = running_sum(drows, 1, reverse=True).mul_(factor)
                    drows, *parameters = activation_backward(rows, A_log, dt_bias, ctx.lower_bound, drows)
                    span.scatter(drows.transpose(1, 2), dg)
                    parts.append(parameters)
            dA_log, ddt_bias = (
                None if x is None else sum((part[i] for part in parts), torch.zeros_like(x, dtype=dtype)).to(x.dtype)
                for i, x in enumerate((A_log, dt_bias))
            )
        grads = dg.to(g.dtype), dA_log, ddt_bias
        return *refuse_double_backward("fused_kda_gate", grads, g, A_log, dt_bias, d), None, None, None


def activation(g, A_log, dt_bias, lower_bound):
    """The formula of ``gate``, in the dtype of ``g [..., HV, K]`` and by autograd."""
    x, rate = _shifted(g, A_log, dt_bias)
    if lower_bound is None:
        return -rate * softplus(x)
    return lower_bound * sigmoid(x if rate is None else rate * x)


def activation_backward(g, A_log, dt_bias, lower_bound, d):
    """Gradients of g, A_log and dt_bias, given ``d`` of the gate."""
    x, rate = _shifted(g, A_log, dt_bias)
    if lower_bound is None:
        dx = -rate * sigmoid(x) * d
        dlog_rate = -rate * softplus(x) * d
    else:
        z = x if rate is None else rate * x
        dz = lower_bound * sigmoid(z) * sigmoid(-z) * d
        dx = dz if rate is None else rate * dz
        dlog_rate = z * dz
    dA_log = None if A_log is None else dlog_rate.flatten(0, -3).sum((0, 2)).view(A_log.shape)
    ddt_bias = None if dt_bias is None else dx.flatten(0, -3).sum(0).view(dt_bias.shape)
    return dx, dA_log, ddt_bias


def _shifted(g, A_log, dt_bias):
    """(g + dt_bias, exp(A_log)) broadcast over [..., HV, K]."""
    x = g if dt_bias is None else g + dt_bias.to(g.dtype).view(g.shape[-2:])
    return x, None if A_log is None else A_log.to(g.dtype).view(-1, 1).exp()
