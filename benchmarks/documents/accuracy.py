"""docs/errors.md: how far every operator, dtype and backend is from the fp64 recurrence."""

from benchmarks.documents.text import NONE, source, table

HEAD = """# Errors

Made by `python -m benchmarks.documents --write` from `benchmarks/results/`; a test holds the two equal.

The error of a tensor is RMS(x − ref) / RMS(ref) against the token recurrence in fp64, on inputs first rounded to the
dtype of the row; d*name* is the gradient of an input, with a loss on every result. Each cell is the worst of the option
sets that the tests run, and in parentheses its share of the bound (`tests/harness/bounds.py`). Beyond the bound it is
**bold**.

"""
UNMEASURED = """Nothing has been measured on a GPU yet. Run `python -m benchmarks.errors --output FOLDER` there, and
`python -m benchmarks.documents --take FOLDER --write` in the checkout.

"""


def render(results) -> dict[str, str]:
    page = HEAD
    measured = {device: found["errors"] for device, found in results.items() if found.get("errors")}
    if not any(device != "cpu" for device in measured):
        page += UNMEASURED
    for device, record in measured.items():
        sizes = " ".join(f"{letter}{size}" for letter, size in record["sizes"].items())
        where = "A CPU" if device == "cpu" else record["device"]
        page += f"## {where}\n\nFrom {source(record)} Sizes: {sizes}.\n\n"
        if device != "cpu":
            page += "The reference ran on its host.\n\n"
        for operator in dict.fromkeys(row["operator"] for row in record["rows"]):
            page += f"### `{operator}`\n\n" + _operator([row for row in record["rows"] if row["operator"] == operator])
    return {"errors.md": page.rstrip() + "\n"}


def _operator(rows) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.get("errors", ())))
    cells = []
    for dtype, backend in dict.fromkeys((row["dtype"], row["backend"]) for row in rows):
        same = [row for row in rows if (row["dtype"], row["backend"]) == (dtype, backend)]
        ran = [row for row in same if "errors" in row]
        cells.append((backend, dtype, *(_worst(ran, name) for name in names)))
    text = table(("backend", "dtype", *names), cells) + "\n"
    refused = dict.fromkeys(
        f'- `{row["backend"]}` does not take the options "{row["variant"]}" in {row["dtype"]}: {row["refused"]}'
        for row in rows
        if "refused" in row
    )
    return text + "".join(f"{line}\n" for line in refused) + ("\n" if refused else "")


def _worst(rows, name: str) -> str:
    """The error that comes nearest to its bound."""
    found = [(row["errors"][name], row["bounds"][name]) for row in rows if name in row["errors"]]
    if not found:
        return NONE
    error, bound = max(found, key=lambda pair: pair[0] / pair[1])
    shown = f"{error:.1e} ({error / bound:.0%})"
    return shown if error <= bound else f"**{shown}**"
