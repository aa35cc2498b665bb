"""What kernels took of a GPU when they were last recorded, and what has grown since.

kernels/cuda_triton/budget.json: row of the table → kernel → target → [registers, spilled bytes, shared bytes].
"""

import json
import os
from pathlib import Path

ROOT = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path(__file__).parents[2]))  # the former in bazel run
FILE = ROOT / "kernels/cuda_triton/budget.json"
MEASURES = ("registers", "spilled", "shared")
UNITS = {"registers": "registers per thread", "spilled": "spilled bytes per thread", "shared": "bytes of shared memory"}
RENEW = "if that is as it must be, record it: tools/bazel run //tests:record_budget"


def load() -> dict:
    return json.loads(FILE.read_text())


def named(kernels: list[dict]) -> dict[str, list[int]]:
    """Measures by kernel; a second launch with other types or switches is "prepare 2"."""
    found = {}
    for kernel in kernels:
        again = sum(name.split()[0] == kernel["kernel"] for name in found)
        name = f"{kernel['kernel']} {again + 1}" if again else kernel["kernel"]
        found[name] = [kernel[measure] for measure in MEASURES]
    return found


def complaints(row: str, target: str, found: dict[str, list[int]], recorded: dict) -> list[str]:
    """Every kernel of ``row`` that takes more than recorded, or that is not the one that was recorded."""
    kernels = recorded["rows"].get(row, {})
    known = {name: by_target[target] for name, by_target in kernels.items() if target in by_target}
    problems = [f"{name} is not recorded" for name in found if name not in known]
    problems += [f"{name} is recorded and no longer launched" for name in known if name not in found]
    problems += [f"{name} takes {now} {UNITS[measure]}, recorded {then}"
                 for name in found if name in known
                 for measure, now, then in zip(MEASURES, found[name], known[name]) if now > then]
    return [f"{row}, {target}: {problem}" for problem in problems]


def dump(version: str, rows: dict[str, dict[str, dict[str, list[int]]]]) -> None:
    """Write the file: a line per kernel."""
    measures = json.dumps([UNITS[measure] for measure in MEASURES])
    lines = [f'{{\n "triton": {json.dumps(version)},\n "measures": {measures},\n "rows": {{']
    for i, (row, kernels) in enumerate(rows.items()):
        lines.append(f"  {json.dumps(row)}: {{")
        lines += [f"   {json.dumps(name)}: {json.dumps(by_target)}{',' if j < len(kernels) - 1 else ''}"
                  for j, (name, by_target) in enumerate(kernels.items())]
        lines.append("  }" + ("," if i < len(rows) - 1 else ""))
    FILE.write_text("\n".join([*lines, " }\n}\n"]))
