"""Operators that are others with some argument fixed: the same values, results and every gradient, in fp64."""

import functools
import math

import pytest
import torch

import facade.ops as fla_ops
from facade.ops.delta_rule import parallel_delta_rule

B, T, H, HV, K, V = 2, 70, 2, 4, 8, 12
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def draw(*shape) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def inputs(heads=H):
    """q, k, v, a gate and a step size per value head, an initial state."""
    q, k = (torch.nn.functional.normalize(draw(B, T, H, K), dim=-1) for _ in range(2))
    return (q, k, draw(B, T, heads, V), torch.nn.functional.logsigmoid(draw(B, T, heads)),
            draw(B, T, heads).sigmoid(), draw(B, heads, K, V))  # fmt: skip


def outcome(call, *leaves):
    """o, final state (or states), and the gradients of a fixed random loss on all."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    results = [x for x in flat(call(*leaves)) if x is not None]
    generator = torch.Generator().manual_seed(0)
    loss = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in results]
    return *results, *torch.autograd.grad(results, leaves, loss)


def flat(results):
    return [y for x in results for y in flat(x)] if isinstance(results, (tuple, list)) else [results]


def equal(first, second):
    assert len(first) == len(second)
    for x, y in zip(first, second):
        torch.testing.assert_close(x, y, **CLOSE)


STATES = {"output_final_state": True}


@pytest.mark.parametrize("function", ["chunk_retention", "fused_chunk_retention", "fused_recurrent_retention"])
def test_retention_is_simple_gla_with_constant_gates(function):
    q, k, v, _, _, S = inputs()
    g = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(H)], dtype=torch.float64).expand(B, T, H)
    retention = getattr(fla_ops, function)
    found = outcome(lambda q, k, v, S: retention(q, k, v, initial_state=S, **STATES), q, k, v, S)
    right = outcome(lambda q, k, v, S: fla_ops.chunk_simple_gla(q, k, v, g, initial_state=S, **STATES), q, k, v, S)
    for x, y in zip(found, right):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)  # the rates are fp32


@pytest.mark.parametrize("function", ["chunk_lightning_attn", "fused_recurrent_lightning_attn"])
@pytest.mark.parametrize("layer", [0, 5, 11])
def test_lightning_attention_is_simple_gla_with_constant_gates(function, layer):
    q, k, v, _, _, S = inputs()
    rates = torch.tensor([-8 / H * (1 - layer / 12) * h for h in range(H)], dtype=torch.float64)
    lightning = getattr(fla_ops, function)
    found = outcome(lambda q, k, v, S: lightning(q, k, v, layer, 12, initial_state=S, **STATES), q, k, v, S)
    right = outcome(
        lambda q, k, v, S: fla_ops.chunk_simple_gla(q, k, v, g_gamma=rates, initial_state=S, **STATES), q, k, v, S
    )
    for x, y in zip(found, right):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_simple_gla_is_gla_with_the_gate_broadcast():
    q, k, v, g, _, S = inputs()
    scalar = outcome(
        lambda q, k, v, g, S: fla_ops.chunk_simple_gla(q, k, v, g, initial_state=S, **STATES), q, k, v, g, S
    )
    vector = outcome(
        lambda q, k, v, g, S: fla_ops.chunk_gla(q, k, v, g[..., None].expand_as(q), initial_state=S, **STATES),
        q, k, v, g, S,
    )  # fmt: skip
    equal(scalar, vector)


@pytest.mark.parametrize("function", ["chunk_delta_rule", "fused_chunk_delta_rule", "fused_recurrent_delta_rule"])
def test_the_delta_rule_is_the_gated_one_without_gates(function):
    q, k, v, _, beta, S = inputs()
    delta = getattr(fla_ops, function)
    found = outcome(lambda *x: delta(*x[:4], initial_state=x[4], **STATES), q, k, v, beta, S)
    none = torch.zeros(B, T, H, dtype=torch.float64)
    right = outcome(
        lambda q, k, v, beta, S: fla_ops.chunk_gated_delta_rule(q, k, v, none, beta, initial_state=S, **STATES),
        q, k, v, beta, S,
    )  # fmt: skip
    equal(found, right)


def test_the_gated_delta_rule_is_kda_with_the_gate_broadcast():
    q, k, v, g, beta, S = inputs(HV)
    scalar = outcome(
        lambda q, k, v, g, beta, S: fla_ops.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=S, **STATES),
        q, k, v, g, beta, S,
    )  # fmt: skip
    vector = outcome(
        lambda q, k, v, g, beta, S: fla_ops.chunk_kda(
            q, k, v, g[..., None].expand(B, T, HV, K), beta, initial_state=S, **STATES
        ),
        q, k, v, g, beta, S,
    )  # fmt: skip
    equal(scalar, vector)


@pytest.mark.parametrize("gates", [("g",), ("gk",), ("g", "gk"), ("gv",), ("g", "gk", "gv")])
def test_every_gate_of_the_recurrent_form_multiplies(gates):
    """Two gates of keys are one that is their sum, and no gate is one of 0; of values likewise."""
    q, k, v, g, beta, S = inputs(HV)
    given = {"g": g, "gk": -draw(B, T, HV, K).abs(), "gv": -draw(B, T, HV, V).abs()}
    given = {name: given[name] for name in gates}
    every = {"gk": sum(x if x.dim() == 4 else x[..., None].expand(B, T, HV, K) for n, x in given.items() if n != "gv")
             + torch.zeros(B, T, HV, K, dtype=torch.float64),
             "gv": given.get("gv", torch.zeros(B, T, HV, V, dtype=torch.float64))}  # fmt: skip
    recurrent = fla_ops.fused_recurrent_gated_delta_rule
    equal(outcome(lambda *x: recurrent(*x[:3], **given, beta=x[3], initial_state=x[4], **STATES), q, k, v, beta, S),
          outcome(lambda *x: recurrent(*x[:3], **every, beta=x[3], initial_state=x[4], **STATES), q, k, v, beta, S))


def by_hand(q, k, v, S, beta=None, g=None, gk=None, gv=None):
    """The recurrence as it is documented, with nothing shared with what it is held against."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    o = []
    for t in range(T):
        if g is not None:
            S = torch.exp(g[:, t])[..., None, None] * S
        if gk is not None:
            S = torch.exp(gk[:, t])[..., :, None] * S
        if gv is not None:
            S = torch.exp(gv[:, t])[..., None, :] * S
        u = v[:, t]
        if beta is not None:
            u = beta[:, t, :, None] * (u - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], u)
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t]) * K**-0.5)
    return torch.stack(o, 1), S


@pytest.mark.parametrize("gate", ["gk", "gv"])
@pytest.mark.parametrize("function", [fla_ops.fused_recurrent_gla, fla_ops.fused_recurrent_gated_delta_rule])
def test_an_empty_state_has_nothing_to_keep(function, gate):
    """C008: whatever the first gate says, also beyond the largest exponent: 0 grows to 0."""
    q, k, v, *_ = inputs()
    gates = -draw(B, T, H, {"gk": K, "gv": V}[gate]).abs()
    expected, _ = function(q, k, v, **{gate: gates})
    gates[:, 0] = 1000
    found, _ = function(q, k, v, **{gate: gates})
    torch.testing.assert_close(found, expected, **CLOSE)


@pytest.mark.parametrize("gates", [(), ("gk",), ("gv",), ("gk", "gv")])
def test_gla_by_hand(gates):
    q, k, v, _, _, S = inputs()
    given = {"gk": -draw(B, T, H, K).abs(), "gv": -draw(B, T, H, V).abs()}
    leaves = [given[name] for name in gates]
    equal(
        outcome(lambda q, k, v, S, *x: fla_ops.fused_recurrent_gla(
            q, k, v, **dict(zip(gates, x)), initial_state=S, **STATES), q, k, v, S, *leaves),
        outcome(lambda q, k, v, S, *x: by_hand(q, k, v, S, **dict(zip(gates, x))), q, k, v, S, *leaves),
    )  # fmt: skip


@pytest.mark.parametrize("gates", [(), ("g",), ("gk",), ("gv",), ("g", "gk"), ("g", "gk", "gv")])
def test_the_gated_delta_rule_by_hand(gates):
    q, k, v, g, beta, S = inputs(HV)
    given = {"g": g, "gk": -draw(B, T, HV, K).abs(), "gv": -draw(B, T, HV, V).abs()}
    leaves = [given[name] for name in gates]
    recurrent = fla_ops.fused_recurrent_gated_delta_rule
    equal(
        outcome(lambda q, k, v, beta, S, *x: recurrent(
            q, k, v, **dict(zip(gates, x)), beta=beta, initial_state=S, **STATES), q, k, v, beta, S, *leaves),
        outcome(lambda q, k, v, beta, S, *x: by_hand(q, k, v, S, beta, **dict(zip(gates, x))), q, k, v, beta, S,
                *leaves),
    )  # fmt: skip


@pytest.mark.parametrize("function", ["simple_gla", "gla", "delta_rule", "gated_delta_rule"])
def test_chunks_and_tokens_are_one_function(function):
    q, k, v, g, beta, S = inputs()
    gates = {"simple_gla": (g,), "gla": (g[..., None].expand(B, T, H, K),), "delta_rule": (beta,),
             "gated_delta_rule": (g, beta)}[function]  # fmt: skip
    chunk, recurrent = (getattr(fla_ops, f"{form}_{function}") for form in ("chunk", "fused_recurrent"))
    names = {"simple_gla": ("g",), "gla": ("gk",), "delta_rule": ("beta",), "gated_delta_rule": ("g", "beta")}[function]
    found = outcome(lambda *x: chunk(*x[:-1], initial_state=x[-1], **STATES), q, k, v, *gates, S)
    with torch.no_grad():
        walked = recurrent(q, k, v, **dict(zip(names, gates)), initial_state=S, **STATES)
    equal(found[:2], walked)
    equal(found, outcome(
        lambda *x: recurrent(*x[:3], **dict(zip(names, x[3:-1])), initial_state=x[-1], **STATES), q, k, v, *gates, S
    ))


@pytest.mark.parametrize("function", ["simple_gla", "retention", "gla", "linear_attn", "rwkv6"])
@pytest.mark.parametrize("packed", [False, True])
def test_reverse_is_the_sequence_turned_round(function, packed):
    q, k, v, _, _, S = inputs()
    recurrent, bonus = getattr(fla_ops, f"fused_recurrent_{function}"), draw(H, K)
    if function == "rwkv6":  # the gates are turned round with the tokens: here they are the queries
        recurrent = functools.partial(with_bonus, recurrent, bonus)
    options, turned = {"initial_state": S, **STATES}, {"initial_state": S, **STATES}
    if packed:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
        options["cu_seqlens"], turned["cu_seqlens"] = torch.tensor([0, 30, 2 * T]), torch.tensor([0, 2 * T - 30, 2 * T])
        turned["initial_state"] = S.flip(0)
    for gradients in (False, True):  # by token, and in chunks
        q.requires_grad_(gradients)
        o, state = recurrent(q, k, v, reverse=True, **options)
        right, right_state = recurrent(*(x.flip(1) for x in (q, k, v)), **turned)
        torch.testing.assert_close(o, right.flip(1), **CLOSE)
        torch.testing.assert_close(state, right_state.flip(0) if packed else right_state, **CLOSE)


def with_bonus(rwkv6, u, q, k, v, **options):
    """RWKV-6 of gates that are made of the queries."""
    return rwkv6(q, k, v, -q.square(), u, **options)


def test_linear_attention_is_simple_gla_without_decay():
    q, k, v, _, _, S = inputs()
    right = outcome(lambda q, k, v, S: fla_ops.chunk_simple_gla(q, k, v, initial_state=S, **STATES), q, k, v, S)
    for function in ("chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"):
        linear = functools.partial(getattr(fla_ops, function), normalize=False, **STATES)
        equal(outcome(lambda q, k, v, S, linear=linear: linear(q, k, v, initial_state=S), q, k, v, S), right)


@pytest.mark.parametrize("function", ["chunk_linear_attn", "fused_chunk_linear_attn", "fused_recurrent_linear_attn"])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_normalised_linear_attention_by_hand(function, scale):
    """A mean of values by weights, which the states continue."""
    q, k, v, _, _, S = inputs()
    q, k, z = q.exp(), k.exp(), draw(B, 1, H, K).exp()
    normalised = functools.partial(getattr(fla_ops, function), normalize=True, scale=scale, **STATES)

    def by_weights(q, k, v, S, z):
        weights = torch.einsum("bihk,bjhk->bhij", q, k).tril() * (scale or K**-0.5)
        before = torch.einsum("bihk,bohk->bih", q, z) * (scale or K**-0.5)
        read = torch.einsum("bihk,bhkv->bihv", q, S) * (scale or K**-0.5)
        read = read + torch.einsum("bhij,bjhv->bihv", weights, v)
        o = read / (weights.sum(-1).transpose(1, 2) + before + 1e-10)[..., None]
        return o, S + torch.einsum("bthk,bthv->bhkv", k, v), z + k.sum(1, keepdim=True)

    equal(outcome(lambda q, k, v, S, z: normalised(q, k, v, initial_state=(S, z)), q, k, v, S, z),
          outcome(by_weights, q, k, v, S, z))


def test_normalised_linear_attention_of_both_directions():
    """In reverse it is the sequence turned round, z too."""
    q, k, v, _, _, S = inputs()
    q, k, z = q.exp(), k.exp(), draw(B, 1, H, K).exp()
    recurrent = functools.partial(fla_ops.fused_recurrent_linear_attn, normalize=True, initial_state=(S, z), **STATES)
    o, states = recurrent(q, k, v, reverse=True)
    right, right_states = recurrent(*(x.flip(1) for x in (q, k, v)))
    equal([o, *states], [right.flip(1), *right_states])


def rwkv6_by_hand(r, k, v, w, u, S):
    """The recurrence as it is documented."""
    o = []
    for t in range(T):
        own = torch.einsum("hk,bhk,bhv->bhkv", u, k[:, t], v[:, t])
        o.append(torch.einsum("bhkv,bhk->bhv", S + own, r[:, t]) * K**-0.5)
        S = torch.exp(w[:, t])[..., None] * S + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
    return torch.stack(o, 1), S


@pytest.mark.parametrize("form", ["tokens", "chunks of 64", "chunks of 8", "chunks of 1"])
def test_rwkv6_by_hand(form):
    r, k, v, _, _, S = inputs()
    w, u = -draw(B, T, H, K).abs(), draw(H, K)
    rwkv6 = fla_ops.fused_recurrent_rwkv6
    if form != "tokens":
        rwkv6 = functools.partial(fla_ops.chunk_rwkv6, chunk_size=int(form.split()[-1]))
    found = outcome(lambda *x: rwkv6(*x[:5], initial_state=x[5], **STATES), r, k, v, w, u, S)
    right = outcome(rwkv6_by_hand, r, k, v, w, u, S)
    equal(found, right)
    with torch.no_grad():
        equal(rwkv6(r, k, v, w, u, initial_state=S, **STATES), right[:2])


def test_rwkv6_is_gla_read_one_token_earlier():
    """With the bonus of a token's own pair added."""
    r, k, v, _, _, S = inputs()
    w, u = -draw(B, T, H, K).abs(), draw(H, K)

    def earlier(r, k, v, w, u, S):
        later = torch.cat((r[:, 1:], torch.zeros_like(r[:, :1])), 1)
        read, state = fla_ops.chunk_gla(later, k, v, w, initial_state=S, **STATES)
        first = torch.einsum("bhkv,bhk->bhv", S, r[:, 0])[:, None] * K**-0.5
        own = torch.einsum("hk,bthk,bthk->bth", u, k, r)[..., None] * v * K**-0.5
        return torch.cat((first, read[:, :-1]), 1) + own, state

    equal(outcome(lambda *x: fla_ops.chunk_rwkv6(*x[:5], initial_state=x[5], **STATES), r, k, v, w, u, S),
          outcome(earlier, r, k, v, w, u, S))


def test_parallel_simple_gla_is_chunks_from_no_state():
    q, k, v, g, _, _ = inputs()
    for packed in (None, torch.tensor([0, 50, 50, 2 * T])):
        x = [q, k, v, g] if packed is None else [x.flatten(0, 1)[None] for x in (q, k, v, g)]
        equal(outcome(lambda *x, packed=packed: fla_ops.parallel_simple_gla(*x, cu_seqlens=packed), *x),
              outcome(lambda *x, packed=packed: fla_ops.chunk_simple_gla(*x, cu_seqlens=packed), *x))


def test_parallel_retention_is_parallel_simple_gla_with_constant_gates():
    q, k, v, _, _, _ = inputs()
    g = torch.log1p(-torch.exp2(-5 - torch.arange(H, dtype=torch.float32))).double().expand(B, T, H)
    asked = {"output_attentions": True}
    equal(outcome(lambda *x: fla_ops.parallel_retention(*x), q, k, v),
          outcome(lambda *x: fla_ops.parallel_simple_gla(*x, g), q, k, v))
    equal(fla_ops.parallel_retention(q, k, v, **asked), fla_ops.parallel_simple_gla(q, k, v, g, **asked))
    equal(outcome(lambda *x: fla_ops.parallel_retention(*x), q, k, v),
          outcome(lambda *x: fla_ops.chunk_retention(*x), q, k, v))


def test_attentions_of_simple_gla_by_hand():
    q, k, v, g, _, _ = inputs()
    o, P = fla_ops.parallel_simple_gla(q, k, v, g, output_attentions=True)
    G = g.cumsum(1).transpose(1, 2)
    decay = (G[..., None] - G[..., None, :]).clamp(max=0).exp()
    right = (torch.einsum("bihk,bjhk->bhij", q, k) * decay).tril() * K**-0.5
    equal([o, P], [torch.einsum("bhij,bjhv->bihv", right, v), right])


def test_attentions_of_the_delta_rule_by_hand():
    """As the docstring writes them; without them the function is the one in chunks."""
    q, k, v, _, beta, _ = inputs()
    o, P = parallel_delta_rule(q, k, v, beta, output_attentions=True)
    scores, corrections = (torch.einsum("bihk,bjhk->bhij", x, k) for x in (q, k))
    steps = beta.transpose(1, 2)[..., None]
    solved = torch.linalg.inv(torch.eye(T, dtype=torch.float64) + steps * corrections.tril(-1))
    right = K**-0.5 * scores.tril() @ solved * steps.mT
    equal([o, P], [torch.einsum("bhij,bjhv->bihv", right, v), right])
    equal(outcome(parallel_delta_rule, q, k, v, beta), outcome(fla_ops.chunk_delta_rule, q, k, v, beta))


def test_names_of_the_same_operator():
    assert fla_ops.chunk_gdn is fla_ops.chunk_gated_delta_rule
    assert fla_ops.fused_recurrent_gdn is fla_ops.fused_recurrent_gated_delta_rule


def test_two_forms_of_one_decay_are_refused():
    q, k, v, g, _, _ = inputs()
    for name in ("chunk_simple_gla", "fused_chunk_simple_gla", "fused_recurrent_simple_gla"):
        with pytest.raises(ValueError, match="`g` and `g_gamma`"):
            getattr(fla_ops, name)(q, k, v, g, g_gamma=g[0, 0])


def test_a_constant_decay_has_no_gradient():
    q, k, v, _, _, _ = inputs()
    rates = torch.tensor([-0.1, -0.2], dtype=torch.float64, requires_grad=True)
    o, _ = fla_ops.chunk_simple_gla(q.requires_grad_(), k, v, g_gamma=rates)
    (dq, drates) = torch.autograd.grad(o.sum(), (q, rates), allow_unused=True)
    assert dq is not None and drates is None
    for function in (fla_ops.chunk_simple_gla, fla_ops.fused_recurrent_simple_gla):
        assert not function(q.detach(), k, v, g_gamma=rates)[0].requires_grad
