"""Triton's interpreter decides an operation once, and then repeats what it did.

What an operation of the language makes of its arguments (promotion, broadcasting, a hundred checks) depends on their
types and on constants, never on the numbers in tensors. So the first call with given types and constants is watched:
what it has NumPy do is written down as a ``Program``, and later calls do that and nothing else. A ``triton.jit``
function that a kernel calls is treated alike, unless its control flow asks for a tensor's numbers; then what it calls
is. What depends on constants alone is computed once, and what is not used (checks of overflow that nobody asked for)
not at all.
"""

import functools
import types
from collections.abc import Callable, Sequence

import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

MOST = 4096  # programs of a function that are remembered
PLAIN = object()  # in place of a program: what was done cannot be repeated
CONSTANTS = (int, float, bool, str, types.NoneType, tl.constexpr, tl.dtype)


def handle_of(array, dtype) -> TensorHandle:
    """Without the checks of its constructor: for what has passed them once."""
    handle = TensorHandle.__new__(TensorHandle)
    handle.__dict__ = {"data": array, "dtype": dtype, "attr": {}}
    return handle


class Kind:
    """The type of a tensor, which of Triton's dtypes its handle has, and which of NumPy's its array: one object for
    equal ones."""

    __slots__ = ("dtype", "fields")
    known: dict[tuple, "Kind"] = {}

    def __init__(self, tensor):
        self.dtype = tensor.handle.dtype
        self.fields = {**vars(tensor), "kind": self}
        del self.fields["handle"]

    @classmethod
    def of(cls, tensor) -> "Kind":
        key = tensor.type.name, tensor.handle.dtype.name, tensor.handle.data.dtype
        kind = cls.known.get(key)
        if kind is None:
            kind = cls.known[key] = cls(tensor)
        tensor.kind = kind
        return kind

    def tensor(self, array) -> tl.tensor:
        tensor = tl.tensor.__new__(tl.tensor)
        tensor.__dict__ = fields = self.fields.copy()
        fields["handle"] = handle_of(array, self.dtype)
        return tensor


tl.tensor.kind = None  # of tensors that were made elsewhere, until it is asked for


class Result:
    """A tensor among a program's results."""

    __slots__ = ("kind", "slot")

    def __init__(self, kind: Kind, slot: int):
        self.kind, self.slot = kind, slot


class Program:
    """Functions of arrays: each step takes some slots and fills one. The first slots are the arguments', then come
    constants."""

    __slots__ = ("results", "slots", "steps")

    def __init__(self, slots: list, steps: Sequence[tuple[Callable, tuple[int, ...], int, bool]], results):
        self.slots, self.steps, self.results = slots, steps, results

    def run(self, tensors: Sequence):
        slots = [x.handle.data for x in tensors]
        slots += self.slots
        for function, takes, fills, _ in self.steps:
            if len(takes) == 2:
                slots[fills] = function(slots[takes[0]], slots[takes[1]])
            else:
                slots[fills] = function(*[slots[i] for i in takes])
        return self.filled(self.results, slots)

    def filled(self, results, slots):
        if type(results) is Result:
            return results.kind.tensor(slots[results.slot])
        return tuple([self.filled(x, slots) for x in results]) if type(results) is tuple else results


class Recording:
    """What one call of a function has NumPy do; ``own``: the function is Triton's, and asks for no numbers."""

    active: "Recording | None" = None

    def __init__(self, tensors: Sequence, own: bool):
        self.own, self.outer, self.failed = own, Recording.active, False
        self.slots: dict[int, int] = {}  # by the id of a handle
        self.kept: list[TensorHandle] = []  # or another would get the id of one that is gone
        self.constants: list = [None] * len(tensors)  # by slot: the array of a constant
        self.steps: list[tuple[Callable, tuple[int, ...], int, bool]] = []
        for slot, x in enumerate(tensors):
            self.name(x.handle, slot)

    def __enter__(self) -> "Recording":
        Recording.active = self
        return self

    def __exit__(self, *_) -> None:
        Recording.active = self.outer

    def fail(self) -> None:
        """What is done cannot be repeated, neither here nor where it is part of something."""
        self.failed = True
        if self.outer:
            self.outer.fail()

    def name(self, handle: TensorHandle, slot: int) -> None:
        self.slots[id(handle)] = slot
        self.kept.append(handle)

    def find(self, handles: Sequence[TensorHandle]) -> tuple[int, ...]:
        found = tuple([self.slots.get(id(handle)) for handle in handles])
        if None in found:  # it came about unwatched
            self.fail()
        return found

    def constant(self, array) -> int:
        self.constants.append(array)
        return len(self.constants) - 1

    def step(self, function: Callable, takes: tuple[int, ...], pure: bool, array=None) -> int:
        """→ the slot that is filled; ``array``: with what, if that is known."""
        if self.failed:
            return 0
        if pure and all([self.constants[i] is not None for i in takes]):
            return self.constant(function(*[self.constants[i] for i in takes]) if array is None else array)
        self.steps.append((function, takes, len(self.constants), pure))
        return self.constant(None)

    def note(
        self, function: Callable, handles: Sequence[TensorHandle], result: TensorHandle | None, pure: bool
    ) -> None:
        """Something was done of which ``function`` does the same with arrays."""
        takes = self.find(handles)
        slot = takes[0] if function is itself else self.step(function, takes, pure, getattr(result, "data", None))
        if result is not None:
            self.name(result, slot)

    def splice(self, program: Program, tensors: Sequence, results) -> None:
        """``program`` led from ``tensors`` to ``results``."""
        slots = list(self.find([x.handle for x in tensors]))
        if not self.failed:
            slots += [None if array is None else self.constant(array) for array in program.slots]
            for function, takes, fills, pure in program.steps:
                slots[fills] = self.step(function, tuple([slots[i] for i in takes]), pure)
            self.identify(program.results, results, slots)

    def identify(self, template, results, slots) -> None:
        if type(template) is Result:
            self.name(results.handle, slots[template.slot])
        elif type(template) is tuple:
            for part, result in zip(template, results):
                self.identify(part, result, slots)

    def program(self, tensors: Sequence, result) -> Program | object:
        """What to do from now on."""
        template = self.template(result)
        if self.failed:
            return PLAIN
        needed, steps = {part.slot for part in flat(template)}, []
        for function, takes, fills, pure in reversed(self.steps):
            if not pure or fills in needed:
                needed.update(takes)
                steps.append((function, takes, fills, pure))
        steps.reverse()
        first = len(tensors)
        constants = [i for i in range(first, len(self.constants)) if i in needed and self.constants[i] is not None]
        places = [*range(first), *constants, *(fills for _, _, fills, _ in steps)]
        where = {slot: place for place, slot in enumerate(places)}
        steps = [(f, tuple([where[i] for i in takes]), where[fills], pure) for f, takes, fills, pure in steps]
        for part in flat(template):
            part.slot = where[part.slot]
        return Program([self.constants[i] for i in places[first:]], steps, template)

    def template(self, result):
        """The results with a ``Result`` for each tensor."""
        if type(result) is tl.tensor and result.handle is not None:
            return Result(Kind.of(result), *self.find([result.handle]))
        if type(result) is tuple:
            return tuple([self.template(x) for x in result])
        if type(result) is not tl.tensor and not isinstance(result, CONSTANTS):
            self.fail()
        return result


def flat(template) -> list[Result]:
    if type(template) is tuple:
        return [x for part in template for x in flat(part)]
    return [template] if type(template) is Result else []


# --- what calls have in common ---


def remembering(plain: Callable, own: bool) -> Callable:
    """``plain``, decided once for each combination of types and constants."""
    programs: dict[tuple, object] = {}

    @functools.wraps(plain, updated=())
    def call(*args, **kwargs):
        if kwargs:
            kwargs.pop("_semantic", None)  # of the operation that this one is part of
        try:
            key, tensors = signature(args, kwargs)
        except KeyError:  # of a type that is not known to be a constant
            return plain(*args, **kwargs)
        program = programs.get(key)
        if program is PLAIN:
            return plain(*args, **kwargs)
        outer = Recording.active
        if program is None:
            # A tensor that is given twice is two: the next call with such types may be given two.
            args, kwargs = copy(args), dict(zip(kwargs, copy(tuple(kwargs.values()))))
            _, copies = signature(args, kwargs)
            with Recording(copies, own) as recording:
                result = plain(*args, **kwargs)
            if len(programs) >= MOST:
                programs.clear()
            program = programs[key] = recording.program(copies, result)
        else:
            result = program.run(tensors)
        if outer is not None and program is not PLAIN:
            outer.splice(program, tensors, result)
        return result

    return call


def signature(args, kwargs) -> tuple[tuple, list[tl.tensor]]:
    """What calls have in common that are treated alike, and the tensors of this one."""
    key, tensors = [], []
    for x in (*args, *kwargs, *kwargs.values()) if kwargs else args:
        kind = type(x)
        if kind is tl.tensor:  # most are
            tensors.append(x)
            key.append(x.kind or Kind.of(x))
        else:
            key.append(KEYS[kind](x, tensors))
    return tuple(key), tensors


def copy(x):
    """Other tensors of the same numbers."""
    if type(x) is tl.tensor:
        return Kind.of(x).tensor(x.handle.data)
    return type(x)([copy(part) for part in x]) if type(x) in (tuple, list, tl.tuple) else x


def _tensor(x, tensors) -> Kind:
    tensors.append(x)
    return x.kind or Kind.of(x)


def _itself(x, tensors):
    return x


def _typed(x, tensors) -> tuple:
    return type(x), x


def _several(x, tensors) -> tuple:
    return type(x), *[KEYS[type(part)](part, tensors) for part in x]


# By the type of an argument: what is equal for arguments that are treated alike; tensors are collected.
KEYS: dict[type, Callable] = {
    tl.tensor: _tensor,
    int: _itself,
    str: _itself,
    types.NoneType: _itself,
    bool: _typed,  # True is not 1
    float: lambda x, tensors: x.hex(),  # nor is 0.0 -0.0
    tl.constexpr: lambda x, tensors: (tl.constexpr, KEYS[type(x.value)](x.value, tensors)),
    tuple: _several,
    list: _several,
    tl.tuple: _several,
    slice: lambda x, tensors: (slice, x.start, x.stop, x.step),
    tl.dtype: lambda x, tensors: (tl.dtype, x.name),
    tl.block_type: lambda x, tensors: (tl.dtype, x.name),
    tl.pointer_type: lambda x, tensors: (tl.dtype, x.name),
    InterpretedFunction: _itself,
    types.FunctionType: _itself,
}


def itself(x):
    return x


def on_arrays(make: Callable, pure: bool = True) -> Callable:
    """The method of the builder that ``make`` describes: its arguments → (a function of the handles' arrays, the dtype
    of its result)."""

    def call(builder, *args):
        function, dtype = make(*args)
        handles = [x for x in args if type(x) is TensorHandle]
        result = TensorHandle(function(*[x.data for x in handles]), dtype)
        if Recording.active is not None:
            Recording.active.note(function, handles, result, pure)
        return result

    return call


def applied(operation: Callable, input):
    """``operation(input)``, which reaches into tensors: a reduction or a scan."""
    result = unwatched(operation, input)
    if Recording.active is not None:
        if type(input) is tl.tensor and type(result) is tl.tensor:
            kind = Kind.of(input)
            Recording.active.note(lambda x: operation(kind.tensor(x)).handle.data, [input.handle], result.handle, True)
        else:
            Recording.active.fail()
    return result


def watched(method: Callable, pure: bool) -> Callable:
    """A method of the builder that is noted, and repeated as it is."""

    @functools.wraps(method)
    def call(builder, *args):
        recording = Recording.active
        if recording is None:
            return method(builder, *args)
        result = unwatched(method, builder, *args)
        if not isinstance(result, TensorHandle | None) or not all(map(_is_plain, args)):
            recording.fail()
            return result
        places = [i for i, x in enumerate(args) if type(x) is TensorHandle]
        dtypes = [args[i].dtype for i in places]
        rest = [None if type(x) is TensorHandle else x for x in args]

        def again(*arrays):
            given = rest.copy()
            for i, array, dtype in zip(places, arrays, dtypes):
                given[i] = handle_of(array, dtype)
            found = method(builder, *given)
            return None if found is None else found.data

        recording.note(again, [args[i] for i in places], result, pure)
        return result

    return call


def unwatched(function: Callable, *args):
    """``function(*args)``, and what it calls is not noted."""
    recording, Recording.active = Recording.active, None
    try:
        return function(*args)
    finally:
        Recording.active = recording


def _is_plain(x) -> bool:
    """A tensor or something that does not change; no pointers to blocks, no descriptors."""
    if isinstance(x, list | tuple):
        return not any(isinstance(part, TensorHandle) for part in x) and all(map(_is_plain, x))
    return isinstance(x, (TensorHandle, *CONSTANTS)) or type(x).__module__.startswith("triton._C")


def asked(method: Callable, own=None) -> Callable:
    """A method of tensors that asks for their numbers; ``own``: what Triton's own functions are answered."""

    def call(tensor):
        recording = Recording.active
        if recording is not None:
            if recording.own and own is not None:
                return own
            recording.fail()
        return method(tensor)

    return call
