"""Putting what another machine measured into the repository's results."""

import json
from pathlib import Path

from benchmarks.timing import save

MACHINE = ("device", "driver", "torch", "triton", "python", "libraries")  # rows of one file agree in these


def take(record: dict, name: str, results: Path) -> Path | None:
    """Put ``record``, a file called ``name``, below ``results``; → the file, or None where it is not of a GPU.

    Rows of operators.json replace rows of the same key and leave the others. Raises ``ValueError`` where those were
    measured on another machine or with other versions.
    """
    if "rows" not in record or "driver" not in record:
        return None
    file = results / record["device"].lower().replace(" ", "_") / name
    if name == "operators.json" and file.exists():
        record = merged(json.loads(file.read_text()), record)
    save(file, record)
    return file


def merged(old: dict, new: dict) -> dict:
    """``new`` and those rows of ``old`` that it has none of. What only one of them measured beside ours is kept."""
    libraries = {**old.get("libraries", {}), **new.get("libraries", {})}
    for what in MACHINE:
        before, now = old.get(what), new.get(what)
        if what == "libraries":  # runs without peers may lie beside runs with them
            both = set(before or ()) & set(now or ())
            before, now = ({name: x[name] for name in both} for x in (before, now))
        if before != now:
            raise ValueError(f"{what} was {before} and is {now}: measure every row anew, into an empty folder")
    fresh = {row["key"] for row in new["rows"]}
    rows = [row for row in old["rows"] if row["key"] not in fresh] + new["rows"]
    left_out = [key for key in new.get("left_out", ()) if key not in {row["key"] for row in rows}]
    return {**new, "libraries": libraries, "rows": rows, "left_out": left_out}
