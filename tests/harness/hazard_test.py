"""Faults of the kinds that users met, planted in a backend: the hazard of each finds it, and nothing else is found."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import cases
import pytest
import torch
from cases import kda_gates, kda_rule, packed, states, tokens

import fla_dispatch
from fla_dispatch import Backend, operator_of
from harness.hazard import Hazard
from harness.trial import Trial

CHUNK_KDA = operator_of("chunk_kda")


@dataclass(frozen=True)
class Fault:
    """``inputs(call)`` → tensors that are read instead; the others spoil dicts by name in place."""

    hazard: Hazard
    inputs: Callable = lambda call: {}
    results: Callable = lambda call, results: None
    gradients: Callable = lambda call, gradients, upstream: None


class Planted(Backend):
    """The decorated body with a fault."""

    name, operation, functions = "planted", "kda", ("chunk_kda",)
    handles = frozenset(CHUNK_KDA.declaration.names)

    def __init__(self, fault: Fault):
        self.fault = fault

    def forward(self, call):
        results = dict(zip(call.plan.returned, self._run(call)))
        self.fault.results(call, results)
        return tuple(results.values()), ()

    def backward(self, call, saved, grads):
        leaves = {name: getattr(call, name).detach().requires_grad_() for name, tensor in call.facts.tensors.items()
                  if tensor.dtype.is_floating_point}
        with torch.enable_grad():
            outputs = dict(zip(call.plan.returned, self._run(call.with_tensors(leaves))))
        read = [name for name, x in outputs.items() if x is not None and grads[name] is not None]
        found = torch.autograd.grad([outputs[name] for name in read], list(leaves.values()),
                                    [grads[name] for name in read], allow_unused=True)
        gradients = {name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(leaves.items(), found)}
        self.fault.gradients(call, gradients, grads)
        return gradients

    def _run(self, call):
        return call.plan.run_body(call.with_tensors(self.fault.inputs(call)))


def _safe_exp(call):
    return {"g": call.g.masked_fill(call.g >= 0, -1e4)} if not call.use_gate_in_kernel else {}


def _anchored_on_the_last_row(call, results):
    results["o"] += 1e-6 * call.g[:, -1:].sum(-1, keepdim=True).to(results["o"].dtype)


def _rows_left_alone(call, results):
    if call.cu_seqlens is not None:
        results["o"][:, call.cu_seqlens[-1] :] = float("nan")


def _state_of_empty_sequences(call, results):
    if call.cu_seqlens is not None and results["final_state"] is not None:
        results["final_state"][call.cu_seqlens.diff() == 0] = 0


_seen = {}


def _remembered_boundaries(call):
    """By identity, whatever was written into the tensor since."""
    if call.cu_seqlens is None:
        return {}
    return {"cu_seqlens": _seen.setdefault(id(call.cu_seqlens), (call.cu_seqlens, call.cu_seqlens.clone()))[1]}


def _gate_of_query_heads(call):
    groups = call.g.shape[2] // call.q.shape[2]
    return {"g": call.g[:, :, ::groups].repeat_interleave(groups, 2)}


def _gate_blind_to_the_final_state(call, gradients, upstream):
    if upstream["final_state"] is not None:
        gradients["g"] *= 0.5


def _state_as_it_lies(call, results):
    if call.state_v_first and results["final_state"] is not None:
        results["final_state"] = results["final_state"].mT.reshape(results["final_state"].shape)


def _narrow_step_size(call):
    return {"beta": call.beta.sigmoid().bfloat16().double().logit().to(call.beta.dtype)} \
        if call.use_beta_sigmoid_in_kernel else {}


def _writes_the_state_in_place(call, results):
    if call.initial_state is not None and results["final_state"] is not None:
        call.initial_state.copy_(results["final_state"])


def _forgets_a_row(call, results):
    results["o"] = torch.empty_like(results["o"])
    results["o"][:, :-1] = 0


_calls = itertools.count()


def _races(call, results):
    results["o"] *= 1 + next(_calls) % 2 * 1e-2


def _gate_in_half_precision(call):
    return {"g": call.g.half().to(call.g.dtype)}


def _state_gradient_in_half_precision(call, gradients, upstream):
    gradients["initial_state"] = gradients["initial_state"].half().float()


FAULTS = {
    "safe exp": Fault(kda_gates.gates_of_exactly_zero, inputs=_safe_exp),
    "anchor on the last row": Fault(tokens.later_tokens_change_nothing, results=_anchored_on_the_last_row),
    "rows left alone": Fault(packed.rows_past_the_last_sequence, results=_rows_left_alone),
    "state of empty sequences": Fault(packed.empty_sequences, results=_state_of_empty_sequences),
    "remembered boundaries": Fault(packed.boundaries_changed_in_place, inputs=_remembered_boundaries),
    "gate of query heads": Fault(tokens.heads_of_any_number, inputs=_gate_of_query_heads),
    "gate blind to the final state": Fault(states.loss_on_the_final_state_alone,
                                           gradients=_gate_blind_to_the_final_state),
    "state as it lies": Fault(states.layouts_are_transposes, results=_state_as_it_lies),
    "narrow step size": Fault(kda_rule.step_size_is_never_rounded, inputs=_narrow_step_size),
    "state written in place": Fault(tokens.inputs_stay_as_they_are, results=_writes_the_state_in_place),
    "a row forgotten": Fault(tokens.nothing_beside_the_tensors_matters, results=_forgets_a_row),
    "race": Fault(tokens.repeated_calls_agree, results=_races),
    "gate in 16 bits": Fault(kda_gates.decay_is_never_rounded, inputs=_gate_in_half_precision),
    "state gradient in 16 bits": Fault(kda_rule.state_beyond_half_precision,
                                       gradients=_state_gradient_in_half_precision),
}


@pytest.fixture
def plant():
    """A backend with a fault, as a trial."""

    def planted(fault):
        fla_dispatch.register(Planted(fault))
        return Trial(cases.SUBJECTS["chunk_kda"], CHUNK_KDA, Planted.name, torch.device("cpu"))

    yield planted
    fla_dispatch.unregister(Planted.name, Planted.operation)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(plant, name):
    fault = FAULTS[name]
    trial = plant(fault)
    with pytest.raises(AssertionError):
        for values in fault.hazard.combinations(trial):
            fault.hazard.check(trial, **values)


@pytest.mark.parametrize("hazard", [fault.hazard for fault in FAULTS.values()], ids=str)
def test_a_faultless_backend_passes(plant, hazard):
    trial = plant(Fault(hazard))
    for values in hazard.combinations(trial)[:6]:
        hazard.check(trial, **values)
