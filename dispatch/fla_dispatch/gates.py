"""What steers the choice from outside: environment variables, read at every call, and ``use_backend``.

A decision belongs to one snapshot of them, so one that flips while a decision is made cannot be remembered under the
wrong key.
"""

import os
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from fla_dispatch import errors

BACKEND = "FLA_BACKEND"  # force one backend by name
DISABLE = "FLA_DISABLE_BACKEND_DISPATCH"  # 1: no backend, only the PyTorch fallback
FALLBACK = "reference"  # the name under which the decorated body is forced and reported

# Variables in use. Whoever registers a backend with a gate of its own adds to them.
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


@dataclass(frozen=True, slots=True)
class Gates:
    """Everything here that can change a decision, as it was at one moment."""

    context: str | None  # what use_backend asks for
    values: tuple[tuple[str, str | None], ...]

    @classmethod
    def read(cls) -> "Gates":
        return cls(forced_backend.get(), tuple((name, os.environ.get(name)) for name in _VARIABLES))

    @classmethod
    def read_by_extension(cls, names: tuple, values: tuple, context: str | None) -> "Gates":
        """From what the compiled path read: names and values as bytes."""
        decode = os.environ.decodevalue
        return cls(
            context,
            tuple(
                (decode(name), None if value is None else decode(value))
                for name, value in zip(names, values, strict=True)
            ),
        )

    def is_set(self, variable: str, default: bool) -> bool:
        """A 0/1 variable; unset or empty means ``default``. Raises ``ValueError`` on anything else."""
        value = dict(self.values).get(variable) or None
        if value not in (None, "0", "1"):
            raise errors.wrong_gate(variable, value)
        return default if value is None else value == "1"

    @property
    def forced(self) -> tuple[str, str] | None:
        """→ (backend, who forces it), or None."""
        if self.context is not None:
            return self.context, f'use_backend("{self.context}")'
        if name := dict(self.values).get(BACKEND):
            return name, f"{BACKEND}={name}"
        return None
