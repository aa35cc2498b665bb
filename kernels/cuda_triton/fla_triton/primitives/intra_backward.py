"""Gradients inside a chunk, once the scans have run in both directions.

From do, y (``state_scan_backward``), s, the state h at the start of the chunk and the gradient dh of the state behind
it, with u = beta s and dr = beta y:

    dbeta = y . s        dv = dr        dA = do u^T (j <= i)        dN = -dr u^T (j < i)
    d(reads) = do h^T    d(read_keys) = -dr h^T    d(write_keys) = u dh^T    d(total) = total sum_V h dh

The gradient of a gate is a sum over everything whose decay spans it. Products of a pair with both tokens on one side of
the gate meet there with both signs and must cancel: they do, because both signs are taken of the same rounded numbers.
"""

import triton
import triton.language as tl

from fla_triton.primitives.arithmetic import LOG2E, column_sums, decay, exact_product, masked_sums, product, rounded
from fla_triton.primitives.gates import gate_tile
from fla_triton.primitives.intra import across, boundary_decay, norms, sums_behind, sums_through
from fla_triton.primitives.places import chunk_place


@triton.jit
def pair_gradients(dA, dN, rows_q, rows_k, keys, PRECISION: tl.constexpr):
    """Of A = rows_q keys^T and N = rows_k keys^T: (drows_q, drows_k, dkeys)."""
    d_q = product(dA, keys, PRECISION)
    d_k = product(dN, keys, PRECISION)
    d_keys = product(tl.trans(dA), rows_q, PRECISION) + product(tl.trans(dN), rows_k, PRECISION)
    return d_q, d_k, d_keys


@triton.jit(do_not_specialize=["T", "NT", "HV"])
def product_gradients(
    steps, do, s, y, h, dh, dreads, dread_keys, dwrite_keys, dtotal, dA, dN, dv, dbeta, chunks,
    T: tl.int64, NT: tl.int64, HV: tl.int64,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, BETA_MAX: tl.constexpr,
    PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, value head): the gradients of everything that ``state_scan`` read.

    dreads, dread_keys, dwrite_keys [tokens, HV, K]; dtotal = sum_V h dh [slots, HV, K]; dA, dN [tokens, HV, C]; dv;
    dbeta of the caller's beta. Rows behind the last sequence get zeros where a caller sees them.
    """
    program = tl.program_id(0).to(tl.int64)
    head = program % HV
    start, count, sequence, _ = chunk_place(program // HV, chunks, T, NT, C, PACKED)
    if count == 0:
        return
    inside = sequence >= 0
    r = tl.arange(0, C)
    live = r < count
    used = live & inside
    row = start * HV + head  # offsets from it, within the chunk, fit 32 bits
    do += row * V
    s += row * V
    y += row * V
    dv += row * V
    dreads += row * K
    dread_keys += row * K
    dwrite_keys += row * K
    dA += row * C
    dN += row * C
    h += program * K * V
    dh += program * K * V
    rows = r * HV.to(tl.int32)
    at_v = rows * V
    at_k = rows * K
    lane_v = tl.arange(0, BV)
    lane_k = tl.arange(0, BK)
    step = tl.load(steps + row + rows, mask=used, other=0.0)
    dA_tile = tl.zeros((C, C), tl.float32)
    dN_tile = tl.zeros((C, C), tl.float32)
    dstep = tl.zeros((C,), tl.float32)
    for column in tl.range(0, V, BV):
        columns = column + lane_v
        mask = used[:, None] & (columns < V)[None, :]
        at = at_v[:, None] + columns[None, :]
        s_tile = tl.load(s + at, mask=mask, other=0.0).to(tl.float32)
        y_tile = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
        do_tile = tl.load(do + at, mask=mask, other=0.0).to(tl.float32)
        dstep += tl.sum(y_tile * s_tile, 1)
        y_tile *= step[:, None]
        s_tile *= step[:, None]
        dA_tile = exact_product(s_tile, tl.trans(do_tile), PRECISION, dA_tile)
        dN_tile = exact_product(-s_tile, tl.trans(y_tile), PRECISION, dN_tile)
        tl.store(dv + at, y_tile, mask=live[:, None] & (columns < V)[None, :])
    if BETA_MAX > 0:
        dstep *= step * (1.0 - step / BETA_MAX)
    tl.store(dbeta + row + rows, tl.where(used, dstep, 0.0), mask=live)
    dA_tile = tl.trans(dA_tile)
    dN_tile = tl.trans(dN_tile)
    at_c = (rows * C)[:, None] + r[None, :]
    tl.store(dA + at_c, tl.where(r[:, None] >= r[None, :], dA_tile, 0.0), mask=used[:, None])
    tl.store(dN + at_c, tl.where(r[:, None] > r[None, :], dN_tile, 0.0), mask=used[:, None])

    for channel in tl.range(0, K, BK, num_stages=1):
        channels = channel + lane_k
        valid = channels < K
        dreads_tile = tl.zeros((C, BK), tl.float32)
        dread_keys_tile = tl.zeros((C, BK), tl.float32)
        dwrite_keys_tile = tl.zeros((C, BK), tl.float32)
        dtotal_tile = tl.zeros((BK,), tl.float32)
        for column in tl.range(0, V, BV):
            columns = column + lane_v
            mask = used[:, None] & (columns < V)[None, :]
            at = at_v[:, None] + columns[None, :]
            state_at = columns[:, None] * K + channels[None, :]
            state_mask = (columns < V)[:, None] & valid[None, :] & inside
            h_tile = tl.load(h + state_at, mask=state_mask, other=0.0)
            dh_tile = tl.load(dh + state_at, mask=state_mask, other=0.0)
            do_tile = tl.load(do + at, mask=mask, other=0.0).to(tl.float32)
            y_tile = tl.load(y + at, mask=mask, other=0.0).to(tl.float32) * step[:, None]
            s_tile = tl.load(s + at, mask=mask, other=0.0).to(tl.float32) * step[:, None]
            dreads_tile += product(do_tile, h_tile, PRECISION)
            dread_keys_tile -= product(y_tile, h_tile, PRECISION)
            dwrite_keys_tile += product(s_tile, dh_tile, PRECISION)
            dtotal_tile += tl.sum(h_tile.to(tl.float32) * dh_tile.to(tl.float32), 0)
        out = at_k[:, None] + channels[None, :]
        mask = used[:, None] & valid[None, :]
        tl.store(dreads + out, dreads_tile, mask=mask)
        tl.store(dread_keys + out, dread_keys_tile, mask=mask)
        tl.store(dwrite_keys + out, dwrite_keys_tile, mask=mask)
        tl.store(dtotal + program * K + channels, dtotal_tile, mask=valid & inside)


@triton.jit
def half_pair_gradients(dq, dk, through, dA, dN, q, k, prefix, covered, PRECISION: tl.constexpr):
    """Adds the adjoint of ``half_pairs`` to dq, dk, and to ``through``: what every gate up to a row receives.

    covered [rows, 1]: the rows of the two-sided form; dA and dN are 0 in the others.
    """
    rise = decay(prefix)
    fall = tl.where(covered, tl.exp2(-prefix * LOG2E), 0.0)
    rows_q = rounded(q * rise, PRECISION)
    rows_k = rounded(k * rise, PRECISION)
    keys = rounded(k * fall, PRECISION)
    d_q, d_k, d_keys = pair_gradients(dA, dN, rows_q, rows_k, keys, PRECISION)
    through = tl.fma(-keys, d_keys, tl.fma(rows_k, d_k, tl.fma(rows_q, d_q, through)))
    return tl.fma(d_q, rise, dq), tl.fma(d_keys, fall, tl.fma(d_k, rise, dk)), through


@triton.jit
def half_pair_gradients_any(dq, dk, through, dA, dN, q, k, g, ROWS: tl.constexpr, PARTS: tl.constexpr,
                            PRECISION: tl.constexpr):  # fmt: skip
    """The adjoint of ``half_pairs_any``, likewise."""
    LEVELS: tl.constexpr = 5 if ROWS == 32 else 4
    for level in tl.range(0, LEVELS, num_stages=1):
        e = boundary_decay(g, 1 << level, ROWS, PARTS)
        rows_q = rounded(q * e, PRECISION)
        rows_k = rounded(k * e, PRECISION)
        pairs = across(1 << level, ROWS)
        d_q, d_k, d_keys = pair_gradients(
            tl.where(pairs, dA, 0.0), tl.where(pairs, dN, 0.0), rows_q, rows_k, rows_k, PRECISION
        )
        dq = tl.fma(d_q, e, dq)
        dk = tl.fma(d_k + d_keys, e, dk)
        through = tl.fma(rows_k, d_k - d_keys, tl.fma(rows_q, d_q, through))
    return dq, dk, through


@triton.jit
def norm_gradient(d, x, rows_d, rows_x, live, along, norm, K: tl.constexpr, BK: tl.constexpr):
    """Turns d, the gradient of x / |x|, into that of x, in place. along: d . x / |x|; norm: 1 / |x|."""
    for channel in tl.range(0, K, BK, num_stages=1):
        channels = channel + tl.arange(0, BK)
        mask = live[:, None] & (channels < K)[None, :]
        at = rows_d[:, None] + channels[None, :]
        unit = tl.load(x + rows_x[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32) * norm[:, None]
        gradient = tl.load(d + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(d + at, tl.fma(-unit, along[:, None], gradient) * norm[:, None], mask=mask)


@triton.jit
def tile(x, rows, channels, mask, factor):
    """x [rows, channels] in fp32, every row times its factor."""
    return tl.load(x + rows[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32) * factor[:, None]


@triton.jit(do_not_specialize=["T", "NT", "H", "HV", "scale", "lower_bound"])
def decay_gradients(
    q, k, g, A_log, dt_bias, dreads, dread_keys, dwrite_keys, dtotal, dA, dN, dq, dk, dg, reach, chunks,
    T: tl.int64, NT: tl.int64, H: tl.int64, HV: tl.int64, scale, lower_bound,
    K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, FRESH: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, SECOND: tl.constexpr, ANY: tl.constexpr, PARTS: tl.constexpr, SUM_PARTS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, value head): the adjoint of ``prepare`` for the rows of the first half or (SECOND) of the
    second. dq and dk are [tokens, HV, K]; dg is the gradient of the gate's value. ANY does the chunks that the
    two-sided form does not cover."""
    program = tl.program_id(0).to(tl.int64)
    head = program % HV
    start, count, sequence, index = chunk_place(program // HV, chunks, T, NT, C, PACKED)
    HALF: tl.constexpr = C // 2
    covered = tl.load(reach + program * 2 + SECOND)
    if ANY:
        if covered == HALF:
            return
    elif covered < HALF:
        return
    if SECOND:
        if count <= HALF:
            return
    elif count == 0:
        return
    r = tl.arange(0, HALF)
    strict = r[:, None] > r[None, :]
    opens = (r == 0)[:, None] & (index == 0)
    live0 = r < count
    live1 = HALF + r < count
    used0 = live0 & (sequence >= 0)
    used1 = live1 & (sequence >= 0)
    # The chunk's own rows: offsets within it fit 32 bits, which costs half the registers.
    q += (start * H + head // (HV // H)) * K
    k += (start * H + head // (HV // H)) * K
    g += (start * HV + head) * K
    dreads += (start * HV + head) * K
    dread_keys += (start * HV + head) * K
    dwrite_keys += (start * HV + head) * K
    dq += (start * HV + head) * K
    dk += (start * HV + head) * K
    dg += (start * HV + head) * K
    dA += (start * HV + head) * C
    dN += (start * HV + head) * C
    stride_k = H.to(tl.int32) * K
    stride = HV.to(tl.int32)
    row_k0 = r * stride_k
    row_k1 = (r + HALF) * stride_k
    row_g0 = r * stride * K
    row_g1 = (r + HALF) * stride * K
    norm_q0 = tl.zeros((HALF,), tl.float32) + 1.0
    norm_q1 = norm_q0
    norm_k0 = norm_q0
    norm_k1 = norm_q0
    if NORM:
        norm_q0, norm_k0 = norms(q, k, row_k0, used0, K, HALF, 1, BK)
        norm_q1, norm_k1 = norms(q, k, row_k1, used1, K, HALF, 1, BK)
    at_c = r * stride * C
    across_c = (at_c + HALF * stride * C)[:, None] + r[None, :]
    dA_across = tl.load(dA + across_c, mask=used1[:, None], other=0.0)
    dN_across = tl.load(dN + across_c, mask=used1[:, None], other=0.0)
    if SECOND:
        row_k, row_g, used, live, norm_q, norm_k = row_k1, row_g1, used1, live1, norm_q1, norm_k1
        within_c = across_c + HALF
    else:
        row_k, row_g, used, live, norm_q, norm_k = row_k0, row_g0, used0, live0, norm_q0, norm_k0
        within_c = at_c[:, None] + r[None, :]
    dA_within = tl.load(dA + within_c, mask=used[:, None] & strict, other=0.0)
    diagonal = tl.load(dA + at_c + (HALF * stride * C + HALF if SECOND else 0) + r, mask=used, other=0.0).to(tl.float32)
    dN_within = tl.load(dN + within_c, mask=used[:, None] & strict, other=0.0)
    along_q = tl.zeros((HALF,), tl.float32)  # of the gradients, along q and k themselves
    along_k = tl.zeros((HALF,), tl.float32)
    for channel in tl.range(0, K, BK, num_stages=STAGES):
        channels = channel + tl.arange(0, BK)
        valid = channels < K
        mask0 = used0[:, None] & valid[None, :]
        mask1 = used1[:, None] & valid[None, :]
        at0 = row_g0[:, None] + channels[None, :]
        at1 = row_g1[:, None] + channels[None, :]
        g0 = gate_tile(g + at0, A_log, dt_bias, head, channels, mask0, valid, lower_bound, K, GATE)
        g1 = gate_tile(g + at1, A_log, dt_bias, head, channels, mask1, valid, lower_bound, K, GATE)
        if FRESH:
            g0 = tl.where(opens, 0.0, g0)
        prefix0 = sums_through(g0, 0, HALF, PARTS)
        prefix1 = sums_through(g1, 0, HALF, PARTS)
        behind0 = sums_behind(g0, HALF, PARTS)
        behind1 = sums_behind(g1, HALF, PARTS)
        total0 = decay(prefix0 + behind0)  # the same in every row
        total1 = decay(prefix1 + behind1)
        # dg collects what a gate receives: from everything (dtotal), from rows at or behind it (through), and from
        # rows before it (ahead).
        at = dtotal + program * K + channels[None, :] + tl.zeros((HALF, 1), tl.int32)
        dg_tile = tl.load(at, mask=valid[None, :] & (sequence >= 0), other=0.0) * total0 * total1
        rise = decay(prefix1)
        fall = decay(behind0)
        if SECOND:
            q_tile = tile(q, row_k1, channels, mask1, norm_q1 * scale)
            k_tile = tile(k, row_k1, channels, mask1, norm_k1)
            rows_q = rounded(q_tile * rise, PRECISION)
            rows_k = rounded(k_tile * rise, PRECISION)
            other = tile(k, row_k0, channels, mask0, norm_k0) * fall
            keys = rounded(other, PRECISION)
            d_q = product(dA_across, keys, PRECISION)
            d_k = product(dN_across, keys, PRECISION)
            through = tl.fma(rows_k, d_k, rows_q * d_q)
            rise0 = rise * total0
            dq_tile = tl.load(dreads + at1, mask=mask1, other=0.0).to(tl.float32) * rise0
            dk_tile = tl.load(dread_keys + at1, mask=mask1, other=0.0).to(tl.float32) * rise0
            through = tl.fma(dk_tile, k_tile, tl.fma(dq_tile, q_tile, through))
            dq_tile = tl.fma(d_q, rise, dq_tile)
            dk_tile = tl.fma(d_k, rise, dk_tile)
            ahead = tl.load(dwrite_keys + at1, mask=mask1, other=0.0).to(tl.float32) * decay(behind1)
            dk_tile += ahead
            ahead *= k_tile
            other *= tl.load(dwrite_keys + at0, mask=mask0, other=0.0).to(tl.float32) * total1
            dg_tile += column_sums(other, HALF, SUM_PARTS)
            g_tile = g1
            prefix = prefix1
        else:
            other = tile(q, row_k1, channels, mask1, norm_q1 * scale) * rise
            d_keys = product(tl.trans(dA_across), other, PRECISION)
            through = tl.load(dreads + at1, mask=mask1, other=0.0).to(tl.float32) * other
            other = tile(k, row_k1, channels, mask1, norm_k1) * rise
            d_keys += product(tl.trans(dN_across), other, PRECISION)
            through = tl.fma(tl.load(dread_keys + at1, mask=mask1, other=0.0).to(tl.float32), other, through)
            dg_tile += column_sums(through * total0, HALF, SUM_PARTS)
            q_tile = tile(q, row_k0, channels, mask0, norm_q0 * scale)
            k_tile = tile(k, row_k0, channels, mask0, norm_k0)
            rise = decay(prefix0)
            dq_tile = tl.load(dreads + at0, mask=mask0, other=0.0).to(tl.float32) * rise
            dk_tile = tl.load(dread_keys + at0, mask=mask0, other=0.0).to(tl.float32) * rise
            # No pair spans the first gate of the chunk: what the rows read from the state is summed apart.
            through = tl.fma(dk_tile, k_tile, dq_tile * q_tile)
            dg_tile += masked_sums(tl.where(r[:, None] <= r[None, :], 1.0, 0.0), through, SUM_PARTS)
            through = tl.zeros((HALF, BK), tl.float32)
            ahead = tl.load(dwrite_keys + at0, mask=mask0, other=0.0).to(tl.float32) * total1
            ahead = (ahead + d_keys) * fall
            dk_tile += ahead
            ahead *= k_tile
            g_tile = g0
            prefix = sums_through(g0, 1, HALF, PARTS)
        dg_tile += masked_sums(tl.where(strict, 1.0, 0.0), ahead, SUM_PARTS)
        if ANY:
            rows = (r < covered)[:, None]
            dq_tile, dk_tile, through = half_pair_gradients(
                dq_tile, dk_tile, through, tl.where(rows, dA_within, 0.0), tl.where(rows, dN_within, 0.0), q_tile,
                k_tile, prefix, rows, PRECISION,
            )  # fmt: skip
            dq_tile, dk_tile, through = half_pair_gradients_any(
                dq_tile, dk_tile, through, tl.where(rows, 0.0, dA_within), tl.where(rows, 0.0, dN_within), q_tile,
                k_tile, g_tile, HALF, PARTS, PRECISION,
            )  # fmt: skip
        else:
            dq_tile, dk_tile, through = half_pair_gradients(
                dq_tile, dk_tile, through, dA_within, dN_within, q_tile, k_tile, prefix, live[:, None], PRECISION
            )
        spanning = (r[:, None] <= r[None, :]) & ((r > 0) | SECOND)[:, None]
        dg_tile += masked_sums(tl.where(spanning, 1.0, 0.0), through, SUM_PARTS)
        dq_tile = tl.fma(diagonal[:, None], k_tile, dq_tile)
        dk_tile = tl.fma(diagonal[:, None], q_tile, dk_tile)
        if FRESH and not SECOND:
            dg_tile = tl.where(opens, 0.0, dg_tile)
        dq_tile *= scale
        along_q += tl.sum(dq_tile * q_tile, 1)
        along_k += tl.sum(dk_tile * k_tile, 1)
        at = row_g[:, None] + channels[None, :]
        mask = used[:, None] & valid[None, :]
        mask_out = live[:, None] & valid[None, :]
        tl.store(dg + at, tl.where(mask, dg_tile, 0.0), mask=mask_out)
        tl.store(dq + at, tl.where(mask, dq_tile, 0.0), mask=mask_out)
        tl.store(dk + at, tl.where(mask, dk_tile, 0.0), mask=mask_out)
    if NORM:
        tl.debug_barrier()  # other threads wrote what is read again here
        norm_gradient(dq, q, row_g, row_k, used, along_q / scale, norm_q, K, BK)
        norm_gradient(dk, k, row_g, row_k, used, along_k, norm_k, K, BK)
