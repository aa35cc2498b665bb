"""Long sequences of few states are walked in segments: the same function, cut where the position says."""

import os

import cases
import pytest
import torch
from harness.trial import STATES, Trial

from fla_dispatch import operator_of
from fla_triton import engine

DEVICE = torch.device(os.environ.get("FLA_TEST_DEVICE", "cpu"))
T = 150
TRIAL = Trial(cases.SUBJECTS["chunk_kda"], operator_of("chunk_kda"), "triton", DEVICE, brief=DEVICE.type == "cpu")

pytestmark = pytest.mark.parametrize("trial", [pytest.param(TRIAL, id="chunk_kda-triton")])


@pytest.fixture(autouse=True)
def _split_after_64_tokens(monkeypatch):
    split, counts = engine.Places.split, []
    monkeypatch.setattr(engine, "SEGMENT", 64)
    monkeypatch.setattr(engine.Places, "split", lambda self, *given: counts.append(given) or split(self, *given))
    yield
    assert counts, "nothing was split"


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize(("variant", "dtype"), [("given", "fp32"), ("activated", "bf16")])
def test_segments_give_the_recurrence(trial, variant, dtype, state_v_first):
    trial.examine(trial.arguments(variant, dtype=dtype, B=1, T=T, H=1, HV=2, state_v_first=state_v_first, **STATES))


def test_what_is_carried_over(trial):
    """Gates so weak that a segment's state outlives the next ones: the maps of segments count."""
    arguments = trial.arguments("given", B=1, T=T, H=1, HV=1, **STATES)
    arguments["g"] /= 64
    trial.examine(arguments)


def test_off_where_algorithms_are_deterministic(trial, monkeypatch):
    arguments = trial.arguments("given", B=1, T=T, H=1, HV=1)
    trial.run(arguments, gradients=False)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(engine.Places, "split", None)  # would fail if it were called
    trial.run(arguments, gradients=False)
