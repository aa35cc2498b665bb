"""C094, C096: compilers miscompile some tiles, so each configuration that can be picked is held alone against fp64; and
kernels are right at numbers of programs around those where some were not.
"""

import os
from collections import defaultdict

import pytest
import torch
from harness import bounds
from harness.poison import poisoned_allocations
from harness.subject import FLOATS
from harness.trial import STATES, same

from device.calls import layer, trial
from tools.tune_launches import compile_ahead, forced, pickable, recorded

DTYPES = ("fp32", "bf16", "fp16")
CHANNELS = (64, 100, 128, 256)
PARTS = 4  # of the kernels of a call
SIZES = {"B": 2, "T": 330, "H": 2, "HV": 4}
OFFSETS = [0, 0, 70, 71, 200, 320]
BLOCKS = {512: (2, 1024, 16, 16), 1023: (1, 31 * 64, 11, 33), 1024: (4, 1024, 16, 16), 4096: (16, 1024, 16, 16)}


def check_each_alone(t, arguments, gradients: bool, part: int | None = None):
    """Every configuration of the kernels that a call launches, or of a part of them, one at a time.

    The oracle runs on the GPU too. What takes more shared memory than there is can never be picked.
    """
    import triton

    arguments = t.place(arguments)
    with recorded() as launches:
        found = t.run(arguments, gradients=gradients)
    loss = t.place(t.cotangents(found)) if gradients else {}
    dtype = arguments[t.differentiable(arguments)[0]].dtype
    right, eager = (t.oracle(arguments, loss, compute) for compute in (torch.float64, dtype))
    kernels = sorted({one.kernel for one in launches})
    chosen = kernels if part is None else kernels[part::PARTS]
    configurations = [(kernel, config) for kernel, config in pickable(launches) if kernel in chosen]
    _compile(launches, configurations)
    problems, fitting = [], set()
    for kernel, config in configurations:
        try:
            with forced(kernel, config) as done, poisoned_allocations():
                found = t.run(arguments, gradients=gradients, cotangents=loss)
        except triton.OutOfResources as refusal:
            assert "shared memory" in str(refusal), refusal
            continue
        assert done, f"{kernel} was not launched"
        fitting.add(kernel)
        wrong = (bounds.check(name, x, right[name], t.operator.declaration.tolerance, dtype, eager[name])
                 for name, x in found.items())
        problems += [f"{kernel}, {config}: {problem}" for problem in wrong if problem]
    assert not problems, "\n".join(problems)
    assert fitting == set(chosen), f"no configuration fits of {', '.join(set(chosen) - fitting)}"


def _compile(launches, configurations):
    """All side by side, on this process's share of the machine."""
    wanted = defaultdict(list)
    for one in launches:
        wanted[one.kernel, one.problem] = [config for kernel, config in configurations if kernel == one.kernel]
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    compile_ahead(launches, wanted, max(1, os.cpu_count() // processes), lambda total, words: lambda: None)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks(dtype, channels, part):
    """A layer's call, results and gradients; in parts, for compiling takes its time."""
    t = trial("chunk_kda")
    arguments = t.arguments(layer(t), dtype=dtype, K=channels, V=channels, **SIZES, **STATES)
    check_each_alone(t, arguments, True, part)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_packed_sequences(dtype, part):
    t = trial("chunk_kda")
    check_each_alone(t, t.arguments("given", dtype=dtype, offsets=OFFSETS, K=128, V=128, **STATES), True, part)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens(dtype, channels):
    t = trial("fused_recurrent_kda")
    check_each_alone(t, t.arguments(layer(t), dtype=dtype, K=channels, V=channels, **SIZES, **STATES), False)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", ["fused_kda_gate", "kda_gate_chunk_cumsum"])
def test_gates(function, dtype, channels):
    t = trial(function)
    check_each_alone(t, t.arguments(layer(t), dtype=dtype, K=channels, **SIZES), True)


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_any_number_of_programs(function, blocks):
    """C096: NT * B * HV programs: results are those of the recurrence; each row's gradients have the bits of the row
    alone, and the last row's are right."""
    t = trial(function)
    B, T, H, HV = BLOCKS[blocks]
    assert -(-T // 64) * B * HV == blocks
    arguments = t.place(t.arguments("given", dtype="bf16", B=B, T=T, H=H, HV=HV, K=64, V=64, **STATES))
    plain = t.run(arguments, gradients=False)
    t.compare(arguments, {}, plain)
    loss = t.cotangents(plain)
    found = t.run(arguments, cotangents=loss)
    names = [name for name in found if t.has_tokens(name) or t.has_sequences(name)]
    for b in range(B):
        row, every = slice(b, b + 1), slice(None)
        own, weights, expected = (t.part(x, row, every, row) for x in (arguments, loss, found))
        alone = t.run(own, cotangents=weights)
        same(alone, expected, names)
    t.compare(own, t.place(weights), alone)


def test_every_dtype_is_meant():
    """fp64 is what the others are held against."""
    assert set(DTYPES) == set(FLOATS) - {"fp64"}
