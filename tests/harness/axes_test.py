"""C151: cases cover every pair of values, and packed sequences, states and grouped heads meet in every way."""

import itertools

import cases
import pytest

from harness.axes import pairwise
from harness.subject import cases_of, traits

AXES = {"a": [1, 2, 3], "b": ["x", "y"], "c": [False, True], "d": [0, 1, 2, 3]}


def _pairs(found):
    return {pair for case in found for pair in itertools.combinations(sorted(case.items()), 2)}


def test_every_pair_is_covered_with_fewer_cases_than_the_product():
    found = pairwise(AXES, lambda case: True)
    everything = [dict(zip(AXES, values)) for values in itertools.product(*AXES.values())]
    assert _pairs(found) == _pairs(everything)
    assert len(found) < len(everything) / 2
    assert found == pairwise(AXES, lambda case: True)


def test_every_pair_that_some_valid_case_holds_is_covered():
    def valid(case):
        return not (case["a"] == 1 and case["c"]) and (case["b"] == "x" or case["d"] < 2)

    found = pairwise(AXES, valid)
    everything = [dict(zip(AXES, values)) for values in itertools.product(*AXES.values())]
    assert all(map(valid, found))
    assert _pairs(found) == _pairs(filter(valid, everything))


OPERATORS = [(subject, operator) for subject in cases.SUBJECTS.values() for operator in subject.operators()]


@pytest.mark.parametrize(("subject", "operator"), OPERATORS, ids=[o.declaration.function for _, o in OPERATORS])
def test_packing_states_and_groups_meet_in_every_way(subject, operator):
    names = operator.declaration.names
    met = {traits(case) for case in cases_of(subject, operator)}
    expected = itertools.product({False, "cu_seqlens" in names}, {False, "initial_state" in names}, (False, True))
    assert met == set(expected)
