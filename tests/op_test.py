"""The one test body: any operator on any backend, against the fp64 recurrence.

``pytest tests -k "chunk_kda and reference"`` and ``bazel test //tests:chunk_kda_reference`` run the same thing.
"""

import cases
import facade
import pytest
import torch
from harness import bounds, subject
from harness.axes import pairwise
from harness.cells import selected
from harness.poison import poisoned_allocations


def _cases():
    for cell in selected():
        described = cases.SUBJECTS[cell.subject]
        for operator in described.operators():
            valid = lambda case, s=described, o=operator: subject.is_valid(s, o, case)  # noqa: E731
            for case in pairwise(subject.axes_of(described, operator), valid):
                yield pytest.param(cell, operator, case, id=f"{cell}-{_label(operator, case)}")


def _label(operator, case) -> str:
    words = []
    for axis, value in case.items():
        if value is True:
            words.append(axis)
        elif value not in (False, None, "plain", "all"):
            words.append(f"{axis}={value}" if axis in operator.declaration.names else str(value))
    return "-".join(word.replace(" ", "") for word in words)


def _operators():
    for cell in selected():
        for operator in cases.SUBJECTS[cell.subject].operators():
            yield pytest.param(cell, operator, id=f"{cell}-{operator.declaration.function}")


@pytest.mark.parametrize(("cell", "operator", "case"), list(_cases()))
def test_against_recurrence(cell, operator, case):
    """Results and every gradient, within the bound of the table; routed to the backend under test."""
    described, dtype = cases.SUBJECTS[cell.subject], subject.FLOATS[case["dtype"]]
    built = subject.arguments(described, operator, case)
    if reason := _refusal(cell, operator, built):
        with pytest.raises(facade.BackendRefused) as raised, facade.use_backend(cell.backend):
            operator.public(**_on(cell, built))
        assert reason in str(raised.value)
        return
    with poisoned_allocations():
        found = subject.run(operator, cell.backend, cell.device, built, case)
    assert found.route == cell.backend
    right = subject.run_oracle(described, operator, built, case, torch.float64)
    eager = subject.run_oracle(described, operator, built, case, dtype)
    assert found.tensors.keys() == right.tensors.keys()
    tolerance = operator.declaration.tolerance
    problems = [bounds.check(name, x, right.tensors[name], tolerance, dtype, eager.tensors[name])
                for name, x in found.tensors.items()]
    assert not any(problems), "\n".join(filter(None, problems))
    for name, x in found.tensors.items():
        if name.startswith("d"):
            assert x.dtype == built[name[1:]].dtype, name
    offsets = subject.PACKED.get(case["tokens"])
    if offsets:
        _check_outside(operator, found, offsets[-1])


def _refusal(cell, operator, built) -> str | None:
    with facade.use_backend(cell.backend):
        route = operator.explain(**_on(cell, built))
    return None if route.backend == cell.backend else route.refusals[0][1].splitlines()[-1].strip(" -")


def _on(cell, built):
    return {name: x.to(cell.device) if isinstance(x, torch.Tensor) and not name.endswith("_cpu") else x
            for name, x in built.items()}


def _check_outside(operator, found, end):
    """Rows past the last sequence are exactly 0 in every result and gradient that has tokens."""
    declaration = operator.declaration
    for name, x in found.tensors.items():
        shape = declaration.results[name].shape if name in declaration.results else \
            declaration.parameter(name[1:]).shape_texts[0]
        if shape.startswith("B T"):
            assert (x[:, end:] == 0).all(), f"{name} past the last sequence"


@pytest.mark.parametrize(("cell", "operator"), list(_operators()))
def test_fp64_gradients(cell, operator):
    """Where a backend takes fp64 its gradients pass gradcheck, packed and with every input present."""
    described = cases.SUBJECTS[cell.subject]
    case = _everything(described, operator) | {"dtype": "fp64", "channels": (5, 3), "heads": (1, 2)}
    built = _on(cell, subject.arguments(described, operator, case))
    if _refusal(cell, operator, built):
        assert cell.backend != "reference"
        return
    names = subject.differentiable(operator, built)
    leaves = [built[name].double().requires_grad_() for name in names]

    def function(*values):
        with facade.use_backend(cell.backend):
            returned = operator.public(**{**built, **dict(zip(names, values, strict=True))})
        return tuple(subject.results_of(operator, returned).values())

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def _everything(described, operator) -> dict:
    """A packed case with every option and optional tensor that can go together."""
    axes = subject.axes_of(described, operator)
    case = {"dtype": "fp32", "heads": (2, 4), "channels": (24, 40), "layout": "plain",
            "tokens": "mixed" if "cu_seqlens" in operator.declaration.names else 65}
    for axis, values in axes.items():
        if axis not in case and axis != "loss":
            for value in reversed(values):
                if subject.is_valid(described, operator, _filled(axes, case | {axis: value})):
                    case[axis] = value
                    break
            else:
                case[axis] = values[0]
    return case | {"loss": "all"}


def _filled(axes, case):
    """Axes not decided yet take whichever value lets the others stand: the gate's parameters depend on the gate."""
    undecided = {axis: values[0] for axis, values in axes.items() if axis not in case}
    if case.get("use_gate_in_kernel"):
        undecided |= {axis: values[-1] for axis, values in axes.items() if axis in ("A_log", "lower_bound")
                      and axis not in case}
    return undecided | case
