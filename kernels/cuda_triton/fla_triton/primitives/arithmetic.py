"""Products, exponentials and activations, each written once."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# An amplification beyond 2^52 within a half chunk is held there: products of two decays stay finite, and 0 * decay 0.
LARGEST = tl.constexpr(52.0)
NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def product(a, b, PRECISION: tl.constexpr, to=None):
    """a @ b (+ to) in fp32. PRECISION "bf16" or "fp16" rounds both; otherwise it is how fp32 numbers are multiplied."""
    if PRECISION == "bf16":
        a = a.to(tl.bfloat16)
        b = b.to(tl.bfloat16)
        c = tl.dot(a, b, to, input_precision="ieee")
    elif PRECISION == "fp16":
        a = a.to(tl.float16)
        b = b.to(tl.float16)
        c = tl.dot(a, b, to, input_precision="ieee")
    else:
        c = tl.dot(a, b, to, input_precision=PRECISION)
    return c


@triton.jit
def exact_product(a, b, PRECISION: tl.constexpr, to):
    """a @ b + to, where a [fp32] may not be rounded to bf16: in two parts, which hold 16 bits."""
    if PRECISION == "bf16":
        high = (a.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)  # the upper 16 bits: bf16
        low = (a - high).to(tl.bfloat16)
        b = b.to(tl.bfloat16)
        high = high.to(tl.bfloat16)
        c = tl.dot(low, b, tl.dot(high, b, to, input_precision="ieee"), input_precision="ieee")
    else:
        c = tl.dot(a, b, to, input_precision=PRECISION)
    return c


@triton.jit
def rounded(x, PRECISION: tl.constexpr):
    """x [fp32] as products see it. Taking the same number in every place keeps what must cancel cancelling.

    In integers: there and back through bf16 is a slow instruction for single numbers.
    """
    if PRECISION == "bf16":
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 32767 + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def masked_sums(mask, x, PARTS: tl.constexpr):
    """mask @ x for a mask of 0 and 1 [C, C]: sums of rows of x, on the matrix units.

    x is split into PARTS bf16 numbers (1 if it holds bf16 values, 3 hold any fp32), so that only the sum rounds.
    """
    mask = mask.to(tl.bfloat16)
    part = x.to(tl.bfloat16)
    sums = tl.dot(mask, part, input_precision="ieee")
    for _ in tl.static_range(PARTS - 1):
        x = x - part.to(tl.float32)
        part = x.to(tl.bfloat16)
        sums = tl.dot(mask, part, sums, input_precision="ieee")
    return sums


@triton.jit
def column_sums(x, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The sum of the rows of x [ROWS, BK], in every row: no exchange between warps."""
    return masked_sums(tl.full((ROWS, ROWS), 1.0, tl.float32), x, PARTS)


@triton.jit
def decay(x):
    """exp(x) of a log-space gate sum x."""
    return tl.exp2(tl.minimum(x * LOG2E, LARGEST))


@triton.jit
def sigmoid(x):
    y = tl.exp2(-tl.abs(x) * LOG2E)
    return tl.where(x > 0, 1.0, y) / (1.0 + y)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with all bits where exp(x) is small."""
    y = tl.exp2(-tl.abs(x) * LOG2E)
    total = 1.0 + y
    log1p = tl.log(total) + (y - (total - 1.0)) / total
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def step_size(raw, BETA_MAX: tl.constexpr):
    """beta of a delta rule: as given (BETA_MAX 0), or BETA_MAX * sigmoid(raw)."""
    x = raw.to(tl.float32)
    if BETA_MAX > 0:
        x = sigmoid(x) * BETA_MAX
    return x
