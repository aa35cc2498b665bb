"""Operators on a GPU, on the named shapes of their declarations, beside fla-core where it is installed.

    python -m benchmarks.operators --output FOLDER                          everything, ours alone
    python -m benchmarks.operators --peers fla --winners winners.json ...   both libraries, in turns, row by row
    python -m benchmarks.operators --only chunk_kda/train_8k,decode ...     rows whose key contains one of these
    python -m benchmarks.operators --list                                   the keys

A row is an operator, a shape and "forward" or "training" (forward and backward), or "decode": GPU time, host time, peak
memory above the inputs, and the seconds of a first call with cold caches (in a process of its own). Before it is timed
the very call is held against the fp64 recurrence; a library that fails gets no figure. The JSON is written after every
row, so that what was measured is there whatever happens next.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import gpu, libraries, windows
from benchmarks.libraries import FLA, OURS
from benchmarks.timing import arguments, device_name, provenance, results_folder, save
from benchmarks.workloads import Workload
from fla_dispatch import operator_of

FORWARD, TRAINING, DECODE = "forward", "training", "decode"
PASSES = 2  # of each library, in turns

# What is to be reached: GPU time over fla's of the same run.
RATIOS = {
    "chunk_kda/train_8k": {FORWARD: 0.65 / 0.953, TRAINING: 2.9 / 4.06},
    "chunk_kda/batch_2k": {FORWARD: 0.60 / 0.939, TRAINING: 2.8 / 3.99},
    "chunk_kda/long_64k": {FORWARD: 2.0 / 2.951, TRAINING: 8.0 / 11.2},
    "chunk_kda/packed_32k": {FORWARD: 1.3 / 1.930, TRAINING: 5.8 / 8.17},
    "chunk_kda/wide_4k": {FORWARD: 2.3 / 3.650, TRAINING: 11 / 15.9},
}
DECODE_RATIO = 1.0
PEAK_RATIO = 0.6
HOST = {FORWARD: 80, TRAINING: 250, DECODE: 25}  # µs
FIRST = {FORWARD: 5, TRAINING: 8}  # seconds; training: on top of forward
BARRED = ("chunk_kda", "fused_recurrent_kda")
# Lengths of one sequence between which time must grow linearly; ours alone.
GROWTH = Workload("chunk_kda", "million", dict(B=1, T=1 << 20, H=2, HV=2, K=128, V=128))
PART = 4  # of the tokens, in the row beside it

ON_SHAPES = {"chunk_kda": (FORWARD, TRAINING), "fused_kda_gate": (FORWARD, TRAINING),
             "kda_gate_chunk_cumsum": (FORWARD,), "fused_recurrent_kda": (DECODE,)}  # fmt: skip
GATE_SHAPES = ("train_8k",)
COLD = ("chunk_kda/train_8k", "fused_recurrent_kda/decode_1")


@dataclass(frozen=True)
class Row:
    workload: Workload
    direction: str
    alone: bool = False  # without peers

    @property
    def key(self) -> str:
        return f"{self.workload.key}/{self.direction}"

    @property
    def training(self) -> bool:
        return self.direction == TRAINING

    @property
    def bars(self) -> dict[str, float]:
        """What is to be reached, by the figure's name."""
        bars = dict(RATIOS.get(self.workload.key, {}))
        found = {"ratio": bars[self.direction]} if self.direction in bars else {}
        if self.direction == DECODE:
            found["ratio"] = DECODE_RATIO
        if self.workload.name in BARRED and not self.alone:
            found["host_us"] = HOST[self.direction]
            if self.direction != DECODE:
                found["peak_ratio"] = PEAK_RATIO
        if self.workload.key in COLD and self.direction in FIRST:
            found["first_s"] = FIRST[self.direction]
        return found


def rows() -> list[Row]:
    """Every row there is."""
    found = []
    for name, directions in ON_SHAPES.items():
        for shape, sizes in operator_of(name).declaration.named_shapes.items():
            decoding = shape.startswith("decode")
            if shape == "ci" or decoding != (directions == (DECODE,)) or "gate" in name and shape not in GATE_SHAPES:
                continue
            found += [Row(Workload(name, shape, sizes), direction) for direction in directions]
    for T in (GROWTH.sizes["T"] // PART, GROWTH.sizes["T"]):
        longer = Workload(GROWTH.name, f"length_{T}", {**GROWTH.sizes, "T": T})
        found += [Row(longer, FORWARD, alone=True), Row(longer, TRAINING, alone=True)]
    return found


def chosen(every: list[Row], only: str) -> list[Row]:
    """Rows whose key contains one of the words; raises ``SystemExit`` for a word that chooses nothing."""
    words = [word for word in only.split(",") if word]
    for word in words:
        if not any(word in row.key for row in every):
            raise SystemExit(f"--only {word}: no row is called so; --list shows them")
    return [row for row in every if not words or any(word in row.key for word in words)]


# --- one library on one row ---


def call_of(row: Row, library: str, inputs: dict, cotangent: torch.Tensor | None):
    """The call that is timed: → (results, gradients by name)."""
    function = libraries.function(library, row.workload)
    names = [name for name in row.workload.tensors if row.training]

    def forward():
        with torch.no_grad():
            return function(**inputs), {}

    def training():
        results = function(**inputs)
        gradients = torch.autograd.grad(results[0], [inputs[name] for name in names], cotangent)
        return results, {f"d{name}": x for name, x in zip(names, gradients)}

    return training if row.training else forward


def checked(row: Row, library: str, inputs, cotangent, parts) -> dict[str, object]:
    """Run once; → the errors, who ran, and what is wrong."""
    if library == OURS:
        with torch.set_grad_enabled(row.training):
            route = row.workload.operator.explain(**inputs, **row.workload.options)
        if route.backend == "reference":
            return {"backend": route.backend, "problem": f"no kernel takes it: {route}"[:300]}
    results, gradients = call_of(row, library, inputs, cotangent)()
    names = row.workload.operator.declaration.results
    found = {name: x for name, x in zip(names, results) if x is not None} | gradients
    errors = windows.errors(found, parts)
    who = libraries.backend(library)
    return {"backend": who, "errors": errors, "problem": windows.problem(row.workload, errors)}


def measure(row: Row, library_names: list[str], spent, device: str = "cuda") -> Iterator[dict]:
    """Records of one row, one per library."""
    sets = [row.workload.inputs(device) for _ in range(gpu.copies(row.workload.input_bytes))]
    for inputs in sets:
        for name in row.workload.tensors:
            inputs[name].requires_grad_(row.training)
        if "cu_seqlens" in inputs:  # what a library remembers of boundaries it finds again
            inputs["cu_seqlens"] = sets[0]["cu_seqlens"]
    cotangent = cotangent_of(row, sets[0]) if row.training else None
    parts = windows.right(row.workload, sets[0], cotangent)
    records = {}
    for library in library_names:
        with failures_of(records, library):
            records[library] = checked(row, library, sets[0], cotangent, parts)
    del parts
    sound = [library for library in library_names if records[library]["problem"] is None]
    calls = {library: [call_of(row, library, inputs, cotangent) for inputs in sets] for library in sound}
    with spent("timing"):
        if row.direction == DECODE:
            _decode(calls, records)
        else:
            _whole(calls, records, row.training)
    del calls, sets
    torch.cuda.empty_cache()
    for library in library_names:
        record = records[library]
        if "ms" in record:
            record["fraction"] = row.workload.floor(row.training) / record["ms"]
        yield {"library": library, **record}


def cotangent_of(row: Row, inputs) -> torch.Tensor:
    """A gradient of the first result; its shape and dtype without running the operator where they are known."""
    w = row.workload
    if "v" in w.tensors:
        return torch.randn_like(inputs["v"].detach())
    return torch.randn(inputs["g"].shape, device=inputs["g"].device)


def _whole(calls, records, training: bool) -> None:
    """GPU time in turns, then what the host spends and what is allocated."""
    passes = {library: [] for library in calls}
    for _ in range(PASSES):
        for library in calls:
            if library in passes:
                with failures_of(records, library, passes):
                    passes[library].append(gpu.milliseconds(calls[library]))
    for library, times in passes.items():
        with failures_of(records, library):
            best = min(times, key=lambda t: t.median)
            records[library] |= {
                "ms": best.median, "p10": best.p10, "p90": best.p90, "passes": [t.median for t in times],
                "launches_queued": all(t.hidden for t in times),
                "host_us": gpu.host_microseconds(calls[library][0]),
                "peak_bytes": gpu.peak_bytes(calls[library][0]),
            }  # fmt: skip
            if training:
                with torch.autograd.set_multithreading_enabled(False):
                    records[library]["host_one_thread_us"] = gpu.host_microseconds(calls[library][0])


def _decode(calls, records) -> None:
    """GPU time of a replayed graph, in turns, and what the host spends on an eager call."""
    passes = {library: [] for library in calls}
    for _ in range(PASSES):
        for library in calls:
            if library in passes:
                with failures_of(records, library, passes):
                    passes[library].append(gpu.replayed_microseconds(calls[library][:50]) / 1e3)
    for library, times in passes.items():
        with failures_of(records, library):
            host = gpu.host_microseconds(calls[library][0], calls=100)
            records[library] |= {"ms": min(times), "passes": times, "host_us": host}


@contextlib.contextmanager
def failures_of(records, library: str, running: dict | None = None):
    """A library that raises loses its figures, not those of the others."""
    try:
        yield
    except Exception as fault:
        torch.cuda.empty_cache()
        records[library] = {"problem": f"{type(fault).__name__}: {fault}"[:300]}
        if running is not None:
            del running[library]


# --- first calls ---


def first_call(workload: Workload, library: str, winners: Path | None) -> dict[str, float]:
    """Seconds of the first forward in a fresh process with an empty compile cache, and of the first backward after."""
    with tempfile.TemporaryDirectory() as cache:
        ended = subprocess.run(
            _command(workload.key, library, winners),
            env=_environment() | {"TRITON_CACHE_DIR": cache},
            capture_output=True,
            text=True,
        )
    if ended.returncode:
        raise RuntimeError(ended.stderr.strip().splitlines()[-1][:300])
    return json.loads(ended.stdout.strip().splitlines()[-1])


def _command(key: str, library: str, winners: Path | None) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.operators", "--first", library, "--only", key]
    return words + (["--winners", str(winners)] if winners else [])


def _environment() -> dict[str, str]:
    """Where this process finds modules, another one does too."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def print_first_call(row: Row, library: str) -> None:
    """In the fresh process: the calls as a user makes them."""
    workload = row.workload
    inputs = workload.inputs()
    cotangent = None if row.direction == DECODE else cotangent_of(row, inputs)
    torch.cuda.synchronize()

    def seconds(direction):
        for name in workload.tensors:
            inputs[name].requires_grad_(direction == TRAINING)
        start = time.perf_counter()
        call_of(Row(workload, direction), library, inputs, cotangent)()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    found = {FORWARD: seconds(FORWARD)}
    if row.direction != DECODE:
        found[TRAINING] = seconds(TRAINING)
    print(json.dumps(found))


def compile_ahead(measured: list[Row], library: str, winners: Path | None, at_once: int) -> None:
    """Fill the compile cache from processes side by side, one per shape; what fails there is reported by its row."""
    keys = list(dict.fromkeys(row.workload.key for row in measured if not row.alone))
    running = []
    while keys or running:
        while keys and len(running) < at_once:
            command = _command(keys.pop(0), library, winners)
            quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            running.append(subprocess.Popen(command, env=_environment(), **quiet))
        running = [process for process in running if process.poll() is None]
        time.sleep(0.2)


# --- the program ---


class Spent:
    """Seconds of device time by what they went to."""

    def __init__(self):
        self.start, self.seconds = time.perf_counter(), {}

    @contextlib.contextmanager
    def __call__(self, what: str):
        start = time.perf_counter()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.perf_counter() - start

    @property
    def total(self) -> float:
        return time.perf_counter() - self.start


def line(row: Row, records: list[dict]) -> str:
    """One row for the eye."""
    words = [f"{row.key:<36}"]
    for record in records:
        if record.get("problem"):
            words.append(f"{record['library']}: {record['problem']}")
            continue
        unit, value = ("µs", record["ms"] * 1e3) if row.direction == DECODE else ("ms", record["ms"])
        words.append(
            f"{record['library']} {value:8.3f} {unit} ({record['fraction']:.0%}) host {record['host_us']:.0f} µs"
        )
    times = {r["library"]: r["ms"] for r in records if "ms" in r}
    if OURS in times and FLA in times:
        bar = row.bars.get("ratio")
        words.append(f"ratio {times[OURS] / times[FLA]:.2f}" + (f" (to reach {bar:.2f})" if bar else ""))
    return "  ".join(words)


def described(row: Row) -> dict[str, object]:
    w = row.workload
    return {
        "key": row.key, "operator": w.name, "shape": w.shape, "direction": row.direction, "sizes": dict(w.sizes),
        "bytes": w.bytes(row.training), "flops": w.flops(row.training), "floor_ms": w.floor(row.training),
        "bars": row.bars,
    }  # fmt: skip


def parsed() -> argparse.Namespace:
    command = arguments(__doc__.partition("\n")[0])
    command.epilog = __doc__.partition("\n\n")[2]
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("--only", default="", help="comma-separated parts of keys")
    command.add_argument("--peers", default="", help="fla: measure it beside ours")
    command.add_argument("--winners", type=Path, metavar="JSON", help="its autotuning winners, which spare its search")
    command.add_argument("--seconds", type=float, default=280, help="begin no row after this (default 280)")
    command.add_argument("--cold", default=OURS, help='libraries whose first call is timed (default ours; "none")')
    command.add_argument("--at-once", type=int, default=10, help="processes that compile the peers' kernels ahead")
    command.add_argument("--list", action="store_true", help="print the keys of all rows and end")
    command.add_argument("--first", help=argparse.SUPPRESS)
    return command.parse_args()


def main() -> int:
    options = parsed()
    measured = chosen(rows(), options.only)
    if options.list:
        print("\n".join(row.key for row in measured))
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.operators needs a GPU, and torch sees none")
    torch.manual_seed(0)
    peers = libraries.Winners(options.winners) if options.winners else None
    if peers:
        peers.install()
    if options.first:
        print_first_call(measured[0], options.first)
        return 0
    return run(options, measured, peers)


def run(options, measured: list[Row], peers) -> int:
    names, spent = libraries.available(options.peers), Spent()
    folder = results_folder(options, "cuda")
    record = {
        **provenance(options.commit, "cuda"),
        "libraries": {library: libraries.version(library) for library in names},
        "rows": [],
        "left_out": [row.key for row in measured],
    }

    def keep():
        record["seconds"] = {"total": round(spent.total, 1), **{k: round(v, 1) for k, v in spent.seconds.items()}}
        if folder is not None:
            save(folder / "operators.json", record)

    print(f"{device_name('cuda')}, torch {record['torch']}, Triton {record['triton']}, commit {record['commit']}")
    with spent("ceilings"):
        record["ceilings"] = gpu.ceilings()
        torch.cuda.empty_cache()
    cold = {}
    for key in dict.fromkeys(row.workload.key for row in measured if row.workload.key in COLD):
        workload = next(row.workload for row in measured if row.workload.key == key)
        for library in options.cold.split(","):
            if library != "none":
                with failures_of(cold, (key, library)), spent("first calls"):
                    cold[key, library] = first_call(workload, library, options.winners)
                print(f"{key}: first call of {library} with cold caches: {cold[key, library]}", flush=True)
    for library in names[1:]:
        with spent("compiling peers"):
            compile_ahead(measured, library, options.winners, options.at_once)
    for row in measured:
        if spent.total > options.seconds:
            break
        found = {}
        with failures_of(found, "whole row"):
            found = list(measure(row, [OURS] if row.alone else names, spent))
        if isinstance(found, dict):
            found = [{"library": OURS, **found["whole row"]}]
        for one in found:
            one |= _first_of(cold.get((row.workload.key, one["library"])), row)
        record["rows"].append({**described(row), "commit": record["commit"], "measured": found})
        record["left_out"].remove(row.key)
        keep()
        print(line(row, found), flush=True)
    if peers:
        record["winners"] = {"reused": peers.reused, "searched": peers.searched}
    keep()
    if record["left_out"]:
        print(f"left out after {spent.total:.0f} s: {', '.join(record['left_out'])}")
    print(f"{spent.total:.0f} s: {record['seconds']}")
    failed = [row["key"] for row in record["rows"] if any(r.get("problem") for r in row["measured"])]
    if failed:
        print(f"no figure, or not all, of {', '.join(failed)}")
    return int(bool(failed) or options.check and bool(record["left_out"]))


def _first_of(seconds: dict | None, row: Row) -> dict:
    if seconds is None:
        return {}
    if "problem" in seconds:
        return {"first_problem": seconds["problem"]}
    return {"first_s": seconds[FORWARD if row.direction == DECODE else row.direction]}


if __name__ == "__main__":
    sys.exit(main())
