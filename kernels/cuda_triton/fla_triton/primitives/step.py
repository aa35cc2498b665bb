"""Token by token: the recurrence itself, for decoding and short sequences, without gradients."""

import triton
import triton.language as tl

from fla_triton.primitives.arithmetic import NORM_EPS, decay, step_size
from fla_triton.primitives.gates import gate_tile
from fla_triton.primitives.places import boundary


@triton.jit
def unit(x, NORM: tl.constexpr):
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x) + NORM_EPS)
    return x


@triton.jit
def sequence_of(n, cu_seqlens, T, N):
    """First token and end of sequence ``n``; sequence N is what lies behind the last."""
    if cu_seqlens is None:
        start = n * T
        end = start + T
    else:
        start = boundary(cu_seqlens, n, N, T)
        end = tl.where(n == N, T, tl.maximum(boundary(cu_seqlens, n + 1, N, T), start))
    return start, end


@triton.jit
def state_offsets(lane_k, lane_v, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Of a tile [K, V] in a state stored as [K, V] or (V_FIRST) as [V, K]."""
    if V_FIRST:
        offsets = lane_v[None, :] * K + lane_k[:, None]
    else:
        offsets = lane_k[:, None] * V + lane_v[None, :]
    return offsets


@triton.jit(do_not_specialize=["T", "H", "HV", "N", "scale", "lower_bound"])
def token_step(
    q, k, v, g, beta, A_log, dt_bias, initial_state, final_state, o, cu_seqlens,
    T: tl.int64, H: tl.int64, HV: tl.int64, N: tl.int64, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BETA_MAX: tl.constexpr,
    BETA_WIDE: tl.constexpr, V_FIRST: tl.constexpr, WIDTH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """One program per (sequence, value head, block of V); its part of the state [K, BV] stays in registers.

    BETA_WIDE: beta is [.., V], a step size per value channel. Program N of packed input writes zeros behind the last
    sequence.
    """
    program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = program // BLOCKS % HV
    n = program // BLOCKS // HV
    start, end = sequence_of(n, cu_seqlens, T, N)
    lane_k = tl.arange(0, WIDTH)
    lane_v = program % BLOCKS * BV + tl.arange(0, BV)
    valid_k = lane_k < K
    valid_v = lane_v < V
    state_at = (n * HV + head) * K * V + state_offsets(lane_k, lane_v, K, V, V_FIRST)
    within = n < N
    state_mask = valid_k[:, None] & valid_v[None, :] & within
    state = tl.zeros((WIDTH, BV), tl.float32)
    if initial_state is not None:
        state += tl.load(initial_state + state_at, mask=state_mask, other=0.0).to(tl.float32)
    mask_k = valid_k & within
    mask_v = valid_v & within
    for token in range(start, end):
        row = (token * H + head // (HV // H)) * K + lane_k
        q_t = unit(tl.load(q + row, mask=mask_k, other=0.0).to(tl.float32), NORM)
        k_t = unit(tl.load(k + row, mask=mask_k, other=0.0).to(tl.float32), NORM)
        row = token * HV + head
        at = g + row * K + lane_k
        g_t = gate_tile(at[None, :], A_log, dt_bias, head, lane_k, mask_k[None, :], mask_k, lower_bound, K, GATE)
        if initial_state is None:
            g_t = tl.where(token == start, 0.0, g_t)
        v_t = tl.load(v + row * V + lane_v, mask=mask_v, other=0.0).to(tl.float32)
        if BETA_WIDE:
            step = step_size(tl.load(beta + row * V + lane_v, mask=mask_v, other=0.0), BETA_MAX)
        else:
            step = step_size(tl.load(beta + row, mask=within, other=0.0), BETA_MAX)
        state *= decay(tl.reshape(g_t, (WIDTH, 1)))
        u = step * (v_t - tl.sum(state * k_t[:, None], 0))
        state = tl.fma(k_t[:, None], u[None, :], state)
        o_t = tl.sum(state * q_t[:, None], 0) * scale
        tl.store(o + row * V + lane_v, tl.where(within, o_t, 0.0), mask=valid_v)
    if final_state is not None:
        tl.store(final_state + state_at, state, mask=state_mask)


@triton.jit(do_not_specialize=["T", "H", "HV", "N", "scale", "lower_bound"])
def state_gradient(
    q, k, g, beta, A_log, dt_bias, do, dfinal_state, dinitial_state, cu_seqlens,
    T: tl.int64, H: tl.int64, HV: tl.int64, N: tl.int64, scale, lower_bound,
    K: tl.constexpr, V: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, BETA_MAX: tl.constexpr,
    V_FIRST: tl.constexpr, WIDTH: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The gradient of the initial state, token by token from the last: dS <- D_t (1 - beta k k^T) (dS + q do^T).

    What is left of it once every token has erased a part can be small against what the chunk form adds up; relative to
    itself it is exact only this way.
    """
    program = tl.program_id(0).to(tl.int64)
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    head = program // BLOCKS % HV
    n = program // BLOCKS // HV
    start, end = sequence_of(n, cu_seqlens, T, N)
    lane_k = tl.arange(0, WIDTH)
    lane_v = program % BLOCKS * BV + tl.arange(0, BV)
    valid_k = lane_k < K
    valid_v = lane_v < V
    state_at = (n * HV + head) * K * V + state_offsets(lane_k, lane_v, K, V, V_FIRST)
    state_mask = valid_k[:, None] & valid_v[None, :]
    state = tl.zeros((WIDTH, BV), tl.float32)
    if dfinal_state is not None:
        state += tl.load(dfinal_state + state_at, mask=state_mask, other=0.0).to(tl.float32)
    for back in range(start, end):
        token = start + end - 1 - back
        row = (token * H + head // (HV // H)) * K + lane_k
        q_t = unit(tl.load(q + row, mask=valid_k, other=0.0).to(tl.float32), NORM) * scale
        k_t = unit(tl.load(k + row, mask=valid_k, other=0.0).to(tl.float32), NORM)
        row = token * HV + head
        at = g + row * K + lane_k
        g_t = gate_tile(at[None, :], A_log, dt_bias, head, lane_k, valid_k[None, :], valid_k, lower_bound, K, GATE)
        d_t = tl.load(do + row * V + lane_v, mask=valid_v, other=0.0).to(tl.float32)
        step = step_size(tl.load(beta + row), BETA_MAX)
        state = tl.fma(q_t[:, None], d_t[None, :], state)
        state = tl.fma(-k_t[:, None], (step * tl.sum(state * k_t[:, None], 0))[None, :], state)
        state *= decay(tl.reshape(g_t, (WIDTH, 1)))
    tl.store(dinitial_state + state_at, state, mask=state_mask)
