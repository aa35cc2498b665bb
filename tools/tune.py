#!/usr/bin/env python3
"""Finds the fastest configuration of every Triton kernel on this GPU and puts it into the tree's configs/<device>.json.

    tools/tune.py                                        chunk_kda, decoding and the gates at 128 channels in bf16
    tools/tune.py --channels 64 --dtype fp32             other problems; files are merged, never replaced
    tools/tune.py --kernels prepare,state_scan           some kernels
    tools/tune.py --output FOLDER                        write FOLDER/<device>.json instead, and a log of every time

Whole calls are run on the shapes of the declarations, and the launches they make recorded. With each candidate of a
kernel the calls are then held against the fp64 recurrence, forward and backward, large ones and small ones with mild
and with strong gates; only then are its launches timed. A candidate that is wrong is reported and never chosen:
compilers do miscompile some tiles.
"""

import contextlib
import fcntl
import itertools
import json
import math
import os
import pathlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[1]))

from tools.repository import UserError, add_import_roots, parser, run
from tools.tune_launches import Recorded, compile_ahead, forced, recorded

SHAPES = ("train_8k", "batch_2k", "packed_32k", "decode_1", "decode_64")
OPERATORS = ("chunk_kda", "fused_recurrent_kda", "fused_kda_gate")
WARPS, STAGES = (4, 8), (1, 2, 3)
TILES = (16, 32, 64, 128)
STRONG = 12  # factor on gates: most of them at the bound, so that kernels take their path for any gate
NOISE = 1.01  # a candidate must be faster than an earlier one by more than this


# --- what to try, and what to choose ---


def space(kernel, problem, wide: bool) -> tuple:
    """The kernel's own search space if it has one; else its candidates, and their tiles with other warps and stages.

    ``wide``: with all tiles up to the widest candidate's.
    """
    candidates = kernel.candidates(problem)
    if own := getattr(kernel, "space", None):
        return tuple(dict.fromkeys((*candidates, *own(problem))))
    tiles = dict.fromkeys((c.BK, c.BV) for c in candidates)
    if wide:
        tiles = dict.fromkeys(itertools.product(*(_up_to(sizes) for sizes in zip(*tiles))))
    others = (
        replace(candidates[0], BK=BK, BV=BV, num_warps=warps, num_stages=stages)
        for (BK, BV), warps, stages in itertools.product(tiles, WARPS, STAGES)
    )
    return tuple(dict.fromkeys((*candidates, *others)))


def _up_to(sizes) -> list:
    return [None] if None in sizes else [size for size in TILES if size <= max(sizes)]


def best(times: Mapping[object, Mapping[str, float]]):
    """The configuration with the least geometric mean over the shapes; of equals the first. None without any.

    ``times``: configuration → shape → µs of all launches of the kernel. One that lacks a shape is out.
    """
    shapes = set().union(*times.values()) if times else set()
    scores = {
        config: sum(map(math.log, found.values())) / len(shapes)
        for config, found in times.items()
        if shapes and set(found) == shapes
    }
    if not scores:
        return None
    limit = min(scores.values()) + math.log(NOISE)
    return next(config for config, score in scores.items() if score <= limit)


# --- the file ---


def merge(file: pathlib.Path, found: Mapping[str, Mapping[str, dict]], versions: Mapping[str, str]) -> None:
    """Put ``found`` (kernel → problem → fields of its configuration) into ``file``, and leave the rest as it is.

    Writers take turns; whoever is killed leaves the old file. A broken file is replaced, with a warning.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        held = read(file)
        for kernel, problems in found.items():
            held["kernels"].setdefault(kernel, {}).update(problems)
            held["versions"][kernel] = dict(versions)
        held = {part: dict(sorted(held[part].items())) for part in ("kernels", "versions")}
        written = file.with_name(f"{file.name}.{os.getpid()}")
        with open(written, "w") as out:
            out.write(json.dumps(held, indent=1) + "\n")
            out.flush()
            os.fsync(out.fileno())
        os.replace(written, file)
        os.fsync(folder)
    finally:
        os.close(folder)


def read(file: pathlib.Path) -> dict:
    """{"kernels": kernel → problem → fields, "versions": kernel → what it was measured with}."""
    try:
        held = json.loads(file.read_text())
        return {"kernels": dict(held["kernels"]), "versions": dict(held.get("versions", {}))}
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError) as fault:
        warnings.warn(f"{file.name} is broken ({fault}) and is written anew", stacklevel=2)
    return {"kernels": {}, "versions": {}}


# --- running ---


@dataclass
class Subject:
    """A call to tune on: ``run()`` makes it, → results and gradients by name; ``problem(found)`` says what is wrong."""

    name: str
    run: Callable[[], Mapping]
    problem: Callable[[Mapping], str | None]


@dataclass
class Tuned:
    """What was found out about a kernel's problem."""

    times: dict = field(default_factory=dict)  # configuration → shape → µs
    faults: dict = field(default_factory=dict)  # configuration → why it is out

    @property
    def best(self):
        return best(self.times)


def tune(
    timed: Iterable[Subject],
    checked: Iterable[Subject],
    only: Iterable[str],
    wide: bool,
    jobs: int,
    microseconds: Callable[[Callable], float],
    progress: Callable,
) -> Iterator[tuple[tuple, Tuned]]:
    """(kernel, problem), and what was found out about every candidate; one kernel after the other.

    ``timed``: large calls; ``checked``: small ones; both decide what is right. ``progress(total, words)`` → ``tell()``.
    """  # fmt: skip
    timed, checked = list(timed), list(checked)
    users: dict[tuple, list[Subject]] = {}
    launches: dict[tuple, dict[str, list[Recorded]]] = {}
    for subject in (*checked, *timed):
        with recorded() as found:
            subject.run()
        for one in found:
            key = one.kernel, one.problem
            if subject not in users.setdefault(key, []):
                users[key].append(subject)
            if subject in timed:
                launches.setdefault(key, {}).setdefault(subject.name, []).append(one)
    if unknown := set(only) - {kernel for kernel, _ in launches}:
        raise UserError(f"--kernels: no call launches {', '.join(sorted(unknown))}")
    launches = {key: shapes for key, shapes in launches.items() if not only or key[0] in only}
    every = {key: [one for found in shapes.values() for one in found] for key, shapes in launches.items()}
    spaces = {key: space(found[0].launch.kernel, key[1], wide) for key, found in every.items()}
    compile_ahead([one for found in every.values() for one in found], spaces, jobs, progress)
    for key, shapes in launches.items():
        tuned = Tuned()
        tell = progress(len(spaces[key]), f"{key[0]} {key[1]}")
        for config in spaces[key]:
            if fault := wrong(key, config, users[key]):
                tuned.faults[config] = fault
            else:
                tuned.times[config] = {
                    name: sum(microseconds(_again(one, config)) for one in found) for name, found in shapes.items()
                }
            tell()
        yield key, tuned


def wrong(key: tuple, config, subjects: Iterable[Subject]) -> str | None:
    """Why a configuration may not be chosen: it does not compile or run, or a call that uses it is wrong."""
    for subject in subjects:
        try:
            with forced(key[0], config, key[1]) as done:
                found = subject.run()
            fault = subject.problem(found) if done else "the call does not use it"
        except Exception as raised:
            fault = f"{type(raised).__name__}: {raised}"[:200]
        if fault:
            return f"{subject.name}: {fault}"
    return None


def _again(one: Recorded, config) -> Callable:
    launch = one.launch.configured(config)
    return lambda: launch(one.grid, one.stream, *one.arguments)


def subjects(options) -> tuple[list[Subject], list[Subject]]:
    """The calls of the command line: those that are timed, those that are only checked."""
    import torch

    from benchmarks.operators import DECODE, TRAINING, Row
    from benchmarks.workloads import Workload
    from fla_dispatch import operator_of

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[options.dtype]
    channels = dict(K=options.channels, V=options.channels)
    timed, checked = [], []
    for name in OPERATORS:
        decoding = name == "fused_recurrent_kda"
        direction = DECODE if decoding else TRAINING
        shapes = operator_of(name).declaration.named_shapes
        wanted = [s for s in options.shapes if s in shapes and s.startswith("decode") == decoding]
        for shape in wanted:
            timed.append(subject(Row(Workload(name, shape, shapes[shape] | channels, dtype), direction)))
        small = dict(B=2, T=1 if decoding else 200, H=2, HV=2, **channels)
        for words, strength in (("small, mild gates", 1), ("small, strong gates", STRONG)) if wanted else ():
            checked.append(subject(Row(Workload(name, words, small, dtype), direction), strength))
    return timed, checked


def subject(row, strength: float = 1) -> Subject:
    """A row of the benchmarks as a call to tune on, held against the fp64 recurrence. Raises ``UserError`` where it is
    wrong with the configurations that it has by itself. ``strength`` is a factor on its gates."""
    from benchmarks import windows
    from benchmarks.libraries import OURS
    from benchmarks.operators import call_of, cotangent_of

    inputs = row.workload.inputs()
    inputs["g"].mul_(strength).clamp_(min=-5)  # what the calls promise
    cotangent = cotangent_of(row, inputs) if row.training else None
    for name in row.workload.tensors:
        inputs[name].requires_grad_(row.training)
    parts = windows.right(row.workload, inputs, cotangent)
    call = call_of(row, OURS, inputs, cotangent)

    def run():
        results, gradients = call()
        names = row.workload.operator.declaration.results
        return {name: x for name, x in zip(names, results) if x is not None} | gradients

    def problem(found):
        return windows.problem(row.workload, windows.errors(found, parts), row.workload.dtype)

    if fault := problem(run()):
        raise UserError(f"{row.key}: wrong before any configuration is tried: {fault}")
    return Subject(row.key, run, problem)


def progress_bar(total: int, words: str) -> Callable[[], None]:
    """→ a function to call after every step: tqdm's bar, or a line now and then."""
    with contextlib.suppress(ImportError):
        from tqdm import tqdm

        bar = tqdm(total=total, desc=words)
        return lambda: (bar.update(), bar.n >= total and bar.close())
    done = itertools.count(1)

    def tell():
        n = next(done)
        if n == total or n % max(1, total // 10) == 0:
            print(f"{words}: {n} of {total}", flush=True)

    return tell


def report(kernel: str, problem, tuned: Tuned) -> list[dict]:
    """Prints what was chosen and what is wrong; → the log."""
    log, chosen = [], tuned.best
    print(f"{kernel}, {problem}: {chosen or 'NOTHING is right'}")
    for config, found in tuned.times.items():
        print(f"  {sum(found.values()):9.1f} µs  {config}" + "  <- chosen" * (config == chosen))
        log.append({"kernel": kernel, "problem": str(problem), "config": asdict(config), "us": found})
    for config, fault in tuned.faults.items():
        print(f"  {'out':>9}     {config}: {fault}")
        log.append({"kernel": kernel, "problem": str(problem), "config": asdict(config), "fault": fault})
    return log


def main() -> int:
    command = parser(__doc__)
    command.add_argument("--channels", type=int, default=128, help="K and V (default 128)")
    command.add_argument("--dtype", choices=("bf16", "fp16", "fp32"), default="bf16")
    command.add_argument("--shapes", type=lambda x: x.split(","), default=SHAPES, help=f"default {','.join(SHAPES)}")
    command.add_argument("--kernels", type=lambda x: x.split(","), default=(), help="names; default all")
    command.add_argument("--wide", action="store_true", help="try all tiles, not only those of the candidates")
    command.add_argument("--jobs", type=int, default=0, help="compile so many at once (default: one per core)")
    command.add_argument("--output", type=pathlib.Path, help="folder for the file and the log (default: the tree's)")
    command.add_argument("--commit", help="what is measured (default: FLA_COMMIT, else what git says)")
    options = command.parse_args()
    add_import_roots()
    import torch

    if not torch.cuda.is_available():
        raise UserError("needs a GPU, and torch sees none")
    from benchmarks.gpu import milliseconds
    from benchmarks.timing import provenance
    from fla_triton.config import FOLDER
    from fla_triton.launch import device_name

    torch.manual_seed(0)
    came_from = provenance(options.commit, "cuda")
    versions = {name: came_from[name] for name in ("commit", "date", "torch", "triton", "driver")}
    file = (options.output or FOLDER) / f"{device_name()}.json"
    timed, checked = subjects(options)
    outcome = tune(
        timed, checked, options.kernels, options.wide, options.jobs,
        lambda call: milliseconds([call], seconds=0.01, most=20).median * 1e3, progress_bar,
    )  # fmt: skip
    log, without = [], 0
    for (kernel, problem), tuned in outcome:
        log += report(kernel, problem, tuned)
        if tuned.best is None:
            without += 1
            continue
        fields = {name: value for name, value in asdict(tuned.best).items() if value is not None}
        merge(file, {kernel: {str(problem): fields}}, versions)
        if options.output:
            (options.output / "tune_log.json").write_text(json.dumps(log, indent=1) + "\n")
    print(f"{file} is up to date" + f"; {without} kernels have no configuration that is right" * bool(without))
    return int(bool(without))


if __name__ == "__main__":
    run(main)
