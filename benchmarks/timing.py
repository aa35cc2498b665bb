"""How times are taken and kept: best of several rounds, printed as a table, written to results/<device>/."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import timeit
from pathlib import Path

import torch

ROUNDS = 7
ROOT = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).absolute().parents[1]))


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
    parser.add_argument("--commit", help="what is measured (default: FLA_COMMIT, else what git says of the checkout)")
    return parser


def provenance(commit: str | None = None, device: str = "cpu") -> dict[str, object]:
    """What a figure came from: commit, machine and versions. "unknown" where nobody says."""
    found = {
        "commit": commit or os.environ.get("FLA_COMMIT") or _checkout() or "unknown",
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device.startswith("cuda"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        found |= {"triton": _version("triton"), "driver": _said(query).split("\n")[0] or "unknown"}
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _checkout() -> str:
    commit = _git("rev-parse", "--short=12", "HEAD")
    return f"{commit} and uncommitted changes" if commit and _git("status", "--porcelain") else commit


def _git(*words: str) -> str:
    return _said(["git", "-C", str(ROOT), *words])


def _said(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def results_folder(options, device: str = "cpu") -> Path | None:
    """Where the JSON goes: ``--output``, the checkout's results under ``--write``, or nowhere."""
    if options.output is None and options.write:
        return ROOT / "benchmarks/results" / device_name(device)
    return options.output


def save(path: Path, record: dict) -> None:
    """Write JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".tmp")
    written.write_text(json.dumps(record, indent=1) + "\n")
    written.replace(path)


def report(name: str, rows: dict[str, float], unit: str, bars: dict[str, float], options, device: str = "cpu") -> int:
    """Print ``rows`` beside their ``bars``, write them where asked; → exit status."""
    width = max(map(len, rows))
    for label, value in rows.items():
        bar = f"   bar {bars[label]:g} {'ok' if value <= bars[label] else 'MISSED'}" if label in bars else ""
        print(f"{label:<{width}}  {value:10.2f} {unit}{bar}")
    folder = results_folder(options, device)
    if folder is not None:
        record = {
            "unit": unit,
            "rows": rows,
            "bars": bars,
            "threads": torch.get_num_threads(),
            **provenance(options.commit, device),
        }
        save(folder / f"{name}.json", record)
    missed = any(value > bars[label] for label, value in rows.items() if label in bars)
    return int(options.check and missed)
