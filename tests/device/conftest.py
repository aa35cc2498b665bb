"""These tests run on a lane with GPUs (FLA_TEST_DEVICE=cuda). Elsewhere they are deselected, and a line says so.

A file that needs several GPUs says how many: ``GPUS = 2``.
"""

import os
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
LEFT_OUT = pytest.StashKey[dict[int, int]]()  # GPUs that are needed → tests


def _present() -> int:
    """On a lane that promises a GPU there is one, or tests fail."""
    return max(1, torch.cuda.device_count()) if os.environ.get("FLA_TEST_DEVICE") == "cuda" else 0


def pytest_collection_modifyitems(config, items):
    present, left_out, kept, out = _present(), {}, [], []
    for item in items:
        needed = getattr(item.module, "GPUS", 1) if item.path.is_relative_to(FOLDER) else 0
        (kept if needed <= present else out).append(item)
        if needed > present:
            left_out[needed] = left_out.get(needed, 0) + 1
    items[:] = kept
    config.stash[LEFT_OUT] = left_out
    config.hook.pytest_deselected(items=out)


def pytest_terminal_summary(terminalreporter, config):
    for needed, count in sorted(config.stash.get(LEFT_OUT, {}).items()):
        what = f"{needed} GPUs" if needed > 1 else "a GPU"
        terminalreporter.write_line(f"NOT RUN: {count} tests, which need {what} and FLA_TEST_DEVICE=cuda")
