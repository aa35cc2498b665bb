"""How far a result may be from the oracle. One table; nothing in a test may loosen it.

The oracle is the token recurrence in fp64 on inputs first rounded to the tested dtype. The error of a tensor is
RMS(x - ref) / RMS(ref). It may reach the larger of

    EAGER_FACTOR times the error of the same recurrence run eagerly in the tested dtype with an fp32 state, and
    FLOOR[kind] * eps(float32),

but never more than the ceiling of its family. The largest single deviation is held to MAXIMUM_FACTOR times as much,
relative to the largest reference value. A reference that is exactly zero must be met exactly.
"""

import torch

EAGER_FACTOR = 3
MAXIMUM_FACTOR = 8
EPS = torch.finfo(torch.float32).eps

# Kinds of results: outputs, states and the gradients of q, k, v; step sizes; everything about gates.
FLOOR = {"value": 64, "beta": 128, "gate": 256}
KIND = {"beta": "beta", "g": "gate", "A_log": "gate", "dt_bias": "gate"}

# Ceilings per tolerance class: results; gradients of values; of step sizes and gates; of gate parameters; of states.
CEILING = {
    "delta_rule": {"result": 0.005, "value": 0.008, "beta": 0.02, "gate": 0.02, "state": 0.008},
    "linear": {"result": 0.005, "value": 0.005, "gate": 0.005, "state": 0.005},
    "gate": {"result": 1e-4, "gate": 1e-4},
}
# A 16-bit gradient of the gate is rounded to 8 or 11 bits on its way out: there the recurrences' ceiling holds.
ROUNDED_GATE = 0.02


def kind_of(name: str) -> str:
    """``name`` of a result, or "d<input>" of a gradient."""
    return KIND.get(name.removeprefix("d"), "value") if name.startswith("d") else "value"


def ceiling(tolerance: str, name: str, dtype: torch.dtype) -> float:
    table = CEILING[tolerance]
    if not name.startswith("d"):
        return table["result"]
    if tolerance == "gate" and dtype.itemsize < 4:
        return ROUNDED_GATE
    return table["state"] if name == "dinitial_state" else table[kind_of(name)]


def deviation(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|x - reference| in fp64. What lies below the spacing of x's smallest numbers is rounding no one can avoid; and
    fp32 arithmetic may flush what lies below its normal numbers."""
    spacing = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    if x.dtype != torch.float64:
        spacing = max(spacing, torch.finfo(torch.float32).smallest_normal)
    away = (x.double().cpu() - reference.double().cpu()).abs()
    return away.masked_fill(away <= spacing, 0)


def error(x: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative RMS error; infinite where x is not finite."""
    if not x.isfinite().all():
        return float("inf")
    norm, away = reference.double().square().mean().sqrt().item(), deviation(x, reference).square().mean().sqrt().item()
    if x.numel() == 0 or away == 0:
        return 0.0
    return float("inf") if norm == 0 else away / norm


def bound(name: str, tolerance: str, dtype: torch.dtype, eager_error: float) -> float:
    """``dtype`` is that of the inputs."""
    allowed = max(EAGER_FACTOR * eager_error, FLOOR[kind_of(name)] * EPS)
    return min(allowed, ceiling(tolerance, name, dtype))


def check(name: str, x: torch.Tensor, reference: torch.Tensor, tolerance: str, dtype: torch.dtype,
          eager: torch.Tensor) -> str | None:
    """None, or what is wrong with ``x``."""
    if x.shape != reference.shape:
        return f"{name}: shape {tuple(x.shape)}, not {tuple(reference.shape)}"
    allowed = bound(name, tolerance, dtype, error(eager, reference))
    if not (found := error(x, reference)) <= allowed:
        return f"{name}: relative RMS error {found:.3g} > {allowed:.3g}"
    if x.numel():
        largest = deviation(x, reference).max().item()
        if not largest <= MAXIMUM_FACTOR * allowed * reference.double().abs().max().item():
            return f"{name}: largest deviation {largest:.3g} beyond {MAXIMUM_FACTOR} times the bound {allowed:.3g}"
    return None
