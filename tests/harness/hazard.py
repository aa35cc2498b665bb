"""A hazard: a fault somebody met in public, as a check that any operator on any backend can be put to."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType

from fla_dispatch import Operator


@dataclass(frozen=True)
class Hazard:
    """``check(trial, **values)`` raises ``AssertionError``; it runs once for every combination of ``axes``."""

    check: Callable
    cases: tuple[str, ...]  # numbers of the reports
    needs: tuple[str, ...]  # parameters that an operator must have for the hazard to exist
    axes: Mapping[str, object]  # name → values, or a function from the subject to them

    def __str__(self):
        return "-".join((*self.cases, self.check.__name__))

    def concerns(self, operator: Operator) -> bool:
        return set(self.needs) <= set(operator.declaration.names)

    def combinations(self, subject) -> Iterator[dict]:
        values = [axis(subject) if callable(axis) else axis for axis in self.axes.values()]
        return (dict(zip(self.axes, chosen, strict=True)) for chosen in itertools.product(*values))


def hazard(*cases: str, needs: tuple[str, ...] = (), **axes) -> Callable[[Callable], Hazard]:
    return lambda check: Hazard(check, cases, needs, axes)


def variants(subject) -> list[str]:
    """An axis: the subject's named sets of options."""
    return list(subject.variants)


def collect(*modules: ModuleType) -> tuple[Hazard, ...]:
    """Every hazard of the modules, in the order they are written."""
    return tuple(x for module in modules for x in vars(module).values() if isinstance(x, Hazard))
