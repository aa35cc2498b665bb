"""Hazards of what surrounds a call in training: autograd, autocast, checkpointing, flipped gates, torch.compile."""

import os
from unittest import mock

import torch
from harness.hazard import hazard, variants
from harness.trial import STATES, same
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import facade

BOTH = (True, False)
NARROW = (torch.bfloat16, torch.float16)


@hazard("C038", variant=variants)
def gradients_of_some_inputs(trial, variant):
    """C038: an input that alone requires a gradient gets the gradient it gets among all."""
    arguments = trial.arguments(variant, T=70, **STATES)
    found = trial.run(arguments)
    results = [name for name in found if name in trial.operator.declaration.results]
    for name in trial.differentiable(arguments):
        same(trial.run(arguments, wrt=[name]), found, [*results, f"d{name}"])


@hazard("C077", variant=variants, narrow=NARROW)
def autocast_changes_nothing(trial, variant, narrow):
    """C077: float32 inputs keep their dtype and their bits under autocast, with backward outside of it."""
    arguments = trial.arguments(variant, T=70, **STATES)
    expected = trial.run(arguments)
    leaves = {name: arguments[name].to(trial.device).requires_grad_() for name in trial.differentiable(arguments)}
    with torch.autocast(trial.device.type, narrow):
        results = trial.call(**{**arguments, **leaves})
    loss = [x.to(trial.device) for x in trial.cotangents(expected).values()]
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), loss)
    found = results | {f"d{name}": x for name, x in zip(leaves, gradients)}
    same({name: x.detach().cpu() for name, x in found.items()}, expected)


@hazard("C077", variant=variants, narrow=NARROW)
def autocast_as_casting_by_hand(trial, variant, narrow):
    """C077: projections that autocast runs in a narrow dtype, their float32 leaves getting float32 gradients."""

    def project(x):
        with torch.autocast(trial.device.type, narrow):
            return x @ torch.eye(x.shape[-1], device=x.device)

    def by_hand(x):
        return x.to(narrow) @ torch.eye(x.shape[-1], device=x.device, dtype=narrow)

    same(_projected(trial, variant, project, torch.autocast(trial.device.type, narrow)),
         _projected(trial, variant, by_hand, torch.autocast(trial.device.type, enabled=False)))


def _projected(trial, variant, project, ambient):
    """Gradients of float32 leaves whose projections the operator takes."""
    arguments = trial.arguments(variant, T=70, **STATES)
    leaves = {name: arguments[name].to(trial.device).requires_grad_() for name in trial.differentiable(arguments)}
    with ambient:
        taken = {name: project(x) if trial.has_tokens(name) else x for name, x in leaves.items()}
        results = trial.call(**{**arguments, **taken})
    sum(x.float().square().sum() for x in results.values()).backward()
    return {name: x.grad for name, x in leaves.items()}


@hazard("C079", "C080", variant=variants, reentrant=BOTH, narrow=(None, torch.bfloat16))
def checkpointing_changes_nothing(trial, variant, reentrant, narrow):
    """C079, C080: recomputed from cu_seqlens and in the dtypes of forward; large gradients stay finite in bfloat16."""
    packed = {"offsets": [0, 30, 30, 100]} if "cu_seqlens" in trial.names else {"T": 100}
    arguments = trial.place(trial.arguments(variant, **packed, **STATES))
    names, seen = trial.differentiable(arguments), []

    def block(cu_seqlens, *values):
        inputs = dict(zip(names, values))
        with torch.autocast(trial.device.type, narrow, enabled=narrow is not None):
            inputs |= {name: x @ torch.eye(x.shape[-1], device=x.device) for name, x in inputs.items()
                       if trial.has_tokens(name)}
            inputs |= {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens}
            seen.append([x.dtype for x in inputs.values()])
            return tuple(trial.call(**{**arguments, **inputs}).values())

    def gradients(run):
        leaves = [arguments[name].detach().clone().requires_grad_() for name in names]
        results = run(block, arguments.get("cu_seqlens"), *leaves)
        torch.autograd.backward(results, [torch.full_like(x, 1e5) for x in results])
        return dict(zip(names, (x.grad for x in leaves)))

    expected = gradients(lambda function, *values: function(*values))
    with set_checkpoint_early_stop(False):  # which spares an operator that keeps nothing
        same(gradients(lambda function, *values: checkpoint(function, *values, use_reentrant=reentrant)), expected)
    assert len(seen) == 3 and seen[0] == seen[1] == seen[2], "forward and recomputation differ in dtypes"
    assert all(x.isfinite().all() for x in expected.values())


@hazard("C082", variant=variants)
def gates_flipped_before_backward(trial, variant):
    """C082: the backend that ran forward runs backward, whatever the environment says by then."""
    arguments = trial.arguments(variant, T=70, **STATES)
    expected = trial.run(arguments)
    leaves = {name: arguments[name].to(trial.device).requires_grad_() for name in trial.differentiable(arguments)}
    results = trial.call(**{**arguments, **leaves})
    loss = [x.to(trial.device) for x in trial.cotangents(expected).values()]
    with mock.patch.dict(os.environ, FLA_DISABLE_BACKEND_DISPATCH="1", FLA_BACKEND="reference"):
        gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), loss)
    same({f"d{name}": x.cpu() for name, x in zip(leaves, gradients)},
         {name: x for name, x in expected.items() if name.startswith("d")})


@hazard("C059", "C061", "C063")
def compiled_as_eager(trial):
    """C059, C061, C063: compiled without a break, forward and backward, K = 256: the bits of eager mode."""
    _check_compiled(trial, trial.arguments(B=1, T=66, H=1, HV=2, K=256, V=16, **STATES))


@hazard("C061", "C063", needs=("cu_seqlens",))
def compiled_as_eager_when_packed(trial):
    """C061, C063: the same with packed sequences."""
    _check_compiled(trial, trial.arguments(offsets=[0, 0, 30, 70], **STATES))


def _check_compiled(trial, arguments):
    arguments = trial.place(arguments)
    names = trial.differentiable(arguments)

    def step(*values):
        return tuple(trial.named(trial.operator.public(**{**arguments, **dict(zip(names, values))})).values())

    def found(function):
        leaves = [arguments[name].detach().clone().requires_grad_() for name in names]
        with facade.use_backend(trial.backend):
            results = function(*leaves)
        upstream = [torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x) for x in results]
        gradients = torch.autograd.grad(results, leaves, upstream)
        return dict(zip(names, gradients)) | {f"result {index}": x for index, x in enumerate(results)}

    torch._dynamo.reset()
    same(found(torch.compile(step, fullgraph=True)), found(step))
