"""Write kernels/cuda_triton/budget.json anew, from the compiler's figures.

    tools/bazel run //tests:record_budget          some minutes
    python -m tests.compile.record                 the same with PYTHONPATH=.:dispatch:kernels/cuda_triton
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import triton

from compile import budget
from compile.table import PASSES, title
from compile.targets import TARGETS
from compile.worker import Worker

SECONDS = 300  # for a pass


def main() -> None:
    workers = {target: Worker(target) for target in TARGETS}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        try:
            futures = {pool.submit(_measure, worker): target for target, worker in workers.items()}
            measured = {futures[future]: future.result() for future in as_completed(futures)}
        except RuntimeError as error:
            pool.shutdown(wait=False, cancel_futures=True)
            sys.exit(f"nothing was recorded: {error}")
        finally:
            for worker in workers.values():
                worker.close()
    rows = {}
    for row in (title(*one) for one in PASSES):
        names = dict.fromkeys(name for target in TARGETS for name in measured[target][row])
        rows[row] = {name: {target: measured[target][row][name] for target in TARGETS if name in measured[target][row]}
                     for name in names}
    budget.dump(triton.__version__, rows)
    print(f"wrote {budget.FILE}")


def _measure(worker: Worker) -> dict[str, dict[str, list[int]]]:
    found = {}
    for n, (row, backward) in enumerate(PASSES, 1):
        print(f"{worker.target} {n}/{len(PASSES)} {title(row, backward)}", flush=True)
        try:
            kernels = worker.ask(SECONDS, "compile", row=row, backward=backward)
        except RuntimeError as error:
            raise RuntimeError(f"{title(row, backward)} for {worker.target}: {error}") from None
        found[title(row, backward)] = budget.named(kernels)
    return found


if __name__ == "__main__":
    main()
