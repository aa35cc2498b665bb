"""C149: the comparison fails what it must fail."""

import pytest
import torch

from harness import bounds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = "delta_rule"
NAMES = ("o", "final_state", "dq", "dbeta", "dg", "dinitial_state")


def _check(name, x, reference, dtype, eager=None):
    return bounds.check(name, x, reference, TOLERANCE, dtype, reference.to(dtype) if eager is None else eager)


def _reference():
    return torch.randn(2, 33, 4, 16, dtype=torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_rounding_passes_and_what_a_lenient_comparison_lets_through_fails(name, dtype):
    reference = _reference()
    assert _check(name, reference.to(dtype), reference, dtype) is None
    for wrong in (reference + 0.29, 1.009 * reference, reference * 0, -reference, reference.roll(1, 1)):
        assert "RMS" in _check(name, wrong.to(dtype), reference, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_element_that_is_not_finite_fails(value):
    reference = _reference()
    x = reference.float()
    x[0, 0, 0, 0] = value
    assert "inf" in _check("o", x, reference, torch.float32)


def test_one_wrong_element_fails_where_its_share_of_the_rms_is_small():
    reference = torch.randn(10_000_000, dtype=torch.float64)
    x = reference.float()
    x[7] += 2e-3
    assert bounds.error(x, reference) < bounds.FLOOR["value"] * bounds.EPS
    assert "largest deviation" in _check("o", x, reference, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_zero_must_be_met_exactly(dtype):
    zero = torch.zeros(3, 4, dtype=torch.float64)
    assert _check("dg", zero.to(dtype), zero, dtype) is None
    x = zero.to(dtype)
    x[0, 0] = 1e-6
    assert _check("dg", x, zero, dtype)


def test_shape_is_compared():
    reference = _reference()
    assert "shape" in _check("o", reference[:, :-1].float(), reference, torch.float32)
    assert "shape" in _check("o", reference[:1].float(), reference, torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_a_bad_eager_run_cannot_lift_the_ceiling(name):
    reference = _reference()
    limit = bounds.ceiling(TOLERANCE, name, torch.bfloat16)
    assert bounds.bound(name, TOLERANCE, torch.bfloat16, eager_error=1.0) == limit <= 0.02
    assert _check(name, 1.03 * reference, reference, torch.bfloat16, eager=2 * reference)


def _recurrence(q, k, v, g, beta, S, fault=None):
    """The delta rule token by token, with one fault."""
    scale, outputs, dtype = q.shape[-1] ** -0.5, [], S.dtype
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    for t in range(q.shape[1]):
        k_t, v_t, decay, step = k[:, t], v[:, t], g[:, t].exp()[..., None], beta[:, t, :, None]
        S = S if fault == "decay after prediction" else decay * S
        u = (1 if fault == "no step size" else step) * (v_t - torch.einsum("bhk,bhkv->bhv", k_t, S))
        S = decay * S if fault == "decay after prediction" else S
        S = S + (scale if fault == "scale on the state" else 1) * k_t[..., None] * u[:, :, None]
        outputs.append((1 if fault == "scale on the state" else scale) * torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(outputs, 1), S


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fault", [None, "decay after prediction", "scale on the state", "no step size"])
def test_a_wrong_recurrence_is_told_from_a_rounded_one(fault, dtype):
    B, T, H, K, V = 2, 40, 2, 24, 40
    q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)
    g, beta = torch.nn.functional.logsigmoid(3 * torch.randn(B, T, H, K)), torch.rand(B, T, H)
    inputs = [x.to(dtype) for x in (q, torch.nn.functional.normalize(k, dim=-1), v, g, beta)]
    state = torch.randn(B, H, K, V)
    right, eager = (_recurrence(*inputs, state.to(compute)) for compute in (torch.float64, torch.float32))
    found = _recurrence(*inputs, state, fault)
    problems = [bounds.check(name, x.to(dtype if name == "o" else x.dtype), y, TOLERANCE, dtype, z)
                for name, x, y, z in zip(("o", "final_state"), found, right, (eager[0].to(dtype), eager[1]))]
    assert problems == [None, None] if fault is None else any(problems)
