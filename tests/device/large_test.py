"""C001, C005, C007: more elements than 32 bits count, in tensors of several gigabytes. A part of a call has the bits of
the same part alone, whose offsets are small; and the last tokens are those of the fp64 recurrence.
"""

import gc

import pytest
import torch
from harness import bounds
from harness.trial import same

import facade
from facade.ops.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda, kda_gate_chunk_cumsum

MOST = 130e9  # bytes that a test may allocate
B, T, H, D = 16, 17477, 64, 128  # B * T * H * D is just above 2^31
HEADWISE = {"B": 1, "T": 70_000, "H": 256, "K": 64, "V": 128}
ALL = slice(None)


@pytest.fixture(autouse=True)
def _memory():
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    peak = torch.cuda.max_memory_allocated()
    gc.collect()
    torch.cuda.empty_cache()
    assert peak < MOST, f"{peak / 1e9:.0f} GB"


def randn(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def inputs(B, T, H, K, V) -> dict[str, torch.Tensor]:
    """Of a delta rule whose state remembers some dozen tokens. No temporary: they are large."""
    return {"q": randn(B, T, H, K), "k": randn(B, T, H, K), "v": randn(B, T, H, V),
            "g": randn(B, T, H, K).abs_().mul_(-1 / 16), "beta": randn(B, T, H).sigmoid_()}


def passes(x, do, function=chunk_kda, **options) -> dict[str, torch.Tensor]:
    """o, the final state, and with ``do`` every gradient; keys are normalised in the operator."""
    leaves = {name: value.detach().requires_grad_(do is not None) for name, value in x.items()}
    with facade.use_backend("triton"):
        o, state = function(**leaves, use_qk_l2norm_in_kernel=True, output_final_state=True, **options)
    found = {"o": o.detach(), "final_state": state.detach()}
    if do is None:
        return found
    gradients = torch.autograd.grad(o, list(leaves.values()), do)
    return found | {f"d{name}": gradient for name, gradient in zip(leaves, gradients)}


def part(tensors, rows=ALL, tokens=ALL, heads=ALL) -> dict[str, torch.Tensor]:
    """States have no tokens."""
    return {name: x[rows, heads] if name == "final_state" else x[rows, tokens, heads] for name, x in tensors.items()}


@pytest.mark.parametrize("function", [chunk_kda, fused_recurrent_kda], ids=lambda f: f.__name__)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_more_than_32_bits_of_elements(function, packed):
    """C001: the first and the last sequence as they are alone. Token by token there is no backward."""
    x = inputs(B, T, H, D, D)
    do = randn(B, T, H, D) if function is chunk_kda else None
    assert x["q"].numel() > 2**31
    if packed:
        row = {name: value.flatten(0, 1)[None] for name, value in x.items()}
        offsets = torch.arange(B + 1, device="cuda") * T
        whole = passes(row, None if do is None else do.flatten(0, 1)[None], function, cu_seqlens=offsets)
        whole = {name: v if name == "final_state" else v[0].unflatten(0, (B, T)) for name, v in whole.items()}
    else:
        whole = passes(x, do, function)
    for one in (slice(0, 1), slice(B - 1, B)):
        same(part(whole, one), passes(part(x, one), None if do is None else do[one], function))


def test_each_head_as_alone():
    """C005: T * H * V beyond 32 bits in one row, the upstream gradient a slice of something wider."""
    x = inputs(**HEADWISE)
    T, H, V = (HEADWISE[letter] for letter in "THV")
    do = randn(1, T, H * V + 64)[..., : H * V].unflatten(-1, (H, V))
    assert x["v"].numel() > 2**31
    whole = passes(x, do)
    for one in (slice(0, 1), slice(H - 1, H)):
        same(part(whole, heads=one), passes(part(x, heads=one), do[:, :, one]))
    _ends_as_the_recurrence(part(x, heads=slice(H - 1, H)), whole["o"][:, :, H - 1 :])


def test_wide_rows_of_the_upstream_gradient():
    """C007: rows of ``do`` so far apart that the last one's offset is beyond 32 bits."""
    T, H, V, row = 230_000, 4, 128, 9728
    x = inputs(1, T, H, 64, V)
    do = randn(1, T, row)[..., : H * V].unflatten(-1, (H, V))
    assert (T - 1) * do.stride(1) > 2**31
    offsets = torch.tensor([0, 1000, 1000, T - 1000, T], device="cuda")
    same(passes(x, do, cu_seqlens=offsets), passes(x, do.contiguous(), cu_seqlens=offsets))


def test_a_million_tokens():
    """One sequence of 2^20 tokens runs, forward and backward, and its last tokens are right."""
    x = inputs(1, 1 << 20, 1, D, D)
    found = passes(x, randn(1, 1 << 20, 1, D))
    assert all(value.isfinite().all() for value in found.values())
    _ends_as_the_recurrence(x, found["o"])


def _ends_as_the_recurrence(x, o):
    """The tokens behind the last but three multiple of 64, from the state there."""
    from facade import reference

    start = (x["q"].shape[1] // 64 - 3) * 64
    state = passes(part(x, tokens=slice(0, start)), None)["final_state"]
    rest = part(x, tokens=slice(start, None))
    right, eager = (
        reference.kda.recurrent(
            **{name: value.to(dtype) for name, value in rest.items()}, initial_state=state.to(torch.float64),
            use_qk_l2norm_in_kernel=True, compute_dtype=dtype,
        )[0]
        for dtype in (torch.float64, torch.bfloat16)
    )  # fmt: skip
    problem = bounds.check("o", o[:, start:], right, "delta_rule", torch.bfloat16, eager)
    assert problem is None, problem


@pytest.mark.parametrize("function", [fused_kda_gate, kda_gate_chunk_cumsum], ids=lambda f: f.__name__)
def test_gates_beyond_32_bits(function):
    """The last rows of a batch as they are alone, forward and backward."""
    g, upstream = randn(B, T, H, D), randn(B, T, H, D).float()
    parameters = {"A_log": torch.rand(H, device="cuda"), "dt_bias": torch.randn(H * D, device="cuda")}

    def gate(g, upstream):
        g = g.detach().requires_grad_()
        with facade.use_backend("triton"):
            result = function(g, **parameters)
        return {"result": result.detach(), "dg": torch.autograd.grad(result, g, upstream)[0]}

    last = slice(B - 1, B)
    same(part(gate(g, upstream), last), gate(g[last], upstream[last]))
