"""C070: tensors on a GPU that is not the current one."""

import pytest
import torch
from harness.trial import STATES, same

from device.calls import layer, trial

GPUS = 2  # that these tests need
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda", "fused_kda_gate", "kda_gate_chunk_cumsum")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward"])
@pytest.mark.parametrize("offsets", [None, [0, 0, 30, 100]], ids=["dense", "packed"])
def test_the_other_gpu(function, gradients, offsets):
    """Results are those of the current GPU, and of that GPU when it is current; which one is current stays."""
    here, there = trial(function, "cuda:0"), trial(function, "cuda:1")
    arguments = here.arguments(layer(here), dtype="bf16", offsets=offsets, T=100, K=64, V=64, **STATES)
    with torch.cuda.device(0):
        found = there.run(arguments, gradients=gradients)
        assert torch.cuda.current_device() == 0
        same(found, here.run(arguments, gradients=gradients))
    with torch.cuda.device(1):
        same(found, there.run(arguments, gradients=gradients))
