"""docs/ holds what the committed JSON renders to, and the pages say what was and what was not measured."""

import copy
import json
from pathlib import Path

import pytest

from benchmarks.documents import read, render
from benchmarks.documents.take import take

ROOT = Path(__file__).resolve().parents[2]
MACHINE = {"commit": "abc", "date": "2026-01-01", "device": "NVIDIA H200", "driver": "1", "python": "3.12",
           "torch": "2", "triton": "3"}  # fmt: skip


def _row(key, ours, fla=None, **more):
    operator, shape, direction = key.split("/")
    sizes = dict(B=1, T=1 if direction == "decode" else 64, H=2, HV=2, K=128, V=128)
    found = [{"library": "facade", **ours}] + ([{"library": "fla", **fla}] if fla else [])
    return {"key": key, "operator": operator, "shape": shape, "direction": direction, "sizes": sizes, "floor_ms": 0.1,
            "bars": {}, "commit": "abc", "measured": found, **more}  # fmt: skip


def _figures(ms, host=50.0, peak=2**20):
    return {"ms": ms, "fraction": 0.1 / ms, "host_us": host, "peak_bytes": peak, "problem": None}


def _operators(*rows, **more):
    return {**MACHINE, "libraries": {"facade": "0", "fla": "0.6.0"}, "rows": list(rows), "left_out": [], **more}


def _page(record):
    return render({"nvidia_h200": {"operators": record}})


@pytest.mark.parametrize("name", sorted(render(read(ROOT / "benchmarks/results"))))
def test_docs_are_what_the_results_render_to(name):
    made = render(read(ROOT / "benchmarks/results"))[name]
    assert (ROOT / "docs" / name).read_text() == made, "run python -m benchmarks.documents --write"


def test_no_plot_is_left_over():
    plots = {path.name for path in (ROOT / "docs").glob("benchmarks_*.svg")}
    assert plots == {name for name in render(read(ROOT / "benchmarks/results")) if name.endswith(".svg")}


def test_a_page_without_gpu_results_says_so():
    for page in render({"cpu": {}}).values():
        assert "Nothing has been measured on a GPU yet" in page


def test_what_misses_its_bar_is_bold_and_what_reaches_it_is_not():
    bars = {"ratio": 0.7, "host_us": 80}
    page = _page(_operators(_row("chunk_kda/good/forward", _figures(0.6), _figures(1.0), bars=bars),
                            _row("chunk_kda/bad/forward", _figures(0.8, host=90), _figures(1.0), bars=bars)))
    good, bad = (next(line for line in page["benchmarks.md"].splitlines() if f"| {shape}:" in line)
                 for shape in ("good", "bad"))
    assert "0.60 (≤ 0.70)" in good and "**" not in good
    assert "**0.80** (≤ 0.70)" in bad and "**90" in bad
    assert "commit abc" in page["benchmarks.md"] and "fla-core 0.6.0" in page["benchmarks.md"]


def test_a_row_without_a_figure_gives_its_reason_and_no_ratio():
    page = _page(_operators(_row("chunk_kda/one/forward", {"problem": "error of o 1 (at most 0.005)"}, _figures(1.0))))
    line = next(line for line in page["benchmarks.md"].splitlines() if "| one:" in line)
    assert "no figure: error of o 1" in line and "| – |" in line
    assert not [name for name in page if name.endswith(".svg")]


def test_long_sequences_first_calls_and_rows_left_out_are_shown():
    sizes = dict(B=1, H=2, HV=2, K=128, V=128)
    rows = [_row(f"chunk_kda/length_{T}/forward", _figures(T / 1000), sizes=sizes | {"T": T}) for T in (1000, 4000)]
    first = _row("chunk_kda/train_8k/forward", _figures(1.0) | {"first_s": 6.0}, bars={"first_s": 5})
    text = _page(_operators(*rows, first, left_out=["a/b/c"]))["benchmarks.md"]
    assert "4.00 for 4 times the tokens" in text and "**6.0** (≤ 5.0)" in text and "`a/b/c`" in text


def test_the_plot_has_a_bar_per_pair():
    rows = [_row(f"chunk_kda/s{i}/forward", _figures(0.5), _figures(1.0), bars={"ratio": 0.6}) for i in range(3)]
    page = _page(_operators(*rows, _row("chunk_kda/alone/forward", _figures(1.0))))
    plot = page["benchmarks_nvidia_h200.svg"]
    assert plot.count(">0.50<") == 3 and "alone" not in plot and "(benchmarks_nvidia_h200.svg)" in page["benchmarks.md"]


def test_errors_show_the_worst_of_the_option_sets():
    rows = [
        {"operator": "chunk_kda", "backend": "triton", "device": "cuda", "dtype": "bf16", "variant": variant,
         "errors": {"o": error}, "bounds": {"o": 0.005}}
        for variant, error in (("a", 0.001), ("b", 0.006))
    ]  # fmt: skip
    about = {key: rows[0][key] for key in ("operator", "backend", "dtype", "device")}
    rows.append({**about, "variant": "c", "refused": "no"})
    text = render({"nvidia_h200": {"errors": {**MACHINE, "sizes": {"T": 200}, "rows": rows}}})["errors.md"]
    assert "**6.0e-03 (120%)**" in text and "1.0e-03" not in text and 'the options "c" in bf16: no' in text


# --- taking what another machine measured ---


def test_rows_are_replaced_one_by_one(tmp_path):
    old = _operators(_row("chunk_kda/a/forward", _figures(1.0)), _row("chunk_kda/b/forward", _figures(1.0)),
                     left_out=["chunk_kda/c/forward"])
    new = _operators(_row("chunk_kda/b/forward", _figures(2.0), commit="def"), left_out=["chunk_kda/a/forward"])
    file = take(old, "operators.json", tmp_path)
    assert file == tmp_path / "nvidia_h200/operators.json" == take(new, "operators.json", tmp_path)
    kept = json.loads(file.read_text())
    assert {row["key"]: row["measured"][0]["ms"] for row in kept["rows"]} == {
        "chunk_kda/a/forward": 1.0, "chunk_kda/b/forward": 2.0}  # fmt: skip
    assert kept["left_out"] == []
    assert "commit abc, def" in _page(kept)["benchmarks.md"]


def test_rows_of_other_versions_are_not_mixed(tmp_path):
    record = _operators(_row("chunk_kda/a/forward", _figures(1.0)))
    take(record, "operators.json", tmp_path)
    other = copy.deepcopy(record) | {"triton": "4"}
    with pytest.raises(ValueError, match="triton was 3 and is 4"):
        take(other, "operators.json", tmp_path)
    assert take(record | {"libraries": {"facade": "0"}}, "operators.json", tmp_path)


def test_figures_of_another_machines_processor_are_left_there(tmp_path):
    assert take({"rows": {}, "device": "x86_64", "unit": "ms"}, "dispatch_cost.json", tmp_path) is None
    assert take({"anything": 1}, "tune_log.json", tmp_path) is None
    assert list(tmp_path.iterdir()) == []
