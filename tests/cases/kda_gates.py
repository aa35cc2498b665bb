"""Hazards of KDA's gates: exponentials that overflow or vanish, unbounded and bounded gates, tails, precision."""

import math

import torch
from harness import bounds
from harness.hazard import hazard
from harness.trial import STATES, same

from cases import golden
from cases.golden import wave

BOTH = (True, False)
WIDE = ("fp32", "bf16")
RULE = ("q", "g")  # the operators that apply gates
GATE = ("output_dtype",)  # the operators that compute them
LENGTHS = (7, 50, 63, 64, 65)
CHUNKED = (64, 65, 130)


@hazard("C008", needs=RULE, T=(1, 4, 63, 65, 130), dtype=WIDE, gradients=BOTH, brief={"T": (1, 65)})
def first_gate_has_nothing_to_forget(trial, T, dtype, gradients):
    """C008: without an initial state a first gate of +176, whose exponential overflows, is as good as 0."""
    for packed in BOTH:
        layout = {"offsets": [0, T, T, 2 * T + 3]} if packed else {"T": T}
        arguments = trial.arguments(dtype=dtype, output_final_state=True, **layout)
        first = [0, T] if packed else [0]
        arguments["g"][:, first] = 0
        expected = trial.run(arguments, gradients=gradients)
        arguments["g"][:, first] = 176
        found = trial.run(arguments, gradients=gradients)
        same(found, expected)
        assert not gradients or not found["dg"][:, first].any()


@hazard("C008", needs=RULE, T=(4, 65), gradients=BOTH)
def overflowing_gate_is_never_nan(trial, T, gradients):
    """C008: with a state the same gate may overflow to inf, but fp64 has a number there, so NaN is wrong."""
    arguments = trial.arguments(T=T, **STATES)
    arguments["g"][:, 0] = 176
    found = trial.run(arguments, gradients=gradients)
    for name in ("o", "final_state"):
        assert not found[name].isnan().any(), name


@hazard("C008", needs=RULE, dtype=WIDE)
def growing_gates(trial, dtype):
    """C008: gates above 0 within reason, and a strong one up behind a strong one down, have finite values: those."""
    arguments = trial.arguments(dtype=dtype, T=65, **STATES)
    arguments["g"] = (torch.rand(arguments["g"].shape, generator=torch.Generator().manual_seed(3)) / 8).to(
        arguments["g"].dtype)
    trial.examine(arguments)
    arguments = trial.arguments(dtype=dtype, T=65, **STATES)
    for t in (20, 31, 63):
        arguments["g"][:, t], arguments["g"][:, t + 1], arguments["beta"][:, t] = -20, 20, 0
    trial.examine(arguments)


@hazard("C010", needs=RULE, T=(*LENGTHS, 500), dtype=WIDE, which=("all", "some", "first", "last"), brief={"T": (7, 65)})
def gates_of_exactly_zero(trial, T, dtype, which):
    """C010: no decay is no decay, everywhere, at random tokens, at either end; not an exponential cut to 0."""
    sizes = {"H": 1, "HV": 1, "K": 16, "V": 16, "B": 1} if T > 100 else {}
    arguments = trial.arguments(dtype=dtype, T=T, **sizes, **STATES)
    tokens = {"all": slice(None), "first": slice(0, 1), "last": slice(T - 1, T),
              "some": torch.rand(T, generator=torch.Generator().manual_seed(4)) < 0.5}[which]
    arguments["g"][:, tokens] = 0
    trial.examine(arguments)


@hazard("C012", needs=RULE, T=CHUNKED, dtype=WIDE, gates=("even", "first", "alternating", "channels", "huge"),
        brief={"T": (64, 65)})
def gates_that_wipe_the_state(trial, T, dtype, gates):
    """C012: decays whose factored exponentials underflow on one side and overflow on the other."""
    arguments = trial.arguments(dtype=dtype, T=T, **STATES)
    g = arguments["g"]
    if gates == "even":
        g.fill_(-25.8)
    elif gates == "first":
        g.fill_(-0.1)[:, 0] = -90
    elif gates == "alternating":
        g.zero_()[:, ::2] = -90
    elif gates == "channels":
        g.fill_(-0.01)[..., ::2] = -25.8
    else:
        g.fill_(-0.1)[:, T // 2 :: 7] = -1e4
    found = trial.examine(arguments)
    if gates == "even":  # only the last token is left in the state
        k, v, beta = (arguments[name][:, -1].double() for name in ("k", "v", "beta"))
        last = beta[..., None, None] * k.repeat_interleave(2, 1)[..., None] * v[:, :, None]
        assert bounds.error(found["final_state"], last) < 64 * bounds.EPS


@hazard("C117", needs=("use_gate_in_kernel",), T=(1, 65, 130), dtype=WIDE, packed=BOTH, brief={"T": (1, 65)})
def unbounded_gates(trial, T, dtype, packed):
    """C117: the softplus gate down to -320 a token, which no exp(-g) survives."""
    layout = {"offsets": [0, T, T, T + 70]} if packed else {"T": T}
    arguments = trial.arguments(dtype=dtype, use_gate_in_kernel=True, A_log=True, dt_bias=True, **layout, **STATES)
    arguments["A_log"] = torch.linspace(0, math.log(16), len(arguments["A_log"])).to(arguments["A_log"].dtype)
    arguments["g"] = (20 * arguments["g"].sigmoid()).to(arguments["g"].dtype)
    trial.examine(arguments)


@hazard("C115", "C117", needs=("use_gate_in_kernel",), T=CHUNKED, dtype=WIDE, safe=BOTH, chunk_size=(32, 64),
        brief={"T": (64, 65)})
def bounded_gates_at_their_bound(trial, T, dtype, safe, chunk_size):
    """C115, C117: every gate of a chunk at -5, computed here or given, promised to be safe or not."""
    options = {"safe_gate": safe, "chunk_size": chunk_size, **STATES}
    gate = {"use_gate_in_kernel": True, "A_log": True, "dt_bias": True, "lower_bound": -5.0}
    heads = {"HV": trial.sized(16, brief=2)}  # dA_log has one number a head, and few of them make no error to compare
    arguments = trial.arguments(dtype=dtype, T=T, **heads, **gate, **options)
    arguments["g"] += 8
    trial.examine(arguments)
    if safe:
        arguments = trial.arguments(dtype=dtype, T=T, **options)
        arguments["g"].fill_(-4.96875)
        trial.examine(arguments)


@hazard("C117", needs=GATE)
def gate_sums(trial):
    """C117: the three forms of the gate, against their documented sums."""
    arguments = {"g": wave((1, 3, 2, 4), 0.7, 3), "A_log": torch.tensor([0, math.log(16)], dtype=torch.float64),
                 "dt_bias": wave((8,), 0.8)}
    forms = {-311.162089: {}, -76.8976054: {"lower_bound": -5.0}, -77.9512731: {"lower_bound": -5.0, "A_log": None}}
    for documented, form in forms.items():
        given = {name: x for name, x in (arguments | form).items() if x is not None}
        assert golden.close(trial.subject.oracle("fused_kda_gate", given, torch.float64).sum(), documented)
        trial.examine({name: x.float() if isinstance(x, torch.Tensor) else x for name, x in given.items()})


@hazard("C117", needs=GATE, raw=(20, 100, 1e4), lower_bound=(None, -5.0), dtype=WIDE)
def extreme_raw_gates(trial, raw, lower_bound, dtype):
    """C117: raw inputs where softplus is linear or nothing and sigmoid saturated: finite, with finite gradients."""
    arguments = trial.arguments(dtype=dtype, T=65, A_log=True, dt_bias=True, lower_bound=lower_bound)
    arguments["g"][:, ::2] = raw
    arguments["g"][:, 1::2] = -raw
    trial.examine(arguments)


@hazard("C113", needs=RULE, T=(65, 130), dtype=("fp32", "bf16", "fp16"), gradients=BOTH, brief={"T": (65,)})
def decay_is_never_rounded(trial, T, dtype, gradients):
    """C113: with v = 0 and k = 0 the state only decays: by exp(sum of gates), to fp32, whatever the inputs' dtype."""
    arguments = trial.arguments(dtype=dtype, T=T, **STATES)
    for name, x in arguments.items():
        if name in ("k", "v"):
            x.zero_()
    arguments["g"] = (arguments["g"].sigmoid() * -0.6065).to(arguments["g"].dtype)
    arguments["initial_state"] = arguments["initial_state"].float()
    found = trial.run(arguments, gradients=gradients)
    right = arguments["initial_state"].double() * arguments["g"].double().sum(1).exp()[..., None]
    assert bounds.error(found["final_state"], right) < bounds.FLOOR["value"] * bounds.EPS


@hazard("C066", needs=("q", "g", "beta"), cu_dtype=(torch.int32, torch.int64))
def dtypes_of_inputs_vary_between_calls(trial, cu_dtype):
    """C066: the same shapes with gates, step sizes and states in other dtypes: none is read as another's width."""
    base = trial.arguments(dtype="bf16", offsets=[0, 30, 70], **STATES)
    base["cu_seqlens"] = base["cu_seqlens"].to(cu_dtype)
    wide, narrow = torch.float32, torch.bfloat16
    mixtures = ((wide, wide, wide), (narrow, wide, wide), (narrow, narrow, narrow), (wide, narrow, wide), (wide,) * 3)
    outcomes = []
    for mixture in mixtures:
        given = dict(zip(("g", "beta", "initial_state"), mixture))
        outcomes.append(trial.examine({**base, **{name: base[name].to(dtype) for name, dtype in given.items()}}))
    same(outcomes[-1], outcomes[0])
