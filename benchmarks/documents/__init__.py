"""docs/benchmarks.md, docs/errors.md and their plots, made from the JSON that benchmarks left in results/<device>/."""

import json
from pathlib import Path

from benchmarks.documents import accuracy, speed

Results = dict[str, dict[str, dict]]  # device → benchmark → what it wrote


def read(folder: Path) -> Results:
    """The JSON below ``folder``, GPUs before the CPU."""
    devices = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: (path.name == "cpu", path))
    return {path.name: {file.stem: json.loads(file.read_text()) for file in sorted(path.glob("*.json"))}
            for path in devices}  # fmt: skip


def render(results: Results) -> dict[str, str]:
    """File names in docs/ and their text."""
    return speed.render(results) | accuracy.render(results)
