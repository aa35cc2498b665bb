"""How far every operator, dtype and backend is from the fp64 recurrence: results and each gradient.

    python -m benchmarks.errors --output FOLDER

The error is RMS(x - ref) / RMS(ref) of what the tests compare (tests/harness), at a trained layer's head size. Backends
run on the GPU if there is one; the reference runs on the CPU.
"""

import argparse
import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from benchmarks.oracle import SUBJECTS, Trial, bounds, short_calls
from benchmarks.timing import arguments, provenance, results_folder, save
from fla_dispatch import registry

REFERENCE = "reference"
DTYPES = ("fp32", "bf16", "fp16")
SIZES = dict(B=1, T=200, H=2, HV=4, K=128, V=128)
STATES = {"initial_state": True, "output_final_state": True}


def backends(operator) -> list[str]:
    declaration = operator.declaration
    found = sorted(registry.backends(declaration.operation, declaration.function), key=lambda b: b.priority)
    return [*dict.fromkeys(backend.name for backend in found), REFERENCE]


def measure(subject, operator, variant: str, dtype: str, accelerator: str, sizes=SIZES) -> list[dict]:
    """Errors of every backend on one set of arguments, with what each may reach."""
    trials = {
        name: Trial(subject, operator, name, torch.device("cpu" if name == REFERENCE else accelerator))
        for name in backends(operator)
    }
    first = trials[REFERENCE]
    given = first.arguments(variant, dtype=dtype, **sizes, **STATES)
    if accelerator == "cpu" and len(trials) > 1:
        trials = {REFERENCE: first}
    cotangents = first.cotangents(first.run(given, gradients=False))
    on = Trial(subject, operator, REFERENCE, torch.device(accelerator)).place
    right, eager = (
        {name: x.cpu() for name, x in first.oracle(on(given), on(cotangents), compute).items()}
        for compute in (torch.float64, given[first.differentiable(given)[0]].dtype)
    )
    eager_errors = {name: bounds.error(x, right[name]) for name, x in eager.items()}
    rows = []
    for name, trial in trials.items():
        row = {"operator": operator.declaration.function, "backend": name, "device": trial.device.type,
               "dtype": dtype, "variant": variant}  # fmt: skip
        if reason := trial.refusal(given):
            rows.append({**row, "refused": reason})
            continue
        # Without gradients another kernel may run than with them.
        outcomes = trial.run(given, gradients=False), trial.run(given, cotangents=cotangents)
        errors = {}
        for found in outcomes:
            for what, x in found.items():
                errors[what] = max(errors.get(what, 0.0), bounds.error(x, right[what]))
        tolerance, kind = operator.declaration.tolerance, given[first.differentiable(given)[0]].dtype
        allowed = {what: bounds.bound(what, tolerance, kind, eager_errors[what]) for what in errors}
        rows.append({**row, "errors": errors, "bounds": allowed})
    return rows


def measure_one(subject: str, number: int, variant: str, dtype: str, accelerator: str) -> list[dict]:
    with short_calls():
        return measure(SUBJECTS[subject], SUBJECTS[subject].operators()[number], variant, dtype, accelerator)


def main() -> int:
    command = arguments(__doc__.partition("\n")[0])
    command.epilog = __doc__.partition("\n\n")[2]
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.add_argument("--jobs", type=int, help="processes that compile side by side (default: 8 on a GPU, else 1)")
    options = command.parse_args()
    accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    folder = results_folder(options, accelerator)
    record = {**provenance(options.commit, accelerator), "sizes": SIZES, "rows": []}
    beyond = []
    work = [
        (name, number, variant, dtype, accelerator)
        for name, subject in SUBJECTS.items()
        for number in range(len(subject.operators()))
        for dtype in DTYPES
        for variant in subject.variants
    ]
    jobs = options.jobs or (8 if accelerator == "cuda" else 1)
    threads = max(1, (os.cpu_count() or 1) // jobs)  # of the reference, in each process
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        for found in pool.map(measure_one, *zip(*work)) if jobs > 1 else itertools.starmap(measure_one, work):
            record["rows"] += found
            beyond += [words for row in found if (words := line(row)).endswith("BEYOND")]
            print("\n".join(map(line, found)), flush=True)
            if folder is not None:
                save(folder / "errors.json", record)
    print(f"{len(record['rows'])} rows, {len(beyond)} beyond their bounds")
    return int(bool(beyond))


def line(row: dict) -> str:
    """One row for the eye: the tensor that is nearest to its bound."""
    words = f"{row['operator']:<22} {row['backend']:<10} {row['dtype']} {row['variant']:<12} "
    if "refused" in row:
        return words + f"refused: {row['refused']}"
    share = {name: error / row["bounds"][name] for name, error in row["errors"].items()}
    worst = max(share, key=share.get)
    return (
        words
        + f"{worst} {row['errors'][worst]:.1e}, {share[worst]:.0%} of its bound"
        + (" BEYOND" if share[worst] > 1 else "")
    )


if __name__ == "__main__":
    sys.exit(main())
