"""The one test body: any operator on any backend, against the fp64 recurrence and against what went wrong in public.

``pytest tests -k "chunk_kda and reference"`` and ``bazel test //tests:chunk_kda_reference`` run the same thing.
"""

import cases
import pytest
import torch
from harness import subject
from harness.cells import selected
from harness.layouts import LAYOUTS
from harness.trial import Trial, short_calls

import facade

REFERENCE = "reference"  # takes every call


def _trials():
    """Every cell's operators, each with the words that name it in a test's id."""
    for cell in selected():
        described = cases.SUBJECTS[cell.subject]
        operators = described.operators()
        for operator in operators:
            label = str(cell) if len(operators) == 1 else f"{cell}-{operator.declaration.function}"
            yield Trial(described, operator, cell.backend, cell.device, brief=cell.interpreted), label


def _cases(trial, **restricted) -> list[dict]:
    return subject.cases_of(trial.subject, trial.operator, trial.sizes, **restricted)


TRIALS = [(trial, label, _cases(trial)) for trial, label in _trials()]
IN_FP64 = {"dtype": ["fp64"], "heads": [(1, 2)], "channels": [(5, 3)], "layout": ["plain"],
           "tokens": [9, *subject.PACKED], "output_dtype": [torch.float64]}


def _crossed(trials) -> list:
    return [pytest.param(trial, case, id=f"{label}-{_words(trial.operator, case)}")
            for trial, label, cases_ in trials for case in cases_]


def _words(operator, case) -> str:
    words = []
    for axis, value in case.items():
        if value is True:
            words.append(axis)
        elif value not in (False, None, "plain", "all"):
            words.append(f"{axis}={value}" if axis in operator.declaration.names else str(value))
    return "-".join(word.replace(" ", "") for word in words)


def _hazards() -> list:
    found = [(trial, label, hazard, values) for trial, label, _ in TRIALS for hazard in trial.subject.hazards
             if hazard.concerns(trial.operator) for values in hazard.combinations(trial)]
    return [pytest.param(trial, hazard, values, id="-".join(
        (label, str(hazard), *(f"{name}={value}".replace(" ", "") for name, value in values.items()))))
        for trial, label, hazard, values in found]


@pytest.fixture(autouse=True)
def _short_calls():
    with short_calls():
        yield


@pytest.mark.parametrize(("trial", "case"), _crossed(TRIALS))
def test_against_recurrence(trial, case):
    """Results and every gradient, within the bound of the table; routed to the backend under test."""
    arguments = subject.arguments(trial.subject, trial.operator, case)
    forward, backward = (trial.refusal(arguments, gradients=gradients) for gradients in (False, True))
    for reason, gradients in ((forward, False), (backward, True)):
        if reason:
            with pytest.raises(facade.BackendRefused) as raised:
                trial.run(arguments, gradients=gradients)
            assert reason in str(raised.value)
    if backward:
        if not forward:
            trial.compare(arguments, {}, trial.run(arguments, gradients=False))
        return
    found = trial.examine(arguments, loss=case.get("loss", "all"), layout=LAYOUTS.get(case["layout"]))
    if offsets := subject.PACKED.get(case["tokens"]):
        for name in filter(trial.has_tokens, found):
            assert (found[name][:, offsets[-1] :] == 0).all(), f"{name} past the last sequence"


@pytest.mark.parametrize(("trial", "case"), _crossed([(t, label, _cases(t, **IN_FP64)) for t, label, _ in TRIALS]))
def test_fp64_gradients(trial, case):
    """Where a backend takes fp64 its gradients pass gradcheck."""
    arguments = trial.place(subject.arguments(trial.subject, trial.operator, case))
    if trial.refusal(arguments):
        assert trial.backend != REFERENCE
        return
    names = trial.differentiable(arguments)

    def function(*values):
        results = trial.call(**{**arguments, **dict(zip(names, values, strict=True))})
        return tuple(results.values())

    assert torch.autograd.gradcheck(function, [arguments[name].requires_grad_() for name in names], fast_mode=True)


@pytest.mark.parametrize(("trial", "hazard", "values"), _hazards())
def test_hazard(trial, hazard, values):
    """What went wrong in public does not go wrong here, or is refused by name."""
    try:
        hazard.check(trial, **values)
    except facade.BackendRefused:
        assert trial.backend != REFERENCE


@pytest.mark.parametrize(("trial", "crossed"), [pytest.param(t, crossed, id=label) for t, label, crossed in TRIALS])
def test_serves(trial, crossed):
    """A backend takes at least half of the cases it is listed for: refusing everything would pass every other test."""
    refusals = [trial.refusal(subject.arguments(trial.subject, trial.operator, case)) for case in crossed]
    assert refusals.count(None) >= len(refusals) / 2, set(refusals)
