"""Environment variables that steer the choice. They are read at every call, so a test or a job can flip them."""

import os
from contextlib import contextmanager
from contextvars import ContextVar

from fla_dispatch import errors

BACKEND = "FLA_BACKEND"  # force one backend by name
DISABLE = "FLA_DISABLE_BACKEND_DISPATCH"  # 1: no backend, only the PyTorch fallback
FALLBACK = "reference"  # the name under which the decorated body is forced and reported

# Gates in use. Whoever registers a backend with a gate of its own adds to it.
_VARIABLES = [BACKEND, DISABLE]

forced_backend: ContextVar[str | None] = ContextVar("forced_backend", default=None)


@contextmanager
def use_backend(name: str):
    """Force the backend ``name`` ("reference" for the PyTorch fallback) for calls made inside the ``with`` block.

    A call that the backend refuses raises ``BackendRefused`` with every reason. Holds for this thread and context, and
    goes before ``FLA_BACKEND``.
    """
    token = forced_backend.set(name)
    try:
        yield
    finally:
        forced_backend.reset(token)


def add_variable(name: str) -> None:
    if name not in _VARIABLES:
        _VARIABLES.append(name)


def variables() -> tuple[str, ...]:
    return tuple(_VARIABLES)


def state() -> tuple:
    """Everything here that can change a decision; part of every decision's key."""
    return forced_backend.get(), *(os.environ.get(name) for name in _VARIABLES)


def is_set(variable: str, default: bool) -> bool:
    """Read a 0/1 variable; unset or empty means ``default``. Raises ``ValueError`` on anything else."""
    value = os.environ.get(variable) or None
    if value not in (None, "0", "1"):
        raise errors.wrong_gate(variable, value)
    return default if value is None else value == "1"


def forced() -> tuple[str, str] | None:
    """→ (backend, who forces it), or None."""
    if (name := forced_backend.get()) is not None:
        return name, f'use_backend("{name}")'
    if name := os.environ.get(BACKEND):
        return name, f"{BACKEND}={name}"
    return None
