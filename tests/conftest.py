"""Settings of every test: deterministic seeds, one way to choose a cell, and a limit on how long a test may take."""

import importlib.util
import os

import pytest
import torch

SECONDS_PER_TEST = 60  # on the CPU lane
INTERPRETER = ("fla_triton", "triton", "numpy")  # what interpreting kernels takes


def pytest_addoption(parser):
    parser.addoption("--op", help="only the cells of this subject, e.g. chunk_kda")
    parser.addoption("--backend", help="only the cells of this backend, e.g. reference")


def pytest_configure(config):
    for option, variable in (("--op", "FLA_TEST_OP"), ("--backend", "FLA_TEST_BACKEND")):
        if value := config.getoption(option):
            os.environ[variable] = value
    from harness.cells import selected

    # Now, because Triton reads it when it is imported, and torch.compile imports Triton.
    if any(cell.interpreted for cell in selected()) and all(map(importlib.util.find_spec, INTERPRETER)):
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _trial(item):
    """What a test of a cell tries; None of any other test."""
    return item.callspec.params.get("trial") if hasattr(item, "callspec") else None


def pytest_collection_finish(session):
    """Mend the interpreter if a test that was chosen needs it."""
    if _interpreting() and any(trial.brief for item in session.items if (trial := _trial(item))):
        from harness import interpreter

        interpreter.mend()


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


def _open_gate(item):
    """Kernels are interpreted in their own cells alone: whatever else runs on the CPU is not slowed down by them."""
    if _interpreting():
        trial = _trial(item)
        os.environ["FLA_TRITON"] = "1" if trial and trial.brief else "0"


# Before fixtures, and again behind them, for some empty the environment.
pytest_runtest_setup = pytest.hookimpl(tryfirst=True)(_open_gate)
pytest_runtest_call = pytest.hookimpl(tryfirst=True)(_open_gate)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    on_cpu_lane = os.environ.get("FLA_TEST_DEVICE", "cpu") == "cpu"  # elsewhere compilers take most of the time
    if on_cpu_lane and call.when == "call" and report.passed and call.duration > SECONDS_PER_TEST:
        report.outcome = "failed"
        report.longrepr = f"took {call.duration:.0f} s; a test has {SECONDS_PER_TEST} s: make its sizes smaller"
    return report
