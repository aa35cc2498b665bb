"""Settings of every test: deterministic seeds, one way to choose a cell, and a limit on how long a test may take."""

import os

import pytest
import torch

SECONDS_PER_TEST = 60  # on the CPU lane


def pytest_addoption(parser):
    parser.addoption("--op", help="only the cells of this subject, e.g. chunk_kda")
    parser.addoption("--backend", help="only the cells of this backend, e.g. reference")


def pytest_configure(config):
    for option, variable in (("--op", "FLA_TEST_OP"), ("--backend", "FLA_TEST_BACKEND")):
        if value := config.getoption(option):
            os.environ[variable] = value


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and report.passed and call.duration > SECONDS_PER_TEST:
        report.outcome = "failed"
        report.longrepr = f"took {call.duration:.0f} s; a test has {SECONDS_PER_TEST} s: make its sizes smaller"
    return report
