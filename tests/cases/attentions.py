"""Hazards of operators that can return the matrix their outputs are read with."""

import pytest
import torch
from harness import bounds
from harness.hazard import hazard, variants
from harness.trial import same

WIDE = ("fp32", "bf16", "fp16")
NEEDS = ("output_attentions",)


def _columns(trial, arguments, dtype):
    """P [B, H, T, T], column by column: what the token recurrence reads of one-hot values."""
    v = arguments["v"]
    B, T, H, _ = v.shape
    one_hot = torch.eye(T, dtype=v.dtype)[None, :, None].expand(B, T, H, T)
    return trial.oracle({**arguments, "v": one_hot}, dtype=dtype)["o"].permute(0, 2, 1, 3)


@hazard(needs=NEEDS, variant=variants, dtype=WIDE, T=(1, 13, 64, 65))
def attentions_are_what_values_are_read_with(trial, variant, dtype, T):
    """The matrix whose product with the values is o, entry by entry, 0 above the diagonal; o keeps its bits."""
    arguments = trial.arguments(variant, dtype=dtype, T=T, B=2)
    with torch.no_grad():
        found = trial.call(**arguments, output_attentions=True)
        same({"o": found["o"]}, trial.call(**arguments))
    P, dtype = found["attentions"].cpu(), arguments["q"].dtype
    right, eager = (_columns(trial, arguments, compute) for compute in (torch.float64, dtype))
    problem = bounds.check("attentions", P, right, trial.operator.declaration.tolerance, dtype, eager)
    assert problem is None, problem
    assert P.dtype == dtype and not P.triu(1).any()


@hazard(needs=NEEDS, variant=variants)
def attentions_carry_no_gradient(trial, variant):
    """A loss on the matrix is an error rather than a gradient of 0; that of o is what it is without the matrix."""
    arguments = trial.place(trial.arguments(variant, T=20))
    leaves = {name: arguments[name].requires_grad_() for name in trial.differentiable(arguments)}
    gradients = []
    for asked in (False, True):
        results = trial.call(**arguments, output_attentions=asked)
        gradients.append(dict(zip(leaves, torch.autograd.grad(results["o"].square().sum(), list(leaves.values())))))
    same(*gradients)
    assert not results["attentions"].requires_grad


@hazard(needs=(*NEEDS, "cu_seqlens"))
def attentions_of_packed_sequences_are_refused(trial):
    """There is no one matrix; the message names both."""
    arguments = trial.arguments(offsets=[0, 3, 10])
    with pytest.raises(ValueError, match="`output_attentions` is for dense input.*cu_seqlens"):
        trial.call(**arguments, output_attentions=True)
