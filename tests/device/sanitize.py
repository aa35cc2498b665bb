"""One small call of every kernel, for NVIDIA's compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/device/sanitize.py bf16
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/device/sanitize.py fp32

Each tensor has an allocation of its own, so that what lies beside it belongs to nobody. Sizes fill no tile. The status
is 1 where a kernel of the tree was not launched.
"""

import os
import sys
from pathlib import Path

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
sys.path.insert(0, str(Path(__file__).absolute().parents[1]))

from harness.trial import STATES  # noqa: E402

from device.calls import layer, trial  # noqa: E402
from tools.tune_launches import recorded  # noqa: E402

SIZES = {"H": 2, "HV": 4, "K": 40, "V": 24}
OFFSETS = [0, 0, 30, 31, 95, 100]


def calls(dtype: str):
    """(trial, arguments, gradients)."""
    for function, gradients in (("chunk_kda", True), ("fused_recurrent_kda", False), ("fused_kda_gate", True),
                                ("kda_gate_chunk_cumsum", True)):
        t = trial(function)
        yield t, t.arguments(layer(t), dtype=dtype, B=2, T=100, **SIZES, **STATES), gradients
        if "cu_seqlens" in t.names:
            packed = next(iter(t.subject.variants))
            yield t, t.arguments(packed, dtype=dtype, offsets=OFFSETS, T=107, **SIZES, **STATES), gradients


def main() -> int:
    from fla_triton import engine
    from fla_triton.launch import kernels

    seen = set()
    engine.SEGMENT = 64  # so that dense sequences are split
    for dtype in sys.argv[1:] or ("bf16", "fp32"):
        for t, arguments, gradients in calls(dtype):
            with recorded() as launches:
                t.run(arguments, gradients=gradients)
            seen |= {one.kernel for one in launches}
            print(f"{t.operator.declaration.function} {dtype}: {len(launches)} launches", flush=True)
    absent = set(kernels) - seen
    if absent:
        print(f"not launched: {', '.join(sorted(absent))}", file=sys.stderr)
    return int(bool(absent))


if __name__ == "__main__":
    sys.exit(main())
