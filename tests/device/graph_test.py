"""C074: calls in CUDA graphs, whose boundaries and values change between replays; and calls that never synchronise."""

from contextlib import contextmanager

import pytest
import torch
from harness.trial import STATES, backward, same

from device.calls import layer, trial

TOKENS, SEQUENCES = 4096, 16
SIZES = {"B": 1, "T": TOKENS, "H": 2, "HV": 4, "K": 64, "V": 96}
# What replays find in cu_seqlens: all sequences; few of them, empty ones among them; rows behind the last; no token.
REPLAYS = ([*range(0, TOKENS + 1, TOKENS // SEQUENCES)], [0, 1, 1, 64, 1000, TOKENS], [0, 0, 0, TOKENS],
           [0, 63, 127, 192, 3000], [0, 0])
DTYPES = ("bf16", "fp32")
BOTH = (True, False)


def padded(offsets) -> list[int]:
    """With empty sequences, up to SEQUENCES of them."""
    return [*offsets, *[offsets[-1]] * (SEQUENCES + 1 - len(offsets))]


def step(trial, arguments, cotangents) -> dict[str, torch.Tensor]:
    """Results, and gradients if there are cotangents."""
    names = trial.differentiable(arguments) if cotangents else []
    with torch.set_grad_enabled(bool(cotangents)):
        results = trial.call(**arguments)
    found = {name: x.detach() for name, x in results.items()}
    return found | backward(results, {name: arguments[name] for name in names}, cotangents) if cotangents else found


class Captured:
    """``step`` in a CUDA graph."""

    def __init__(self, trial, arguments, cotangents):
        self.tensors = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        self.cotangents = {name: x.clone() for name, x in cotangents.items()}
        for name in trial.differentiable(arguments):
            self.tensors[name].requires_grad_(bool(cotangents))
        given = {**arguments, **self.tensors}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                step(trial, given, self.cotangents)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.found = step(trial, given, self.cotangents)

    def replay(self, arguments, cotangents) -> dict[str, torch.Tensor]:
        """What ``step`` finds for other values."""
        with torch.no_grad():
            for name, x in self.tensors.items():
                x.copy_(arguments[name])
            for name, x in self.cotangents.items():
                x.copy_(cotangents[name])
        self.graph.replay()
        return self.found


def packed(trial, offsets, dtype, seed, **given):
    arguments = trial.arguments(layer(trial), dtype=dtype, offsets=offsets, seed=seed, **SIZES, **STATES, **given)
    return trial.place(arguments)


def require_gradients(trial, arguments, wanted: bool):
    for name in trial.differentiable(arguments):
        arguments[name].requires_grad_(wanted)
    return arguments


def cotangents_of(trial, arguments, wanted: bool, loss: str = "all") -> dict[str, torch.Tensor]:
    return trial.place(trial.cotangents(step(trial, arguments, {}), loss)) if wanted else {}


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradients", BOTH, ids=["training", "forward"])
def test_replays_equal_eager(function, dtype, gradients):
    """Bit for bit, whatever cu_seqlens holds by then, and without another byte of memory."""
    t = trial(function)
    graph_mode = {"use_graph": True, "max_num_seqs": SEQUENCES} if "use_graph" in t.names else {}
    first = packed(t, padded(REPLAYS[0]), dtype, 0, **graph_mode)
    cotangents = cotangents_of(t, first, gradients)
    captured = Captured(t, first, cotangents)
    for index, offsets in enumerate(REPLAYS):
        arguments = packed(t, padded(offsets), dtype, index, **graph_mode)
        upstream = {name: (index + 1) * x for name, x in cotangents.items()}
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        found = captured.replay(arguments, upstream)
        torch.cuda.synchronize()
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        eager = {name: x for name, x in arguments.items() if name not in graph_mode}
        same(found, step(t, require_gradients(t, eager, gradients), upstream))
        _equals_unpadded(t, found, eager, upstream, offsets)


def _equals_unpadded(t, found, eager, upstream, offsets):
    """Sequences that only fill up hand their states on and change nothing else."""
    every, there, N = slice(None), slice(0, len(offsets) - 1), len(offsets) - 1
    fewer = {name: x.detach() for name, x in t.part(eager, every, every, there).items() if isinstance(x, torch.Tensor)}
    fewer = {**eager, **fewer, "cu_seqlens": torch.tensor(offsets, device=t.device)}
    weights = t.part(upstream, every, every, there)
    expected = step(t, require_gradients(t, fewer, bool(upstream)), weights)
    names = [name for name in found if t.has_tokens(name) or t.has_sequences(name)]
    same(t.part(found, every, every, there), expected, names)
    assert torch.equal(found["final_state"][N:], eager["initial_state"][N:])
    if upstream:
        assert torch.equal(found["dinitial_state"][N:], upstream["final_state"][N:].to(found["dinitial_state"].dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("B", [1, 8])
def test_decoding_in_a_graph(B, dtype):
    """Token after token, each from the state that the replay before it left: the bits of eager calls."""
    t = trial("fused_recurrent_kda")
    tokens = [t.place(t.arguments(layer(t), dtype=dtype, seed=seed, **{**SIZES, "B": B, "T": 1}, **STATES))
              for seed in range(6)]
    state = tokens[0]["initial_state"].float()
    captured = Captured(t, {**tokens[0], "initial_state": state}, {})
    for token in tokens[1:]:
        expected = step(t, {**token, "initial_state": state}, {})
        state = captured.replay({**token, "initial_state": state}, {})["final_state"]
        same(captured.found, expected)


@contextmanager
def no_synchronisation():
    """torch raises where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("function", ["chunk_kda", "fused_recurrent_kda", "kda_gate_chunk_cumsum"])
@pytest.mark.parametrize("gradients", BOTH, ids=["training", "forward"])
def test_packed_calls_do_not_synchronise(function, gradients):
    """With boundaries on the device alone, seen for the first time."""
    t = trial(function)
    first, second = (packed(t, offsets, "bf16", 0) for offsets in REPLAYS[1:3])
    cotangents = cotangents_of(t, first, gradients, "first")
    for arguments in (first, second):
        require_gradients(t, arguments, gradients)
        with no_synchronisation():
            step(t, arguments, cotangents)


def test_waiting_is_noticed():
    with pytest.raises(RuntimeError, match="synchroniz"), no_synchronisation():
        torch.ones(1, device="cuda").item()
