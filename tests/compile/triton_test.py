"""Every Triton kernel compiles for every target, fits its shared memory, and takes no more of a GPU than recorded.

No GPU is needed. FLA_TEST_TRITON=next: with another Triton than the recorded one, where the compiler's figures differ.
"""

import copy
import os

import pytest

from compile import budget
from compile.table import PASSES, ROWS, title
from compile.targets import KB, TARGETS
from compile.worker import Worker

NEXT = os.environ.get("FLA_TEST_TRITON") == "next"
TESTED = ("sm_90", "gfx942") if NEXT else tuple(TARGETS)  # a newer compiler: one target of each maker
SECONDS = 55  # a compiler that is given too large a tile does not come back
# A target's rows together, because they share kernels: what its process has compiled it does not compile again.
TRIED = [
    pytest.param(row, backward, target, id=f"{title(row, backward)} {target}".replace(" ", "-"),
                 marks=pytest.mark.together(target))
    for row, backward in PASSES for target in TESTED if ROWS[row].sample or not NEXT
]  # fmt: skip
LARGEST = [(row, backward) for row, backward in PASSES if ROWS[row].K == 256 and ROWS[row].operator == "chunk_kda"]


@pytest.fixture(scope="module")
def workers():
    """A compiling process per target, started when it is first asked."""
    started = {target: Worker(target) for target in TESTED}
    yield started
    for worker in started.values():
        worker.close()


@pytest.mark.together("sm_90")
def test_triton_is_the_one_that_was_recorded(workers):
    version, recorded = workers["sm_90"].ask(SECONDS, "version"), budget.load()["triton"]
    assert (version != recorded) if NEXT else (version == recorded), budget.RENEW


@pytest.mark.parametrize(("row", "backward", "target"), TRIED)
def test_compiles_and_stays_within_the_budget(workers, row, backward, target):
    kernels = workers[target].ask(SECONDS, "compile", row=row, backward=backward)
    assert kernels
    for kernel in kernels:
        assert kernel["shared"] <= TARGETS[target].shared, kernel
    if not NEXT:
        problems = budget.complaints(title(row, backward), target, budget.named(kernels), budget.load())
        assert not problems, "\n".join([*problems, budget.RENEW])


if not NEXT:  # of the choice, not of the compiler

    @pytest.mark.together("sm_80")
    @pytest.mark.parametrize("shared", [64, 99, 163, 227])
    @pytest.mark.parametrize(("row", "backward"), LARGEST, ids=[title(*one).replace(" ", "-") for one in LARGEST])
    def test_some_configuration_fits_any_device(workers, row, backward, shared):
        """C106: with 64 KB (T4, RDNA), 99 KB (sm_86, sm_89, sm_120), 163 KB and 227 KB."""
        kernels = workers["sm_80"].ask(SECONDS, "compile", row=row, backward=backward, shared=shared * KB)
        assert kernels
        for kernel in kernels:
            assert kernel["shared"] <= shared * KB, kernel


    @pytest.mark.together("sm_90")
    def test_the_choice_follows_the_device(workers):
        """C072: of two devices with other limits each gets what fits it, whichever was asked first."""
        row = next(i for i, one in enumerate(ROWS) if one.K == 256 and one.dtype == "bf16")
        backward, worker, largest = False, workers["sm_90"], {}
        for shared in (228, 99, 227):
            kernels = worker.ask(SECONDS, "compile", row=row, backward=backward, shared=shared * KB)
            largest[shared] = max(kernel["shared"] for kernel in kernels)
        assert largest[99] <= 99 * KB < largest[227] == largest[228]


def test_every_switch_is_thrown_in_some_row():
    fresh = Worker("sm_90")  # a first call of a plan makes more ready than a second
    try:
        assert fresh.ask(SECONDS, "missing") == []
    finally:
        fresh.close()


@pytest.mark.parametrize("measure", range(len(budget.MEASURES)))
def test_growth_is_found(measure):
    recorded = budget.load()
    row, kernels = next(iter(recorded["rows"].items()))
    name, by_target = next(iter(kernels.items()))
    found = {kernel: figures["sm_90"] for kernel, figures in kernels.items()}
    assert budget.complaints(row, "sm_90", found, recorded) == []
    lowered = copy.deepcopy(recorded)
    lowered["rows"][row][name]["sm_90"][measure] -= 1
    (complaint,) = budget.complaints(row, "sm_90", found, lowered)
    assert name in complaint and str(by_target["sm_90"][measure]) in complaint


def test_what_is_not_recorded_is_found():
    recorded = budget.load()
    row, kernels = next(iter(recorded["rows"].items()))
    found = {name: figures["sm_90"] for name, figures in kernels.items()}
    assert budget.complaints(row, "sm_90", {**found, "new": [1, 0, 0]}, recorded)
    gone = dict(list(found.items())[1:])
    assert budget.complaints(row, "sm_90", gone, recorded)
