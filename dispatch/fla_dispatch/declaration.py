"""From an annotated function to its ``Declaration``: what it takes, what it returns, and what must hold between them.

Everything else derives from it: binding, error messages, the torch.library schema and fake kernels, test axes,
benchmark shapes and documentation tables.
"""

import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fla_dispatch.dims import OUTER, VARYING, Dim, alternatives, fitting, parse_shape

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int32, torch.int64)

# Keywords every operator once had, under every name they went by.
RENAMED = {"transpose_state_layout": "state_v_first"}
REMOVED = {"head_first": "inputs are always [B, T, H, ...]; transpose them before the call"}

ACCUMULATOR = "accumulator"  # a result dtype: float32, or float64 where the inputs are float64


@dataclass(frozen=True, slots=True)
class TensorParameter:
    name: str
    position: int
    keyword_only: bool
    optional: bool
    shapes: tuple[tuple[Dim, ...], ...]  # alternatives, told apart by their rank
    dtypes: tuple[torch.dtype, ...]
    constant: bool = False  # floating-point, and has no gradient

    @property
    def floating(self) -> bool:
        return self.dtypes is FLOATS

    @property
    def differentiable(self) -> bool:
        return self.floating and not self.constant

    @property
    def has_outer(self) -> bool:
        """Whether ``...`` is in its shape."""
        return len(self.shapes) > 1 and any(dim.text in OUTER for dim in self.shapes[-1])

    @property
    def shape_texts(self) -> tuple[str, ...]:
        return tuple(" ".join(dim.text for dim in shape) for shape in self.shapes)


@dataclass(frozen=True, slots=True)
class OptionParameter:
    name: str
    position: int
    keyword_only: bool
    optional: bool  # None is a legal value
    type: type  # bool, int, float, torch.dtype, or object for what only the body understands
    default: object
    required: bool


@dataclass(frozen=True, slots=True)
class Result:
    """One result. ``when`` names the option that asks for it; unasked it is None, or left out if ``omitted``.

    Of alternative shapes the longest holds whose letters the call gives a size. Of several dtypes the first holds that
    is not an option left None.
    """

    shape: str
    dtype: str | torch.dtype | tuple[str | torch.dtype, ...]  # a parameter's name (its dtype), ACCUMULATOR, or a dtype
    when: str | None = None
    omitted: bool = False
    shapes: tuple[tuple[Dim, ...], ...] = field(init=False, default=())

    def __post_init__(self):
        object.__setattr__(self, "shapes", alternatives(self.shape))

    @property
    def dtypes(self) -> tuple[str | torch.dtype, ...]:
        return self.dtype if isinstance(self.dtype, tuple) else (self.dtype,)

    @property
    def counts_chunks(self) -> bool:
        return any("NT" in dim.letters for shape in self.shapes for dim in shape)


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition between options, presence of tensors and dimensions, written as a Python expression.

    In ``condition`` an option stands for its value, a tensor for its facts or None, a letter for its size, and
    ``inference`` for torch.inference_mode. ``when`` names an option: unless it is set, the rule holds.
    """

    condition: str
    message: str
    error: type[Exception] = ValueError
    when: str | None = None
    names: tuple[str, ...] = field(init=False, default=())
    code: types.CodeType = field(init=False, default=None, compare=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "code", compile(self.condition, "<rule>", "eval"))
        object.__setattr__(self, "names", self.code.co_names)

    def holds(self, *values) -> bool:
        """Whether the condition is true of these values of ``names``."""
        return eval(self.code, {"__builtins__": {}} | dict(zip(self.names, values, strict=True)))

    @property
    def varies(self) -> bool:
        """True where the condition reads a size that changes between calls with one and the same decision."""
        return not VARYING.isdisjoint(self.names)


@dataclass(frozen=True, slots=True)
class Declaration:
    function: str
    operation: str
    body: Callable
    parameters: tuple[TensorParameter | OptionParameter, ...]
    results: Mapping[str, Result]
    rules: tuple[Rule, ...]
    derived: Mapping[str, Callable]  # option → its value from the dimensions, where the caller left it None
    layouts: Mapping[str, tuple[str, str]]  # option → (shape without it, shape with it)
    same_dtype: tuple[tuple[str, ...], ...]
    renamed: Mapping[str, str]
    removed: Mapping[str, str]
    composed: Mapping[str, Callable]  # option → how a call in which it is set is made of calls in which it is not
    chunk_size: str | None  # the option that NT, the number of chunks, depends on
    tolerance: str
    named_shapes: Mapping[str, Mapping[str, object]]

    @property
    def tensors(self) -> tuple[TensorParameter, ...]:
        return tuple(p for p in self.parameters if isinstance(p, TensorParameter))

    @property
    def options(self) -> tuple[OptionParameter, ...]:
        return tuple(p for p in self.parameters if isinstance(p, OptionParameter))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    @property
    def positional(self) -> int:
        return sum(not p.keyword_only for p in self.parameters)

    def parameter(self, name: str) -> TensorParameter | OptionParameter:
        return next(p for p in self.parameters if p.name == name)

    def shapes_of(self, parameter: TensorParameter, options: Mapping[str, object]) -> tuple[tuple[Dim, ...], ...]:
        """The parameter's shapes under the layout options that are set."""
        return tuple(self._laid_out(shape, options) for shape in parameter.shapes)

    def result_dims(
        self, result: Result, options: Mapping[str, object], sizes: Mapping[str, int] = {}
    ) -> tuple[Dim, ...]:
        shapes = result.shapes
        return self._laid_out(shapes[0] if len(shapes) == 1 else fitting(shapes, {*sizes, "NT"}), options)

    def _laid_out(self, dims: tuple[Dim, ...], options: Mapping[str, object]) -> tuple[Dim, ...]:
        text = " ".join(dim.text for dim in dims)
        for option, (plain, laid_out) in self.layouts.items():
            if options.get(option) and text.endswith(plain):
                return parse_shape(text.removesuffix(plain) + laid_out)
        return dims

    def wanted(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Names of the results the options ask for."""
        return tuple(name for name, result in self.results.items() if result.when is None or options[result.when])


def declare(
    body: Callable,
    operation: str,
    *,
    returns,
    rules: Sequence[Rule] = (),
    derive=None,
    layouts=None,
    same_dtype=(),
    constants=(),
    composed=None,
    chunk_size=None,
    tolerance="default",
    shapes=None,
) -> Declaration:
    """Read ``body``'s annotated signature. Raises ``TypeError`` where an annotation is not understood."""
    parameters = tuple(
        _parameter(body.__name__, position, parameter, parameter.name in constants)
        for position, parameter in enumerate(inspect.signature(body).parameters.values())
    )
    names = {p.name for p in parameters}
    options = {p.name for p in parameters if isinstance(p, OptionParameter)}
    results = {"result": returns} if isinstance(returns, Result) else dict(returns)
    renamed = {old: new for old, new in RENAMED.items() if new in names}
    derive, layouts, composed = dict(derive or {}), dict(layouts or {}), dict(composed or {})
    letters = {
        letter
        for p in parameters
        if isinstance(p, TensorParameter)
        for shape in p.shapes
        for dim in shape
        for letter in dim.letters
    } | {"N"}
    for known, used in (
        (names | letters | {"inference"}, [name for rule in rules for name in rule.names]),
        (
            options,
            [
                *derive,
                *layouts,
                *composed,
                *(r.when for r in results.values() if r.when),
                *([chunk_size] if chunk_size else []),
            ],
        ),
        (names, [rule.when for rule in rules if rule.when]),
        (names | {ACCUMULATOR}, [d for r in results.values() for d in r.dtypes if isinstance(d, str)]),
        (names, [name for group in same_dtype for name in group]),
        ({p.name for p in parameters if isinstance(p, TensorParameter) and p.floating}, list(constants)),
        (letters - VARYING, [name for expression in derive.values() for name in _expression(expression).co_names]),
    ):
        for name in used:
            if name not in known:
                raise ValueError(
                    f"{body.__name__}: the declaration speaks of `{name}`, which is not among its parameters"
                )
    derived = {option: _derivation(expression) for option, expression in derive.items()}
    return Declaration(
        body.__name__,
        operation,
        body,
        parameters,
        results,
        tuple(rules),
        derived,
        layouts,
        tuple(map(tuple, same_dtype)),
        renamed,
        REMOVED,
        composed,
        chunk_size,
        tolerance,
        dict(shapes or {}),
    )


@functools.cache
def _expression(text: str) -> types.CodeType:
    return compile(text, "<derive>", "eval")


def _derivation(expression: str) -> Callable:
    code = _expression(expression)
    return lambda sizes: eval(code, {"__builtins__": {}}, sizes)


def _parameter(
    function: str, position: int, parameter: inspect.Parameter, constant: bool
) -> TensorParameter | OptionParameter:
    keyword_only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    if not keyword_only and parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise TypeError(f"{function}: parameter {parameter.name} must be an ordinary or keyword-only parameter")
    annotation = parameter.annotation
    members = typing.get_args(annotation) if _is_union(annotation) else (annotation,)
    optional = type(None) in members or annotation is None
    members = tuple(member for member in members if member not in (type(None), None))
    if members and all(hasattr(member, "dim_str") for member in members):
        dtypes = _dtypes(members[0].dtypes)
        if dtypes is None:
            raise TypeError(
                f"{function}: cannot read the annotation {annotation!r} of {parameter.name}: "
                "tensors are Float or Integer"
            )
        shapes = tuple(shape for member in members for shape in alternatives(member.dim_str))
        return TensorParameter(parameter.name, position, keyword_only, optional, shapes, dtypes, constant)
    if len(members) > 1 or members and members[0] not in (bool, int, float, torch.dtype, object):
        raise TypeError(f"{function}: cannot read the annotation {annotation!r} of {parameter.name}")
    required = parameter.default is inspect.Parameter.empty
    return OptionParameter(
        parameter.name,
        position,
        keyword_only,
        optional,
        members[0] if members else object,
        None if required else parameter.default,
        required,
    )


def _dtypes(names) -> tuple[torch.dtype, ...] | None:
    """The dtypes of jaxtyping's Float or Integer."""
    if {"float16", "float32", "float64"} <= set(names):
        return FLOATS
    return INTEGERS if {"int32", "int64"} <= set(names) else None


def _is_union(annotation) -> bool:
    return isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union
