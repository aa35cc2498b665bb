"""What ``import facade.ops`` adds to ``import torch``: median of fresh interpreters."""

import statistics
import subprocess
import sys

from benchmarks.timing import arguments, report

PROCESSES = 9
PROGRAM = """
import sys, time, torch
start = time.perf_counter()
import facade.ops
elapsed = time.perf_counter() - start
assert "triton" not in sys.modules and not torch.cuda.is_initialized()
print(elapsed * 1e3)
"""


def main() -> int:
    options = arguments(__doc__).parse_args()
    times = [
        float(subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True).stdout)
        for _ in range(PROCESSES)
    ]
    rows = {"import facade.ops, over import torch": statistics.median(times)}
    return report("import_cost", rows, "ms", {"import facade.ops, over import torch": 150}, options)


if __name__ == "__main__":
    sys.exit(main())
