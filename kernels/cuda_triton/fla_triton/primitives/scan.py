"""From chunk to chunk: the state of a gated delta rule, its outputs, and the same backwards.

A program has BV of the V columns of a state and keeps them in registers, in fp32 and transposed, [BV, K]: then state
and values are the operand of every product that may stay in registers. With what ``prepare`` wrote for a chunk (reads,
read_keys, write_keys, steps beta, total, A, P):

    r = v - read_keys h            s = r - P (beta r)          u = beta s
    o = reads h + A u              h <- total h + write_keys^T u

In 16 bits h and u are multiplied in two parts where they meet the state itself, so that a small residual of large
values, and a step size, reach the state unrounded.
"""

import triton
import triton.language as tl

from fla_triton.primitives.arithmetic import exact_product, product, rounded
from fla_triton.primitives.places import sequence_place


@triton.jit
def state_offsets(lane_k, lane_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Of a tile [V, K] in a state stored as [K, V] or (V_FIRST) as [V, K]."""
    if V_FIRST:
        offsets = lane_v[:, None] * K + lane_k[None, :]
    else:
        offsets = lane_v[:, None] + lane_k[None, :] * V
    return offsets


@triton.jit(do_not_specialize=["T", "NT", "span", "segments", "HV", "N"])
def state_scan(
    reads, read_keys, write_keys, v, steps, total, A, P, initial_state, final_state, o, h, s, sequences,
    T: tl.int64, NT: tl.int64, span: tl.int64, segments: tl.int64, HV: tl.int64, N: tl.int64,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    V_FIRST: tl.constexpr, H_V_FIRST: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr,
    IDENTITY: tl.constexpr, EACH: tl.constexpr, STAGES: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, value head, block of V). Each of initial_state, final_state, o, h (the states at the
    starts of the chunks), s may be None. V_FIRST: the caller's states are [.., V, K], H_V_FIRST: so is h.
    Program N of packed input writes zeros to o behind the last sequence. WIDTH: K as a power of two.

    Segments of a sequence that is split start from the state [.., n] and end in the final state of the sequence, or
    (EACH) each in its own. IDENTITY: start from the unit matrix, with v None: the final state is then the linear map of
    the segment."""
    program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = program // BLOCKS % HV
    n = program // BLOCKS // HV
    start, count, slot = sequence_place(n, sequences, T, NT, span, segments, C, PACKED)
    r = tl.arange(0, C)
    lane_k = tl.arange(0, WIDTH)
    lane_v = program % BLOCKS * BV + tl.arange(0, BV)
    valid_k = (lane_k < K) | (K == WIDTH)
    valid_v = (lane_v < V) | (V % BV == 0)
    inside = n < N
    state_mask = valid_v[:, None] & valid_k[None, :] & inside
    state = tl.zeros((BV, WIDTH), tl.float32)
    if IDENTITY:
        state += tl.where(lane_v[:, None] == lane_k[None, :], 1.0, 0.0)
    if initial_state is not None:
        at_first = initial_state + (n * HV + head) * K * V + state_offsets(lane_k, lane_v, K, V, V_FIRST)
        state += tl.load(at_first, mask=state_mask, other=0.0).to(tl.float32)
    # Offsets within a chunk fit 32 bits and cost half the registers; the 64-bit part is one number per chunk.
    rows = r * HV.to(tl.int32) + head.to(tl.int32)
    at_k = (rows * K)[:, None] + lane_k[None, :]
    at_v = (rows * V)[None, :] + lane_v[:, None]
    at_c = (rows * C)[:, None] + r[None, :]
    for chunk in tl.range(0, (count + C - 1) // C, num_stages=STAGES):
        live = chunk * C + r < count
        used = live & inside
        mask_k = used[:, None] & valid_k[None, :]
        mask_v = valid_v[:, None] & used[None, :]
        block = (slot + chunk) * HV + head
        row = (start + chunk * C) * HV
        w = tl.load(read_keys + row * K + at_k, mask=mask_k, other=0.0)
        x = tl.zeros((BV, C), tl.float32)
        if v is not None:
            x += tl.load(v + row * V + at_v, mask=mask_v, other=0.0).to(tl.float32)
        p = tl.load(P + row * C + at_c, mask=used[:, None], other=0.0)
        step = tl.load(steps + row + rows, mask=used, other=0.0)[None, :]
        if h is not None:
            at_h = h + block * K * V + state_offsets(lane_k, lane_v, K, V, H_V_FIRST)
            tl.store(at_h, state, mask=state_mask)
        x = rounded(-exact_product(state, tl.trans(w), PRECISION, -x), PRECISION)
        x = product(-x * step, tl.trans(p), PRECISION, x)
        if s is not None:
            tl.store(s + row * V + at_v, x, mask=mask_v)
        x *= step
        if o is not None:
            w = tl.load(reads + row * K + at_k, mask=mask_k, other=0.0)
            a = tl.load(A + row * C + at_c, mask=used[:, None], other=0.0)
            y = product(x, tl.trans(a), PRECISION, product(state, tl.trans(w), PRECISION))
            tl.store(o + row * V + at_v, y, mask=valid_v[:, None] & live[None, :])
        w = tl.load(write_keys + row * K + at_k, mask=mask_k, other=0.0)
        state *= tl.load(total + block * K + lane_k, mask=valid_k & inside, other=0.0)[None, :]
        state = exact_product(x, w, PRECISION, state)
    if final_state is not None:
        last = n
        if not EACH:
            last = n // segments
            state_mask = state_mask & (n % segments == segments - 1)
        at_final = final_state + (last * HV + head) * K * V + state_offsets(lane_k, lane_v, K, V, V_FIRST)
        tl.store(at_final, state, mask=state_mask)


@triton.jit(do_not_specialize=["T", "NT", "span", "segments", "HV", "N"])
def state_scan_backward(
    reads, read_keys, write_keys, do, steps, total, A, P, dfinal_state, dinitial_state, dh, y, sequences,
    T: tl.int64, NT: tl.int64, span: tl.int64, segments: tl.int64, HV: tl.int64, N: tl.int64,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    V_FIRST: tl.constexpr, PRECISION: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """The adjoint of ``state_scan``, from the last chunk to the first:

        du = A^T do + write_keys dh          y = du - P^T (beta du)          dr = beta y
        dh <- total dh + reads^T do - read_keys^T dr

    Writes y [tokens, HV, V] and dh [slots, HV, V, K] (the gradient of the state behind each chunk), each unless None,
    and dinitial_state unless None. Of a sequence that is split, dfinal_state and dinitial_state are those of the
    segments.
    """
    program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = program // BLOCKS % HV
    n = program // BLOCKS // HV
    start, count, slot = sequence_place(n, sequences, T, NT, span, segments, C, PACKED)
    r = tl.arange(0, C)
    lane_k = tl.arange(0, WIDTH)
    lane_v = program % BLOCKS * BV + tl.arange(0, BV)
    valid_k = (lane_k < K) | (K == WIDTH)
    valid_v = (lane_v < V) | (V % BV == 0)
    state_mask = valid_v[:, None] & valid_k[None, :]
    state = tl.zeros((BV, WIDTH), tl.float32)
    if dfinal_state is not None:
        at_final = dfinal_state + (n * HV + head) * K * V + state_offsets(lane_k, lane_v, K, V, V_FIRST)
        state += tl.load(at_final, mask=state_mask, other=0.0).to(tl.float32)
    last = (count + C - 1) // C - 1
    # Offsets within a chunk fit 32 bits and cost half the registers; the 64-bit part is one number per chunk.
    rows = r * HV.to(tl.int32) + head.to(tl.int32)
    at_k = (rows * K)[:, None] + lane_k[None, :]
    at_v = (rows * V)[None, :] + lane_v[:, None]
    at_c = (rows * C)[:, None] + r[None, :]
    for back in tl.range(0, last + 1, num_stages=STAGES):
        chunk = last - back
        live = chunk * C + r < count
        mask_k = live[:, None] & valid_k[None, :]
        mask_v = valid_v[:, None] & live[None, :]
        block = (slot + chunk) * HV + head
        row = (start + chunk * C) * HV
        d = tl.load(do + row * V + at_v, mask=mask_v, other=0.0)
        a = tl.load(A + row * C + at_c, mask=live[:, None], other=0.0)
        p = tl.load(P + row * C + at_c, mask=live[:, None], other=0.0)
        step = tl.load(steps + row + rows, mask=live, other=0.0)[None, :]
        w = tl.load(write_keys + row * K + at_k, mask=mask_k, other=0.0)
        if dh is not None:
            tl.store(dh + block * K * V + state_offsets(lane_k, lane_v, K, V, True), state, mask=state_mask)
        if PRECISION != "bf16":
            d = d.to(tl.float32)
        x = rounded(product(state, tl.trans(w), PRECISION, product(d, a, PRECISION)), PRECISION)
        x = product(-x * step, p, PRECISION, x)
        if y is not None:
            tl.store(y + row * V + at_v, x, mask=mask_v)
        x *= step
        state *= tl.load(total + block * K + lane_k, mask=valid_k, other=0.0)[None, :]
        w = tl.load(reads + row * K + at_k, mask=mask_k, other=0.0)
        state = product(d, w, PRECISION, state)
        w = tl.load(read_keys + row * K + at_k, mask=mask_k, other=0.0)
        state = product(-x, w, PRECISION, state)
    if dinitial_state is not None:
        at_first = dinitial_state + (n * HV + head) * K * V + state_offsets(lane_k, lane_v, K, V, V_FIRST)
        tl.store(at_first, state, mask=state_mask)


@triton.jit(do_not_specialize=["segments", "HV"])
def merge_segments(
    maps, ends, given, starts, segments: tl.int64, HV: tl.int64,
    K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """From segment to segment: start[s + 1] = map[s] start[s] + end[s], where start[0] is ``given`` (None: 0) and
    end[s] is what segment s makes of nothing. REVERSE: the same for gradients, from the last,
    start[s - 1] = map[s]^T start[s] + end[s]. One program per (sequence, value head, block of V); maps [.., K, K],
    states fp32, laid out as the caller's.
    """
    program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = program // BLOCKS % HV
    n = program // BLOCKS // HV
    lane_k = tl.arange(0, BK)
    lane_v = program % BLOCKS * BV + tl.arange(0, BV)
    valid_v = (lane_v < V)[:, None]
    for row in tl.range(0, K, BK, num_stages=1):
        rows = row + lane_k
        mask = valid_v & (rows < K)[None, :]
        offsets = state_offsets(rows, lane_v, K, V, V_FIRST)
        state = tl.zeros((BV, BK), tl.float32)
        if given is not None:
            state += tl.load(given + (n * HV + head) * K * V + offsets, mask=mask, other=0.0).to(tl.float32)
        first = n * segments
        if REVERSE:
            first += segments - 1
        tl.store(starts + (first * HV + head) * K * V + offsets, state, mask=mask)
    for step in tl.range(0, segments - 1, num_stages=1):
        tl.debug_barrier()  # other threads wrote what is read here
        here = n * segments + step
        there = here + 1
        if REVERSE:
            here = n * segments + segments - 1 - step
            there = here - 1
        here = here * HV + head
        there = there * HV + head
        for row in tl.range(0, K, BK, num_stages=1):
            rows = row + lane_k
            mask = valid_v & (rows < K)[None, :]
            offsets = state_offsets(rows, lane_v, K, V, V_FIRST)
            state = tl.load(ends + here * K * V + offsets, mask=mask, other=0.0)
            for column in tl.range(0, K, BK, num_stages=1):
                columns = column + lane_k
                x = tl.load(
                    starts + here * K * V + state_offsets(columns, lane_v, K, V, V_FIRST),
                    mask=valid_v & (columns < K)[None, :], other=0.0,
                )  # fmt: skip
                if REVERSE:
                    at = columns[:, None] * K + rows[None, :]
                else:
                    at = rows[None, :] * K + columns[:, None]
                m = tl.load(maps + here * K * K + at, mask=(columns < K)[:, None] & (rows < K)[None, :], other=0.0)
                state = product(x, m, PRECISION, state)
            tl.store(starts + there * K * V + offsets, state, mask=mask)
