"""Markdown tables and words that several pages share."""

from collections.abc import Iterable, Sequence

NONE = "–"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|-" * len(head) + "|"]
    lines += ["| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def three_digits(value: float | None) -> str:
    """Three significant digits, without an exponent."""
    if value is None:
        return NONE
    if value >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.3f}"


def against(value: float | None, bar: float | None, show=three_digits) -> str:
    """A figure beside what is to be reached; bold where it is missed."""
    if value is None or bar is None:
        return show(value)
    return f"{show(value)} (≤ {show(bar)})" if value <= bar else f"**{show(value)}** (≤ {show(bar)})"


def source(record: dict, rows: Iterable[dict] = ()) -> str:
    """What figures came from."""
    commits = dict.fromkeys(row.get("commit", record["commit"]) for row in rows) or [record["commit"]]
    words = [f"commit {', '.join(commits)}", record["date"], f"Python {record['python']}", f"torch {record['torch']}"]
    if record.get("triton"):
        words.append(f"Triton {record['triton']}")
    if record.get("driver"):
        words.append(f"driver {record['driver']}")
    words += [f"{name}-core {version}" for name, version in record.get("libraries", {}).items()
              if name != "facade" and version]  # fmt: skip
    return ", ".join(words) + "."
