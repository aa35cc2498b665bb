"""How times are taken and kept: best of several rounds, printed as a table, written to results/<device>/."""

import argparse
import json
import os
import platform
import timeit
from pathlib import Path

import torch

ROUNDS = 7


def microseconds(function, calls: int, rounds: int = ROUNDS) -> float:
    """Best mean of ``calls`` calls over several rounds: what the function costs when nothing else runs."""
    function()
    return min(timeit.repeat(function, number=calls, repeat=rounds)) / calls * 1e6


def device_name(device: str = "cpu") -> str:
    """The folder of a device's results."""
    return torch.cuda.get_device_name().lower().replace(" ", "_") if device.startswith("cuda") else "cpu"


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the JSON (default: benchmarks/results/<device> of the checkout under --write, else nowhere)",
    )
    parser.add_argument("--write", action="store_true", help="write the JSON into the checkout's results")
    parser.add_argument("--check", action="store_true", help="exit 1 where a figure misses its bar")
    return parser


def report(name: str, rows: dict[str, float], unit: str, bars: dict[str, float], options, device: str = "cpu") -> int:
    """Print ``rows`` beside their ``bars``, write them where asked; → exit status."""
    width = max(map(len, rows))
    for label, value in rows.items():
        bar = f"   bar {bars[label]:g} {'ok' if value <= bars[label] else 'MISSED'}" if label in bars else ""
        print(f"{label:<{width}}  {value:10.2f} {unit}{bar}")
    folder = options.output
    if folder is None and options.write:
        here = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).parent.parent))
        folder = here / "benchmarks/results" / device_name(device)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "unit": unit,
            "rows": rows,
            "bars": bars,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
        }
        (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    missed = any(value > bars[label] for label, value in rows.items() if label in bars)
    return int(options.check and missed)
