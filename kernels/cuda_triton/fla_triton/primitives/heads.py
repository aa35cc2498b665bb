"""Key heads that several value heads share."""

import triton
import triton.language as tl


@triton.jit
def add_up(x, total, first, rows, head, H, HV, K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    row = first + tl.arange(0, ROWS)
    for channel in tl.range(0, K, BK, num_stages=1):
        channels = channel + tl.arange(0, BK)
        mask = (row < rows)[:, None] & (channels < K)[None, :]
        found = tl.zeros((ROWS, BK), tl.float32)
        for each in range(0, HV // H):
            at = (row * HV + head * (HV // H) + each) * K
            found += tl.load(x + at[:, None] + channels[None, :], mask=mask, other=0.0)
        tl.store(total + ((row * H + head) * K)[:, None] + channels[None, :], found, mask=mask)


@triton.jit(do_not_specialize=["rows", "H", "HV"])
def sum_heads(
    dq_each, dk_each, dq, dk, rows: tl.int64, H: tl.int64, HV: tl.int64,
    K: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One program per (ROWS tokens, key head): sums over the value heads of a key head, always in their order, so that
    a token's gradient does not depend on what is beside it. dq_each, dk_each fp32 [rows, HV, K]; dq, dk [rows, H, K].
    """
    program = tl.program_id(0).to(tl.int64)
    head = program % H
    first = program // H * ROWS
    add_up(dq_each, dq, first, rows, head, H, HV, K, ROWS, BK)
    add_up(dk_each, dk, first, rows, head, H, HV, K, ROWS, BK)
