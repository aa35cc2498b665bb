"""Triton's interpreter decides an operation once, and then repeats what it did.

What an operation of the language makes of its arguments (promotion, broadcasting, a hundred checks) depends on their
types and on constants, never on the numbers in tensors. So the first call with given types and constants is watched:
what it has NumPy do is written down as a ``Program``, and later calls do that and nothing else. What depends on
constants alone is computed once, and what is not used (checks of overflow that nobody asked for) not at all.

- A ``triton.jit`` function that a kernel calls is treated alike, unless its control flow asks for a tensor's numbers:
  then only what it calls is.
- So is a kernel, program by program of its grid. It may ask for numbers; the answers are part of the ``Way`` that it
  went, which a program leaves where an answer is another. Then what it wrote is undone, and it tries the next way.

What cannot be repeated (a tensor that came about unseen, an atomic operation before a question) runs as it always did.
"""

import inspect
import types
from collections.abc import Callable, Sequence

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as memory
from triton.runtime.interpreter import InterpretedFunction, TensorHandle

MOST = 4096  # programs of a function that are remembered
WAYS = 8  # of a kernel with arguments of some types and constants that are remembered
MOST_STEPS = 500_000  # of all ways: 200 MB
TRIES = 3  # to record a kernel: the first may find out which of its functions ask for numbers
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


# A function of arrays, the slots that it takes, the slot that it fills, and its effect: None, or
READS = "reads"  # memory, or which program this is
WRITES = "writes"  # memory: the function is ``write``
ASKS = "asks"  # whether a number is the same again; raises ``Otherwise`` if not
ACTS = "acts"  # in a way that cannot be undone
Step = tuple[Callable, tuple[int, ...], int, str | None]


class Program:
    """Steps, one after the other. The first slots are the arguments', then come constants."""

    __slots__ = ("results", "slots", "steps")

    def __init__(self, slots: list, steps: Sequence[Step], results):
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
    """What one call of a function has NumPy do. ``own``: the function is Triton's, and asks for no numbers; ``whole``:
    it is a kernel, which may ask."""

    active: "Recording | None" = None

    def __init__(self, tensors: Sequence, own: bool = False, whole: bool = False):
        self.own, self.whole, self.outer, self.failed = own, whole, Recording.active, False
        self.slots: dict[int, int] = {}  # by the id of a handle
        self.kept: list[TensorHandle] = []  # or another would get the id of one that is gone
        self.constants: list = [None] * len(tensors)  # by slot: the array of a constant
        self.steps: list[Step] = []
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

    def step(self, function: Callable, takes: tuple[int, ...], effect: str | None, array=None) -> int:
        """→ the slot that is filled; ``array``: with what, if that is known."""
        if self.failed:
            return 0
        if effect is None and all([self.constants[i] is not None for i in takes]):
            return self.constant(function(*[self.constants[i] for i in takes]) if array is None else array)
        self.steps.append((function, takes, len(self.constants), effect))
        return self.constant(None)

    def note(self, function: Callable, handles: Sequence, result: TensorHandle | None, effect: str | None = None):
        """Something was done of which ``function`` does the same with arrays."""
        takes = self.find(handles)
        slot = takes[0] if function is itself else self.step(function, takes, effect, getattr(result, "data", None))
        if result is not None:
            self.name(result, slot)

    def ask(self, question: Callable, handle: TensorHandle, answer) -> None:
        """What follows is right for this answer only."""

        def again(array):
            if question(array) != answer:
                raise Otherwise

        (slot,) = self.find([handle])
        if not self.failed and self.constants[slot] is None:
            self.step(again, (slot,), ASKS)

    def splice(self, program: Program, tensors: Sequence, results) -> None:
        """``program`` led from ``tensors`` to ``results``."""
        slots = list(self.find([x.handle for x in tensors]))
        if not self.failed:
            slots += [None if array is None else self.constant(array) for array in program.slots]
            for function, takes, fills, effect in program.steps:
                slots[fills] = self.step(function, tuple([slots[i] for i in takes]), effect)
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
        for function, takes, fills, effect in reversed(self.steps):
            if effect or fills in needed:
                needed.update(takes)
                steps.append((function, takes, fills, effect))
        steps.reverse()
        first = len(tensors)
        constants = [i for i in range(first, len(self.constants)) if i in needed and self.constants[i] is not None]
        places = [*range(first), *constants, *(fills for _, _, fills, _ in steps)]
        where = {slot: place for place, slot in enumerate(places)}
        steps = [(f, tuple([where[i] for i in takes]), where[fills], effect) for f, takes, fills, effect in steps]
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
    """``plain``, an operation or a device function, decided once for each combination of types and constants."""
    programs: dict[tuple, object] = {}

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
            result = program.run(tensors) if outer is None else unwatched(program.run, tensors)
        if outer is not None and program is not PLAIN:
            outer.splice(program, tensors, result)
        return result

    return call


class Otherwise(Exception):
    """A kernel goes another way than when it was recorded."""


class Way:
    """What a kernel did once, with all the answers to its questions about numbers."""

    __slots__ = ("repeatable", "slots", "steps", "undo")

    def __init__(self, program: Program):
        self.slots, self.steps, self.undo = program.slots, list(program.steps), []
        last = max((i for i, (*_, effect) in enumerate(self.steps) if effect is ASKS), default=0)
        self.repeatable = all(effect is not ACTS for *_, effect in self.steps[:last])
        for i, (_, takes, fills, effect) in enumerate(self.steps[:last]):
            if effect is WRITES:
                self.steps[i] = self.write, takes, fills, effect

    def write(self, pointers, values, *mask) -> None:
        self.undo.append((pointers, read(pointers, values.dtype, *mask), *mask))
        write(pointers, values, *mask)

    def follow(self, tensors: Sequence) -> bool:
        """Whether the kernel goes this way; if not, memory is as it was."""
        slots = [x.handle.data for x in tensors]
        slots += self.slots
        self.undo.clear()
        try:
            for function, takes, fills, _ in self.steps:
                slots[fills] = function(*[slots[i] for i in takes])
        except Otherwise:
            for written in reversed(self.undo):
                write(*written)
            return False
        return True


class Ways:
    """Those of all kernels, by kernel and what their arguments have in common."""

    known: dict[tuple, list[Way]] = {}
    failures: dict[tuple, int] = {}  # how often what a kernel did could not be repeated
    steps = 0

    @classmethod
    def add(cls, key: tuple, program: Program | object) -> None:
        way = None if program is PLAIN else Way(program)
        if way is None or not way.repeatable:
            cls.failures[key] = cls.failures.get(key, 0) + 1
            return
        cls.steps += len(way.steps)
        if cls.steps > MOST_STEPS:
            cls.known.clear()
            cls.steps = len(way.steps)
        cls.known.setdefault(key, []).insert(0, way)

    @classmethod
    def follow(cls, key: tuple, tensors: Sequence) -> bool:
        """Whether it was one of those that are known."""
        known = cls.known.get(key, [])
        for i, way in enumerate(known):
            if way.follow(tensors):
                known.insert(0, known.pop(i))
                return True
        return False

    @classmethod
    def full(cls, key: tuple) -> bool:
        return len(cls.known.get(key, [])) >= WAYS or cls.failures.get(key, 0) >= TRIES


def following(kernel: Callable) -> Callable:
    """A kernel that goes the ways that it went before with arguments of the same types and constants: most programs of
    a grid go one of two or three."""

    def call(**given):
        try:
            key, tensors = signature((), given)
        except KeyError:
            return kernel(**given)
        key = kernel, key
        if Ways.follow(key, tensors):
            return None
        if Ways.full(key):
            return kernel(**given)
        given = dict(zip(given, copy(tuple(given.values()))))
        _, copies = signature((), given)
        with Recording(copies, whole=True) as recording:
            kernel(**given)
        return Ways.add(key, recording.program(copies, None))

    call.__signature__, call.__annotations__ = inspect.signature(kernel), kernel.__annotations__
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


def _several(x, tensors) -> tuple:
    return type(x), *[KEYS[type(part)](part, tensors) for part in x]


# By the type of an argument: what is equal for arguments that are treated alike; tensors are collected.
KEYS: dict[type, Callable] = {
    tl.tensor: _tensor,
    int: _itself,
    str: _itself,
    types.NoneType: _itself,
    bool: lambda x, tensors: (bool, x),  # True is not 1
    float: lambda x, tensors: x.hex(),  # nor is 1.0, and 0.0 is not -0.0
    tl.constexpr: lambda x, tensors: (tl.constexpr, KEYS[type(x.value)](x.value, tensors)),
    tuple: _several,
    list: _several,
    tl.tuple: _several,
    slice: lambda x, tensors: _several((x.start, x.stop, x.step), tensors),
    tl.dtype: lambda x, tensors: (tl.dtype, x.name),
    tl.block_type: lambda x, tensors: (tl.dtype, x.name),
    tl.pointer_type: lambda x, tensors: (tl.dtype, x.name),
    InterpretedFunction: _itself,
    types.FunctionType: _itself,
}


def itself(x):
    return x


def read(pointers, dtype, mask=None, other=None):
    mask = np.ones(pointers.shape, bool) if mask is None else mask
    return memory.load(pointers, mask, np.zeros(pointers.shape, dtype) if other is None else other, dtype)


def write(pointers, values, mask=None) -> None:
    memory.store(pointers, values, np.ones(pointers.shape, bool) if mask is None else mask)


def on_arrays(make: Callable, effect: str | None = None) -> Callable:
    """The method of the builder that ``make`` describes: its arguments → (a function of the handles' arrays, the dtype
    of its result or None if it has none)."""

    def call(builder, *args):
        function, dtype = make(*args)
        handles = [x for x in args if type(x) is TensorHandle]
        found = function(*[x.data for x in handles])
        result = None if dtype is None else TensorHandle(found, dtype)
        if Recording.active is not None:
            Recording.active.note(function, handles, result, effect)
        return result

    return call


def applied(operation: Callable, input):
    """``operation(input)``, which reaches into tensors: a reduction or a scan."""
    result = unwatched(operation, input)
    if Recording.active is not None:
        if type(input) is tl.tensor and type(result) is tl.tensor:
            kind = Kind.of(input)
            Recording.active.note(lambda x: operation(kind.tensor(x)).handle.data, [input.handle], result.handle)
        else:
            Recording.active.fail()
    return result


def watched(method: Callable, effect: str | None) -> Callable:
    """A method of the builder that is noted, and repeated as it is."""

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

        recording.note(again, [args[i] for i in places], result, effect)
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


def asking(question: Callable, own=None) -> Callable:
    """A method of tensors that asks about their numbers; ``own``: what Triton's own functions are answered."""

    def ask(tensor):
        recording = Recording.active
        if recording is not None and recording.own and own is not None:
            return own
        answer = question(tensor.handle.data)
        if recording is not None:
            if recording.whole:
                recording.ask(question, tensor.handle, answer)
            else:
                recording.fail()
        return answer

    return ask
