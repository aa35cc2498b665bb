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


def test_tensors_that_start_anywhere_have_another_binary(kernel, monkeypatch):
    """Which is a bit of the call; one that starts elsewhere is enough, and an absent one is not."""
    compiled, ran = [], []

    def compile(self, aligned):
        compiled.append(aligned)
        self.ready[aligned] = (lambda *given: ran.append((aligned, *given))), ("function",), 2, ("constant",)
        return self.ready[aligned]

    monkeypatch.setattr(launch.Launch, "compile", compile)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: 70 + device))
    monkeypatch.setattr(launch, "driver", driver)
    found = kernel.launch(SECOND, PROBLEM, (FP32, None, FP32))
    for addresses in ((64, None, 128), (64, None, 132), (32, None, 16), (68, None, 136)):
        found(3, launch.queue(SECOND, addresses), *addresses, 5)
    assert compiled == [True, False]
    assert ran[0] == (True, 6, 1, 1, 71, "function", 64, None, 128, 5, "constant")
    assert [aligned for aligned, *_ in ran] == [True, False, True, False]


def test_no_program_no_launch(kernel, monkeypatch):
    found = kernel.launch(FIRST, PROBLEM, ())
    found.ready[True] = pytest.fail, (), 1, ()
    found(0, launch.Queue(0, True))


def test_pieces_of_a_workspace_lie_apart(monkeypatch):
    monkeypatch.setattr(launch, "apart", False)
    pieces = ((3,), FP32), None, ((5, 7), BF16), ((1000,), torch.int32)
    memory, (first, absent, second, third) = launch.Workspace(torch.device("cpu"), pieces).allocate()
    assert absent is None and first == memory.data_ptr()
    assert second - first >= 12 and third - second >= 70
    assert memory.data_ptr() + memory.numel() - third >= 4000
    assert {(x - first) % launch.PIECE for x in (second, third)} == {0}
