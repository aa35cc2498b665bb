"""Between a checked call and a backend: autograd in eager mode, a torch.library op under torch.compile.

Where no gradient is needed the call goes straight through. The decorated body differentiates itself (its reference is
one autograd.Function), so in eager mode it is simply called; under compile it is as opaque to Dynamo as a kernel.
"""

import contextlib
import threading
from operator import itemgetter

import torch

from fla_dispatch import errors
from fla_dispatch.bind import TensorParameter
from fla_dispatch.declaration import ACCUMULATOR, Declaration
from fla_dispatch.guard import autocast_again, autocast_setting, device_guard, plain

HOST_DEVICES = ("cpu", "meta")


class RefuseDoubleBackward(torch.autograd.Function):
    """Identity on gradients that raises where someone differentiates them again."""

    @staticmethod
    def forward(ctx, function, count, *tensors):
        ctx.function = function
        return tuple(None if t is None else t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx, *_):
        raise errors.double_backward(ctx.function)


def refuse_double_backward(function: str, gradients: tuple, *sources: torch.Tensor | None) -> tuple:
    """Tie ``gradients``, computed without a graph, to what they depend on by a node that only raises."""
    if not torch.is_grad_enabled():
        return gradients
    return RefuseDoubleBackward.apply(function, len(gradients), *gradients, *sources)


class Bridge(torch.autograd.Function):
    """One backend's forward and backward as autograd sees them."""

    @staticmethod
    def forward(ctx, call, *tensors):
        plan = call.plan
        outputs, saved = plan.backend.forward(call)
        ctx.save_for_backward(*tensors, *saved)
        # The call without its tensors: those go through save_for_backward, which watches over them.
        ctx.call = plan.bind(call.values, (None,) * len(tensors))
        ctx.autocast = autocast_setting(plan.facts.device.type)
        ctx.set_materialize_grads(False)
        ctx.first = outputs[0].shape, outputs[0].dtype
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        plan, kept = ctx.call.plan, ctx.saved_tensors  # once: checkpointing unpacks anew each time
        device, count = plan.facts.device, len(plan.tensors)
        tensors = kept[:count]
        call = plan.bind(ctx.call.values, tensors)
        with without_gradients(), device_guard(device), autocast_again(device.type, ctx.autocast):
            if grads[0] is None:  # a loss on the final state alone
                shape, dtype = ctx.first
                grads = (torch.zeros(shape, dtype=dtype, device=device), *grads[1:])
            gradients = backend_gradients(call, kept[count:], dict(zip(plan.returned, grads)))
        needed = ctx.needs_input_grad
        gradients = tuple(gradients.get(name) if needed[i] else None for i, name in enumerate(plan.facts.tensors, 1))
        return None, *refuse_double_backward(plan.function, gradients, *tensors, *grads)


def without_gradients():
    """``torch.no_grad()``, where that would change anything."""
    return torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext()


def backend_gradients(call, saved, grads) -> dict:
    """Ask the call's backend for gradients; checked for completeness, in the dtype of each input."""
    plan = call.plan
    backend, expected = plan.backend, plan.differentiable
    grads = {name: None if g is None else plain(g) for name, g in grads.items()}
    gradients = backend.backward(call, dict(zip(backend.saves, saved, strict=True)), grads)
    if gradients.keys() != expected.keys():
        if unknown := sorted(gradients.keys() - expected.keys()):
            raise errors.unknown_gradients(plan.function, backend.name, unknown)
        raise errors.missing_gradients(plan.function, backend.name, sorted(expected.keys() - gradients.keys()))
    return {
        name: g if g is None or g.dtype == expected[name] else g.to(expected[name]) for name, g in gradients.items()
    }


def body_results(call, differentiable: bool) -> tuple[tuple, dict]:
    """The decorated body's results, and the inputs they can be differentiated by.

    Works inside a torch.library op, where autograd does not see tensor operations, because the body's reference applies
    one autograd.Function directly to its arguments.
    """
    inputs = {
        name: getattr(call, name).detach().requires_grad_(differentiable) for name in call.plan.differentiable
    }
    with torch.set_grad_enabled(differentiable):
        outputs = call.plan.run_body(call.with_tensors(inputs))
    return outputs if isinstance(outputs, tuple) else (outputs,), inputs


def body_gradients(call, grads) -> dict:
    """Gradients of the decorated body, given those of the wanted results, by running it again."""
    outputs, inputs = body_results(call, differentiable=True)
    outputs = [o for o in outputs if o is not None]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o.requires_grad and g is not None]
    gradients = torch.autograd.grad(
        [o for o, _ in pairs], list(inputs.values()), [g for _, g in pairs], allow_unused=True
    )
    return dict(zip(inputs, gradients, strict=True))


def runs_straight(plan) -> bool:
    """True where a call needs no autograd and no device made current, so that forward can be called as it is."""
    return (
        plan.backend is not None
        and not plan.facts.needs_grad
        and not plan.single
        and not plan.constants
        and plan.facts.device.type in HOST_DEVICES
    )


def run_through(plan):
    """The function that carries calls of this plan from choice to results."""
    if plan.backend is None:
        runner = plan.run_body
    elif plan.facts.needs_grad:
        apply, tensors = Bridge.apply, several(plan.tensors)

        def runner(call):
            return apply(call, *tensors(call.values))
    else:
        forward = plan.backend.forward

        def runner(call):
            return forward(call)[0]

    runner = runner if plan.backend is None or not plan.single else _first(runner)
    runner = _detached(runner, plan.constants) if plan.constants else runner
    device = plan.facts.device
    if device.type in HOST_DEVICES or device.index is None:
        return runner
    module, index = getattr(torch, device.type), device.index

    def guarded(call):
        if module.current_device() == index:
            return runner(call)
        with module.device(index):
            return runner(call)

    return guarded


def several(positions: tuple[int, ...]):
    """``operator.itemgetter`` that returns a tuple of one item too."""
    getter = itemgetter(*positions)
    return getter if len(positions) > 1 else lambda values: (getter(values),)


def _first(runner):
    return lambda call: runner(call)[0]


def _detached(runner, constants):
    """No graph through tensors that are declared to have no gradient, whoever runs."""
    return lambda call: runner(call.with_tensors({name: getattr(call, name).detach() for name in constants}))


# --- torch.compile ---------------------------------------------------------------------------------------------------

NAMESPACE = "fla"
_libraries: dict[str, torch.library.Library] = {}
_awaited: dict[str, object] = {}  # operators whose ops nobody has looked for yet
_defining = threading.RLock()

_SCHEMA_TYPES = {bool: "bool", int: "int", float: "float", torch.dtype: "ScalarType"}


def in_schema(declaration: Declaration):
    """The parameters that a torch.library op can take: all but opaque objects."""
    return tuple(p for p in declaration.parameters if isinstance(p, TensorParameter) or p.type is not object)


def schema(declaration: Declaration) -> str:
    """The parameters in torch's schema language."""
    words = []
    for p in in_schema(declaration):
        kind = "Tensor" if isinstance(p, TensorParameter) else _SCHEMA_TYPES[p.type]
        words.append(f"{kind}{'?' if p.optional else ''} {p.name}")
    return ", ".join(words)


def await_library_op(operator) -> None:
    """Have ``fla::<function>`` defined when it is first looked for. That takes ten times as long as a declaration, and
    an import declares every operator."""
    name = operator.declaration.function
    with _defining:
        if name in _libraries:
            _libraries.pop(name)._destroy()
        _awaited[name] = operator


def library_op(function: str):
    """The torch.library op of an operator, with all that belongs to it."""
    with _defining:
        return getattr(getattr(torch.ops, NAMESPACE), function).default


def _look_up(name: str):
    """What ``torch.ops.fla`` was asked for and does not have yet, defined if it is awaited.

    One thread at a time: the namespace by itself would give each of several another object.
    """
    namespace = getattr(torch.ops, NAMESPACE)
    with _defining:
        operator = _awaited.pop(name.removesuffix("_backward"), None)
        if operator is not None:
            _define_library_op(operator)
        found = vars(namespace).get(name)
        return type(namespace).__getattr__(namespace, name) if found is None else found


getattr(torch.ops, NAMESPACE).__getattr__ = _look_up  # one of this module, before that of its class


def _define_library_op(operator) -> None:
    """Define ``fla::<function>`` and its backward.

    Both take the name of the backend, which is chosen while the graph is traced, so that the tensors kept for backward
    are known. ``fla::<function>`` returns the wanted results and then what the backend saves.
    """
    declaration = operator.declaration
    name, parameters = declaration.function, in_schema(declaration)
    library = _libraries[name] = torch.library.Library(NAMESPACE, "FRAGMENT")
    arguments = schema(declaration)
    tags = (torch.Tag.pt2_compliant_tag,)
    library.define(f"{name}({arguments}, str backend, bool keep) -> Tensor[]", tags=tags)
    library.define(
        f"{name}_backward({arguments}, str backend, Tensor[] saved, Tensor?[] grads, bool[] wanted) -> Tensor[]",
        tags=tags,
    )
    count = len(parameters)

    def prepare(values, backend):
        return operator.prepare([*values], backend)

    def forward(*inputs):
        *values, backend, keep = inputs
        call = prepare(values, backend)
        with device_guard(call.device):
            if call.plan.backend is None:
                outputs, saved = body_results(call, differentiable=keep)[0], ()
            else:
                with torch.no_grad():
                    outputs, saved = call.plan.backend.forward(call)
        results = [o.detach() for o in outputs if o is not None]
        return _unaliased([*results, *saved] if keep else results, inputs)

    def fake_forward(*inputs):
        *values, backend, keep = inputs
        call = prepare(values, backend)
        wanted = [declaration.results[name] for name in call.wanted]
        shapes = [(declaration.result_dims(r, call.facts.options, call.dims), r.dtype) for r in wanted]
        if keep and call.plan.backend is not None:
            shapes += [(saved.dims, saved.dtype) for saved in call.plan.backend.saves.values()]
        return [empty(call, dims, dtype) for dims, dtype in shapes]

    def backward(*inputs):
        values, (backend, saved, grads, wanted) = inputs[:count], inputs[count:]
        call = prepare(values, backend)
        with device_guard(call.device):
            if call.plan.backend is None:
                gradients = body_gradients(call, grads)
            else:
                named = dict.fromkeys(call.plan.returned) | dict(zip(call.wanted, grads, strict=True))
                with torch.no_grad():
                    gradients = backend_gradients(call, saved, named)
        return [_own(gradients.get(p.name), v) for p, v, w in zip(parameters, values, wanted, strict=True) if w]

    def fake_backward(*inputs):
        values, wanted = inputs[:count], inputs[-1]
        return [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v, w in zip(values, wanted, strict=True) if w]

    def setup_context(ctx, inputs, output):
        *values, ctx.backend, keep = inputs
        tensors = [v for v in values if isinstance(v, torch.Tensor)]
        ctx.options = [None if isinstance(v, torch.Tensor) else v for v in values]
        ctx.present = [isinstance(v, torch.Tensor) for v in values]
        ctx.results = len(output) - _saved_count(operator, ctx.backend, keep)
        ctx.save_for_backward(*tensors, *output[ctx.results :])

    def autograd_backward(ctx, grads):
        kept = list(ctx.saved_tensors)
        values = [kept.pop(0) if present else v for v, present in zip(ctx.options, ctx.present, strict=True)]
        wanted = [bool(w) for w in ctx.needs_input_grad[:count]]
        backward_op = library_op(f"{name}_backward")
        gradients = iter(backward_op(*values, ctx.backend, kept, list(grads[: ctx.results]), wanted))
        return *(next(gradients) if w else None for w in wanted), None, None

    library.impl(name, forward, "CompositeExplicitAutograd")
    library.impl(f"{name}_backward", backward, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake_forward, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::{name}_backward", fake_backward, lib=library)
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", autograd_backward, setup_context=setup_context, lib=library
    )


def _saved_count(operator, backend, keep) -> int:
    return len(operator.backend_named(backend).saves) if keep and operator.backend_named(backend) else 0


def _unaliased(outputs, inputs) -> list:
    """Copies where an output shares memory with an input or an earlier output, which a torch.library op may not."""
    seen = {x.untyped_storage().data_ptr() for x in inputs if isinstance(x, torch.Tensor)}
    fresh = []
    for x in outputs:
        x = x.clone() if x.untyped_storage().data_ptr() in seen else x
        seen.add(x.untyped_storage().data_ptr())
        fresh.append(x)
    return fresh


def _own(gradient, value):
    """A torch.library op may not return its arguments or None."""
    if gradient is None:
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return gradient.contiguous()


def empty(call, dims, dtype) -> torch.Tensor:
    """An output as the fake kernels see it: shape, dtype and device."""
    sizes = dict(call.dims)
    if any("NT" in dim.letters for dim in dims):  # of packed sequences: in the data
        sizes["NT"] = sizes["NT"] if "NT" in sizes else torch.library.get_ctx().new_dynamic_size()
    return torch.empty([dim.size(sizes) for dim in dims], dtype=result_dtype(call.facts, dtype), device=call.device)


def result_dtype(facts, dtype) -> torch.dtype:
    if isinstance(dtype, tuple):
        return result_dtype(facts, next(d for d in dtype if facts.options.get(d, d) is not None))
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == ACCUMULATOR:
        return torch.promote_types(facts.dtype, torch.float32)
    if dtype in facts.options:
        return facts.options[dtype]
    return facts.tensors[dtype].dtype
