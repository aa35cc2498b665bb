"""Gates: from a raw projection to a log-space decay, alone or inside another kernel, and the gradients.

GATE 0: given in log space.  1: -exp(A_log) softplus(g + dt_bias).  2: lower_bound sigmoid(exp(A_log) (g + dt_bias)).
A_log None counts as 0, and so does dt_bias.
"""

import triton
import triton.language as tl

from fla_triton.primitives.arithmetic import LOG2E, masked_sums, sigmoid, softplus
from fla_triton.primitives.places import chunk_place


@triton.jit
def gate_input(g, dt_bias, head, channels, mask, valid, K: tl.constexpr):
    """g + dt_bias in fp32; g and the result [rows, channels]."""
    x = tl.load(g, mask=mask, other=0.0).to(tl.float32)
    if dt_bias is not None:
        x += tl.load(dt_bias + head * K + channels, mask=valid, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def gate_rate(A_log, head):
    """exp(A_log) of a head."""
    if A_log is not None:
        rate = tl.exp2(tl.load(A_log + head).to(tl.float32) * LOG2E)
    else:
        rate = 1.0
    return rate


@triton.jit
def gate_value(x, rate, lower_bound, GATE: tl.constexpr):
    """The gate of x = g + dt_bias."""
    if GATE == 1:
        y = -rate * softplus(x)
    else:
        y = lower_bound * sigmoid(rate * x)
    return y


@triton.jit
def gate_tile(
    g, A_log, dt_bias, head, channels, mask, valid, lower_bound, K: tl.constexpr, GATE: tl.constexpr
):  # fmt: skip
    """Gates [rows, channels] in fp32, 0 outside of ``mask``."""
    if GATE == 0:
        x = tl.load(g, mask=mask, other=0.0).to(tl.float32)
    else:
        x = gate_input(g, dt_bias, head, channels, mask, valid, K)
        x = tl.where(mask, gate_value(x, gate_rate(A_log, head), lower_bound, GATE), 0.0)
    return x


@triton.jit(do_not_specialize=["T", "NT", "HV", "lower_bound", "scale"])
def gate(
    g, A_log, dt_bias, out, chunks, T: tl.int64, NT: tl.int64, HV: tl.int64, lower_bound, scale,
    K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr, SUM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out = the gate, or (SUM) ``scale`` times its sums from the start of the chunk through each token."""
    program = tl.program_id(0).to(tl.int64)
    head = program % HV
    start, count, sequence, _ = chunk_place(program // HV, chunks, T, NT, C, PACKED)
    r = tl.arange(0, C)
    live = r < count
    row = ((start + r) * HV + head) * K
    for channel in tl.range(0, K, BK, num_stages=1):
        channels = channel + tl.arange(0, BK)
        valid = channels < K
        mask = live[:, None] & valid[None, :]
        at = row[:, None] + channels[None, :]
        y = gate_tile(g + at, A_log, dt_bias, head, channels, mask & (sequence >= 0), valid, lower_bound, K, GATE)
        if SUM:
            y = masked_sums(tl.where(r[:, None] >= r[None, :], 1.0, 0.0), y, 3) * scale
        tl.store(out + at, y, mask=mask)


@triton.jit(do_not_specialize=["T", "NT", "HV", "lower_bound", "scale"])
def gate_backward(
    d, g, A_log, dt_bias, dg, dA_log, ddt_bias, chunks,
    T: tl.int64, NT: tl.int64, HV: tl.int64, lower_bound, scale,
    K: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, GATE: tl.constexpr, SUM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Given d of the result: dg, and the chunk's part of dA_log [slots, HV] and ddt_bias [slots, HV, K]."""
    program = tl.program_id(0).to(tl.int64)
    head = program % HV
    start, count, sequence, _ = chunk_place(program // HV, chunks, T, NT, C, PACKED)
    r = tl.arange(0, C)
    live = r < count
    row = ((start + r) * HV + head) * K
    rate = gate_rate(A_log, head)
    d_rate = tl.zeros((), tl.float32)
    for channel in tl.range(0, K, BK, num_stages=1):
        channels = channel + tl.arange(0, BK)
        valid = channels < K
        mask = live[:, None] & valid[None, :]
        at = row[:, None] + channels[None, :]
        inside = mask & (sequence >= 0)
        x = gate_input(g + at, dt_bias, head, channels, inside, valid, K)
        dy = tl.load(d + at, mask=inside, other=0.0).to(tl.float32)
        if SUM:
            dy = masked_sums(tl.where(r[:, None] <= r[None, :], 1.0, 0.0), dy, 3) * scale
        if GATE == 1:
            dx = -rate * sigmoid(x) * dy
            d_log_rate = -rate * softplus(x) * dy
        else:
            z = rate * x
            dz = lower_bound * sigmoid(z) * sigmoid(-z) * dy
            dx = rate * dz
            d_log_rate = z * dz
        tl.store(dg + at, tl.where(inside, dx, 0.0), mask=mask)
        if dt_bias is not None:
            tl.store(ddt_bias + program * K + channels, tl.sum(tl.where(inside, dx, 0.0), 0), mask=valid)
        d_rate += tl.sum(tl.where(inside, d_log_rate, 0.0))
    if A_log is not None:
        tl.store(dA_log + program, d_rate)
