"""Long sequences of few states are walked in segments: the same function, cut where the position says."""

import os

import cases
import pytest
import torch
from harness.trial import STATES, Trial

from fla_dispatch import operator_of
from fla_triton import engine, launch
from fla_triton.kda import chunk

DEVICE = torch.device(os.environ.get("FLA_TEST_DEVICE", "cpu"))
T = 150
TRIAL = Trial(cases.SUBJECTS["chunk_kda"], operator_of("chunk_kda"), "triton", DEVICE, brief=DEVICE.type == "cpu")

pytestmark = pytest.mark.parametrize("trial", [pytest.param(TRIAL, id="chunk_kda-triton")])


@pytest.fixture(autouse=True)
def _split_after_64_tokens(monkeypatch):
    found, Places = [], engine.Places
    monkeypatch.setattr(engine, "SEGMENT", 64)
    monkeypatch.setattr(chunk, "Places", lambda *given: found.append(Places(*given)) or found[-1])
    launch.forget()  # where chunks lie
    yield found
    launch.forget()


def _segments(found) -> set[int]:
    return {places.segments for places in found}


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(("variant", "dtype"), [("given", "fp32"), ("activated", "bf16")])
def test_segments_give_the_recurrence(trial, variant, dtype, state_v_first, _split_after_64_tokens):
    trial.examine(trial.arguments(variant, dtype=dtype, B=1, T=T, H=1, HV=2, state_v_first=state_v_first, **STATES))
    assert _segments(_split_after_64_tokens) == {3}


@pytest.mark.parametrize("states", [{}, STATES], ids=["from nothing", "from a state"])
def test_what_is_carried_over(trial, states, _split_after_64_tokens):
    """Gates so weak that a segment's state outlives the next ones: the maps of segments count."""
    arguments = trial.arguments("given", B=1, T=T, H=1, HV=1, **states)
    arguments["g"] /= 64
    trial.examine(arguments)
    assert _segments(_split_after_64_tokens) == {3}


def test_off_where_algorithms_are_deterministic(trial, monkeypatch, _split_after_64_tokens):
    arguments = trial.arguments("given", B=1, T=T, H=1, HV=1)
    trial.run(arguments, gradients=False)
    assert _segments(_split_after_64_tokens) == {3}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    trial.run(arguments, gradients=False)
    assert _segments(_split_after_64_tokens) == {3, 1}
