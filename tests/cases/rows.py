"""Softmax, its gradient, log-sum-exp and Sinkhorn's normalisation: how to make inputs, and what is right."""

import torch
from harness.subject import Subject

from cases import tokens, training
from facade.ops.utils import logsumexp_fwd, sinkhorn, softmax_bwd, softmax_fwd


def make(name: str, shape, options, generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def formula(function: str, arguments: dict, dtype: torch.dtype):
    """As it is written, in fp32 or fp64."""
    wide = torch.promote_types(dtype, torch.float32)
    inputs = [x.to(wide) for x in arguments.values() if isinstance(x, torch.Tensor)]
    if function == "softmax_bwd":
        p, dp = inputs
        return p * dp - p * (p * dp).sum(-1, keepdim=True)
    (x,) = inputs
    if function == "sinkhorn":
        P = x.exp()
        for _ in range(arguments["num_iters"]):
            P = P / P.sum(-2, keepdim=True)
            P = P / P.sum(-1, keepdim=True)
        return P
    scale = arguments.get("scale")
    total = (x if scale is None else x * scale).exp().sum(-1)
    return total.log() if function == "logsumexp_fwd" else x.exp() / total[..., None]


OUTER = {"A1": 3, "A2": 2, "A3": 1, "A4": 2, "A5": 3}
HAZARDS = (
    tokens.repeated_calls_agree, tokens.memory_layout_is_invisible, tokens.nothing_beside_the_tensors_matters,
    tokens.inputs_stay_as_they_are, training.gradients_of_some_inputs, training.autocast_changes_nothing,
    training.gates_flipped_before_backward, training.compiled_as_eager,
)  # fmt: skip

SUBJECTS = (
    Subject("softmax", (softmax_fwd, softmax_bwd, logsumexp_fwd), make, formula, {"scale": [None, 0.3]}, sizes=OUTER,
            hazards=HAZARDS),
    Subject("sinkhorn", (sinkhorn,), make, formula, {"num_iters": [20, 1]}, sizes=OUTER | {"M": 4},
            variants={"plain": {"num_iters": 20}}, hazards=HAZARDS),
)
