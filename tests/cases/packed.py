"""Hazards of packed sequences: empty ones, slack rows, leakage between them, and every form of cu_seqlens."""

import pytest
import torch
from harness.hazard import hazard, variants
from harness.poison import poisoned_allocations
from harness.subject import PACKED
from harness.trial import STATES, same

import facade

BOTH = (True, False)
WIDE = ("fp32", "bf16")
ODD = {"H": 1, "HV": 3, "K": 33, "V": 21}  # nothing fills a vector register, so remainders round their own way
PACKABLE = ("cu_seqlens",)


def _each(offsets):
    """The sequences that hold tokens: (index, tokens)."""
    return [(n, slice(a, b)) for n, (a, b) in enumerate(zip(offsets, offsets[1:])) if a < b]


def _unpacked(arguments):
    return {name: x for name, x in arguments.items() if not name.startswith("cu_seqlens")}


@hazard("C083", "C151", needs=PACKABLE, variant=variants, dtype=WIDE, offsets=PACKED, gradients=BOTH)
def packed_as_alone(trial, variant, dtype, offsets, gradients):
    """C083, C151: a packed sequence gives the same bits as the same sequence alone: results, states, gradients."""
    offsets = PACKED[offsets]
    arguments = trial.arguments(variant, dtype=dtype, offsets=offsets, T=offsets[-1] + 7, **ODD, **STATES)
    found = trial.run(arguments, gradients=gradients)
    loss = trial.cotangents(found)
    for n, tokens in _each(offsets):
        own, weights, expected = (trial.part(x, slice(None), tokens, slice(n, n + 1)) for x in (arguments, loss, found))
        alone = trial.run(_unpacked(own), gradients=gradients, cotangents=weights)
        same(alone, expected, [name for name in found if trial.has_tokens(name) or trial.has_sequences(name)])


@hazard("C023", needs=PACKABLE, variant=variants)
def oracle_keeps_sequences_apart(trial, variant):
    """C023: the reference that everything is held against honours cu_seqlens, gradients included."""
    arguments = trial.arguments(variant, offsets=[0, 3, 10], **STATES)
    loss = trial.cotangents(trial.run(arguments, gradients=False))
    found = trial.oracle(arguments, loss)
    for n, tokens in _each([0, 3, 10]):
        own, weights, expected = (trial.part(x, slice(None), tokens, slice(n, n + 1)) for x in (arguments, loss, found))
        alone = trial.oracle(_unpacked(own), weights)
        for name in found:
            if trial.has_tokens(name) or trial.has_sequences(name):
                torch.testing.assert_close(alone[name], expected[name], rtol=0, atol=1e-12)


@hazard("C015", needs=("cu_seqlens", "initial_state"), variant=variants, gradients=BOTH,
        offsets=([0, 0], [0, 0, 0, 5, 5, 69, 70, 70], [0, 1, 2, 2, 3], [0, 64, 64, 128]))
def empty_sequences(trial, variant, offsets, gradients):
    """C015: an empty sequence hands its state through, and the gradient of its state back, bit for bit."""
    arguments = trial.arguments(variant, offsets=offsets, T=offsets[-1] + 1, **STATES)
    with poisoned_allocations():
        found = trial.run(arguments, gradients=gradients)
    empty = torch.tensor(offsets).diff() == 0
    assert torch.equal(found["final_state"][empty], arguments["initial_state"][empty])
    if gradients:
        assert torch.equal(found["dinitial_state"][empty], trial.cotangents(found)["final_state"][empty])
        trial.compare(arguments, trial.cotangents(found), found)


@hazard("C017", needs=PACKABLE, variant=variants, end=(100, 64), gradients=BOTH)
def rows_past_the_last_sequence(trial, variant, end, gradients):
    """C017: NaN in the rows behind the sequences: zeros come out there, the bits of the trimmed call elsewhere."""
    arguments = trial.arguments(variant, offsets=[0, 30, end], T=128, **STATES)
    trimmed = trial.part(arguments, slice(None), slice(0, end), slice(None))
    expected = trial.run(trimmed, gradients=gradients)
    loss = trial.cotangents(expected)
    soiled = {name: _soiled(x, 128) if trial.has_tokens(name) else x for name, x in loss.items()}
    for name in filter(trial.has_tokens, arguments):
        arguments[name][:, end:] = float("nan")
    with poisoned_allocations():
        found = trial.run(arguments, gradients=gradients, cotangents=soiled)
    same(trial.part(found, slice(None), slice(0, end), slice(None)), expected)
    for name in filter(trial.has_tokens, found):
        assert (found[name][:, end:] == 0).all(), f"{name} past the last sequence"


def _soiled(x, T):
    """``x`` continued with NaN up to T tokens."""
    return torch.cat([x, x.new_full((1, T - x.shape[1], *x.shape[2:]), float("nan"))], 1)


@hazard("C019", needs=("cu_seqlens", "initial_state"), zeros=BOTH)
def long_tail_of_short_sequences(trial, zeros):
    """C019: one long sequence, then many of length 1 and some of length 0, with initial states: ends, and agrees."""
    offsets = torch.tensor([0, trial.sized(700, brief=130)] + [1] * trial.sized(64, brief=16) + [0] * 3)
    offsets = offsets.cumsum(0).tolist()
    arguments = trial.arguments(offsets=offsets, K=32, V=16, **STATES)
    arguments["initial_state"] *= 0 if zeros else 1
    found = trial.run(arguments)
    loss = trial.cotangents(found)
    for n, tokens in _each(offsets)[:5]:
        own, weights, expected = (trial.part(x, slice(None), tokens, slice(n, n + 1)) for x in (arguments, loss, found))
        names = [name for name in found if trial.has_tokens(name) or trial.has_sequences(name)]
        same(trial.run(_unpacked(own), cotangents=weights), expected, names)


@hazard("C021", needs=PACKABLE)
def batch_and_boundaries_exclude_each_other(trial):
    """C021: cu_seqlens with a batch is an error, never a guess."""
    arguments = trial.arguments(B=2, T=64)
    with pytest.raises(ValueError, match="batch size must be 1"):
        trial.call(**arguments, cu_seqlens=torch.tensor([0, 64, 128], device=trial.device))


@hazard("C057", needs=PACKABLE, variant=variants, gradients=BOTH)
def boundaries_of_every_type(trial, variant, gradients):
    """C057: int32 and int64 boundaries, on the device and on the host, with their host copy and without: same bits."""
    arguments = trial.arguments(variant, offsets=PACKED["mixed"], **STATES)
    cu_seqlens = arguments.pop("cu_seqlens")
    found = trial.run({**arguments, "cu_seqlens": cu_seqlens}, gradients=gradients)
    for dtype in (torch.int32, torch.int64):
        forms = [{"cu_seqlens": cu_seqlens.to(dtype)}]
        if "cu_seqlens_cpu" in trial.names:
            forms += [{"cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens.to(dtype)},
                      {"cu_seqlens": cu_seqlens.to(dtype), "cu_seqlens_cpu": cu_seqlens}]
        for form in forms:
            same(trial.run({**arguments, **form}, gradients=gradients), found)
    with facade.use_backend(trial.backend), torch.no_grad():  # boundaries that stayed on the host
        results = trial.named(trial.operator.public(**trial.place(arguments), cu_seqlens=cu_seqlens))
    if not gradients:
        same({name: x.cpu() for name, x in results.items()}, found)
    with pytest.raises(TypeError, match="`cu_seqlens`"):
        trial.call(**arguments, cu_seqlens=cu_seqlens.float())


@hazard("C055", needs=PACKABLE, gradients=BOTH)
def boundaries_changed_in_place(trial, gradients):
    """C055: boundaries written into the same tensor are seen by the next call, also under torch.inference_mode."""
    arguments = trial.arguments(offsets=[0, 64, 128], **STATES)
    fresh = {**arguments, "cu_seqlens": torch.tensor([0, 100, 128], dtype=torch.int32)}
    expected = trial.run(fresh, gradients=gradients)
    boundaries = arguments["cu_seqlens"] = arguments["cu_seqlens"].to(trial.device)
    before = trial.run(arguments, gradients=gradients)
    boundaries.copy_(fresh["cu_seqlens"])
    found = trial.run(arguments, gradients=gradients)
    same(found, expected)
    assert not torch.equal(found[next(iter(found))], before[next(iter(before))])
    if not gradients:
        with torch.inference_mode():
            same(trial.run(arguments, gradients=False), expected)
            boundaries.copy_(torch.tensor([0, 64, 128]))
            same(trial.run(arguments, gradients=False), before)
