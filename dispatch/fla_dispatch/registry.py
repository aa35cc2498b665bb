"""Who can run what: backends by operation, the trees they come from, and the choice among them."""

import importlib
import importlib.metadata
import importlib.util
import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

from fla_dispatch import errors, gates
from fla_dispatch.backend import Backend
from fla_dispatch.call import Facts
from fla_dispatch.extension import watch_gates

log = logging.getLogger("fla_dispatch")

# Our own kernel trees. A tree is a package with OPERATIONS: operation → the module whose import registers backends.
TREES = ("fla_triton", "fla_gluon", "fla_tilelang", "fla_ascend")
for tree in TREES:  # before the first call reads its gates, which is before any tree is loaded
    gates.add_variable(tree.upper())
ENTRY_POINTS = "fla.backends"  # third parties: an entry point named after the operation, loading a Backend

_backends: dict[str, list[Backend]] = {}
_tree_refusals: dict[str, list[tuple[str, str]]] = {}  # operation → (tree, why it brings nothing)
_probes: dict[tuple, tuple[bool, str | None]] = {}
_listeners: list = []  # called when a registration makes cached decisions stale


@dataclass(frozen=True, slots=True)
class Route:
    """Who runs a call, and why every other backend does not."""

    function: str
    backend: str  # gates.FALLBACK for the decorated body
    refusals: tuple[tuple[str, str], ...]
    forced_by: str | None = None

    def __str__(self):
        forced = f", forced by {self.forced_by}" if self.forced_by else ""
        refused = "".join(f"\n  {name} refuses: {reason}" for name, reason in self.refusals)
        return f"{self.function} → {self.backend}{forced}{refused}"


def on_change(listener) -> None:
    _listeners.append(listener)


def register(backend):
    """Register a backend from anywhere: a ``Backend`` subclass or instance. Usable as a class decorator.

    A second registration of the same name, operation and functions replaces the first. Raises ``TypeError`` where the
    contract is not met.
    """
    instance = backend() if isinstance(backend, type) else backend
    if not isinstance(instance, Backend):
        raise errors.wrong_registration(f"{backend!r} is not a Backend")
    for attribute in ("name", "operation"):
        if not isinstance(getattr(instance, attribute, None), str):
            raise errors.wrong_registration(f"{type(instance).__name__}.{attribute} must be a string")
    if instance.name == gates.FALLBACK:
        raise errors.wrong_registration(f"the name {gates.FALLBACK!r} belongs to the PyTorch fallback")
    for what, taken in instance.limits.items():
        if isinstance(taken, str) or not isinstance(taken, Collection):
            raise errors.wrong_registration(
                f"{type(instance).__name__}.limits[{what!r}] must be a collection or a range"
            )
    for saved in instance.saves.values():
        try:
            _ = saved.dims
        except ValueError as error:
            raise errors.wrong_registration(error) from None
    rivals = _backends.setdefault(instance.operation, [])
    rivals[:] = [b for b in rivals if (b.name, b.functions) != (instance.name, instance.functions)] + [instance]
    if instance.env is not None:
        gates.add_variable(instance.env)
        watch_gates()
    _changed()
    return backend


def unregister(name: str, operation: str) -> None:
    """Take a registered backend out again."""
    _backends[operation] = [b for b in _backends.get(operation, []) if b.name != name]
    _changed()


def _changed() -> None:
    _probes.clear()
    for listener in _listeners:
        listener()


def backends(operation: str, function: str) -> list[Backend]:
    """The backends that serve a function; loads the trees the first time an operation is asked for."""
    absent(operation)
    return [b for b in _backends.get(operation, []) if b.functions is None or function in b.functions]


def absent(operation: str) -> list[tuple[str, str]]:
    """The kernel trees and entry points that bring nothing to an operation, each with its reason."""
    if operation not in _tree_refusals:
        _tree_refusals[operation] = _load(operation)
    return list(_tree_refusals[operation])


def known_names() -> tuple[str, ...]:
    names = dict.fromkeys(b.name for rivals in _backends.values() for b in rivals)
    return (*names, gates.FALLBACK)


def _load(operation: str) -> list[tuple[str, str]]:
    """Import whatever serves the operation. Toolchains fail to import in many ways; each is a reason to refuse."""
    refusals = []
    for tree in TREES:
        if importlib.util.find_spec(tree) is None:
            refusals.append((tree.removeprefix("fla_"), f"kernel tree {tree} is not installed"))
            continue
        try:
            module = importlib.import_module(tree).OPERATIONS.get(operation)
            if module is None:
                refusals.append((tree.removeprefix("fla_"), f"kernel tree {tree} does not have {operation}"))
                continue
            importlib.import_module(module)
        except Exception as error:
            refusals.append((tree.removeprefix("fla_"), f"{tree} cannot be imported: {_short(error)}"))
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=operation):
        try:
            register(entry.load())
        except Exception as error:
            refusals.append((entry.value, f"entry point cannot be imported: {_short(error)}"))
    return refusals


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def choose(facts: Facts, defaults, state: gates.Gates) -> tuple[Backend | None, Route]:
    """→ (backend, or None for the decorated body; the route). Raises ``BackendRefused`` if a forced one refuses."""
    forced = state.forced
    rivals = backends(facts.operation, facts.function)
    disabled = state.is_set(gates.DISABLE, False)
    if forced is not None and forced[0] != gates.FALLBACK:
        return _forced(facts, defaults, forced, rivals, state, disabled)
    refusals = [] if disabled else absent(facts.operation)
    chosen = None
    for backend in sorted(rivals, key=lambda b: b.rank(facts)):
        if disabled:
            reason = f"{gates.DISABLE}=1"
        elif forced is not None:
            reason = f"{forced[1]} asks for the fallback"
        else:
            reason = _refusal(backend, facts, defaults, state)
        if reason is not None:
            refusals.append((backend.name, reason))
        elif chosen is None:
            chosen = backend
        else:
            refusals.append((backend.name, f"comes after {chosen.name}"))
    return chosen, Route(
        facts.function, chosen.name if chosen else gates.FALLBACK, tuple(refusals), forced[1] if forced else None
    )


def _forced(facts, defaults, forced, rivals, state, disabled):
    name, origin = forced
    named = [b for b in rivals if b.name == name]
    if not named:
        reasons = [why for tree, why in absent(facts.operation) if tree == name]
        if not reasons and name not in known_names():
            raise errors.unknown_backend(facts.function, name, origin, known_names())
        reasons = reasons or [f"it does not have {facts.function}"]
    else:
        reasons = [f"{gates.DISABLE}=1"] if disabled else [_refusal(b, facts, defaults, state) for b in named]
        for backend, reason in zip(named, reasons, strict=False):
            if reason is None:
                return backend, Route(facts.function, name, (), origin)
    raise errors.forced_refusal(facts.function, name, origin, reasons)


def gate_refusal(backend: Backend, state: gates.Gates) -> str | None:
    """Why its gate keeps the backend out, or None."""
    if backend.env is None or state.is_set(backend.env, backend.default_on):
        return None
    return f"{backend.env}=0" if backend.default_on else f"off by default (set {backend.env}=1)"


def _refusal(backend: Backend, facts: Facts, defaults, state: gates.Gates) -> str | None:
    """Gate, then toolchain, then verifier; None if all agree. An exception in a verifier is a bug and propagates."""
    if (closed := gate_refusal(backend, state)) is not None:
        return closed
    where = (backend.name, backend.operation, facts.device)
    if where not in _probes:
        _probes[where] = backend.probe(facts.device)
    works, problem = _probes[where]
    if not works:
        return problem
    return backend.verify(facts, defaults)[1]


def architecture(device: torch.device) -> str:
    """ "sm90", "gfx942" …; the device type where there is nothing finer to say."""
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        if torch.version.hip:
            return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
        return "sm{}{}".format(*torch.cuda.get_device_capability(device))
    return device.type
