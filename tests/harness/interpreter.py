"""What Triton's CPU interpreter gets wrong or does slowly, mended: kernels then mean there what they mean on a GPU.

``mend()`` is called once, with TRITON_INTERPRET=1, before the first kernel runs. Numbers:

- bfloat16 is stored as 16 raw bits, and the interpreter adds, multiplies and compares the bits as integers. Here every
  operation on bfloat16 is one on float32 whose result is rounded to nearest even, as ``fma`` units do it.
- Conversions to bfloat16 cut the digits off (integers and float64 become arbitrary bits). Here they round too.
- Products of 16-bit matrices are accumulated in float32 from exact operands, as matrix units do it.
- A scalar tensor as bound of a ``range`` is an error with NumPy 2.4.

Time: every call of a device function patched ``triton.language`` anew, which took most of it. Here this happens once.
"""

import functools
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)


@functools.cache
def mend() -> None:
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("nothing is interpreted: set TRITON_INTERPRET=1 before triton is imported")
    interpreter._get_np_dtype = _numpy_dtype
    _patch_language_once()
    for name, function in {
        "binary_op": _binary, "unary_op": _unary, "ternary_op": _ternary, "create_fma": _fma, "create_dot": _dot,
        "cast_impl": _cast, "get_bf16": _constant,
    }.items():
        setattr(InterpreterBuilder, name, function)


def narrow(handle: TensorHandle) -> bool:
    """Whether it holds bits of bfloat16."""
    return handle.dtype.scalar.name == "bf16"


def widened(bits: np.ndarray) -> np.ndarray:
    """bfloat16 bits as the float32 of the same value."""
    wide = bits.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """The bits of the bfloat16 next to a float32, of two equally near ones the even one."""
    x = np.asarray(x, dtype=np.float32, order="C")
    bits = x.view(np.uint32)
    up = bits >> 16
    up &= 1
    up += 0x7FFF
    up += bits
    up >>= 16
    found = up.astype(np.uint16)
    nan = np.isnan(x)
    return np.where(nan, np.uint16(0x7FC0), found) if nan.any() else found


def _value(handle: TensorHandle) -> np.ndarray:
    """The numbers of a handle: float32 for bfloat16, its own array for all else."""
    return widened(handle.data) if narrow(handle) else handle.data


def _as_bfloat16(x: np.ndarray) -> TensorHandle:
    return TensorHandle(rounded(x), tl.bfloat16)


_plain_binary, _plain_unary = InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
_plain_ternary, _plain_fma = InterpreterBuilder.ternary_op, InterpreterBuilder.create_fma
_plain_dot, _plain_cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def _binary(self, a, b, operation):
    if not narrow(a) or operation in BITWISE:
        return _plain_binary(self, a, b, operation)
    result = operation(_value(a), _value(b))
    return TensorHandle(result, tl.int1) if result.dtype == np.bool_ else _as_bfloat16(result)


def _unary(self, a, operation):
    return _as_bfloat16(operation(_value(a))) if narrow(a) else _plain_unary(self, a, operation)


def _ternary(self, a, b, c, operation):
    if not narrow(a):  # the condition of a select is no number, and what it selects needs no arithmetic
        return _plain_ternary(self, a, b, c, operation)
    return _as_bfloat16(operation(_value(a), _value(b), _value(c)))


def _fma(self, a, b, c):
    return _as_bfloat16(_value(a) * _value(b) + _value(c)) if narrow(c) else _plain_fma(self, a, b, c)


def _dot(self, a, b, c, *settings):
    if a.dtype.primitive_bitwidth != 16:
        return _plain_dot(self, a, b, c, *settings)
    x, y = (_value(operand).astype(np.float32, copy=False) for operand in (a, b))
    product = x @ y + _value(c)
    if narrow(c):
        return _as_bfloat16(product)
    return TensorHandle(product.astype(c.data.dtype, copy=False), c.dtype.scalar)


def _cast(self, a, dtype):
    if dtype.scalar.name == "bf16":
        return TensorHandle(a.data, tl.bfloat16) if narrow(a) else _as_bfloat16(a.data)
    if narrow(a):
        wide = widened(a.data)
        return TensorHandle(wide.astype(_numpy_dtype(dtype), copy=False), dtype.scalar)
    return _plain_cast(self, a, dtype)


def _constant(self, value):
    return _as_bfloat16(np.array([value], dtype=np.float32))


_plain_numpy_dtype, _numpy_dtypes = interpreter._get_np_dtype, {}


def _numpy_dtype(dtype):
    """Remembered: the interpreter builds a table of all of them whenever it asks for one."""
    name = dtype.scalar.name
    found = _numpy_dtypes.get(name)
    if found is None:
        found = _numpy_dtypes[name] = _plain_numpy_dtype(dtype.scalar)
    return found


def _patch_language_once() -> None:
    """``triton.language`` gets its interpreted meaning here and keeps it."""
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(everything)
    kept = interpreter._LangPatchScope()  # nothing to restore
    interpreter._patch_lang = lambda function: kept
    tl.tensor.__index__ = lambda self: int(self.handle.data.item())
