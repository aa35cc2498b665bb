"""What a lint finds, and how a lint runs as a program."""

import argparse
import pathlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tools.repository import ROOT, Source, UserError, sources

# A rule looks at one file and yields (line, message); its name is the function's, its meaning the docstring.
Rule = Callable[[Source], Iterator[tuple[int, str]]]


@dataclass(frozen=True, order=True)
class Finding:
    path: str
    line: int
    rule: str
    message: str

    def __str__(self):
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def check(rules: Iterable[Rule], files: Iterable[Source]) -> list[Finding]:
    files = list(files)
    return sorted(
        {
            Finding(source.path, line, rule.__name__, message)
            for rule in rules
            for source in files
            for line, message in rule(source)
        }
    )


def main(description: str, rules: tuple[Rule, ...]) -> int:
    listed = "\n".join(f"  {rule.__name__}: {' '.join((rule.__doc__ or '').split())}" for rule in rules)
    summary, _, examples = description.strip().partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary,
        allow_abbrev=False,
        epilog=f"{examples}\n\nrules:\n{listed}\n\nStatus: 1 if something is found.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", help="files or folders below the root; everything without any")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository; by default this one")
    wanted = parser.parse_args()
    if not wanted.root.is_dir():
        raise UserError(f"--root {wanted.root}: no such folder")
    every = sources(wanted.root)
    chosen = [s for s in every if not wanted.paths or any(_below(s.path, path) for path in wanted.paths)]
    if not chosen:
        raise UserError(f"no file of {wanted.root} is at {', '.join(wanted.paths)}")
    findings = check(rules, chosen)
    print("\n".join(map(str, findings)), end="\n" if findings else "")
    print(f"{len(findings)} found in {len(chosen)} files by {len(rules)} rules")
    return 1 if findings else 0


def _below(path: str, folder: str) -> bool:
    folder = folder.removeprefix("./").rstrip("/")
    return folder in (".", path) or path.startswith(f"{folder}/")
