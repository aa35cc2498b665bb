#!/usr/bin/env python3
"""Makes the table of operators × backends, with how each cell was proven, from the registry and docs/proofs.json.

    tools/operator_table.py              print the table
    tools/operator_table.py --write      put it into README.md, between <!-- operators --> and <!-- /operators -->
    tools/operator_table.py --check      fail if README.md holds another one

docs/proofs.json maps operator → backend → how the cell was proven. A registered cell without a proof is an error, and
so is a proof of a cell that is not registered, unless the backend's kernel tree cannot be imported on this machine: so
the table is the same wherever it is made.
"""

import argparse
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[1]))

from tools.inspect_fla_ops import OURS, load, public_operators
from tools.repository import ROOT, UserError, add_import_roots, parser, run

MARKED = re.compile(r"(<!-- operators -->\n).*?(<!-- /operators -->)", re.DOTALL)
LABEL = re.compile(r"//[\w/:.-]*[\w]")
NONE = "–"
FALLBACK = "reference"


def registered_cells(operators: dict) -> tuple[dict[str, list[str]], set[str]]:
    """→ (operator → the backends that serve it, in order of priority; backends whose tree cannot be imported here)."""
    from fla_dispatch import operator_of, registry

    cells, unknown = {}, set()
    for name, function in operators.items():
        if not hasattr(function, "operator"):  # a plain function
            continue
        declaration = operator_of(function).declaration
        if declaration.function != name:  # another name of an operator
            continue
        rivals = sorted(registry.backends(declaration.operation, name), key=lambda b: b.priority)
        cells[name] = list(dict.fromkeys(backend.name for backend in rivals)) + [FALLBACK]
        unknown |= {
            tree for tree, reason in registry.absent(declaration.operation) if "cannot be imported" in reason
        }
    return cells, unknown


def table(cells: dict[str, list[str]], proofs: dict[str, dict[str, str]], unknown: set[str]) -> str:
    """Raises ``UserError`` where the registry and the proofs disagree."""
    problems = [
        f"{name} × {backend} is registered and has no proof"
        for name, backends in cells.items()
        for backend in backends
        if backend not in proofs.get(name, {})
    ]
    problems += [
        f"{name} × {backend} has a proof and is not registered"
        for name, proven in proofs.items()
        for backend in proven
        if backend not in cells.get(name, []) and not (name in cells and backend in unknown)
    ]
    if problems:
        raise UserError("docs/proofs.json: " + "; ".join(problems))
    backends = list(dict.fromkeys(backend for names in cells.values() for backend in names))
    backends = sorted(unknown & {b for proven in proofs.values() for b in proven} - set(backends)) + backends
    backends.sort(key=FALLBACK.__eq__)  # which every operator has, last
    lines = ["| operator | " + " | ".join(backends) + " |", "|-" * (len(backends) + 1) + "|"]
    for name in sorted(cells):
        shown = [LABEL.sub(r"`\g<0>`", proofs[name].get(backend, NONE)) for backend in backends]
        lines.append(f"| `{name}` | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def read_proofs(path: pathlib.Path) -> dict[str, dict[str, str]]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; it maps operator → backend → how the cell was proven") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def arguments() -> argparse.Namespace:
    command = parser(__doc__)
    action = command.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="put the table into the README")
    action.add_argument("--check", action="store_true", help="status 1 if the README holds another table")
    command.add_argument("--readme", type=pathlib.Path, default=ROOT / "README.md", help="the file that holds it")
    command.add_argument(
        "--proofs", type=pathlib.Path, default=ROOT / "docs" / "proofs.json", help="how cells are proven"
    )
    return command.parse_args()


def main() -> int:
    wanted = arguments()
    add_import_roots()
    operators, _ = public_operators(load(OURS))
    cells, unknown = registered_cells(operators)
    made = table(cells, read_proofs(wanted.proofs), unknown)
    if not (wanted.write or wanted.check):
        print(made, end="")
        return 0
    try:
        text = wanted.readme.read_text()
    except FileNotFoundError:
        raise UserError(f"{wanted.readme} does not exist") from None
    if not MARKED.search(text):
        raise UserError(f"{wanted.readme} has no lines <!-- operators --> and <!-- /operators -->")
    updated = MARKED.sub(lambda found: found[1] + made + found[2], text)
    if wanted.write:
        wanted.readme.write_text(updated)
    elif updated != text:
        print(f"the table in {wanted.readme.name} is stale: run tools/operator_table.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
