"""Options that make a call of other calls: who sees what, and whose arguments are checked."""

import inspect
from unittest import mock

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import facade
from fla_dispatch import Backend, Described, Result, bind, dispatch, operator_of

B, T, H = 2, 3, 4


def doubled(run, x, state=None, size=1, doubled=True):
    """Two calls on half of the tokens each, and both states."""
    assert doubled
    states = state if isinstance(state, tuple) else (state, None)
    halves = x.repeat(1, 2, 1).split(x.shape[1], 1)
    results = [run(x=half, state=s, size=size, doubled=False)[0] for half, s in zip(halves, states)]
    return torch.cat(results, 1), len(results)


@dispatch("toy_composed", returns={"y": Result("B T H", "x")}, composed={"doubled": doubled})
def toy_composed(x: Float[Tensor, "B T H"], state: Float[Tensor, "N H"] | None = None, size: int = 1,
                 doubled: bool = True):
    """Adds the state."""
    assert not doubled
    return (size * x if state is None else size * x + state[:, None],)


class Seen(Backend):
    """Takes what it has no name for but the state; the option is not in ``handles``."""

    name, operation, handles = "toy_seen", "toy_composed", frozenset({"state"})

    def forward(self, call):
        assert call.doubled is False
        return call.plan.run_body(call), ()


@pytest.fixture
def x():
    return torch.arange(B * T * H, dtype=torch.float32).view(B, T, H)


def test_a_composed_call_is_what_its_function_returns(x):
    state = torch.ones(B, H)
    y, count = toy_composed(x, (state, 2 * state))
    assert count == 2 and torch.equal(y, torch.cat((x + 1, x + 2), 1))
    assert torch.equal(toy_composed(x, state, 1, False)[0], x + 1)
    assert torch.equal(toy_composed(x, state, 3, doubled=0)[0], 3 * x + 1)


def test_gradients_reach_through(x):
    x.requires_grad_()
    (dx,) = torch.autograd.grad(toy_composed(x, size=3)[0].sum(), x)
    assert torch.equal(dx, torch.full_like(x, 6))


def test_backends_see_simple_calls_only(x, register):
    """And do not refuse one for an option that is not at its default."""
    register(Seen)
    for options in ({}, {"doubled": True}, {"doubled": False}):
        toy_composed(x, **options)
        assert facade.last_route().backend == "toy_seen"
        assert facade.explain(toy_composed, x, **options).backend == "toy_seen"
    toy_composed(x, size=2)
    assert facade.last_route().backend == "reference"
    assert "option size=2 is not implemented" in str(facade.explain(toy_composed, x, size=2))


def test_explain_takes_what_the_call_takes(x):
    state = torch.ones(B, H)
    assert facade.explain(toy_composed, x, (state, state)).backend == "reference"
    assert facade.explain(toy_composed, x, (None, state)).backend == "reference"
    described = operator_of(toy_composed).describe({"B": 2, "T": 3, "H": 4}, tensors=("state",))
    assert isinstance(described["x"], Described)
    assert facade.explain(toy_composed, **described).backend == "reference"


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"state": torch.ones(B, H + 1)}, ValueError, "`state` .* has H=5"),
    ({"state": (torch.ones(B, H + 1), None)}, ValueError, "`state` .* has H=5"),
    ({"state": ("zeros",)}, TypeError, "`state` must be a tensor"),
    ({"size": 1.5}, TypeError, "`size` must be int"),
    ({"doubled": "yes"}, TypeError, "`doubled` must be bool"),
    ({"doubled": torch.ones(2)}, TypeError, "`doubled` must be bool"),
    ({"doubled": 2}, TypeError, "`doubled` must be bool"),
    ({"state": (torch.ones(B, H), None), "doubled": False}, TypeError, "`state` must be a tensor"),
    ({"double": True}, TypeError, "did you mean `doubled`"),
    ({"head_first": True}, DeprecationWarning, "head_first"),
])  # fmt: skip
def test_what_the_caller_gave_is_checked(x, arguments, error, message, monkeypatch):
    """Before the function that composes gets it."""
    monkeypatch.setitem(toy_composed.operator.declaration.composed, "doubled", None)
    with pytest.raises(error, match=message):
        toy_composed(x, **arguments)


def test_compiled(x):
    state = torch.ones(B, H)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x, *states):
        return toy_composed(x, states)[0] * 2

    torch._dynamo.reset()
    assert torch.equal(step(x, state, 2 * state), torch.cat((x + 1, x + 2), 1) * 2)


def test_warnings_point_at_the_caller(x):
    """Through the function that composes, wherever that is written."""
    toy_composed.operator.forget()
    elsewhere = {"_check_devices": lambda *_: torch.device("cuda"), "architecture": lambda device: device.type}
    with mock.patch.multiple(bind, **elsewhere), pytest.warns(UserWarning, match="fallback on cuda") as told:
        line = inspect.currentframe().f_lineno + 1
        toy_composed(x)
    toy_composed.operator.forget()
    assert (told[0].filename, told[0].lineno) == (__file__, line)
