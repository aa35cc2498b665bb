"""The public operator: what ``@dispatch`` makes of a declaration."""

import builtins
import functools
import logging
import types
from collections.abc import Mapping
from operator import index

import torch

from fla_dispatch import bind, bridge, errors, gates, registry
from fla_dispatch.bind import Described
from fla_dispatch.call import Call, Facts
from fla_dispatch.declaration import Declaration, OptionParameter, TensorParameter, declare
from fla_dispatch.extension import note_route
from fla_dispatch.extension import registry as compiled
from fla_dispatch.gates import Gates
from fla_dispatch.guard import is_fake
from fla_dispatch.plan import Plan

log = logging.getLogger("fla_dispatch")

CACHED_DECISIONS = 1024  # per operator; beyond that the cache starts afresh

_operators: dict[str, "Operator"] = {}


def dispatch(operation: str, **declared):
    """Decorator: turn an annotated function into an operator of ``operation`` whose body is the semantic fallback.

    Keywords: ``returns`` (a ``Result``, or a dict of them by name), ``rules``, ``derive`` (option → expression over
    dimension letters), ``layouts`` (option → (shape without it, with it)), ``same_dtype`` (groups of tensor names),
    ``constants`` (floating-point tensors without a gradient), ``composed`` (option → a function that makes a call in
    which it is set of calls in which it is not, which are all that backends and the body see), ``chunk_size`` (the
    option that chunks are counted by), ``tolerance`` and ``shapes`` (named sizes for tests and benchmarks). See
    docs/api-and-dispatch.md.
    """

    def decorate(body):
        return Operator(declare(body, operation, **declared)).public

    return decorate


class Operator:
    def __init__(self, declaration: Declaration):
        self.declaration = declaration
        self.defaults = {
            p.name: getattr(p, "default", None)
            for p in declaration.parameters
            if isinstance(p, OptionParameter) or p.optional
        }
        self.simple = self.defaults | dict.fromkeys(declaration.composed, False)  # what a backend sees unless told
        self._plans: dict[tuple, Plan] = {}
        self._told: set[tuple] = set()
        bridge.await_library_op(self)
        self.compiled = (
            None
            if compiled is None
            else compiled.Operator(**self._table(), call_type=Call, plan=self.plan_for, slow=self.call_in_order)
        )
        registry.on_change(self.forget)
        _operators[declaration.function] = self
        self.public = _public(self)

    # --- eager ---

    def call_in_python(self, *args, **kwargs):
        """Bind, choose and run without the compiled path."""
        return self.call_in_order(*bind.arrange(self.declaration, args, kwargs))

    def call_in_order(self, *values):
        """The same, given one value per parameter."""
        if any(map(is_fake, values)):
            return _tracer(self)(**dict(zip(self.declaration.names, values, strict=True)))
        call = self.prepare(values)
        note_route(call.plan.route)
        return call.plan.run(call)

    def prepare(self, values: list, backend: str | None = None) -> Call:
        """Check arranged values and choose; ``backend`` names one that was chosen already."""
        full = self._with_opaque(values)
        full, facts = bind.check(self.declaration, full, traced=backend is not None)
        return Call(self._plan(facts, backend or Gates.read()), tuple(full))

    def plan_for(self, gate_names, gate_values, context, *values) -> Plan | None:
        """For the compiled path: check everything once and decide; None where it must not remember the decision."""
        _, facts = bind.check(self.declaration, list(values))
        plan = self._plan(facts, Gates.read_by_extension(gate_names, gate_values, context))
        return None if plan.always_check else plan

    def _plan(self, facts: Facts, decider: Gates | str) -> Plan:
        """The plan for these facts under these gates, or with the backend that a graph was traced with."""
        key = (bind.key(facts), decider)
        plan = self._plans.get(key)
        if plan is None:
            plans = self._plans  # a registration meanwhile puts another dict in its place
            plan = self._decide(facts, decider)
            if len(plans) >= CACHED_DECISIONS:
                plans.clear()
            plans[key] = plan
        return plan

    def _decide(self, facts: Facts, decider: Gates | str) -> Plan:
        if isinstance(decider, str):
            chosen = self.backend_named(decider)
            route = registry.Route(facts.function, decider, (), "torch.compile")
        else:
            chosen, route = registry.choose(facts, self.simple, decider)
            self._tell(route, facts)
        return Plan(self.declaration, facts, chosen, route)

    def _tell(self, route: registry.Route, facts: Facts) -> None:
        """Log the first use of a route; warn once where the fallback runs on an accelerator unasked."""
        told = route.backend, facts.device.type, route.forced_by is None
        if told not in self._told:
            self._told.add(told)
            log.info("%s", route)
            if route.backend == gates.FALLBACK and not route.forced_by and facts.device.type not in ("cpu", "meta"):
                errors.warn(errors.fallback_on_accelerator(facts.function, facts.device, route.refusals))

    def backend_named(self, name: str):
        if name == gates.FALLBACK:
            return None
        rivals = registry.backends(self.declaration.operation, self.declaration.function)
        found = next((b for b in rivals if b.name == name), None)
        if found is None:
            raise errors.unknown_backend(self.declaration.function, name, "the compiled graph", registry.known_names())
        return found

    def forget(self) -> None:
        """Drop every cached decision."""
        self._plans = {}
        if self.compiled is not None:
            self.compiled.forget()

    # --- torch.compile ---

    def _with_opaque(self, values: list) -> list:
        """torch.library ops carry no opaque parameters; put their defaults back."""
        if len(values) == len(self.declaration.parameters):
            return list(values)
        given = iter(values)
        in_schema = set(bridge.in_schema(self.declaration))
        return [next(given) if p in in_schema else p.default for p in self.declaration.parameters]

    # --- composed calls ---

    def simplified(self, values: list) -> list:
        """Arranged values without composed options, and of several tensors in one place the first."""
        given = dict(zip(self.declaration.names, values, strict=True))
        composed = {name for name in self.declaration.composed if isinstance(given[name], int) and given[name] == 1}
        if not composed:
            return values
        tensors = {p.name for p in self.declaration.tensors}
        return [
            False if name in composed else next(iter(v), None) if name in tensors and type(v) in (tuple, list) else v
            for name, v in given.items()
        ]

    # --- questions ---

    def explain(self, *args, **kwargs) -> registry.Route:
        """Who would run this call and why every other backend would not; runs nothing."""
        values = self.simplified(bind.arrange(self.declaration, args, kwargs))
        _, facts = bind.check(self.declaration, values)
        try:
            return registry.choose(facts, self.simple, Gates.read())[1]
        except errors.BackendRefused as refusal:
            return registry.Route(facts.function, "none", (("forced", str(refusal)),))

    def describe(
        self,
        dims: Mapping[str, int],
        *,
        dtype=torch.bfloat16,
        device="cpu",
        arch=None,
        tensors=(),
        requires_grad=False,
        **options,
    ) -> dict[str, object]:
        """Arguments for ``explain`` that stand for tensors nobody has to allocate.

        ``dims`` gives the letters' sizes, ``tensors`` names the optional tensors that are present.
        """
        device = torch.device(device)
        sizes = dict(dims)
        sizes.setdefault("N", sizes.get("B", 1))
        arguments = dict(options)
        for p in self.declaration.tensors:
            if p.optional and p.name not in tensors:
                continue
            shape = self.declaration.shapes_of(p, options)[0]
            arguments[p.name] = Described(
                tuple(dim.size(sizes) for dim in shape),
                dtype if p.floating else torch.int64,
                torch.device("cpu") if p.name.endswith(bind.HOST_COPY) else device,
                requires_grad and p.differentiable,
                arch,
            )
        return arguments

    # --- the table behind the compiled path ---

    def _table(self):
        """Parameters as the compiled path reads them: kinds, and for each tensor the varying axes per rank."""
        kinds = []
        for p in self.declaration.parameters:
            if isinstance(p, TensorParameter):
                shapes = tuple(tuple(_varying(dim) for dim in shape) for shape in p.shapes)
                kinds.append(("tensor", p.optional, shapes, p.differentiable))
            else:
                kinds.append((p.type.__name__, p.optional))
        names = self.declaration.names
        packed, host_copy = (names.index(n) if n in names else -1 for n in (bind.PACKED, bind.PACKED + bind.HOST_COPY))
        return dict(kinds=tuple(kinds), packed=packed, host_copy=host_copy)


def _varying(dim):
    """("B", 0) for an axis whose size varies, None for one whose size belongs to the decision of the compiled path."""
    return (dim.letters[0], dim.offset) if len(dim.letters) == 1 and dim.letters[0] in ("B", "T", "N") else None


_FRONT = """
def front({parameters}, **unknown):
    if is_dynamo_compiling() or unknown:
        return differently(unknown, {in_order})
    return run({in_order})
"""

_COMPOSING_FRONT = """
def {name}({parameters}, **unknown):
    if {composed} or unknown:
        return compose({by_name}, **unknown)
    return simple({by_name})
"""


@functools.cache
def _front(positional: int, count: int) -> types.CodeType:
    """The code behind public functions of ``count`` parameters: compiled once, for operators differ in names only."""
    names = [f"_{position}" for position in range(count)]
    words = [*names[:positional], *(["*"] if positional < count else []), *names[positional:]]
    written = {}
    exec(_FRONT.format(parameters=", ".join(words), in_order=", ".join(names)), written)
    return written["front"].__code__


def _public(operator: Operator):
    """The function users call.

    Dynamo refuses C callables, so a thin Python front asks who is calling. It has the operator's own parameters because
    the interpreter binds those for less than a ``*args, **kwargs`` detour costs.
    """
    declaration = operator.declaration
    function, names, defaults = declaration.function, declaration.names, operator.defaults
    trace = _tracer(operator)

    def differently(unknown, *values):
        arguments = dict(zip(names, values, strict=True))
        if torch.compiler.is_dynamo_compiling():
            return trace(**arguments, **unknown)
        return operator.call_in_python(**arguments, **unknown)

    namespace = {
        "__builtins__": builtins,  # Dynamo looks there
        "differently": differently,
        "is_dynamo_compiling": torch.compiler.is_dynamo_compiling,
        "run": operator.compiled or operator.call_in_order,
    }
    code = _front(declaration.positional, len(names)).replace(
        co_name=function, co_filename=errors.FRONT.format(function), co_varnames=(*names, "unknown")
    )
    positional = names[: declaration.positional]
    required = next((i for i, name in enumerate(positional) if name in defaults), len(positional))
    public = types.FunctionType(code, namespace, function, tuple(map(defaults.get, positional[required:])))
    public.__kwdefaults__ = {name: defaults[name] for name in names[len(positional) :] if name in defaults}
    if declaration.composed:
        public = _composing(operator, public)
    public = functools.update_wrapper(public, declaration.body)
    public.operator = operator
    return public


def _composing(operator: Operator, simple):
    """The front of an operator with composed options: calls in which one is set are made of calls of ``simple``."""
    declaration = operator.declaration
    words = [
        f"{p.name}=defaults[{p.name!r}]" if p.name in operator.defaults else p.name for p in declaration.parameters
    ]
    if declaration.positional < len(words):
        words.insert(declaration.positional, "*")
    source = _COMPOSING_FRONT.format(
        name=declaration.function,
        parameters=", ".join(words),
        by_name=", ".join(f"{name}={name}" for name in declaration.names),
        composed=" or ".join(f"{option} is not False" for option in declaration.composed),
    )
    namespace = {"defaults": operator.defaults, "compose": _composer(operator, simple), "simple": simple}
    exec(compile(source, errors.FRONT.format(declaration.function), "exec"), namespace)
    return namespace[declaration.function]


def _composer(operator: Operator, simple):
    """What makes a call in which composed options are set of calls of ``simple``, in which they are not."""
    declaration = operator.declaration

    def compose(**arguments):
        traced = torch.compiler.is_dynamo_compiling()
        if traced:
            _check_keywords(declaration.function, tuple(arguments))
        values = bind.arrange(declaration, (), arguments)
        arguments = dict(zip(declaration.names, values, strict=True))
        if not traced:
            bind.check(declaration, operator.simplified(values))
        for option, composition in declaration.composed.items():
            if arguments[option]:
                return composition(simple, **arguments)
        return simple(**arguments)

    errors.composing.add(compose.__code__)
    return compose


# --- traced calls ---


def _backend_for_graph(function: str, descriptions: tuple, options: tuple, needs_grad: bool) -> str:
    """Choose while a graph is traced, from what is constant in it; the graph keeps the backend it was traced with."""
    operator = _operators[function]
    bridge.library_op(function)  # there at the latest now
    tensors = iter(descriptions)
    rest = iter(options)
    values = []
    for p in operator.declaration.parameters:
        if isinstance(p, TensorParameter):
            description = next(tensors)
            values.append(None if description is None else Described(*description, needs_grad and p.differentiable))
        else:
            values.append(next(rest))
    with torch.set_grad_enabled(needs_grad or torch.is_grad_enabled()):
        _, facts = bind.check(operator.declaration, values, traced=True)
    return registry.choose(facts, operator.simple, Gates.read())[1].backend


def _check_keywords(function: str, names: tuple) -> None:
    """Raise on unknown keywords while a graph is traced; finding the nearest known one is beyond Dynamo."""
    known = _operators[function].declaration
    bind.arrange(known, (), dict.fromkeys((*known.names, *(n for n in names if n not in known.renamed))))


# What torch.compiler.assume_constant_result does, without the seconds that importing Dynamo costs.
_backend_for_graph._dynamo_marked_constant = True
_check_keywords._dynamo_marked_constant = True


def _tracer(operator: Operator):
    """A closure over plain data that Dynamo traces into one ``fla::<function>`` node."""
    declaration = operator.declaration
    function = declaration.function
    tensors = tuple(
        (p.position, {len(shape): tuple(dim.varies for dim in shape) for shape in p.shapes}, p.differentiable)
        for p in declaration.tensors
    )
    options = tuple(p.position for p in declaration.options)
    ruled = {name for rule in declaration.rules for name in rule.names}
    free = {p.position for p in declaration.options if p.type is float and p.name not in ruled}
    integers = tuple(p.position for p in declaration.options if p.type is int)
    in_schema = tuple(p.position for p in bridge.in_schema(declaration))
    results = tuple((r.when and declaration.names.index(r.when), r.omitted) for r in declaration.results.values())
    single = tuple(declaration.results) == ("result",)

    def trace(**arguments):
        _check_keywords(function, tuple(arguments))
        values = bind.arrange(declaration, (), arguments)
        descriptions, needs_grad = [], False
        for position, varying, differentiable in tensors:
            tensor = values[position]
            if tensor is None:
                descriptions.append(None)
                continue
            axes = varying.get(tensor.dim())
            shape = tuple(None if axes is not None and axes[a] else int(tensor.shape[a]) for a in range(tensor.dim()))
            descriptions.append((shape, tensor.dtype, tensor.device))
            needs_grad = needs_grad or differentiable and tensor.requires_grad
        needs_grad = needs_grad and torch.is_grad_enabled()
        # Dynamo makes numbers symbolic once they vary. Integers are held; of a float that no rule reads, the choice
        # needs to know only whether it is given.
        for position in integers:
            if values[position] is not None:
                values[position] = index(values[position])
        chosen = tuple(0.0 if p in free and values[p] is not None else values[p] for p in options)
        backend = _backend_for_graph(function, tuple(descriptions), chosen, needs_grad)
        op = getattr(torch.ops.fla, function).default
        outputs = op(*(values[position] for position in in_schema), backend, needs_grad)
        if single:
            return outputs[0]
        public, taken = [], 0
        for when, omitted in results:
            if when is None or values[when]:
                public.append(outputs[taken])
                taken += 1
            elif not omitted:
                public.append(None)
        return tuple(public)

    return trace


def operator_of(function) -> Operator:
    """The operator behind a public function or its name."""
    if isinstance(function, str):
        if function not in _operators:
            raise errors.unknown_operator(function, _operators)
        return _operators[function]
    return function.operator


def operators() -> Mapping[str, Operator]:
    """Every declared operator by name."""
    return dict(_operators)


__all__ = ["Operator", "dispatch", "operator_of", "operators"]
