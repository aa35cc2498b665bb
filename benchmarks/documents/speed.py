"""docs/benchmarks.md: time, memory and host time of every operator, beside fla-core and the floor."""

from benchmarks.documents import plot
from benchmarks.documents.text import NONE, against, source, table, three_digits

OURS, FLA = "facade", "fla"
DIRECTIONS = {"forward": "forward", "training": "forward + backward", "decode": "one token"}

HEAD = """# Benchmarks

Made by `python -m benchmarks.documents --write` from `benchmarks/results/`; a test holds the two equal.

"""
METHOD = """## How

- **Time** is GPU time: the median of calls between two events, queued behind a spinning kernel so that gaps between
  launches do not count, with inputs rotated past L2; the better of two passes, in which the libraries take turns. For
  one token: a replayed CUDA graph. A row is marked ‡ where launches came too late to be queued.
- **Host** is what enqueuing a call costs. PyTorch runs backward on a thread of its own and waits for it; **on one
  thread** is the same call under `torch.autograd.set_multithreading_enabled(False)`. **Peak** is what a call allocates
  at most above its inputs. **First call** is the first one of a process whose compile cache is empty; nothing is tuned
  at run time.
- **Floor** is the larger of bytes / 4.3 TB/s and FLOPs / 790 TFLOP/s (a copy and a bf16 product, as measured on an
  H200). Every input is read and every output written once; backward reads both again and writes a gradient of every
  input. FLOPs are those of the algorithm in chunks of 64, and twice as many backward. The percentage is floor / time.
- **Right first.** Before a call is timed, its results and gradients are held against the fp64 recurrence on windows of
  two heads (`benchmarks/windows.py`); a library that fails has no figure.
- In parentheses stands what is to be reached, and what misses it is **bold**. What counts is the ratio to fla-core,
  called as a black box with the same tensors in the same run; `safe_gate`, which our bf16 path asks for and which
  fla-core needs not, is passed to ours alone.

"""
UNMEASURED = """Nothing has been measured on a GPU yet: there is no `benchmarks/results/<device>/operators.json`. Run

```sh
python -m benchmarks.operators --peers fla --output FOLDER   # on the device, fla-core on the import path
python -m benchmarks.documents --take FOLDER --write         # in the checkout
```

"""


def render(results) -> dict[str, str]:
    """The page and its plots."""
    page, plots = HEAD, {}
    measured = {device: found["operators"] for device, found in results.items() if found.get("operators")}
    if not measured:
        page += UNMEASURED
    page += METHOD
    for device, record in measured.items():
        name = f"benchmarks_{device}.svg"
        if drawn := plot.draw(_bars(record["rows"])):
            plots[name] = drawn
        page += _device(record, name if drawn else None)
    for device, found in results.items():
        page += _small(device, found)
    return {"benchmarks.md": page.rstrip() + "\n", **plots}


def _device(record: dict, plot_name: str | None) -> str:
    rows = record["rows"]
    text = f"## {record['device']}\n\nFrom {source(record, rows)}"
    if ceilings := record.get("ceilings"):
        copy, product = ceilings["copy"] / 1e12, ceilings["product"] / 1e12
        text += f" In the same run a copy took {copy:.2f} TB/s and a bf16 product {product:.0f} TFLOP/s."
    text += "\n\n"
    if plot_name:
        text += f"![Time of each call relative to fla-core, and the floor]({plot_name})\n\n"
    text += _whole([row for row in rows if row["direction"] != "decode" and not _growing(row)])
    text += _decode([row for row in rows if row["direction"] == "decode"])
    text += _first([row for row in rows if row["direction"] != "decode"])
    text += _growth([row for row in rows if _growing(row)])
    if record.get("left_out"):
        text += f"Not measured in this run: {', '.join(f'`{key}`' for key in record['left_out'])}.\n\n"
    return text


def _growing(row) -> bool:
    return row["shape"].startswith("length_")


def of(row: dict, library: str) -> dict:
    return next((found for found in row["measured"] if found["library"] == library), {})


def ratio(row: dict, figure: str = "ms") -> float | None:
    ours, peer = of(row, OURS).get(figure), of(row, FLA).get(figure)
    return ours / peer if ours is not None and peer else None


def _time(row, library, unit=1.0) -> str:
    found = of(row, library)
    if "ms" not in found:
        return f"no figure: {found['problem']}" if found.get("problem") else NONE
    late = "" if found.get("launches_queued", True) else " ‡"
    return f"{three_digits(found['ms'] * unit)} ({found['fraction']:.0%}){late}"


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _sizes(row) -> str:
    return " ".join(f"{letter}{size}" for letter, size in row["sizes"].items() if not _implied(row["sizes"], letter))


def _implied(sizes, letter) -> bool:
    return letter in ("HV", "V") and sizes[letter] == sizes.get({"HV": "H", "V": "K"}[letter])


def _mib(found: dict) -> str:
    return three_digits(found["peak_bytes"] / 2**20) if "peak_bytes" in found else NONE


def _whole(rows) -> str:
    if not rows:
        return ""
    cells = []
    for row in rows:
        bars, ours = row["bars"], of(row, OURS)
        cells.append((
            f"`{row['operator']}`", f"{row['shape']}: {_sizes(row)}", DIRECTIONS[row["direction"]], _time(row, OURS),
            _time(row, FLA), against(ratio(row), bars.get("ratio"), _percent), three_digits(row["floor_ms"]),
            against(ours.get("host_us"), bars.get("host_us"), three_digits),
            three_digits(ours.get("host_one_thread_us")), three_digits(of(row, FLA).get("host_us")),
            f"{_mib(ours)} / {_mib(of(row, FLA))}", against(ratio(row, "peak_bytes"), bars.get("peak_ratio"), _percent),
        ))  # fmt: skip
    head = ("operator", "shape", "", "ms (of floor)", "fla ms (of floor)", "ratio", "floor ms", "host µs",
            "on one thread", "fla host µs", "peak MiB, ours / fla", "ratio")  # fmt: skip
    return "### Training and prefill, bf16\n\n" + table(head, cells) + "\n"


def _decode(rows) -> str:
    if not rows:
        return ""
    cells = [
        (
            f"`{row['operator']}`", f"{row['shape']}: {_sizes(row)}", _time(row, OURS, 1e3), _time(row, FLA, 1e3),
            against(ratio(row), row["bars"].get("ratio"), _percent), three_digits(row["floor_ms"] * 1e3),
            against(of(row, OURS).get("host_us"), row["bars"].get("host_us")),
            three_digits(of(row, FLA).get("host_us")),
        )
        for row in rows
    ]  # fmt: skip
    head = ("operator", "shape", "µs (of floor)", "fla µs (of floor)", "ratio", "floor µs", "host µs", "fla host µs")
    return "### One token, bf16 with an fp32 state in and out\n\n" + table(head, cells) + "\n"


def _first(rows) -> str:
    rows = [row for row in rows if any("first_s" in found or "first_problem" in found for found in row["measured"])]
    if not rows:
        return ""
    cells = []
    for row in rows:
        for found in row["measured"]:
            if "first_s" in found or "first_problem" in found:
                bar = row["bars"].get("first_s") if found["library"] == OURS else None
                seconds = found.get("first_problem") or against(found["first_s"], bar, lambda s: f"{s:.1f}")
                words = {"forward": "forward", "training": "forward + backward, after that"}[row["direction"]]
                cells.append((f"`{row['operator']}`", row["shape"], found["library"], words, seconds))
    return "### First call with cold caches\n\n" + table(("operator", "shape", "", "", "seconds"), cells) + "\n"


def _growth(rows) -> str:
    if not rows:
        return ""
    cells = []
    for direction in dict.fromkeys(row["direction"] for row in rows):
        same = sorted((row for row in rows if row["direction"] == direction), key=lambda row: row["sizes"]["T"])
        shortest = same[0]
        for row in same:
            time, base = of(row, OURS).get("ms"), of(shortest, OURS).get("ms")
            tokens = row["sizes"]["T"] / shortest["sizes"]["T"]
            grown = (
                f"{time / base:.2f} for {tokens:.0f} times the tokens" if time and base and row != shortest else NONE
            )
            cells.append((_sizes(row), DIRECTIONS[direction], _time(row, OURS), grown, _mib(of(row, OURS))))
    head = ("one sequence", "", "ms (of floor)", "times as long", "peak MiB")
    return "### Very long sequences\n\n" + table(head, cells) + "\n"


def _bars(rows) -> list[plot.Bar]:
    """Rows that both libraries were measured on."""
    return [
        plot.Bar(
            f"{row['operator']} {row['shape']}, {DIRECTIONS[row['direction']]}",
            of(row, OURS)["ms"], of(row, FLA)["ms"], row["floor_ms"], row["bars"].get("ratio"),
        )
        for row in rows
        if ratio(row) is not None
    ]  # fmt: skip


def _small(device: str, found: dict) -> str:
    """Programs whose rows are single figures."""
    simple = {name: record for name, record in found.items() if "unit" in record}
    if not simple:
        return ""
    text = f"## {'A CPU' if device == 'cpu' else f'The host of {device}'}\n\n"
    cells = []
    for name, record in simple.items():
        for label, value in record["rows"].items():
            cells.append((f"`{name}`", label, against(value, record["bars"].get(label)), record["unit"]))
    first = next(iter(simple.values()))
    about = f"Python {first['python']}, torch {first['torch']}"
    commits = dict.fromkeys(record["commit"] for record in simple.values() if "commit" in record)
    about += f", commit {', '.join(commits)}" if commits else ""
    return text + f"{about}, {first['threads']} threads.\n\n" + table(("program", "what", "best", ""), cells) + "\n"
