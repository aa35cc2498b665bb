"""Fixtures of the dispatch tests: no gate set from outside, backends that leave with their test, fresh interpreters."""

import os
import subprocess
import sys

import pytest

import fla_dispatch

OURS = ("FLA_DISPATCH_EXTENSION", "FLA_TEST_")  # variables that choose what is tested, not who runs a call


@pytest.fixture(autouse=True)
def _no_gates(monkeypatch):
    for name in list(os.environ):
        if name.startswith("FLA_") and not name.startswith(OURS):
            monkeypatch.delenv(name)


@pytest.fixture
def register():
    """``fla_dispatch.register`` for the length of a test."""
    registered = []

    def register(*backends):
        for backend in backends:
            registered.append(backend)
            fla_dispatch.register(backend)

    yield register
    for backend in registered:
        fla_dispatch.unregister(backend.name, backend.operation)


@pytest.fixture
def fresh_python():
    """Run code in a new interpreter that imports what this one does; → what it prints."""

    def run(code: str, *paths: str, **environment: str) -> str:
        path = os.pathsep.join([*map(str, paths), *filter(None, sys.path)])
        done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path} | environment,
                              capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
