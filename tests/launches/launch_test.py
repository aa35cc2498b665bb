"""C066: a compiled kernel serves only calls whose arguments are what it was compiled for, whoever shares it."""

from types import SimpleNamespace

import pytest
import torch

from fla_triton import launch
from fla_triton.config import Config, Problem

PROBLEM = Problem(64, 64, 16)


@pytest.fixture
def kernel(monkeypatch):
    """A kernel whose launches count what they compile."""
    monkeypatch.setattr(launch, "kernels", {})
    found = launch.Kernel(SimpleNamespace(__name__="probe"), lambda problem: (Config(),))
    monkeypatch.setattr(launch.Launch, "_compile", lambda self, arguments: object())
    return found


def _tensor(dtype=torch.float32, offset=0):
    return torch.zeros(16, dtype=dtype)[offset:]


def test_the_same_constants_share_one_launch(kernel):
    assert kernel.launch(PROBLEM, K=64, NORM=True) is kernel.launch(PROBLEM, NORM=True, K=64)
    assert kernel.launch(PROBLEM, K=64, NORM=True) is not kernel.launch(PROBLEM, K=64, NORM=False)
    assert kernel.launch(PROBLEM, K=64) is not kernel.launch(Problem(64, 64, 32), K=64)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((_tensor(torch.bfloat16), _tensor(), 3), id="dtype"),
        pytest.param((_tensor(), None, 3), id="absent"),
        pytest.param((_tensor(), _tensor(offset=1), 3), id="alignment"),
    ],
)
def test_other_arguments_are_compiled_for(kernel, other):
    shared, first = kernel.launch(PROBLEM), (_tensor(), _tensor(), 3)
    compiled = shared._compiled(0, first)
    assert shared._compiled(0, (_tensor(), _tensor(), 4)) is compiled  # no size is in the key
    assert shared._compiled(1, first) is not compiled
    assert shared._compiled(0, other) is not compiled
