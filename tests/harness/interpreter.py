"""What Triton's CPU interpreter gets wrong or does slowly, mended: kernels then mean there what they mean on a GPU.

``mend()`` is called once, with TRITON_INTERPRET=1, before the first kernel runs. Numbers:

- bfloat16 is stored as 16 raw bits, and the interpreter adds, multiplies and compares the bits as integers. Here every
  operation on bfloat16 is one on float32 whose result is rounded to nearest even, as ``fma`` units do it.
- Conversions to bfloat16 cut the digits off (integers and float64 become arbitrary bits). Here they round too.
- Products of 16-bit matrices are accumulated in float32 from exact operands, as matrix units do it.
- A scalar tensor as bound of a ``range`` is an error with NumPy 2.4.

Time: every call of a device function patched ``triton.language`` anew; here this happens once. Of what is left, types
took nearly all and numbers hardly any: ``replay.py`` works out types once.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import triton
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import GridExecutor, InterpretedFunction, InterpreterBuilder, TensorHandle

from harness import replay

BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
# In names of the builder's methods: what they do besides computing.
EFFECTS = {"program": replay.READS, "barrier": replay.READS} | dict.fromkeys(
    ("load", "store", "descriptor", "atomic", "assert", "assume", "print"), replay.ACTS)


@functools.cache
def mend() -> None:
    if not triton.knobs.runtime.interpret:
        raise RuntimeError("nothing is interpreted: set TRITON_INTERPRET=1 before triton is imported")
    interpreter._get_np_dtype = _numpy_dtype
    for name, method in _methods().items():
        setattr(InterpreterBuilder, name, method)
    interpreter._patch_attr = _remember_operation
    _patch_language_once()
    tl.tensor.__index__ = replay.asking(lambda numbers: int(numbers.item()))
    # Triton's own functions ask only whether there is a tensor, for the compiler has no numbers.
    tl.tensor.__bool__ = replay.asking(lambda numbers: bool(numbers) if numbers.size == 1 else True, own=True)
    interpreter.GridExecutor = _Executor
    InterpretedFunction.__call__ = _remember_function


# --- numbers ---


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


# What the builder's methods do with arrays, given handles with the types of their arguments: → (a function of the
# handles' arrays, the dtype of its result).


def _binary(a, b, operation):
    dtype = a.dtype.scalar
    if narrow(a) and operation not in BITWISE:
        if _produced(operation, np.dtype(np.float32), np.dtype(np.float32)) == np.bool_:
            return lambda x, y: operation(widened(x), widened(y)), tl.int1
        return lambda x, y: rounded(operation(widened(x), widened(y))), dtype
    return _fitted(operation, dtype, a, b), dtype


def _unary(a, operation):
    if narrow(a):
        return lambda x: rounded(operation(widened(x))), a.dtype.scalar
    return operation, a.dtype.scalar


def _ternary(a, b, c, operation):
    if narrow(a):  # the condition of a select is no number, and what it selects needs no arithmetic
        return lambda x, y, z: rounded(operation(widened(x), widened(y), widened(z))), tl.bfloat16
    return _fitted(operation, c.dtype.scalar, a, b, c), c.dtype.scalar


def _fma(a, b, c):
    if narrow(c):
        return lambda x, y, z: rounded(widened(x) * widened(y) + widened(z)), tl.bfloat16
    return lambda x, y, z: x * y + z, c.dtype.scalar


_plain_dot = InterpreterBuilder.create_dot


def _dot(a, b, c, *settings):
    if a.dtype.primitive_bitwidth != 16:
        dtypes = a.dtype, b.dtype, c.dtype
        return lambda *arrays: _plain_dot(None, *map(replay.handle_of, arrays, dtypes), *settings).data, c.dtype.scalar
    wide = widened if narrow(a) else lambda x: x.astype(np.float32)
    if narrow(c):
        return lambda x, y, z: rounded(wide(x) @ wide(y) + widened(z)), c.dtype.scalar
    return lambda x, y, z: (wide(x) @ wide(y) + z).astype(z.dtype, copy=False), c.dtype.scalar


def _cast(a, dtype, *signed):
    numbers = _numpy_dtype(dtype)
    if dtype.scalar.name == "bf16":
        return (lambda x: x) if narrow(a) else rounded, tl.bfloat16
    if narrow(a):
        return lambda x: widened(x).astype(numbers, copy=False), dtype.scalar
    return lambda x: x.astype(numbers), dtype.scalar


def _shift(a, b):
    """To the right; Triton's method turns its arguments into signed numbers where they lie."""
    x, y = (interpreter._get_signed_np_dtype(handle.data.dtype) for handle in (a, b))
    return lambda a, b: np.right_shift(a.astype(x, copy=False), b.astype(y, copy=False)), a.dtype.scalar


def _constant(value):
    return lambda: rounded(np.array([value], dtype=np.float32)), tl.bfloat16


def _quotient(a, b):
    return lambda x, y: (x - np.fmod(x, y)) // y, a.dtype.scalar


def _address(pointer, offset):
    width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
    return lambda x, y: x + width * y.astype(np.uint64), pointer.dtype


def _load(pointer, *hints):
    dtype = pointer.get_element_ty()
    numbers = _numpy_dtype(dtype)
    return lambda x: replay.read(x, numbers), dtype


def _masked_load(pointer, mask, other, *hints):
    dtype = pointer.get_element_ty()
    numbers = _numpy_dtype(dtype)
    return lambda x, *rest: replay.read(x, numbers, *rest), dtype


def _store(*given):
    return replay.write, None


def _splat(block, a):
    shape, numbers = block.shape, _numpy_dtype(a.dtype)

    def splat(x):
        full = np.empty(shape, numbers)
        full[...] = x
        return full

    return splat, a.dtype.scalar


def _broadcast(a, shape):
    shape = tuple(shape)
    same = a.data.shape == shape
    return replay.itself if same else lambda x: np.broadcast_to(x, shape), a.dtype.scalar


def _expand(a, axis):
    index = (slice(None),) * axis + (None,)
    return lambda x: x[index], a.dtype.scalar


def _fitted(operation, dtype, *handles) -> Callable:
    """``operation``, and its result cut to ``dtype`` if NumPy makes it wider, as the interpreter does it."""
    produced = _produced(operation, *(handle.data.dtype for handle in handles))
    if interpreter._validate_np_data_size(produced, dtype):
        return operation
    numbers = _numpy_dtype(dtype)
    return lambda *arrays: operation(*arrays).astype(numbers)


@functools.cache
def _produced(operation, *dtypes) -> np.dtype:
    return operation(*(np.ones(1, dtype) for dtype in dtypes)).dtype


_plain_numpy_dtype, _numpy_dtypes = interpreter._get_np_dtype, {}


def _numpy_dtype(dtype):
    """Remembered: the interpreter builds a table of all of them whenever it asks for one."""
    name = dtype.scalar.name
    found = _numpy_dtypes.get(name)
    if found is None:
        found = _numpy_dtypes[name] = _plain_numpy_dtype(dtype.scalar)
    return found


# --- the builder's methods ---


OPERATIONS = {
    "create_fma": _fma, "create_dot": _dot, "create_ashr": _shift, "create_idiv": _quotient, "get_bf16": _constant,
    "create_addptr": _address, "create_splat": _splat, "create_broadcast": _broadcast, "create_expand_dims": _expand,
}  # fmt: skip
MEMORY = {
    "create_load": (_load, replay.READS), "create_masked_load": (_masked_load, replay.READS),
    "create_store": (_store, replay.WRITES), "create_masked_store": (_store, replay.WRITES),
}  # fmt: skip


class _General:
    """In place of a builder: its general methods tell what they were called with."""

    def binary_op(self, *given):
        return _binary, given

    def unary_op(self, *given):
        return _unary, given

    def ternary_op(self, *given):
        return _ternary, given

    def cast_impl(self, *given):
        return _cast, given

    def create_idiv(self, *given):
        return _quotient, given


def _methods() -> dict[str, Callable]:
    """Methods of the builder, in terms of arrays where that is mended, and all of them noted by replay."""
    methods = {}
    for name, plain in vars(InterpreterBuilder).items():
        if name.startswith(("create_", "get_")) and not name.endswith("_ty"):
            make = _passed_on(plain)
            methods[name] = replay.on_arrays(make) if make else replay.watched(plain, _effect(name))
    methods |= {name: replay.on_arrays(make) for name, make in OPERATIONS.items()}
    return methods | {name: replay.on_arrays(make, effect) for name, (make, effect) in MEMORY.items()}


def _effect(name: str) -> str | None:
    return next((effect for part, effect in EFFECTS.items() if part in name), None)


def _passed_on(method) -> Callable | None:
    """What makes the function of a method that passes its arguments on to a general one, maybe with an operation."""
    arguments = [object() for _ in range(method.__code__.co_argcount - 1)]
    try:
        make, given = method(_General(), *arguments)
    except Exception:  # any: it does more, and stumbles over what stands for its arguments; so it is repeated as it is
        return None
    count = sum(x in arguments for x in given)
    if list(given[:count]) != arguments[:count]:
        return None
    return lambda *args: make(*args[:count], *given[count:])


# --- the language ---


def _patch_language_once() -> None:
    """``triton.language`` gets its interpreted meaning here and keeps it."""
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang(everything)
    kept = interpreter._LangPatchScope()  # nothing to restore
    interpreter._patch_lang = lambda function: kept
    for module in (tl, tl.core):
        module.reduce, module.associative_scan = _reduce, _scan


def _reduce(input, axis, combine_fn, keep_dims=False, **_):
    return replay.applied(interpreter.ReduceOps(axis, combine_fn, keep_dims).apply, input)


def _scan(input, axis, combine_fn, reverse=False, **_):
    return replay.applied(interpreter.ScanOps(axis, combine_fn, reverse).apply, input)


def _remember_operation(holder, name, operation, builder, scope) -> None:
    scope.set_attr(holder, name, _remembered(operation))


@functools.cache
def _remembered(operation) -> Callable:
    semantic = TritonSemantic(interpreter.interpreter_builder)
    return replay.remembering(lambda *args, **kwargs: operation(*args, **kwargs, _semantic=semantic), own=True)


class _Executor(GridExecutor):
    """Launches a kernel."""

    def __init__(self, kernel, *settings):
        super().__init__(_following(kernel), *settings)


_following = functools.cache(replay.following)
_plain_call = InterpretedFunction.__call__


def _remember_function(function, *args, **kwargs):
    """Calls a device function."""
    call = vars(function).get("remembered")
    if call is None:
        call = function.remembered = replay.remembering(functools.partial(_plain_call, function), own=False)
    return call(*args, **kwargs)
