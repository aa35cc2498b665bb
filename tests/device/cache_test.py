"""C064: one call compiles whatever calls of other lengths need; nothing is compiled, or tried out, for a length."""

import random
from contextlib import contextmanager

import pytest
import torch

from device.calls import layer, trial

CHANNELS = {"K": 72, "V": 56}  # of no other test, so that the first call compiles whatever ran before
WARM, SHORTEST, LONGEST, CALLS = 1000, 500, 70_000, 20
PASSES = {"chunk_kda": (True, False), "fused_recurrent_kda": (False,), "fused_kda_gate": (True,),
          "kda_gate_chunk_cumsum": (True,)}


@contextmanager
def compilations():
    """The names of kernels that are compiled."""
    from fla_triton import launch

    found = []

    def observe(kernel, problem, config, constants, compiled):
        found.append(kernel.name)

    launch.on_compile.append(observe)
    try:
        yield found
    finally:
        launch.on_compile.remove(observe)


def calls(trial, dtype, packed: bool):
    """A call of WARM tokens, then others of random lengths; packed ones of random numbers of sequences."""
    draw = random.Random(0)
    whole = trial.place(trial.arguments(layer(trial), dtype=dtype, B=1, T=LONGEST, H=1, HV=1, **CHANNELS))
    for T in (WARM, *(draw.randint(SHORTEST, LONGEST) for _ in range(CALLS))):
        arguments = trial.part(whole, slice(None), slice(0, T), slice(None))
        if packed:
            cuts = sorted(draw.randint(0, T) for _ in range(draw.randint(0, 20)))
            arguments["cu_seqlens"] = torch.tensor([0, *cuts, T], device=trial.device)
        yield arguments


@pytest.mark.parametrize("function", PASSES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_one_call_compiles_for_all_lengths(function, dtype):
    for gradients in PASSES[function]:
        _check_all_lengths(trial(function), dtype, gradients)


def _check_all_lengths(t, dtype, gradients):
    from fla_triton import launch

    for packed in (False, True)[: 1 + ("cu_seqlens" in t.names)]:
        first, *others = calls(t, dtype, packed)
        launch.forget()
        with compilations() as warm:
            t.run(first, gradients=gradients)
        with compilations() as later:
            for arguments in others:
                t.run(arguments, gradients=gradients)
        assert warm, "the first call compiled nothing"
        assert not later, f"compiled after the first {'packed ' * packed}call: {', '.join(sorted(later))}"
