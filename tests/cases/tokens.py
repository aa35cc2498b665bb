"""Hazards of any operator over tokens: causality, independence, determinism, sizes, and where tensors lie in memory."""

import warnings

import pytest
import torch
from harness.hazard import hazard, variants
from harness.layouts import LAYOUTS
from harness.poison import poisoned_allocations
from harness.trial import STATES, same

BOTH = (True, False)
WIDE = ("fp32", "bf16")
SMALL = {"H": 1, "HV": 2, "K": 16, "V": 8}
ODD = {"H": 1, "HV": 3, "K": 33, "V": 21}  # nothing fills a vector register, so remainders round their own way

# Every K that somebody's kernel got wrong or crashed on, and sizes that no tile divides; V in steps of 16, and larger.
CHANNELS = ((1, 1), (3, 130), (16, 32), (32, 48), (48, 64), (64, 80), (80, 96), (96, 112), (100, 17), (128, 128),
            (128, 144), (160, 160), (192, 176), (192, 384), (255, 192), (255, 208), (256, 224), (64, 240), (256, 256),
            (128, 512))
FEW_CHANNELS = ((1, 1), (3, 130), (48, 64), (100, 17), (192, 176), (255, 208), (256, 256))
HEADS = ((1, 3), (3, 3), (5, 10), (12, 12), (21, 21), (16, 32))
FEW_HEADS = ((1, 3), (3, 3), (5, 10))


@hazard("C115", variant=variants, dtype=WIDE, gradients=BOTH)
def later_tokens_change_nothing(trial, variant, dtype, gradients):
    """C115: everything at tokens >= P changed: results before P, and gradients of a loss on them, keep every bit.

    All T in 2..80, three P each, as packed sequences of one call; and T around the chunk sizes as a batch.
    """
    lengths = trial.sized(range(2, 81), brief=(17, 65))
    if "cu_seqlens" in trial.names:
        pairs = [(T, P) for T in lengths for P in sorted({1, T // 2, T - 1})]
        offsets = torch.tensor([0] + [T for T, _ in pairs]).cumsum(0).tolist()
        earlier = torch.cat([torch.arange(T) < P for T, P in pairs])[None]
        _check_earlier(trial, earlier, gradients, variant=variant, dtype=dtype, offsets=offsets)
    for T in trial.sized((2, 17, 31, 63, 64, 65, 80), brief=(65,)):
        positions = sorted({1, T // 2, T - 1})
        earlier = torch.arange(T) < torch.tensor(positions)[:, None]
        _check_earlier(trial, earlier, gradients, variant=variant, dtype=dtype, B=len(positions), T=T)


def _check_earlier(trial, earlier, gradients, **given):
    before, other = (trial.arguments(**SMALL, **STATES, **given, seed=seed) for seed in (0, 1))
    after = before | {name: _choose(earlier, before[name], other[name]) for name in filter(trial.has_tokens, before)}
    plain = trial.run(before, gradients=False)
    result, x = next(iter(plain.items()))
    loss = {result: _choose(earlier, torch.randn(x.shape).to(x.dtype), torch.zeros_like(x))}
    first = trial.run(before, cotangents=loss) if gradients else plain
    second = trial.run(after, gradients=gradients, cotangents=loss)
    assert not torch.equal(first[result], second[result])
    for name in first:
        if trial.has_tokens(name):
            assert torch.equal(first[name][earlier], second[name][earlier]), f"{name} of earlier tokens"
            assert not name.startswith("d") or not second[name][~earlier].any(), f"{name} of later tokens"
        elif name.startswith("d"):
            assert torch.equal(first[name], second[name]), name


def _choose(mask, x, y):
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, y)


@hazard("C083", variant=variants, dtype=WIDE, gradients=BOTH)
def sequence_in_a_batch_as_alone(trial, variant, dtype, gradients):
    """C083: a sequence gives the same bits alone and among others of a batch."""
    B, T = trial.sized((5, 130), brief=(3, 66))
    arguments = trial.arguments(variant, dtype=dtype, B=B, T=T, **ODD, **STATES)
    found = trial.run(arguments, gradients=gradients)
    loss = trial.cotangents(found)
    for b in (0, B - 2):
        def own(tensors, b=b):
            return trial.part(tensors, slice(b, b + 1), slice(None), slice(b, b + 1))

        alone = trial.run(own(arguments), gradients=gradients, cotangents=own(loss))
        same(alone, own(found), [name for name in found if trial.has_tokens(name) or trial.has_sequences(name)])


@hazard("C085", variant=variants, dtype=WIDE, gradients=BOTH)
def repeated_calls_agree(trial, variant, dtype, gradients):
    """C085: twenty repeats of a packed or dense call are equal in every bit."""
    lengths = trial.sized((0, 7, 33, 1, 64, 65, 20, 3, 40, 17), brief=(0, 7, 1, 64, 65))
    packed = {"offsets": torch.tensor((0, *lengths)).cumsum(0).tolist()} if "cu_seqlens" in trial.names else {"T": 70}
    arguments = trial.arguments(variant, dtype=dtype, H=1, HV=3, K=32, V=16, **packed, **STATES)
    found = trial.run(arguments, gradients=gradients)
    for _ in range(trial.sized(19, brief=2)):
        same(trial.run(arguments, gradients=gradients), found)


@hazard("C038", "C040", "C042", variant=variants, layout=("strided", "pitched", "transposed", "odd"), gradients=BOTH)
def memory_layout_is_invisible(trial, variant, layout, gradients):
    """C038, C040, C042: slices of fused projections, transposes and steps, of inputs, states and upstream gradients."""
    arguments = trial.arguments(variant, **trial.sized({"T": 130, "H": 3, "HV": 12}, brief={"H": 2, "HV": 4}), **STATES)
    same(trial.run(arguments, gradients=gradients, layout=LAYOUTS[layout]), trial.run(arguments, gradients=gradients))


@hazard("C038", variant=variants)
def fused_projection_and_concatenation(trial, variant):
    """C038: inputs are views of one wide tensor, results are concatenated: backward meets a view of a wide gradient."""
    arguments = trial.place(trial.arguments(variant, T=trial.sized(130, brief=66)))
    names = [name for name in trial.differentiable(arguments) if trial.has_tokens(name)]
    flat = [arguments[name].flatten(2) for name in names]
    widths = [x.shape[-1] for x in flat]

    def gradient(separate):
        wide = torch.cat(flat, -1).requires_grad_()
        parts = {name: separate(part.unflatten(-1, arguments[name].shape[2:]))
                 for name, part in zip(names, wide.split(widths, -1))}
        result = trial.call(**{**arguments, **parts})[next(iter(trial.operator.declaration.results))]
        joined = torch.cat([separate(result.flatten(2)), wide.to(result)], -1)
        weights = torch.randn(joined.shape, generator=torch.Generator().manual_seed(2)).to(joined)
        return torch.autograd.grad((joined * weights).sum(), wide)[0].cpu()

    assert torch.equal(gradient(lambda x: x), gradient(lambda x: x.contiguous()))


@hazard("C042", variant=variants)
def broadcast_inputs_and_gradients(trial, variant):
    """C042: inputs and upstream gradients with stride 0: x.expand(...), and .sum().backward()."""
    arguments = trial.place(trial.arguments(variant, B=1, T=65, **STATES))

    def found(finish):
        leaves = {name: arguments[name].clone().requires_grad_() for name in trial.differentiable(arguments)}
        spread = {name: finish(x.expand(3, *x.shape[1:])) if trial.has_tokens(name) or trial.has_sequences(name) else x
                  for name, x in leaves.items()}
        results = trial.call(**{**arguments, **spread})
        ones = [finish(torch.ones((), dtype=x.dtype, device=x.device).expand(x.shape)) for x in results.values()]
        gradients = torch.autograd.grad(list(results.values()), list(leaves.values()), ones)
        return results | dict(zip(leaves, gradients))

    same(found(lambda x: x), found(lambda x: x.contiguous()))


@hazard("C025", "C029", variant=variants, T=(1, 65, 100, 127), gradients=BOTH, brief={"T": (1, 100)})
def nothing_beside_the_tensors_matters(trial, variant, T, gradients):
    """C025, C029: what lies behind inputs is not read (NaN there), beside results not written; every element is."""
    arguments = trial.arguments(variant, B=1, T=T, V=100, **STATES)
    with poisoned_allocations():
        found = trial.run(arguments, gradients=gradients, layout=LAYOUTS["prefix"])
    same(found, trial.run(arguments, gradients=gradients))


@hazard("C029", variant=variants, gradients=BOTH)
def inputs_stay_as_they_are(trial, variant, gradients):
    """C029: neither forward nor backward writes into inputs, states or upstream gradients."""
    arguments = trial.place(trial.arguments(variant, T=70, **STATES))
    kept = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    leaves = [arguments[name].requires_grad_(gradients) for name in trial.differentiable(arguments)]
    results = trial.call(**arguments)
    if gradients:
        upstream = [torch.randn_like(x) for x in results.values()]
        before = [x.clone() for x in upstream]
        torch.autograd.grad(list(results.values()), leaves, upstream)
        assert all(map(torch.equal, upstream, before)), "backward wrote into upstream gradients"
    same({name: arguments[name].detach() for name in kept}, kept)


@hazard("C027", "C096", variant=variants, T=(28, 92, 156, 1500), dtype=("bf16",), brief={"T": (28, 92)})
def tail_of_the_last_chunk(trial, variant, T, dtype):
    """C027, C096: a last chunk of 28 rows, with every activation in the kernel; and many chunks."""
    sizes = {"H": 1, "HV": 1, "K": 16, "V": 16, "B": 1} if T > 1000 else {"H": 2, "HV": 2, "K": 32, "V": 32}
    trial.examine(trial.arguments(variant, T=T, dtype=dtype, **sizes, **STATES))


@hazard("C030", "C034", needs=("v",), channels=CHANNELS, brief={"channels": FEW_CHANNELS})
def channels_of_any_size(trial, channels):
    """C030, C034: the right numbers for every K and V, or a refusal, never wrong ones."""
    K, V = channels
    trial.examine(trial.arguments(T=20, B=1, H=1, HV=2, K=K, V=V, **STATES))


@hazard("C036", "C043", needs=("v",), heads=HEADS, dtype=WIDE, brief={"heads": FEW_HEADS})
def heads_of_any_number(trial, heads, dtype):
    """C036, C043: H that no 16-byte row holds; gates and step sizes are read by value head."""
    H, HV = heads
    trial.examine(trial.arguments(T=33, B=1, H=H, HV=HV, K=16, V=16, dtype=dtype, **STATES))


@hazard("C043", needs=("q", "v", "HV"))
def value_heads_read_their_own_query_head(trial):
    """C043: value head j belongs to query/key head j // (HV / H), and to no other; HV must be a multiple of H."""
    arguments = trial.arguments(H=2, HV=6, **STATES)
    found = trial.run(arguments, gradients=False)
    changed = {name: arguments[name].clone() for name in ("q", "k")}
    for name, x in changed.items():
        x[:, :, 1] = trial.arguments(H=2, HV=6, seed=1)[name][:, :, 1]
    other = trial.run({**arguments, **changed}, gradients=False)
    heads = {"o": 2, "final_state": 1}
    for name, axis in heads.items():
        moved = (found[name] != other[name]).transpose(0, axis).flatten(1).any(1)
        assert moved.tolist() == [False] * 3 + [True] * 3, f"{name}: heads {moved.tolist()} changed"
    with pytest.raises(ValueError, match="multiple"):
        trial.call(**trial.arguments(H=2, HV=5))


@hazard("C032")
def wrong_rank_is_named(trial):
    """C032: an input without its last axis is a ValueError that names it."""
    for name in filter(trial.has_tokens, arguments := trial.arguments()):
        with pytest.raises(ValueError, match=f"`{name}`"):
            trial.call(**{**arguments, name: arguments[name][..., 0].contiguous()[..., 0]})


@hazard("C045", sizes=((13, 16), (1, 32)))
def more_heads_than_tokens(trial, sizes):
    """C045: shapes that only look like a forgotten transpose draw no warning."""
    T, H = sizes
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial.run(trial.arguments(B=1, T=T, H=H, HV=H, K=16, V=16))


@hazard("C015", variant=variants, gradients=BOTH)
def no_tokens(trial, variant, gradients):
    """C015: T = 0 gives empty results, states as they came, and gradients that say so; or a ValueError."""
    arguments = trial.arguments(variant, T=0, **STATES)
    try:
        found = trial.run(arguments, gradients=gradients)
    except ValueError:
        return
    for name, x in found.items():
        if name == "final_state":
            assert torch.equal(x, arguments["initial_state"])
        elif name == "dinitial_state":
            assert torch.equal(x, trial.cotangents(found)["final_state"])
        else:
            assert not x.any(), name
