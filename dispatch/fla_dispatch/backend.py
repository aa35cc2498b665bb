"""What a backend is: data that says what it can take, and two functions, forward and backward."""

import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fla_dispatch.call import Call, Facts
from fla_dispatch.dims import Dim, parse_shape


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that forward keeps for backward: its shape, in the dimension letters, and its dtype."""

    shape: str
    dtype: str | torch.dtype  # a parameter's name (its dtype), ACCUMULATOR, or a dtype

    @property
    def dims(self) -> tuple[Dim, ...]:
        return parse_shape(self.shape)


class Backend:
    """Subclass, fill in the data, write ``forward`` and ``backward``, and hand it to ``fla_dispatch.register``.

    ``limits`` maps what a call has to what is taken: ``device`` ("cuda"), ``arch`` ("sm90", or "sm80+"), ``dtype``
    (of the first tensor), or a dimension letter; each to a collection or a range. ``handles`` names the options and
    optional tensors that are implemented: one that the caller sets and that is not named is refused.
    """

    name: str
    operation: str
    functions: tuple[str, ...] | None = None  # the operation's functions it serves; None: all
    priority: int = 10  # lower runs first
    package: str | None = None  # must be importable
    env: str | None = None  # the variable that gates it: 0 or 1
    default_on: bool = True
    limits: Mapping[str, object] = {}
    handles: frozenset[str] = frozenset()
    saves: Mapping[str, Saved] = {}
    differentiable: bool = True

    def rank(self, facts: Facts) -> float:
        """Where it stands among the others for calls of these facts. Pure."""
        return self.priority

    def also_refuses(self, facts: Facts) -> Iterable[str]:
        """Reasons that ``limits`` and ``handles`` cannot say. Pure."""
        return ()

    def probe(self, device: torch.device) -> tuple[bool, str | None]:
        """Whether the toolchain works on ``device``; asked once per device type and index."""
        if self.package is not None and importlib.util.find_spec(self.package) is None:
            return False, f"package {self.package} is not installed"
        return True, None

    def forward(self, call: Call) -> tuple[tuple, tuple]:
        """→ (the results named by ``call.wanted``, None for an unasked one; the tensors named by ``saves``)."""
        raise NotImplementedError

    def backward(
        self, call: Call, saved: Mapping[str, torch.Tensor], grads: Mapping[str, torch.Tensor | None]
    ) -> Mapping[str, torch.Tensor | None]:
        """→ the gradient of every differentiable tensor that is present, by name. Computes in any dtype."""
        raise NotImplementedError

    def refusals(self, facts: Facts, defaults: Mapping[str, object]) -> list[str]:
        """Every reason not to take calls of these facts; empty if it takes them."""
        reasons = [
            f"{what}={value} (takes {listed(taken)})"
            for what, taken in self.limits.items()
            for value in [_value(facts, what)]
            if not within(what, value, taken)
        ]
        reasons += [
            f"option {name}={value!r} is not implemented"
            for name, value in facts.options.items()
            if value != defaults[name] and name not in self.handles
        ]
        reasons += [
            f"optional tensor {name} is not implemented"
            for name in facts.tensors
            if name in defaults and name not in self.handles
        ]
        if facts.needs_grad and not self.differentiable:
            reasons.append("gradients are not implemented")
        return reasons + list(self.also_refuses(facts))

    def verify(self, facts: Facts, defaults: Mapping[str, object]) -> tuple[bool, str | None]:
        """→ (True, None), or (False, every reason in one line)."""
        reasons = self.refusals(facts, defaults)
        return (False, "; ".join(reasons)) if reasons else (True, None)


def _value(facts: Facts, what: str):
    if what == "device":
        return facts.device.type
    return getattr(facts, what) if what in ("arch", "dtype") else facts.dims.get(what)


def within(what, value, taken) -> bool:
    if what == "arch":
        return any(_arch_matches(value, arch) for arch in taken)
    return value is None or value in taken


def _arch_matches(value: str, arch: str) -> bool:
    """ "sm90" matches "sm90" and "sm80+"; architectures of different makers never match."""
    if not arch.endswith("+"):
        return value == arch
    (maker, number), (other_maker, other_number) = _generation(value), _generation(arch[:-1])
    return maker == other_maker and number >= other_number


def _generation(arch: str) -> tuple[str, int]:
    digits = arch.lstrip("abcdefghijklmnopqrstuvwxyz")
    return arch[: len(arch) - len(digits)], int(digits, 16 if arch.startswith("gfx") else 10) if digits else 0


def listed(taken) -> str:
    if isinstance(taken, range):
        step = f" in steps of {taken.step}" if taken.step != 1 else ""
        return f"{taken.start} to {taken[-1]}{step}"
    return ", ".join(str(item) for item in taken)
