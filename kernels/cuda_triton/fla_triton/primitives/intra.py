"""Inside a chunk: the decayed products of its tokens, the triangular solve, and the decayed reads and writes.

For per-key gates g (log space), reads q (scaled), read keys and write keys k:

    A[i, j] = sum_K q_i k_j exp(g_{j+1} + .. + g_i)   j <= i        N[i, j] = the same of k_i, k_j   j < i
    P = (I + N diag(beta))^-1 N

A chunk is worked on in two halves, 0 and 1. Across them both exponents are sums up to the middle, so <= 0 for gates
<= 0. Within a half, in the two-sided form, exp(g_{j+1} + .. + g_i) = exp(p_i) exp(-p_j) with p the sums from the start
of the half: one product, exact as long as -p and 2 p stay below SPAN (base 2), which 16-bit and 32-bit numbers hold.
``reach`` says how many rows of a half that covers; the rows behind are done by the same kernel once more (ANY), in the
one-sided form, which halves the halves down to single tokens and fits any gate. References and the choice of the form
depend on nothing behind a row: a later token changes no bit.
No pair spans the first gate of a chunk, so it enters only where the chunk meets the state before it.
"""

import triton
import triton.language as tl

from fla_triton.primitives.arithmetic import LOG2E, NORM_EPS, decay, masked_sums, product, step_size
from fla_triton.primitives.gates import gate_tile
from fla_triton.primitives.places import chunk_place

SPAN = tl.constexpr(100.0)  # base 2: leaves 2^26 for the numbers themselves


@triton.jit
def norms(q, k, rows, live, K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BK: tl.constexpr):
    """1 / |q| and 1 / |k| of the rows [ROWS] that start at ``rows``."""
    q_squares = tl.zeros((ROWS,), tl.float32)
    k_squares = tl.zeros((ROWS,), tl.float32)
    for channel in tl.range(0, K, BK, num_stages=STAGES):
        channels = channel + tl.arange(0, BK)
        mask = live[:, None] & (channels < K)[None, :]
        x = tl.load(q + rows[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        q_squares += tl.sum(x * x, 1)
        x = tl.load(k + rows[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        k_squares += tl.sum(x * x, 1)
    return tl.rsqrt(q_squares + NORM_EPS), tl.rsqrt(k_squares + NORM_EPS)


@triton.jit
def sums_through(x, FIRST: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Sums of x [ROWS, BK] from row FIRST through each row."""
    r = tl.arange(0, ROWS)
    mask = (r[:, None] >= r[None, :]) & (r >= FIRST)[None, :]
    return masked_sums(tl.where(mask, 1.0, 0.0), x, PARTS)


@triton.jit
def sums_behind(x, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """Sums of x [ROWS, BK] over the rows behind each."""
    r = tl.arange(0, ROWS)
    return masked_sums(tl.where(r[:, None] < r[None, :], 1.0, 0.0), x, PARTS)


@triton.jit
def boundary_decay(g, size, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """exp of the gates between each row and the middle of its block of 2 * size rows: behind the row up to the middle,
    or from the middle through the row."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, ROWS)[None, :]
    middle = r // (2 * size) * (2 * size) + size
    between = ((r >= middle) & (c >= middle) & (c <= r)) | ((r < middle) & (c > r) & (c < middle))
    return decay(masked_sums(tl.where(between, 1.0, 0.0), g, PARTS))


@triton.jit
def across(size, ROWS: tl.constexpr):
    """Mask [ROWS, ROWS] of pairs with the row in the second half of a block of 2 * size and the column in the first."""
    r = tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, ROWS)[None, :]
    return (r // (2 * size) == c // (2 * size)) & (r // size > c // size)


@triton.jit
def half_pairs(A, N, q, k, prefix, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """Adds one block of channels to A and N [ROWS, ROWS] of a half; entries above the diagonal are meaningless."""
    rise = decay(prefix)
    y = tl.trans(k * tl.exp2(-prefix * LOG2E))
    return A + product(q * rise, y, PRECISION), N + product(k * rise, y, PRECISION)


@triton.jit
def half_pairs_any(A, N, q, k, g, ROWS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """The same in the one-sided form."""
    LEVELS: tl.constexpr = 5 if ROWS == 32 else 4
    r = tl.arange(0, ROWS)
    A += tl.where(r[:, None] == r[None, :], tl.sum(q * k, 1)[:, None], 0.0)
    for level in tl.range(0, LEVELS, num_stages=1):
        e = boundary_decay(g, 1 << level, ROWS, PARTS)
        x = k * e
        y = tl.trans(x)
        pairs = across(1 << level, ROWS)
        A += tl.where(pairs, product(q * e, y, PRECISION), 0.0)
        N += tl.where(pairs, product(x, y, PRECISION), 0.0)
    return A, N


@triton.jit
def reach_of(span, ROWS: tl.constexpr):
    """How many rows the two-sided form covers, given the largest exponents of each."""
    return tl.min(tl.where(span * LOG2E >= SPAN, tl.arange(0, ROWS), ROWS))


@triton.jit
def solve(N, beta, ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """P = (I + N diag(beta))^-1 N for strictly lower N [ROWS, ROWS].

    Joins blocks of 1, 2, 4 .. rows: P10 = (I - P11 diag(beta_1)) N10 (I - diag(beta_0) P00). No sum cancels.
    """
    LEVELS: tl.constexpr = 5 if ROWS == 32 else 4
    P = tl.where(across(1, ROWS), N, 0.0)
    for level in tl.range(1, LEVELS, num_stages=1):
        P += join(P, P, tl.where(across(1 << level, ROWS), N, 0.0), beta, beta, PRECISION)
    return P


@triton.jit
def join(P1, P0, N, beta1, beta0, PRECISION: tl.constexpr):
    """(I - P1 diag(beta1)) N (I - diag(beta0) P0)"""
    N -= product(P1 * beta1[None, :], N, PRECISION)
    return N - product(N, P0 * beta0[:, None], PRECISION)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "scale", "lower_bound"])
def prepare(
    q, k, g, beta, A_log, dt_bias, reads, read_keys, write_keys, steps, total, A, P, reach, chunks,
    T: tl.int64, NT: tl.int64, H: tl.int64, HV: tl.int64, scale, lower_bound,
    K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, FRESH: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, BETA_MAX: tl.constexpr, ANY: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, SOLVE: tl.constexpr, STAGES: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, value head), value heads innermost. Writes, token-major,

        reads       q exp(since)    [.., K]      since: gates from the start of the chunk through the row
        read_keys   k exp(since)    [.., K]
        write_keys  k exp(until)    [.., K]      until: gates behind the row to the end of the chunk
        steps       beta            [tokens, HV] fp32
        total       exp(sum of all) [slots, HV, K] fp32
        A, P                        [.., C]

    and reach [slots, HV, 2]. ANY does the A and P of the chunks that the two-sided form does not cover.
    FRESH: there is no initial state, so the first gate of a sequence has nothing to forget and counts as 0.
    """
    program = tl.program_id(0).to(tl.int64)
    head = program % HV
    HALF: tl.constexpr = C // 2
    if ANY:
        reach0 = tl.load(reach + program * 2)
        reach1 = tl.load(reach + program * 2 + 1)
        if reach0 + reach1 == C:
            return
    start, count, sequence, index = chunk_place(program // HV, chunks, T, NT, C, PACKED)
    if sequence < 0 or count == 0:
        tl.store(reach + program * 2, HALF)
        tl.store(reach + program * 2 + 1, HALF)
        return
    r = tl.arange(0, HALF)
    live0 = r < count
    live1 = HALF + r < count
    # The chunk's own rows: offsets within it fit 32 bits, which costs half the registers.
    q += (start * H + head // (HV // H)) * K
    k += (start * H + head // (HV // H)) * K
    g += (start * HV + head) * K
    reads += (start * HV + head) * K
    read_keys += (start * HV + head) * K
    write_keys += (start * HV + head) * K
    A += (start * HV + head) * C
    P += (start * HV + head) * C
    beta += start * HV + head
    steps += start * HV + head
    stride_k = H.to(tl.int32) * K
    stride = HV.to(tl.int32)
    row_k0 = r * stride_k
    row_k1 = (r + HALF) * stride_k
    row_g0 = r * stride * K
    row_g1 = (r + HALF) * stride * K
    norm_q0 = tl.zeros((HALF,), tl.float32) + scale
    norm_q1 = norm_q0
    norm_k0 = tl.zeros((HALF,), tl.float32) + 1.0
    norm_k1 = norm_k0
    if NORM and BK < K:
        norm_q0, norm_k0 = norms(q, k, row_k0, live0, K, HALF, STAGES, BK)
        norm_q1, norm_k1 = norms(q, k, row_k1, live1, K, HALF, STAGES, BK)
        norm_q0 *= scale
        norm_q1 *= scale

    A00 = tl.zeros((HALF, HALF), tl.float32)
    A10 = tl.zeros((HALF, HALF), tl.float32)
    A11 = tl.zeros((HALF, HALF), tl.float32)
    N00 = tl.zeros((HALF, HALF), tl.float32)
    N10 = tl.zeros((HALF, HALF), tl.float32)
    N11 = tl.zeros((HALF, HALF), tl.float32)
    span0 = tl.zeros((HALF,), tl.float32)
    span1 = tl.zeros((HALF,), tl.float32)
    if ANY:
        A00_any = tl.zeros((HALF, HALF), tl.float32)
        A11_any = tl.zeros((HALF, HALF), tl.float32)
        N00_any = tl.zeros((HALF, HALF), tl.float32)
        N11_any = tl.zeros((HALF, HALF), tl.float32)
    for channel in tl.range(0, K, BK, num_stages=STAGES):
        channels = channel + tl.arange(0, BK)
        valid = channels < K
        mask0 = live0[:, None] & valid[None, :]
        mask1 = live1[:, None] & valid[None, :]
        at0 = row_g0[:, None] + channels[None, :]
        at1 = row_g1[:, None] + channels[None, :]
        q0 = tl.load(q + row_k0[:, None] + channels[None, :], mask=mask0, other=0.0).to(tl.float32)
        k0 = tl.load(k + row_k0[:, None] + channels[None, :], mask=mask0, other=0.0).to(tl.float32)
        q1 = tl.load(q + row_k1[:, None] + channels[None, :], mask=mask1, other=0.0).to(tl.float32)
        k1 = tl.load(k + row_k1[:, None] + channels[None, :], mask=mask1, other=0.0).to(tl.float32)
        g0 = gate_tile(g + at0, A_log, dt_bias, head, channels, mask0, valid, lower_bound, K, GATE)
        g1 = gate_tile(g + at1, A_log, dt_bias, head, channels, mask1, valid, lower_bound, K, GATE)
        if FRESH:
            g0 = tl.where((r == 0)[:, None] & (index == 0), 0.0, g0)
        if NORM and BK >= K:
            norm_q0 = scale * tl.rsqrt(tl.sum(q0 * q0, 1) + NORM_EPS)
            norm_q1 = scale * tl.rsqrt(tl.sum(q1 * q1, 1) + NORM_EPS)
            norm_k0 = tl.rsqrt(tl.sum(k0 * k0, 1) + NORM_EPS)
            norm_k1 = tl.rsqrt(tl.sum(k1 * k1, 1) + NORM_EPS)
        q0 *= norm_q0[:, None]
        k0 *= norm_k0[:, None]
        q1 *= norm_q1[:, None]
        k1 *= norm_k1[:, None]
        prefix0 = sums_through(g0, 1, HALF, PARTS)
        prefix1 = sums_through(g1, 0, HALF, PARTS)
        span0 = tl.maximum(span0, tl.max(tl.maximum(-prefix0, 2.0 * prefix0), 1))
        span1 = tl.maximum(span1, tl.max(tl.maximum(-prefix1, 2.0 * prefix1), 1))
        A00, N00 = half_pairs(A00, N00, q0, k0, prefix0, HALF, PRECISION)
        A11, N11 = half_pairs(A11, N11, q1, k1, prefix1, HALF, PRECISION)
        if ANY:
            A00_any, N00_any = half_pairs_any(A00_any, N00_any, q0, k0, g0, HALF, PARTS, PRECISION)
            A11_any, N11_any = half_pairs_any(A11_any, N11_any, q1, k1, g1, HALF, PARTS, PRECISION)
        rise = decay(prefix1)
        behind0 = sums_behind(g0, HALF, PARTS)
        fall = k0 * decay(behind0)
        y = tl.trans(fall)
        A10 += product(q1 * rise, y, PRECISION)
        N10 += product(k1 * rise, y, PRECISION)
        if not ANY:
            prefix0 = sums_through(g0, 0, HALF, PARTS)
            total0 = decay(prefix0 + behind0)  # the same in every row
            tl.store(reads + at1, q1 * rise * total0, mask=mask1)
            tl.store(read_keys + at1, k1 * rise * total0, mask=mask1)
            behind1 = sums_behind(g1, HALF, PARTS)
            tl.store(write_keys + at1, k1 * decay(behind1), mask=mask1)
            total1 = decay(prefix1 + behind1)
            tl.store(write_keys + at0, fall * total1, mask=mask0)
            rise = decay(prefix0)
            tl.store(reads + at0, q0 * rise, mask=mask0)
            tl.store(read_keys + at0, k0 * rise, mask=mask0)
            at = total + program * K + channels[None, :] + tl.zeros((HALF, 1), tl.int32)
            tl.store(at, total0 * total1, mask=(r == 0)[:, None] & valid[None, :])
    if ANY:
        A00 = tl.where((r < reach0)[:, None], A00, A00_any)
        N00 = tl.where((r < reach0)[:, None], N00, N00_any)
        A11 = tl.where((r < reach1)[:, None], A11, A11_any)
        N11 = tl.where((r < reach1)[:, None], N11, N11_any)
    else:
        tl.store(reach + program * 2, reach_of(span0, HALF))
        tl.store(reach + program * 2 + 1, reach_of(span1, HALF))

    strict = r[:, None] > r[None, :]
    below = r[:, None] >= r[None, :]
    at_c0 = (r * stride * C)[:, None] + r[None, :]
    at_c1 = at_c0 + HALF * stride * C
    mask_c0 = live0[:, None] & (r < HALF)[None, :]
    mask_c1 = live1[:, None] & (r < HALF)[None, :]
    tl.store(A + at_c0, tl.where(below, A00, 0.0), mask=mask_c0)
    tl.store(A + at_c0 + HALF, tl.zeros((HALF, HALF), tl.float32), mask=mask_c0)
    tl.store(A + at_c1, A10, mask=mask_c1)
    tl.store(A + at_c1 + HALF, tl.where(below, A11, 0.0), mask=mask_c1)
    beta0 = step_size(tl.load(beta + r * stride, mask=live0, other=0.0), BETA_MAX)
    beta1 = step_size(tl.load(beta + (r + HALF) * stride, mask=live1, other=0.0), BETA_MAX)
    if not ANY:
        tl.store(steps + r * stride, beta0, mask=live0)
        tl.store(steps + (r + HALF) * stride, beta1, mask=live1)
    P00 = solve(tl.where(strict, N00, 0.0), beta0, HALF, SOLVE)
    tl.store(P + at_c0, P00, mask=mask_c0)
    tl.store(P + at_c0 + HALF, tl.zeros((HALF, HALF), tl.float32), mask=mask_c0)
    P11 = solve(tl.where(strict, N11, 0.0), beta1, HALF, SOLVE)
    tl.store(P + at_c1 + HALF, P11, mask=mask_c1)
    tl.store(P + at_c1, join(P11, P00, N10, beta1, beta0, SOLVE), mask=mask_c1)
