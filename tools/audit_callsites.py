#!/usr/bin/env python3
"""Lists every place that a change of a signature, a state layout or a return would touch, and checks kernel launches.

    tools/audit_callsites.py                      check every launch in kernels/ against its kernel's parameters
    tools/audit_callsites.py chunk_kda            an operator: declaration, backends, launches, residuals, tests, docs
    tools/audit_callsites.py solve_wy_kernel      a kernel: its launches with the order of arguments, and who gets there
    tools/audit_callsites.py initial_state        a parameter (or a saved tensor) under that name, everywhere

Reads source only: no toolchain is needed. Status: 1 where launch arguments and kernel parameters disagree.
"""

import argparse
import itertools
import json
import pathlib
import sys
from dataclasses import asdict

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[1]))

from tools.audit.places import Audit, Place
from tools.repository import ROOT, UserError, nearest, parser, run, sources

KERNELS = "kernels/"


def arguments() -> argparse.Namespace:
    command = parser(__doc__)
    command.add_argument("name", nargs="?", metavar="OP|KERNEL|PARAMETER", help="leave out to check all launches")
    command.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository; by default this one")
    command.add_argument("--json", action="store_true", help="print JSON")
    return command.parse_args()


def as_text(places: list[Place]) -> str:
    lines = []
    width = max((len(f"{p.path}:{p.line}") for p in places), default=0)
    for kind, group in itertools.groupby(places, key=lambda p: p.kind):
        lines += ["", kind]
        for p in group:
            lines.append(f"  {f'{p.path}:{p.line}':{width}}  {p.text}")
            if p.arguments:
                lines.append(f"  {'':{width}}    ({', '.join(p.arguments)})")
            lines += [f"  {'':{width}}    DISAGREES: {problem}" for problem in p.disagreements]
    return "\n".join(lines)


def main() -> int:
    wanted = arguments()
    if not wanted.root.is_dir():
        raise UserError(f"--root {wanted.root}: no such folder")
    audit = Audit(sources(wanted.root))
    unknown = []
    if wanted.name is None:
        places = audit.launches(KERNELS)
        unknown = [
            f"{source.at(call)}: {source.line(call.lineno)}"
            for source, call in audit.index.unknown
            if source.path.startswith(KERNELS)
        ]
        what = [f"{len(places)} launches of {len(audit.kernels)} kernels"]
    else:
        known = audit.names()
        if wanted.name not in known:
            raise UserError(
                f"no operator, kernel, parameter or saved tensor is called `{wanted.name}`{nearest(wanted.name, known)}"
            )
        what, places = sorted(known[wanted.name]), audit.places(wanted.name)
    wrong = [p for p in places if p.disagreements]
    if wanted.json:
        print(
            json.dumps(
                {
                    "name": wanted.name,
                    "what": what,
                    "places": [asdict(p) for p in places],
                    "disagree": len(wrong),
                    "not_checked": unknown,
                },
                indent=2,
            )
        )
    else:
        print(f"{wanted.name or KERNELS}: {' and '.join(what)}")
        print(as_text(places if wanted.name else wrong).lstrip("\n")) if (places if wanted.name else wrong) else None
        for line in unknown:
            print(f"not checked, launches something unknown: {line}")
        print(f"{len(wrong)} of {sum(p.kind == 'launch' for p in places)} launches disagree with their kernels")
    return 1 if wrong else 0


if __name__ == "__main__":
    run(main)
