"""The tuner: what it tries, what it may choose, and that its file survives other writers. Kernels are stand-ins."""

import json
import multiprocessing
import sys
import threading
import types
import warnings
from dataclasses import dataclass

import pytest

from tools import tune
from tools.repository import UserError
from tools.tune_launches import forced, pickable, recorded


@dataclass(frozen=True)
class Config:
    BK: int | None = None
    BV: int | None = None
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None


class Kernel:
    def __init__(self, name, *candidates):
        self.name, self.list, self.calls = name, candidates, []

    def candidates(self, problem):
        return self.list

    def launch(self, problem, config=None):
        return Launch(self, problem, config)


class Launch:
    def __init__(self, kernel, problem, config=None):
        self.kernel, self.problem, self.config = kernel, problem, config

    def __call__(self, grid, stream, *arguments):
        self.kernel.calls.append((self.config or self.kernel.list[0], *arguments))

    def configured(self, config):
        return Launch(self.kernel, self.problem, config)


def compile_each(launches, jobs):
    """As if some did not compile."""
    for launch in launches:
        yield RuntimeError("out of shared memory") if launch.config == BROKEN else None


@pytest.fixture(autouse=True)
def tree(monkeypatch, tmp_path):
    """A Triton tree without Triton."""
    package, launch, config = (types.ModuleType(name) for name in ("fla_triton", "launch", "config"))
    launch.Launch, launch.compile_each, launch.apart = Launch, compile_each, False
    config.FOLDER, config.Config = tmp_path, Config
    package.launch, package.config = launch, config
    for name, module in (("", package), (".launch", launch), (".config", config)):
        monkeypatch.setitem(sys.modules, f"fla_triton{name}", module)
    return package


SLOW, FAST, WRONG, BROKEN = (Config(BK=size) for size in (16, 32, 64, 128))
STREAM = 7
TIMES = {SLOW: 4.0, FAST: 1.0, WRONG: 0.5, BROKEN: 0.1}


@pytest.fixture
def call():
    """An operator of two kernels; one of the candidates of "prepare" computes something wrong, one does not run."""
    prepare, scan = Kernel("prepare", SLOW, FAST, WRONG, BROKEN), Kernel("scan", SLOW)
    prepare.space = scan.space = lambda problem: ()
    launches = prepare.launch("K128"), scan.launch("K128")

    def run():
        for launch in launches:
            launch(1, STREAM, "tokens")
        used = prepare.calls[-1][0]
        if used == BROKEN:
            raise RuntimeError("out of shared memory")
        return {"o": 0 if used == WRONG else 1}

    return tune.Subject("call", run, lambda found: None if found["o"] == 1 else "o is wrong")


def _tune(timed, checked, only=()):
    def microseconds(again):
        (launch,) = (cell.cell_contents for cell in again.__closure__ if isinstance(cell.cell_contents, Launch))
        again()
        return TIMES[launch.config]

    return dict(tune.tune(timed, checked, only, False, 2, microseconds, lambda total, words: lambda: None))


# --- choosing ---


def test_the_fastest_right_candidate_is_chosen_and_the_faults_are_named(call):
    tuned = _tune([call], [])["prepare", "K128"]
    assert tuned.best == FAST and set(tuned.times) == {SLOW, FAST}
    assert tuned.faults == {WRONG: "call: o is wrong", BROKEN: "call: RuntimeError: out of shared memory"}


def test_a_small_call_can_rule_a_candidate_out(call):
    strict = tune.Subject("small", call.run, lambda found: "never right")
    tuned = _tune([call], [strict])["prepare", "K128"]
    assert tuned.best is None and not tuned.times and tuned.faults[FAST] == "small: never right"


def test_some_kernels_only(call):
    assert set(_tune([call], [], only=["scan"])) == {("scan", "K128")}
    with pytest.raises(UserError, match="no call launches nothing"):
        _tune([call], [], only=["nothing"])


def test_progress_reaches_its_totals(call):
    totals, told = [], []

    def progress(total, words):
        totals.append(total)
        return lambda: told.append(words)

    list(tune.tune([call], [], [], False, 2, lambda again: 1.0, progress))
    assert sum(totals) == len(told)


def test_the_geometric_mean_over_shapes_decides():
    a, b, c = "abc"
    assert tune.best({a: {"x": 1.0, "y": 8.0}, b: {"x": 2.0, "y": 2.0}}) == b
    assert tune.best({a: {"x": 1.0, "y": 1.0}, b: {"x": 0.995, "y": 0.995}}) == a, "within the noise the first stays"
    assert tune.best({a: {"x": 1.0, "y": 1.0}, c: {"x": 0.1}}) == a, "not timed on every shape"
    assert tune.best({}) is None


def test_the_space_holds_the_candidates_first_and_no_tile_that_none_has():
    kernel = Kernel("k", Config(BV=64), Config(BV=32, num_warps=8, num_stages=1))
    found = tune.space(kernel, None, wide=False)
    assert found[:2] == kernel.list and len(set(found)) == len(found) == 2 * len(tune.WARPS) * len(tune.STAGES)
    assert {c.BV for c in found} == {64, 32} and {c.BK for c in found} == {None}
    assert {c.BV for c in tune.space(kernel, None, wide=True)} == {16, 32, 64}
    kernel.space = lambda problem: [Config(BV=16), Config(BV=64)]
    assert tune.space(kernel, None, wide=False) == (*kernel.list, Config(BV=16))


# --- launches ---


def test_launches_are_recorded_with_their_arguments(call):
    with recorded() as found:
        call.run()
    assert [(one.kernel, one.problem, one.arguments) for one in found] == [
        ("prepare", "K128", ("tokens",)), ("scan", "K128", ("tokens",))]  # fmt: skip
    call.run()
    assert len(found) == 2


def test_one_kernel_is_configured_otherwise_and_the_rest_is_left():
    one, other = Kernel("one", SLOW), Kernel("other", SLOW)
    launch, rest = one.launch("K128"), other.launch("K128")
    with forced("one", FAST) as done:
        launch(1, STREAM), rest(1, STREAM)
    launch(1, STREAM)
    assert [config for config, *_ in one.calls] == [FAST, SLOW] and [c for c, *_ in other.calls] == [SLOW]
    assert done == [launch]
    with forced("one", FAST, "K64") as done:
        launch(1, STREAM)
    assert not done


def test_pickable_is_what_the_heuristic_and_the_files_name(tree, tmp_path):
    (tmp_path / "gpu.json").write_text(json.dumps({"kernels": {"k": {"K128": {"BK": 64, "num_warps": 8}, "K64": {}}}}))
    kernel = Kernel("k", SLOW, FAST)
    with recorded() as found:
        kernel.launch("K128")(1, STREAM)
    assert pickable(found) == [("k", SLOW), ("k", FAST), ("k", Config(BK=64, num_warps=8))]


# --- C068: the file ---

VERSIONS = {"triton": "3.6.0"}


def _kernels(file):
    return json.loads(file.read_text())["kernels"]


def test_saving_merges(tmp_path):
    file = tmp_path / "configs/gpu.json"
    tune.merge(file, {"a": {"K128": {"BK": 64}}, "b": {"K128": {"BV": 32}}}, VERSIONS)
    tune.merge(file, {"a": {"K64": {"BK": 32}}}, {"triton": "3.7.0"})
    assert _kernels(file) == {"a": {"K128": {"BK": 64}, "K64": {"BK": 32}}, "b": {"K128": {"BV": 32}}}
    assert json.loads(file.read_text())["versions"] == {"a": {"triton": "3.7.0"}, "b": VERSIONS}
    assert [path.name for path in file.parent.iterdir()] == ["gpu.json"]


@pytest.mark.parametrize("text", ["{", "[]", '{"kernels": 3}', "{}"])
def test_a_broken_file_is_written_anew_with_a_warning(text, tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text(text)
    with pytest.warns(UserWarning, match="gpu.json is broken"):
        tune.merge(file, {"a": {"K128": {}}}, VERSIONS)
    assert _kernels(file) == {"a": {"K128": {}}}


def test_who_is_stopped_while_writing_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "gpu.json"
    tune.merge(file, {"a": {"K128": {}}}, VERSIONS)

    def stopped(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune.os, "replace", stopped)
    with pytest.raises(KeyboardInterrupt):
        tune.merge(file, {"b": {"K128": {}}}, VERSIONS)
    assert _kernels(file) == {"a": {"K128": {}}}


def _write(file, name):
    for problem in range(10):
        tune.merge(file, {name: {f"K{problem}": {}}}, VERSIONS)


def test_no_writer_drops_what_another_wrote(tmp_path):
    """Processes and threads, all at once."""
    file = tmp_path / "gpu.json"
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of forking where threads run
        writers = [context.Process(target=_write, args=(file, f"p{i}")) for i in range(3)]
        for writer in writers:
            writer.start()
    writers += [threading.Thread(target=_write, args=(file, f"t{i}")) for i in range(2)]
    for writer in writers[3:]:
        writer.start()
    for writer in writers:
        writer.join()
    assert {name: len(problems) for name, problems in _kernels(file).items()} == dict.fromkeys(
        ("p0", "p1", "p2", "t0", "t1"), 10)  # fmt: skip
