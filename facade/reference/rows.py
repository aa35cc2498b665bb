"""What is done row by row, over the last axis: softmax, its gradient, log-sum-exp; and Sinkhorn's normalisation.

Computed in fp32 (fp64 for fp64 input). Backward computes forward again.
"""

import torch

from facade.reference.arithmetic import no_autocast, working_dtype
from facade.reference.linear import by_token


def softmax(x, dtype=torch.float32):
    """exp(x) / sum exp(x)."""
    return _run("softmax_fwd", lambda x: torch.softmax(x, -1), dtype or x.dtype, x)


def softmax_backward(p, dp, dtype=torch.float32):
    """p (dp - sum p dp): the gradient of x, where p = softmax(x)."""
    return _run("softmax_bwd", lambda p, dp: p * (dp - (p * dp).sum(-1, keepdim=True)), dtype or p.dtype, p, dp)


def logsumexp(x, scale=None, dtype=None):
    """log sum exp(scale x)."""
    scale = 1 if scale is None else scale
    return _run("logsumexp_fwd", lambda x: torch.logsumexp(x * scale, -1), dtype or working_dtype(x), x)


def sinkhorn(logits, num_iters=20):
    """exp(logits [..., M, M]) with columns, then rows divided by their sums, ``num_iters`` times, in log space."""

    def run(x):
        for _ in range(num_iters):
            x = x - torch.logsumexp(x, -2, keepdim=True)
            x = x - torch.logsumexp(x, -1, keepdim=True)
        return torch.exp(x)

    return _run("sinkhorn", run, working_dtype(logits), logits)


def _run(function, formula, dtype, *inputs):
    def run(*inputs):
        with no_autocast(inputs[0]):
            wide = torch.promote_types(working_dtype(inputs[0]), working_dtype(inputs[-1]))
            return (formula(*(x.to(wide) for x in inputs)).to(dtype),)

    return by_token(function, run, inputs)[0]
