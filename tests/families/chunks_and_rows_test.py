"""Sums, means, inverses, softmax, Sinkhorn and products: what their cells do not show."""

import pytest
import torch

from facade.ops.utils import (
    addmm,
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum,
    chunk_local_cumsum_scalar,
    chunk_local_cumsum_vector,
    logsumexp_fwd,
    matmul,
    mean_pooling,
    sinkhorn,
    softmax_bwd,
    softmax_fwd,
    softplus,
    solve_tril,
)

NARROW = (torch.bfloat16, torch.float16)


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
def test_dtype_of_sums(dtype):
    """float32 unless asked for, summed in it and rounded once."""
    x = torch.randn(1, 70, 3).to(dtype)
    for call in (lambda **o: chunk_local_cumsum(x, 32, **o), lambda **o: chunk_global_cumsum(x, **o)):
        wide = call()
        assert wide.dtype == torch.float32
        assert torch.equal(call(output_dtype=None), wide.to(dtype))
        assert torch.equal(call(output_dtype=torch.float64).float(), wide)


def test_suffix_sums_keep_what_is_small():
    """Behind tokens that are larger than all that follow by more than float32 has bits (FLA takes total - prefix)."""
    x = torch.cat([torch.full((1, 100, 1), 1e8), torch.full((1, 100, 1), 1e-4)], 1)
    found = chunk_global_cumsum(x, reverse=True)[:, 100:]
    torch.testing.assert_close(found, 1e-4 * torch.arange(100, 0, -1.0)[None, :, None], rtol=1e-5, atol=0)


def test_sums_of_a_rank():
    scalar, vector = torch.randn(1, 9, 2), torch.randn(1, 9, 2, 3)
    for x, local, over_all, wrong in (
        (scalar, chunk_local_cumsum_scalar, chunk_global_cumsum_scalar, vector),
        (vector, chunk_local_cumsum_vector, chunk_global_cumsum_vector, scalar),
    ):
        assert torch.equal(local(x, 4, True), chunk_local_cumsum(x, 4, reverse=True))
        assert torch.equal(over_all(x, True), chunk_global_cumsum(x, reverse=True))
        for function, *size in ((local, 4), (over_all,)):
            with pytest.raises(ValueError, match=rf"{function.__name__}: `.` is \[B, T, H"):
                function(wrong, *size)


def test_what_sums_refuse():
    x = torch.randn(1, 8, 2)
    with pytest.raises(ValueError, match="power of two"):
        chunk_local_cumsum(x, 12)
    with pytest.raises(ValueError, match=r"`g` is \[B, T, H\] or \[B, T, H, K\]"):
        chunk_local_cumsum(x[0], 4)
    with pytest.raises(DeprecationWarning, match="`head_first` has been removed"):
        chunk_local_cumsum(x, 4, head_first=True)
    with pytest.raises(TypeError, match="unknown keyword `reversed`; did you mean `reverse`"):
        chunk_global_cumsum(x, reversed=True)


# --- means -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_means_are_those_of_each_sequence(dtype):
    offsets = [0, 0, 5, 5, 69, 70, 70]
    x = torch.randn(1, 75, 3, 7).to(dtype).requires_grad_()
    packed = mean_pooling(x, 16, torch.tensor(offsets))
    alone = torch.cat([mean_pooling(x[:, a:b], 16) for a, b in zip(offsets, offsets[1:])], 1)
    d = torch.randn_like(packed)
    assert torch.equal(packed, alone) and packed.shape[1] == 1 + 4 + 1
    assert all(map(torch.equal, *(torch.autograd.grad(y, x, d) for y in (packed, alone))))


def test_a_chunk_of_no_tokens_is_refused():
    with pytest.raises(ValueError, match="`chunk_size` must be positive"):
        mean_pooling(torch.randn(1, 4, 1, 2), 0)


# --- inverses --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("C", [1, 2, 16, 32, 64])
def test_inverse_of_large_and_small_tiles(C):
    """Also where powers of A grow, which a series in them would lose."""
    A = torch.randn(2, 70, 3, C, dtype=torch.float64).tril(-1)
    X = solve_tril(A, output_dtype=torch.float64)
    T = 70 // C * C
    tiles, inverses = (x[:, :T].unflatten(1, (-1, C)).transpose(2, 3) for x in (A.clone(), X))
    unit = torch.eye(C, dtype=torch.float64)
    torch.testing.assert_close(inverses, torch.linalg.inv(tiles.tril(-1) + unit), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", NARROW)
def test_dtype_of_inverses(dtype):
    A = (torch.randn(1, 20, 2, 16) / 8).to(dtype)
    assert torch.equal(solve_tril(A, output_dtype=None), solve_tril(A.float()).to(dtype))
    with pytest.raises(ValueError, match="a power of two of columns"):
        solve_tril(A[..., :12])


# --- rows ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW)
def test_dtype_of_rows(dtype):
    """Computed in float32 and rounded once."""
    x, y = (torch.randn(5, 9).to(dtype) for _ in range(2))
    for call, wide in (
        (lambda **o: softmax_fwd(x, **o), torch.softmax(x.float(), -1)),
        (lambda **o: softmax_bwd(x, y, **o), x.float() * (y.float() - (x.float() * y.float()).sum(-1, keepdim=True))),
        (lambda **o: logsumexp_fwd(x, **o), x.float().logsumexp(-1)),
    ):
        assert torch.equal(call(), wide) and torch.equal(call(dtype=dtype), wide.to(dtype))
    assert torch.equal(softmax_fwd(x, None), torch.softmax(x.float(), -1).to(dtype))
    assert logsumexp_fwd(x, dtype=None).dtype == torch.float32


def test_rows_that_overflow_exp():
    x = torch.tensor([[1000.0, 999.0], [-1000.0, -1001.0]])
    right = torch.tensor([1.0, -1.0]).softmax(0).new_tensor([0.7310586, 0.2689414]).expand(2, 2)
    torch.testing.assert_close(softmax_fwd(x), right)
    torch.testing.assert_close(logsumexp_fwd(x), torch.tensor([1000.3133, -999.6867]))


def test_softmax_backward_is_that_of_softmax():
    x = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    p = softmax_fwd(x, torch.float64)
    dp = torch.randn_like(p)
    (dx,) = torch.autograd.grad(p, x, dp)
    torch.testing.assert_close(softmax_bwd(p, dp, torch.float64), dx)


def test_shapes_of_softmax_backward():
    with pytest.raises(ValueError, match="`dp` has shape .4., while `p` has shape .3, 4."):
        softmax_bwd(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="`dp` .A1 K. has A1=2"):
        softmax_bwd(torch.zeros(3, 4), torch.zeros(2, 4))


def test_softplus():
    x = torch.tensor([-100.0, -1.0, 0.0, 19.0, 21.0, 1e4], dtype=torch.float64)
    torch.testing.assert_close(softplus(x), torch.log1p(x.clamp(max=100).exp()).where(x < 20, x))


# --- Sinkhorn --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("M", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_doubly_stochastic(M, dtype):
    P = sinkhorn(torch.randn(3, 5, M, M).to(dtype), 200)
    ones = torch.ones(3, 5, M)
    assert P.dtype == torch.float32
    torch.testing.assert_close(P.sum(-1), ones)
    torch.testing.assert_close(P.sum(-2), ones)


def test_rows_come_last():
    """After one step rows sum to 1 and columns need not; large logits do not overflow."""
    P = sinkhorn(torch.randn(4, 4) * 200, 1)
    torch.testing.assert_close(P.sum(-1), torch.ones(4))
    assert P.isfinite().all() and (P.sum(-2) - 1).abs().max() > 1e-3


def test_what_sinkhorn_refuses():
    for logits, num_iters, error, message in (
        (torch.zeros(9, 9), 20, ValueError, "1 to 8 rows"),
        (torch.zeros(2, 0, 0), 20, ValueError, "1 to 8 rows"),
        (torch.zeros(2, 3), 20, ValueError, "has M=3"),
        (torch.zeros(2, 2), 0, ValueError, "at least 1"),
        (torch.zeros(2, 2), True, TypeError, "must be int, not bool"),
        (torch.zeros(2, 2), 2.0, TypeError, "must be int, not float"),
        (torch.zeros(2, 2, dtype=torch.int32), 2, TypeError, "not int32"),
    ):
        with pytest.raises(error, match=message):
            sinkhorn(logits, num_iters)


# --- products --------------------------------------------------------------------------------------------------------

ACTIVATIONS = {
    "": lambda x: x,
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "relu": lambda x: x.clamp(min=0),
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "tanh": lambda x: (torch.exp(2 * x) - 1) / (torch.exp(2 * x) + 1),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *NARROW])
def test_matmul(activation, shape, dtype):
    a, b = torch.randn(shape).to(dtype), torch.randn(7, 3).to(dtype)
    found = matmul(a, b, activation)
    right = ACTIVATIONS[activation](a.double() @ b.double())
    assert found.dtype == dtype
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps if dtype != torch.float64 else 0)
    torch.testing.assert_close(found.double(), right, rtol=4 * eps, atol=16 * eps)


@pytest.mark.parametrize("x", [(), (3,), (5, 1), (5, 3)])
@pytest.mark.parametrize("factors", [{}, {"alpha": 0.5}, {"beta": -2.0}, {"alpha": 3.0, "beta": 0.25}])
def test_addmm(x, factors):
    x, a, b = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in (x, (5, 7), (7, 3)))
    right = factors.get("beta", 1) * x + factors.get("alpha", 1) * a @ b
    torch.testing.assert_close(addmm(x, a, b, **factors), right)
    assert torch.autograd.gradcheck(lambda *inputs: addmm(*inputs, **factors), (x, a, b), fast_mode=True)


def test_what_products_refuse():
    a, b = torch.randn(5, 7), torch.randn(7, 3)
    for call, error, message in (
        (lambda: matmul(a, b.T), ValueError, r"shapes \[5, 7\] and \[3, 7\]"),
        (lambda: matmul(a, b[None]), ValueError, r"`b` \[K, N\]"),
        (lambda: matmul(a[0], b), ValueError, r"`a` is \[M, K\]"),
        (lambda: matmul(a, b, "gelu"), ValueError, "'leaky_relu', 'relu', 'sigmoid', 'tanh', not 'gelu'"),
        (lambda: matmul(a.int(), b.int()), TypeError, "`a` must be a floating-point tensor"),
        (lambda: addmm(torch.zeros(4), a, b), ValueError, r"`x` of shape \[4\] does not broadcast"),
        (lambda: addmm(torch.zeros(2, 5, 3), a, b), ValueError, "does not broadcast"),
    ):
        with pytest.raises(error, match=message):
            call()


# --- torch.compile ---------------------------------------------------------------------------------------------------


def test_packed_means_compiled():
    """The number of chunks is in the boundaries: unknown while the graph is traced."""
    x, cu_seqlens = torch.randn(1, 40, 2, 3, requires_grad=True), torch.tensor([0, 7, 7, 40])
    compiled = torch.compile(lambda x, c: mean_pooling(x, 16, c), fullgraph=True, backend="aot_eager")
    for boundaries in (cu_seqlens, torch.tensor([0, 20, 30, 40])):
        found, right = compiled(x, boundaries), mean_pooling(x, 16, boundaries)
        d = torch.randn_like(right)
        assert torch.equal(found, right)
        assert all(map(torch.equal, *(torch.autograd.grad(y, x, d) for y in (found, right))))


@pytest.mark.parametrize("outer", [(), (3,), (2, 3)])
def test_opcheck_of_rows(outer):
    x = torch.randn(*outer, 4, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.fla.sinkhorn.default, (x, 3, "reference", True))
    torch.library.opcheck(torch.ops.fla.logsumexp_fwd.default, (x, 0.5, None, "reference", True))
