"""Hazards of recurrent states: None, dtype, layout, splits, gradients, and the states in between."""

import pytest
import torch
from harness import bounds
from harness.hazard import declared, hazard, variants
from harness.trial import STATES, backward, same

BOTH = (True, False)
WIDE = ("fp32", "bf16")
STATEFUL = ("initial_state", "output_final_state")
ORIENTED = (*STATEFUL, "state_v_first")


@hazard("C083", needs=STATEFUL, variant=variants, dtype=WIDE, gradients=BOTH)
def no_state_as_zeros(trial, variant, dtype, gradients):
    """C083: initial_state=None and zeros give the same bits."""
    arguments = trial.arguments(variant, dtype=dtype, T=trial.sized(130, brief=66), **STATES)
    zeros = torch.zeros_like(arguments.pop("initial_state"))
    expected = trial.run({**arguments, "initial_state": zeros}, gradients=gradients)
    same(trial.run(arguments, gradients=gradients), {n: x for n, x in expected.items() if n != "dinitial_state"})


@hazard("C083", "C121", needs=STATEFUL, variant=variants, dtype=WIDE, gradients=BOTH,
        state_v_first=declared("state_v_first", BOTH))
def split_with_carried_state(trial, variant, dtype, state_v_first, gradients):
    """C083, C121: two calls, cut at a chunk boundary, the state carried, are one call: results and gradients."""
    T = trial.sized(150, brief=70)
    arguments = trial.arguments(variant, dtype=dtype, T=T, K=24, V=40, state_v_first=state_v_first, **STATES)
    names = trial.differentiable(arguments)
    leaves = {name: arguments[name].to(trial.device).requires_grad_(gradients) for name in names}
    every, heads = slice(None), {**arguments, **leaves}
    first = trial.call(**trial.part(heads, every, slice(0, 64), every))
    rest = trial.part(heads, every, slice(64, None), every) | {"initial_state": first["final_state"]}
    second = trial.call(**rest)
    results = {"o": torch.cat([first["o"], second["o"]], 1), "final_state": second["final_state"]}
    found = {name: x.detach().cpu() for name, x in results.items()}
    loss = trial.cotangents(found)
    if gradients:
        found |= backward(results, leaves, {name: x.to(trial.device) for name, x in loss.items()})
    trial.compare(arguments, loss, found)


@hazard("C049", needs=STATEFUL, variant=variants, dtype=WIDE)
def loss_on_the_final_state_alone(trial, variant, dtype):
    """C049: gradients, also the gate's, have a part that comes through the final state; the query's has none."""
    T = trial.sized(130, brief=66)
    found = trial.examine(trial.arguments(variant, dtype=dtype, T=T, **STATES), loss="last")
    query = trial.names[0]
    assert all(found[name].any() for name in ("dk", "dg", "dw") if name in found) and not found[f"d{query}"].any()


@hazard("C051", needs=STATEFUL, gradients=BOTH)
def final_state_is_one_per_sequence(trial, gradients):
    """C051: [N, HV, K, V] in float32, not one per token; None unless asked for."""
    arguments = trial.arguments(B=2, T=4, H=2, HV=2, K=16, V=8, dtype="fp16", output_final_state=True)
    state = trial.run(arguments, gradients=gradients)["final_state"]
    assert state.shape == (2, 2, 16, 8) and state.dtype == torch.float32
    assert "final_state" not in trial.run({**arguments, "output_final_state": False}, gradients=gradients)


@hazard("C032", "C066", needs=STATEFUL, dtype=WIDE, gradients=BOTH)
def states_of_any_float_dtype(trial, dtype, gradients):
    """C032, C066: a state in a narrow dtype is read as the same values in float32; its gradient has its dtype."""
    arguments = trial.arguments(dtype=dtype, T=70, **STATES)
    for narrow in (torch.bfloat16, torch.float16, torch.float32):
        state = arguments["initial_state"].to(narrow)
        expected = trial.run({**arguments, "initial_state": state.float()}, gradients=gradients)
        if gradients:
            expected["dinitial_state"] = expected["dinitial_state"].to(narrow)
        same(trial.run({**arguments, "initial_state": state}, gradients=gradients), expected)


@hazard("C121", "C123", needs=ORIENTED, variant=variants, dtype=WIDE, gradients=BOTH)
def layouts_are_transposes(trial, variant, dtype, gradients):
    """C121, C123: state_v_first transposes every state and its gradient and changes nothing else."""
    arguments = trial.arguments(variant, dtype=dtype, T=70, **STATES)
    found = trial.run(arguments, gradients=gradients)
    loss = trial.cotangents(found)

    def turned(tensors):
        return {name: x.mT.contiguous() if trial.has_sequences(name) else x for name, x in tensors.items()}

    other = trial.run({**turned(arguments), "state_v_first": True}, gradients=gradients, cotangents=turned(loss))
    same(other, turned(found))


@hazard("C121", needs=ORIENTED, state_v_first=BOTH)
def transposed_state_is_an_error(trial, state_v_first):
    """C121: a state in the other layout is a ValueError wherever K != V."""
    arguments = trial.arguments(K=64, V=128, state_v_first=state_v_first, **STATES)
    with pytest.raises(ValueError, match="`initial_state`"):
        trial.call(**{**arguments, "initial_state": arguments["initial_state"].mT})


@hazard("C123", needs=ORIENTED)
def old_name_of_the_layout(trial):
    """C123: transpose_state_layout works with a DeprecationWarning; both names together are a ValueError."""
    arguments = trial.arguments(state_v_first=True, **STATES)
    expected = trial.call(**arguments)
    del arguments["state_v_first"]
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        found = trial.call(**arguments, transpose_state_layout=True)
    same(found, expected)
    with pytest.raises(ValueError, match="transpose_state_layout"):
        trial.call(**arguments, transpose_state_layout=True, state_v_first=True)


@hazard("C128", needs=("return_intermediate_states", *ORIENTED), variant=variants, dtype=WIDE, chunk_size=(32, 64),
        state_v_first=BOTH, offsets=(None, [0, 200, 200, 330]), brief={"offsets": (None, [0, 70, 70, 135])})
def states_at_chunk_starts(trial, variant, dtype, chunk_size, state_v_first, offsets):
    """C128: entry i is the state after chunk_size * i tokens, entry 0 the initial one, packed sequences in order."""
    arguments = trial.arguments(variant, dtype=dtype, T=130 if offsets is None else None, K=16, V=24, H=1, HV=2,
                                offsets=offsets, state_v_first=state_v_first, chunk_size=chunk_size,
                                return_intermediate_states=True, **STATES)
    with torch.inference_mode():
        found = trial.call(**arguments)
    expected = [_prefix_states(trial, arguments, compute) for compute in (torch.float64, arguments["q"].dtype)]
    tolerance = trial.operator.declaration.tolerance
    problem = bounds.check("h", found["h"], expected[0], tolerance, arguments["q"].dtype, expected[1])
    assert problem is None, problem
    assert found["h"].dtype == arguments["k"].dtype
    trial.compare({**arguments, "return_intermediate_states": False}, {},
                  {name: x.cpu() for name, x in found.items() if name != "h"})


def _prefix_states(trial, arguments, dtype):
    """[B, NT, ...] of the oracle, run anew for each prefix of each sequence, in k's dtype unless in fp64."""
    every, C = slice(None), arguments["chunk_size"]
    packed = "cu_seqlens" in arguments
    offsets = arguments["cu_seqlens"].tolist() if packed else [0, arguments["q"].shape[1]]
    dense = {name: x for name, x in arguments.items() if not name.startswith("cu_seqlens")}
    states = []
    for n, (a, b) in enumerate(zip(offsets, offsets[1:])):
        for t in range(a, b, C):
            prefix = trial.part(dense, every, slice(a, t), slice(n, n + 1) if packed else every)
            state = trial.oracle(prefix, dtype=dtype)["final_state"] if t > a else prefix["initial_state"].to(dtype)
            states.append(state if dtype == torch.float64 else state.to(arguments["k"].dtype))
    return torch.stack(states, 1)
