"""C066: a compiled kernel serves only calls whose arguments are what it was compiled for, whoever shares it."""

from types import SimpleNamespace

import pytest
import torch

from fla_triton import launch
from fla_triton.config import Config, Problem

PROBLEM = Problem(64, 64, 16)
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
FP32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch, "kernels", {})
    monkeypatch.setattr(launch, "INTERPRETED", False)
    return launch.Kernel(SimpleNamespace(__name__="probe"), lambda problem: (Config(),))


def test_the_same_constants_share_one_launch(kernel):
    found = kernel.launch(FIRST, PROBLEM, (FP32,), K=64, NORM=True)
    assert kernel.launch(FIRST, PROBLEM, [FP32], NORM=True, K=64) is found
    assert kernel.launch(FIRST, PROBLEM, (FP32,), K=64, NORM=False) is not found
    assert kernel.launch(FIRST, Problem(64, 64, 32), (FP32,), K=64, NORM=True) is not found
    assert found.configured(Config(num_warps=8)) is found.configured(Config(num_warps=8)) is not found


@pytest.mark.parametrize(
    ("device", "dtypes"),
    [
        pytest.param(FIRST, (FP32, BF16), id="dtype"),
        pytest.param(FIRST, (FP32, None), id="absent"),
        pytest.param(SECOND, (FP32, FP32), id="device"),
    ],
)
def test_other_tensors_have_another_launch(kernel, device, dtypes):
    found = kernel.launch(FIRST, PROBLEM, (FP32, FP32))
    assert kernel.launch(device, PROBLEM, dtypes) is not found


def test_a_launch_compiles_once_and_passes_addresses(kernel, monkeypatch):
    compiled, ran = [], []

    def compile(self):
        compiled.append(self)
        self.ready = (lambda *given: ran.append(given)), ("function",), 2, ("constant",)
        return self.ready

    monkeypatch.setattr(launch.Launch, "compile", compile)
    found = kernel.launch(SECOND, PROBLEM, (FP32, None, FP32))
    for grid in (3, 4, 0):
        found(grid, 71, 64, None, 128, 5)
    assert compiled == [found]
    assert ran == [(2 * grid, 1, 1, 71, "function", 64, None, 128, 5, "constant") for grid in (3, 4)]


def test_tensors_that_start_anywhere_are_copied(monkeypatch):
    """The compiler relies on multiples of 16 bytes."""
    monkeypatch.setattr(launch, "apart", False)
    aligned, odd = torch.arange(8.0), torch.arange(9.0)[1:]
    tensors, found = launch.received((aligned, None, odd))
    assert tensors[0] is aligned and tensors[2] is not odd and torch.equal(tensors[2], odd)
    assert found == [aligned.data_ptr(), None, tensors[2].data_ptr()]
    assert all(x % launch.ALIGNMENT == 0 for x in (found[0], found[2]))
    tensors, found = launch.received((aligned, None))
    assert tensors[0] is aligned and found == [aligned.data_ptr(), None]


def test_pieces_of_a_workspace_lie_apart(monkeypatch):
    monkeypatch.setattr(launch, "apart", False)
    pieces = ((3,), FP32), None, ((5, 7), BF16), ((1000,), torch.int32)
    memory, (first, absent, second, third) = launch.Workspace(torch.device("cpu"), pieces).allocate()
    assert absent is None and first == memory.data_ptr()
    assert second - first >= 12 and third - second >= 70
    assert memory.data_ptr() + memory.numel() - third >= 4000
    assert {(x - first) % launch.PIECE for x in (second, third)} == {0}
