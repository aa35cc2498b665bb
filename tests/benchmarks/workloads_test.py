"""Rows, floors and first rules of the benchmarks; a figure is never printed beside a wrong result."""

import argparse
import json

import pytest
import torch

from benchmarks import documents, gpu, operators, windows
from benchmarks.libraries import OURS, Winners
from benchmarks.oracle import SUBJECTS
from benchmarks.workloads import UNEVEN, Workload, lengths

TINY = dict(H=2, HV=2, K=16, V=16)
MOMENT = gpu.Time(1.0, 0.9, 1.1, 8, True)


@pytest.fixture
def timed_without_gpu(monkeypatch):
    """Calls are made, and every clock says the same."""
    monkeypatch.setattr(gpu, "milliseconds", lambda calls: calls[0]() and MOMENT)
    monkeypatch.setattr(gpu, "host_microseconds", lambda call, calls=8: 20.0)
    monkeypatch.setattr(gpu, "replayed_microseconds", lambda calls: 5.0)
    monkeypatch.setattr(gpu, "peak_bytes", lambda call: 2**20)
    monkeypatch.setattr(gpu, "copies", lambda size: 2)


class Kernel:
    """Stands for a backend: the route of every call."""

    backend = "kernel"


@pytest.fixture
def routed(monkeypatch):
    operator = Workload("chunk_kda", "tiny", TINY).operator
    monkeypatch.setattr(operator, "explain", lambda **arguments: Kernel)


def _row(direction, T=40):
    return operators.Row(Workload("chunk_kda", "tiny", dict(B=2, T=T, **TINY)), direction)


def _measure(row, *names):
    return list(operators.measure(row, list(names) or [OURS], operators.Spent(), "cpu"))


# --- rows ---


def test_every_bar_is_of_a_row_that_exists():
    keys = {row.workload.key for row in operators.rows()}
    assert set(operators.RATIOS) <= keys and set(operators.COLD) <= keys


def test_keys_are_unique_and_rows_are_chosen_by_their_parts():
    every = operators.rows()
    assert len({row.key for row in every}) == len(every)
    (one,) = operators.chosen(every, "chunk_kda/train_8k/training")
    assert one.training and one.workload.sizes["T"] == 8192
    assert {row.direction for row in operators.chosen(every, "decode_,train_8k/forward")} == {"decode", "forward"}
    with pytest.raises(SystemExit, match="--only nothing"):
        operators.chosen(every, "nothing")


def test_uneven_lengths():
    assert lengths(16, 32768) == UNEVEN
    assert sum(lengths(5, 1000)) == 1000 and min(lengths(5, 1000)) > 0
    packed = Workload("chunk_kda", "packed", dict(B=1, T=32768, N=16, H=1, HV=1, K=16, V=16))
    assert packed.offsets[:3] == [0, 97, 4098] and packed.offsets[-1] == 32768
    assert Workload("fused_kda_gate", "packed", packed.sizes).offsets is None


def test_floor_counts_what_cannot_be_saved():
    """The counts that the published tables use: 0.078 and 0.219 ms at this shape."""
    w = Workload("chunk_kda", "train_8k", dict(B=1, T=8192, H=32, HV=32, K=128, V=128))
    assert w.input_bytes == 8192 * 32 * (4 * 128 + 1) * 2 and w.output_bytes == 8192 * 32 * 128 * 2
    assert round(w.floor(training=False), 3) == 0.078 and round(w.floor(training=True), 3) == 0.219
    step = Workload("fused_recurrent_kda", "decode_1", dict(B=1, T=1, H=32, HV=32, K=128, V=128))
    assert step.bytes(False) == pytest.approx(2 * 4 * 32 * 128 * 128, rel=0.02)


def test_inputs_are_what_a_layer_could_have():
    values = Workload("chunk_kda", "tiny", dict(B=1, T=500, **TINY)).inputs("cpu")
    assert values["g"].max() < 0 and values["g"].min() >= -5 and values["g"].dtype == torch.bfloat16
    assert values["k"].float().norm(dim=-1).sub(1).abs().max() < 0.01
    assert 0 < values["beta"].min() and values["beta"].max() < 1


# --- what is right ---


def test_windows_agree_with_the_whole_recurrence():
    """What lies beyond the margin changes nothing, in results and in gradients."""
    w = Workload("chunk_kda", "long", dict(B=2, T=700, H=2, HV=2, K=32, V=32))
    values = {name: x.requires_grad_() for name, x in w.inputs("cpu").items()}
    do = torch.randn(values["v"].shape, dtype=torch.bfloat16)
    parts = windows.right(w, values, do)
    assert len(parts) == 4
    leaves = {name: x.detach().double().requires_grad_() for name, x in values.items()}
    o, _ = SUBJECTS["chunk_kda"].oracle("chunk_kda", {**w.options, **leaves}, torch.float64)
    gradients = torch.autograd.grad(o, list(leaves.values()), do.double())
    found = {"o": o} | {f"d{name}": x for name, x in zip(leaves, gradients)}
    assert max(windows.errors(found, parts).values()) < 1e-12


def test_windows_lie_inside_their_sequences():
    packed = Workload("chunk_kda", "packed", dict(B=1, T=32768, N=16, **TINY))
    found = windows.windows(packed)
    for window in found:
        start = max(x for x in packed.offsets if x <= window.begin)
        end = min(x for x in packed.offsets if x > window.begin)
        assert start <= window.begin <= window.first < window.last <= window.end <= end
        assert window.first == start or window.first - window.begin == windows.MARGIN
        assert window.last == end or window.end - window.last == windows.MARGIN
    assert {(w.begin, w.end) for w in found} >= {(0, 97)}


@pytest.mark.parametrize("direction", [operators.FORWARD, operators.TRAINING])
def test_a_right_call_has_its_figures(direction, timed_without_gpu, routed):
    (record,) = _measure(_row(direction))
    assert record["ms"] == 1.0 and record["problem"] is None and 0 < record["fraction"] < 1
    names = {"o"} | ({"dq", "dk", "dv", "dg", "dbeta"} if direction == operators.TRAINING else set())
    assert set(record["errors"]) == names


@pytest.mark.parametrize("broken", ["o", "dg"])
def test_a_wrong_call_has_none(broken, timed_without_gpu, routed, monkeypatch):
    honest = operators.call_of

    def wrong(*arguments):
        call = honest(*arguments)

        def run():
            (o, state), gradients = call()
            if broken == "o":
                o = o.clone()
                o[-1, -1, -1] = 0
            else:
                gradients = gradients | {"dg": gradients["dg"].roll(1, 1)}
            return (o, state), gradients

        return run

    monkeypatch.setattr(operators, "call_of", wrong)
    (record,) = _measure(_row(operators.TRAINING))
    assert "ms" not in record and record["problem"].startswith(f"error of {broken}")


def test_the_fallback_is_not_timed(timed_without_gpu):
    (record,) = _measure(_row(operators.FORWARD))
    assert "ms" not in record and record["problem"].startswith("no kernel takes it")


def test_a_library_that_raises_leaves_the_others_their_figures(timed_without_gpu, routed, monkeypatch):
    honest = operators.libraries.function

    def function(library, workload):
        if library != OURS:
            raise RuntimeError("no such kernel")
        return honest(library, workload)

    monkeypatch.setattr(operators.libraries, "function", function)
    ours, theirs = _measure(_row(operators.FORWARD), OURS, "fla")
    assert ours["ms"] == 1.0 and theirs["problem"] == "RuntimeError: no such kernel" and "ms" not in theirs


def test_a_step_of_decoding_is_checked_with_its_state(timed_without_gpu, monkeypatch):
    w = Workload("fused_recurrent_kda", "decode_2", dict(B=2, T=1, **TINY))
    monkeypatch.setattr(w.operator, "explain", lambda **arguments: Kernel)
    (record,) = _measure(operators.Row(w, operators.DECODE))
    assert set(record["errors"]) == {"o", "final_state"} and record["ms"] == 0.005


@pytest.mark.parametrize("name", ["fused_kda_gate", "kda_gate_chunk_cumsum"])
def test_gates_are_compared_whole(name, timed_without_gpu, monkeypatch):
    w = Workload(name, "tiny", dict(B=1, T=130, **TINY))
    monkeypatch.setattr(w.operator, "explain", lambda **arguments: Kernel)
    (record,) = _measure(operators.Row(w, operators.TRAINING))
    assert set(record["errors"]) == {"result", "dg", "dA_log", "ddt_bias"} and record["ms"] == 1.0


# --- the program ---


@pytest.fixture
def machine(timed_without_gpu, routed, monkeypatch):
    """A GPU that is not there."""
    about = {"commit": "abc", "date": "2026-01-01", "device": "NVIDIA H200", "driver": "1", "python": "3", "torch": "2",
             "triton": "3"}  # fmt: skip
    monkeypatch.setattr(operators, "provenance", lambda commit, device: about)
    monkeypatch.setattr(operators, "device_name", lambda device: "nvidia_h200")
    monkeypatch.setattr(gpu, "ceilings", lambda: {"copy": 4e12, "product": 7e14})
    measure = operators.measure
    monkeypatch.setattr(operators, "measure", lambda row, names, spent: measure(row, names, spent, "cpu"))


def _options(folder, **changed):
    given = dict(output=folder, write=False, check=False, commit=None, peers="", winners=None, seconds=100, cold="none")
    return argparse.Namespace(**given | changed)


def test_the_json_holds_every_row_and_renders(machine, tmp_path, capsys):
    measured = [_row(operators.FORWARD), _row(operators.TRAINING)]
    assert operators.run(_options(tmp_path), measured, None) == 0
    record = json.loads((tmp_path / "operators.json").read_text())
    assert [row["key"] for row in record["rows"]] == [row.key for row in measured] and record["left_out"] == []
    assert "chunk_kda/tiny/training" in capsys.readouterr().out
    page = documents.render({"nvidia_h200": {"operators": record}})["benchmarks.md"]
    assert page.count("| `chunk_kda` | tiny: B2 T40 H2 K16 |") == 2 and "4.00 TB/s" in page


def test_what_there_was_no_time_for_is_named(machine, tmp_path, capsys):
    assert operators.run(_options(tmp_path, seconds=-1), [_row(operators.FORWARD)], None) == 0
    assert json.loads((tmp_path / "operators.json").read_text())["left_out"] == ["chunk_kda/tiny/forward"]
    assert "left out" in capsys.readouterr().out
    assert operators.run(_options(tmp_path, seconds=-1, check=True), [_row(operators.FORWARD)], None) == 1


def test_a_row_that_fails_is_kept_with_its_reason_and_the_next_one_runs(machine, tmp_path, monkeypatch):
    measure = operators.measure

    def failing(row, *arguments):
        if not row.training:
            raise MemoryError("no room")
        return measure(row, *arguments)

    monkeypatch.setattr(operators, "measure", failing)
    assert operators.run(_options(tmp_path), [_row(operators.FORWARD), _row(operators.TRAINING)], None) == 1
    first, second = json.loads((tmp_path / "operators.json").read_text())["rows"]
    assert first["measured"] == [{"library": OURS, "problem": "MemoryError: no room"}]
    assert second["measured"][0]["ms"] == 1.0


def test_a_first_call_that_fails_is_told(machine, tmp_path, monkeypatch):
    monkeypatch.setattr(operators, "COLD", ("chunk_kda/tiny",))

    def first_call(workload, library, winners):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(operators, "first_call", first_call)
    operators.run(_options(tmp_path, cold=OURS), [_row(operators.FORWARD)], None)
    (found,) = json.loads((tmp_path / "operators.json").read_text())["rows"][0]["measured"]
    assert found["first_problem"] == "RuntimeError: no compiler" and found["ms"] == 1.0


def test_a_first_call_runs_in_a_process_of_its_own():
    if torch.cuda.is_available():
        found = operators.first_call(Workload("chunk_kda", "train_8k", {}), OURS, None)
        assert set(found) == {operators.FORWARD, operators.TRAINING}
    else:
        with pytest.raises(RuntimeError, match="needs a GPU"):
            operators.first_call(Workload("chunk_kda", "train_8k", {}), OURS, None)


# --- autotuning winners ---


def test_winners_are_found_by_all_keys_before_the_tight_ones(tmp_path):
    def entry(H, dtype, warps):
        named = [("H", H), ("BT", 64)]
        return {"full": str(named) + str([dtype]), "red": str([("BT", 64)]), "cfg": {"num_warps": warps}}

    file = tmp_path / "winners.json"
    file.write_text(json.dumps({"op": {"m.k": [entry(32, "a", 1), entry(16, "a", 2)]}, "other": {"m.k": []}}))
    winners = Winners(file)
    assert winners.find("m.k", [("H", 16), ("BT", 64)], ["a"])["num_warps"] == 2
    assert winners.find("m.k", [("H", 8), ("BT", 64)], ["a"])["num_warps"] == 1
    assert winners.find("m.k", [("H", 8), ("BT", 32)], ["a"]) is None
    assert winners.find("m.other", [("BT", 64)], ["a"]) is None
