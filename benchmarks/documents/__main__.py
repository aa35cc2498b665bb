"""Makes docs/benchmarks.md and docs/errors.md from the committed JSON.

python -m benchmarks.documents                    print them
python -m benchmarks.documents --write            put them into docs/
python -m benchmarks.documents --check            status 1 if docs/ holds others
python -m benchmarks.documents --take FOLDER ...  first put the JSON of a run on another machine into results/<device>/;
                                                  rows of operators.json are replaced one by one
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.documents import read, render
from benchmarks.documents.take import take
from benchmarks.timing import ROOT


def main() -> int:
    command = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=__doc__.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--write", action="store_true", help="put them into docs/")
    command.add_argument("--check", action="store_true", help="status 1 if docs/ holds others")
    command.add_argument("--take", type=Path, nargs="+", default=(), metavar="FOLDER", help="JSON of another machine")
    options = command.parse_args()
    results = ROOT / "benchmarks/results"
    for folder in options.take:
        for file in sorted(folder.glob("*.json")):
            try:
                take(json.loads(file.read_text()), file.name, results)
            except ValueError as fault:
                print(f"{file}: {fault}", file=sys.stderr)
                return 2
    made = render(read(results))
    stale = []
    for name, text in made.items():
        file = ROOT / "docs" / name
        if options.write:
            file.write_text(text)
        elif options.check:
            stale += [name] if not file.exists() or file.read_text() != text else []
        else:
            print(text)
    if stale:
        print(f"stale: {', '.join(stale)}; run python -m benchmarks.documents --write", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
