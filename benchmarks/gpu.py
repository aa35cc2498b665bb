"""How work on a GPU is timed: events around each call, launches queued behind a spinning kernel, inputs rotated.

Queued behind a spin, every launch is there before the GPU gets to it, so gaps between launches do not count: what a
replayed CUDA graph would take. What the host spends is a figure of its own. Inputs rotate over copies that exceed L2.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

L2 = 60e6  # bytes
CLOCK = 1.98e9  # of the spinning kernel, cycles per second
LONGEST_SPIN = 0.2  # seconds
TRIES = 3  # how often a batch that came late is queued again
BATCHES = (8, 4, 2)  # calls queued at once: fewer where they fill the queue of launches


@dataclass(frozen=True)
class Time:
    """Milliseconds of GPU time; ``hidden``: every launch was queued before the GPU began."""

    median: float
    p10: float
    p90: float
    calls: int
    hidden: bool


def copies(size: int, most: int = 100) -> int:
    """How many sets of inputs of ``size`` bytes defeat L2."""
    return max(2, min(most, math.ceil(3 * L2 / size)))


def milliseconds(calls: Sequence[Callable], seconds: float = 0.1, most: int = 40) -> Time:
    """Median over calls that take turns, for about ``seconds`` of GPU time."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    host, total = _once(calls)
    wanted = int(min(most, max(8, seconds / max(total, 1e-6))))
    batch, spin = _batch(calls, host)
    times, late = [], 0
    while len(times) < wanted:
        found, hidden = _queued([calls[(len(times) + i) % len(calls)] for i in range(batch)], spin)
        if not hidden and late < TRIES:
            late, spin = late + 1, min(2 * spin, LONGEST_SPIN)
            continue
        times += found
    times.sort()
    count = len(times)
    return Time(statistics.median(times), times[count // 10], times[9 * count // 10], count, late < TRIES)


def _batch(calls, host: float) -> tuple[int, float]:
    """How many calls to queue at once, and for how many seconds to spin, so that all are queued in time."""
    for batch in BATCHES:
        spin = 1.5 * host * batch + 2e-4
        while spin <= LONGEST_SPIN:
            if _queued([calls[i % len(calls)] for i in range(batch)], spin)[1]:
                return batch, spin
            spin *= 2
    return BATCHES[-1], LONGEST_SPIN


def _once(calls) -> tuple[float, float]:
    """Seconds that one call takes the host, and until it is done."""
    hosts, totals = [], []
    for i in range(5):
        start = time.perf_counter()
        calls[i % len(calls)]()
        hosts.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        totals.append(time.perf_counter() - start)
    return min(hosts), min(totals)


def _queued(calls, spin: float) -> tuple[list[float], bool]:
    """Milliseconds of each call, and whether all were queued before the GPU began."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
    torch.cuda._sleep(int(min(spin, LONGEST_SPIN) * CLOCK))
    for call, (start, end) in zip(calls, events):
        start.record()
        call()
        end.record()
    hidden = not events[0][0].query()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in events], hidden


def host_microseconds(call: Callable, calls: int = 8, rounds: int = 9) -> float:
    """What enqueuing one call costs: the median round of ``calls`` that do not wait for the GPU."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(times)


def replayed_microseconds(calls: Sequence[Callable], rounds: int = 15) -> float:
    """GPU time per call where all ``calls`` are captured in one CUDA graph and replayed: median of the rounds."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            kept.append(call())  # else every call would write its results where the one before it did
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times)


def peak_bytes(call: Callable) -> int:
    """The most that one call allocates above what is there."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceilings() -> dict[str, float]:
    """What this machine reaches: bytes per second of a copy (read and written), FLOP per second of a bf16 product."""
    source = torch.randint(255, (1 << 32,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = milliseconds([lambda: target.copy_(source)], most=10)
    del source, target
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = milliseconds([lambda: a @ b], most=20)
    return {"copy": 2 * 2**32 / copy.median * 1e3, "product": 2 * 8192**3 / product.median * 1e3}
