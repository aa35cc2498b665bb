"""A hazard: a fault somebody met in public, as a check that any operator on any backend can be put to."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from fla_dispatch import Operator
from harness.axes import pairwise


@dataclass(frozen=True)
class Hazard:
    """``check(trial, **values)`` raises ``AssertionError``; it runs once for every combination of ``axes``.

    Where a trial is brief (kernels are interpreted) the axes take the values of ``brief``, and every two values of two
    axes meet instead of all.
    """

    check: Callable
    cases: tuple[str, ...]  # numbers of the reports
    needs: tuple[str, ...]  # parameters, and letters of dimensions, that an operator must have for the hazard to exist
    axes: Mapping[str, object]  # name → values, or a function from the trial to them
    brief: Mapping[str, object] = field(default_factory=dict)  # values instead of those of some axes

    def __str__(self):
        return "-".join((*self.cases, self.check.__name__))

    def concerns(self, operator: Operator) -> bool:
        declaration = operator.declaration
        letters = {letter for p in declaration.tensors for shape in p.shapes for dim in shape for letter in dim.letters}
        return set(self.needs) <= {*declaration.names, *letters}

    def combinations(self, trial) -> list[dict]:
        axes = {**self.axes, **(self.brief if trial.brief else {})}
        axes = {name: list(axis(trial) if callable(axis) else axis) for name, axis in axes.items()}
        if trial.brief and len(axes) > 1:
            return pairwise(axes, lambda case: True)
        return [dict(zip(axes, chosen, strict=True)) for chosen in itertools.product(*axes.values())]


def hazard(
    *cases: str, needs: tuple[str, ...] = (), brief: Mapping[str, object] = {}, **axes
) -> Callable[[Callable], Hazard]:
    if unknown := set(brief) - set(axes):
        raise TypeError(f"brief values of axes that are not there: {', '.join(sorted(unknown))}")
    return lambda check: Hazard(check, cases, needs, axes, brief)


def variants(trial) -> list[str]:
    """An axis: the subject's named sets of options."""
    return list(trial.subject.variants)


def declared(option: str, values: tuple) -> Callable:
    """An axis: the values of an option, where the operator has it."""
    return lambda trial: values if option in trial.names else (None,)


def collect(*modules: ModuleType) -> tuple[Hazard, ...]:
    """Every hazard of the modules, in the order they are written."""
    return tuple(x for module in modules for x in vars(module).values() if isinstance(x, Hazard))
