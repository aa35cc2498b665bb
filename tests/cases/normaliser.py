"""Hazards of linear attention that divides what it reads by the weights it was read with: a call composed of one that
does not, with a pair of states, S and the sum of keys z."""

import pytest
import torch
from harness import bounds
from harness.hazard import declared, hazard
from harness.poison import poisoned_allocations
from harness.subject import FLOATS, PACKED
from harness.trial import same

import facade
from facade import reference

BOTH = (True, False)
WIDE = ("fp32", "bf16", "fp16")
NEEDS = ("normalize",)
ODD = {"H": 3, "K": 33, "V": 21}  # nothing fills a vector register, so remainders round their own way
RESULTS = ("o", "final_state", "z")
SEQUENCES = ("initial_state", "z", "final_state", "dinitial_state", "dz")


def _arguments(trial, states=True, **given):
    """Arguments by name, with "z" beside "initial_state"."""
    arguments = trial.arguments(normalize=True, initial_state=states, output_final_state=True, **given)
    if states:
        N, H, K, _ = arguments["initial_state"].shape
        z = torch.rand(N, 1, H, K, generator=torch.Generator().manual_seed(2)) * 3
        arguments["z"] = z.to(arguments["initial_state"].dtype)
    return arguments


def _paired(arguments):
    """As the operator takes them."""
    given = {name: x for name, x in arguments.items() if name not in ("initial_state", "z")}
    pair = arguments.get("initial_state"), arguments.get("z")
    return given if pair == (None, None) else given | {"initial_state": pair}


def _flat(returned):
    o, states = returned
    return {name: x for name, x in zip(RESULTS, (o, *states)) if x is not None}


def _call(trial, arguments):
    with facade.use_backend(trial.backend):
        results = _flat(trial.operator.public(**_paired(arguments)))
    route = facade.last_route()
    assert (route.function, route.backend) == (trial.operator.declaration.function, trial.backend), str(route)
    return results


def _oracle(trial, arguments, dtype):
    return _flat(reference.linear_attn.recurrent(**_paired(arguments), compute_dtype=dtype))


def _run(trial, arguments, loss=None, call=_call, wide=False):
    """Results, and the gradients by ``loss`` (random, of the results) of everything that floats, all on the CPU."""
    floats = [name for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves = {name: x.detach().to(trial.device, copy=True).requires_grad_() for name, x in arguments.items()
              if name in floats}
    if wide:
        leaves = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    results = call(trial, trial.place(arguments) | leaves)
    loss = _loss(results) if loss is None else loss
    upstream = [loss[name].to(results[name]) for name in results]
    gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), upstream)
    found = results | {f"d{name}": x for name, x in zip(leaves, gradients)}
    return {name: x.detach().cpu() for name, x in found.items()}


def _loss(results):
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(x.shape, generator=generator).to(x.dtype) for name, x in results.items()}


def _compare(trial, arguments, found):
    dtype, loss = arguments["q"].dtype, _loss({name: found[name] for name in RESULTS})
    right = _run(trial, arguments, loss, lambda trial, wide: _oracle(trial, wide, torch.float64), wide=True)
    eager = _run(trial, arguments, loss, lambda trial, narrow: _oracle(trial, narrow, dtype))
    problems = [bounds.check(name, x, right[name], trial.operator.declaration.tolerance, dtype, eager[name])
                for name, x in found.items()]
    assert not any(problems), "\n".join(filter(None, problems))


def _part(tensors, tokens, sequence):
    """What belongs to one packed sequence; boundaries fall away."""
    return {name: x if not isinstance(x, torch.Tensor) else x[sequence : sequence + 1] if name in SEQUENCES
            else x[:, tokens] for name, x in tensors.items() if name != "cu_seqlens"}


@hazard(needs=NEEDS, dtype=WIDE, states=BOTH, reverse=declared("reverse", BOTH), scale=(None, 0.3),
        tokens=(13, 65, *PACKED), brief={"tokens": (65, "mixed")})
def normalised_as_the_recurrence(trial, dtype, states, reverse, scale, tokens):
    """Results and every gradient, of both states too, against the sums taken token by token in fp64."""
    sizes = {"offsets": PACKED[tokens]} if tokens in PACKED else {"T": tokens}
    arguments = _arguments(trial, states, dtype=dtype, reverse=reverse, scale=scale, **sizes)
    with poisoned_allocations():
        found = _run(trial, arguments)
    _compare(trial, arguments, found)
    assert found["z"].dtype == found["final_state"].dtype == torch.float32 and found["o"].dtype == FLOATS[dtype]
    assert all(found[f"d{name}"].dtype == arguments[name].dtype for name in ("q", "k", "v"))


@hazard(needs=NEEDS, dtype=WIDE)
def one_token_reads_itself(trial, dtype):
    """Where there is nothing else to read, o is v whatever q and k are: their gradients are rounding and no more."""
    arguments = _arguments(trial, False, T=1, B=4, dtype=dtype)
    loss = {name: x * (name == "o") for name, x in _loss(_oracle(trial, arguments, torch.float64)).items()}
    found = _run(trial, arguments, loss)
    q, k, v, do = (x.double() for x in (*(arguments[name] for name in "qkv"), loss["o"]))
    eps = torch.finfo(FLOATS[dtype]).eps
    assert (found["o"] - v).abs().max() <= 2 * eps * v.abs().max()
    assert (found["dv"] - do).abs().max() <= 2 * eps * do.abs().max()
    cancelled = (do * v).abs().sum(-1, keepdim=True) / (q * k).sum(-1, keepdim=True)  # what comes through v, less scale
    assert (found["dq"].abs() <= 4 * eps * cancelled * k).all() and (found["dk"].abs() <= 4 * eps * cancelled * q).all()


@hazard(needs=NEEDS, dtype=("fp32", "bf16"))
def normalised_packed_as_alone(trial, dtype):
    """A packed sequence gives the bits of the same sequence alone; behind the last one, NaN is not read."""
    offsets = PACKED["mixed"]
    arguments = _arguments(trial, dtype=dtype, offsets=[*offsets, offsets[-1] + 7], **ODD)
    arguments["cu_seqlens"] = arguments["cu_seqlens"][:-1]
    arguments |= {name: arguments[name][:-1] for name in ("initial_state", "z")}
    for name in "qkv":
        arguments[name][:, offsets[-1] :] = float("nan")
    with poisoned_allocations():
        found = _run(trial, arguments)
    for name in ("o", "dq", "dk", "dv"):
        assert (found[name][:, offsets[-1] :] == 0).all(), f"{name} past the last sequence"
    loss = _loss({name: found[name] for name in RESULTS})
    for n, (a, b) in enumerate(zip(offsets, offsets[1:])):
        alone = _run(trial, _part(arguments, slice(a, b), n), _part(loss, slice(a, b), n))
        same(alone, _part(found, slice(a, b), n))
        if a == b:
            assert torch.equal(found["z"][n], arguments["z"][n].float())
            assert torch.equal(found["dz"][n], loss["z"][n].to(found["dz"].dtype))


@hazard(needs=NEEDS, dtype=WIDE)
def normalised_and_resumed(trial, dtype):
    """Two calls, the pair of states carried, are one call: results and gradients."""
    arguments = _arguments(trial, dtype=dtype, T=70)

    def in_two(trial, arguments):
        def piece(tokens):
            return {name: x[:, tokens] if name in ("q", "k", "v") else x for name, x in arguments.items()}

        first = _call(trial, piece(slice(0, 33)))
        states = {"initial_state": first["final_state"], "z": first["z"]}
        second = _call(trial, piece(slice(33, None)) | states)
        return second | {"o": torch.cat((first["o"], second["o"]), 1)}

    _compare(trial, arguments, _run(trial, arguments, call=in_two))


@hazard(needs=NEEDS, T=(200,), brief={"T": (130,)})
def weights_beyond_half_precision(trial, T):
    """What is divided may be larger than any fp16; its quotient is not."""
    arguments = _arguments(trial, False, dtype="fp16", T=T, B=1, H=1, K=64, V=16)
    for name in "qk":
        arguments[name].fill_(8)
    found = _run(trial, arguments)
    assert all(x.isfinite().all() for x in found.values())
    mean = arguments["v"].double().cumsum(1) / torch.arange(1, T + 1)[:, None, None]
    assert (found["o"] - mean).abs().max() <= 2 * torch.finfo(torch.float16).eps * mean.abs().max()


@hazard(needs=NEEDS)
def states_come_alone_or_in_pairs(trial):
    """A missing half counts as zeros; z is returned whether the state is asked for or not."""
    arguments = _arguments(trial, T=20)
    for half in ("initial_state", "z"):
        zeros = {**arguments, half: torch.zeros_like(arguments[half])}
        missing = {name: x for name, x in arguments.items() if name != half}
        expected = _call(trial, zeros)
        same(_call(trial, missing), expected)
    alone = {name: x for name, x in arguments.items() if name != "z"}
    with facade.use_backend(trial.backend):
        o, states = trial.operator.public(**trial.place(alone))
        same(_flat((o, states)), _call(trial, alone))
        o, (state, z) = trial.operator.public(**trial.place(_paired(arguments) | {"output_final_state": False}))
    expected = _call(trial, arguments)
    assert state is None and torch.equal(z, expected["z"]) and torch.equal(o, expected["o"])


@hazard(needs=NEEDS)
def wrong_pairs_are_named(trial):
    """Whatever is wrong with the second of the pair, or with there being one, is said of `initial_state`."""
    arguments = trial.place(_arguments(trial, T=5))
    S, z = arguments.pop("initial_state"), arguments.pop("z")

    def call(**changes):
        with facade.use_backend(trial.backend):
            trial.operator.public(**{**arguments, **changes})

    for pair, error, words in (
        ((S, z[:, 0]), ValueError, r"`initial_state\[1\]` is \[N=\d, 1, H=\d+, K=\d+\]"),
        ((S, z[:-1]), ValueError, r"`initial_state\[1\]` is "),
        ((S, z.long()), TypeError, r"`initial_state\[1\]` must be float"),
        ((S, 1.0), TypeError, r"`initial_state\[1\]` must be a tensor"),
        ((S, z, z), TypeError, r"`initial_state` must be a tensor or a pair \(S, z\), not 3 values"),
        ((S[:, :, :-1], z), ValueError, r"`initial_state` .* has K="),
    ):
        with pytest.raises(error, match=words):
            call(initial_state=pair)
    with pytest.raises(TypeError, match="`initial_state` must be a tensor"):
        call(initial_state=(S, z), normalize=False)
    with pytest.raises(TypeError, match="did you mean `normalize`"):
        call(normalise=True)
    with pytest.raises(ValueError, match=r"`v` \[B T H V\] has T="):  # the caller's v, not one with a channel more
        call(v=arguments["v"][:, :-1])


@hazard("C059", "C061", needs=NEEDS, packed=BOTH)
def normalised_when_compiled(trial, packed):
    """C059, C061: traced without a break, forward and backward, to the calls that eager mode makes."""
    arguments = _arguments(trial, K=256, V=16, H=1, **({"offsets": [0, 0, 30, 70]} if packed else {"T": 66}))

    def compiled(trial, arguments):
        def step(tensors):
            return _flat(trial.operator.public(**_paired(tensors)))

        torch._dynamo.reset()
        with facade.use_backend(trial.backend):
            return torch.compile(step, fullgraph=True, backend="aot_eager")(arguments)

    same(_run(trial, arguments, call=compiled), _run(trial, arguments))


@hazard("C077", needs=NEEDS, narrow=(torch.bfloat16, torch.float16))
def normalised_under_autocast(trial, narrow):
    """C077: float32 inputs keep their dtype and their bits."""
    arguments = _arguments(trial, T=70)

    def autocast(trial, arguments):
        with torch.autocast(trial.device.type, narrow):
            return _call(trial, arguments)

    same(_run(trial, arguments, call=autocast), _run(trial, arguments))
