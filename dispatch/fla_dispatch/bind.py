"""Step one of a call: put arguments in order, check them against the declaration, and gather the facts.

This is the slow path that knows every message. The compiled path does the same for calls it has seen the like of, and
comes here on any doubt.
"""

from dataclasses import dataclass
from numbers import Integral, Real

import torch

from fla_dispatch import errors
from fla_dispatch.call import Facts, TensorFacts
from fla_dispatch.declaration import Declaration, OptionParameter, TensorParameter
from fla_dispatch.dims import VARYING
from fla_dispatch.guard import is_fake, plain
from fla_dispatch.registry import architecture
from fla_dispatch.sequences import check_offsets

PACKED = "cu_seqlens"  # the parameter that turns one row of tokens into N sequences
HOST_COPY = "_cpu"  # what the name of a parameter that must be on the host ends with


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """Stands for a tensor in questions about a call that is not made: what would happen on another device, or in a
    graph whose sizes are not known yet (``None`` in the shape)."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    arch: str | None = None

    def dim(self) -> int:
        return len(self.shape)


def arrange(declaration: Declaration, args: tuple, kwargs: dict) -> list:
    """Arguments in the order of the parameters, defaults filled in."""
    function, parameters = declaration.function, declaration.parameters
    if len(args) > declaration.positional:
        raise errors.too_many_positional(function, len(args), declaration.positional)
    values = dict(zip(declaration.names, args, strict=False))
    for name, value in kwargs.items():
        if name in declaration.renamed:
            continue
        if name in declaration.removed:
            raise errors.removed_keyword(function, name, declaration.removed[name])
        if name not in declaration.names:
            raise errors.unknown_keyword(function, name, declaration.names)
        if name in values:
            raise errors.given_twice(function, name)
        values[name] = value
    for old, new in declaration.renamed.items():
        if old in kwargs:
            _rename(declaration, old, new, kwargs[old], values)
    missing = [
        p.name
        for p in parameters
        if p.name not in values and (p.required if isinstance(p, OptionParameter) else not p.optional)
    ]
    if missing:
        raise errors.missing(function, missing)
    return [values.get(p.name, getattr(p, "default", None)) for p in parameters]


def _rename(declaration, old, new, value, values):
    """Take a value given under an old name, unless the new one was given as well."""
    default = declaration.parameter(new).default
    if values.get(new, default) != default:
        raise errors.given_under_both_names(declaration.function, old, new)
    if not torch.compiler.is_compiling():
        errors.warn(errors.renamed_keyword(declaration.function, old, new), DeprecationWarning)
    values[new] = value


def check(declaration: Declaration, values: list, traced: bool = False) -> tuple[list, Facts]:
    """Check arranged values; → the values a kernel may rely on, and the facts. Raises ``ValueError``/``TypeError``.

    ``traced``: the call belongs to a graph, where inference mode does not reach and no_grad stands for it.
    """
    options = {p.name: _option(declaration.function, p, values[p.position]) for p in declaration.options}
    tensors = {p.name: values[p.position] for p in declaration.tensors if _present(declaration.function, p, values)}
    packed = tensors.get(PACKED)
    if packed is None and PACKED + HOST_COPY in tensors:
        raise errors.host_copy_alone(declaration.function, PACKED + HOST_COPY, PACKED)
    sizes = _unify(declaration, tensors, options, packed)
    _check_dtypes(declaration, tensors)
    device = _check_devices(declaration, tensors, packed)
    for name, derive in declaration.derived.items():
        if options[name] is None and (wanted := derive(sizes)) is not None:
            values[declaration.parameter(name).position] = wanted
    facts = _facts(declaration, tensors, options, sizes, device, traced)
    for rule in declaration.rules:
        _check_rule(declaration, rule, options, facts, sizes)
    if packed is not None:
        _check_packed(declaration.function, tensors, sizes["T"])
    for p in declaration.options:
        if p.name not in declaration.derived or options[p.name] is not None:
            values[p.position] = options[p.name]
    for p in declaration.tensors:
        if isinstance(values[p.position], torch.Tensor):
            values[p.position] = plain(values[p.position])
    _bring_to_device(declaration, values, packed, device)
    return values, facts


def _option(function, parameter, value):
    if value is None and (parameter.optional or parameter.type is object):
        return None
    if parameter.type is bool and isinstance(value, Integral) and value in (0, 1):
        return bool(value)
    if parameter.type is int and isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if parameter.type is float and isinstance(value, Real) and not isinstance(value, bool):
        return float(value)
    if parameter.type is object or parameter.type is torch.dtype and isinstance(value, torch.dtype):
        return value
    expected = parameter.type.__name__ + (" or None" if parameter.optional else "")
    raise errors.wrong_option(function, parameter.name, expected, value)


def _present(function, parameter, values) -> bool:
    value = values[parameter.position]
    if value is None and parameter.optional:
        return False
    if not isinstance(value, torch.Tensor | Described):
        raise errors.not_a_tensor(function, parameter.name, parameter.shape_texts[0], value)
    return True


def _unify(declaration, tensors, options, packed) -> dict[str, int | None]:
    """Give every letter its size. A size that is not known (None) agrees with any."""
    function, sizes, origins, products = declaration.function, {}, {}, []
    outer = None  # the first tensor with `...` in its shape
    if packed is not None and packed.dim() == 1:
        if packed.shape[0] == 0:
            raise errors.empty_cu_seqlens(function, PACKED)
        sizes["N"] = None if packed.shape[0] is None else packed.shape[0] - 1
    for name, tensor in tensors.items():
        parameter = declaration.parameter(name)
        shapes = declaration.shapes_of(parameter, options)
        dims = next((shape for shape in shapes if len(shape) == tensor.dim()), None)
        texts = tuple(" ".join(dim.text for dim in shape) for shape in shapes)
        if dims is None:
            raise errors.wrong_rank(function, name, texts, tensor.shape)
        if parameter.has_outer:
            axes = len(dims) - len(shapes[0])
            outer = outer or (name, axes, tensor.shape)
            if axes != outer[1]:
                raise errors.outer_axes_disagree(function, name, tensor.shape, outer[0], outer[2])
        text = " ".join(dim.text for dim in dims)
        for axis, dim in enumerate(dims):
            if len(dim.letters) > 1:
                products.append((name, text, tensor.shape, axis, dim))
                continue
            letter, size = dim.letters[0], tensor.shape[axis]
            if size is None:
                sizes.setdefault(letter, None)
                continue
            size -= dim.offset
            if letter == "N" and packed is None and "B" in sizes:
                sizes.setdefault("N", sizes["B"])
            if letter not in sizes or sizes[letter] is None:
                sizes[letter], origins[letter] = size, (name, text, tensor.shape)
            elif sizes[letter] != size and letter == "N" and name not in (PACKED, PACKED + HOST_COPY):
                raise errors.wrong_state_count(function, name, size, sizes["N"], packed is not None)
            elif sizes[letter] != size:
                other = origins.get(letter) or (PACKED, "N+1", packed.shape)
                raise errors.dims_disagree(function, name, text, tensor.shape, letter, size, *other, sizes[letter])
        if packed is not None and sizes.get("B", 1) not in (1, None):
            raise errors.packed_batch(function, sizes["B"])
    for name, text, shape, axis, dim in products:
        if shape[axis] is not None and shape[axis] != dim.size(sizes):
            raise errors.wrong_product(function, name, text, shape, axis, dim.size(sizes), dim.text)
    if packed is None and "B" in sizes:
        sizes.setdefault("N", sizes["B"])
    return sizes


def _check_dtypes(declaration, tensors):
    for name, tensor in tensors.items():
        if tensor.dtype not in declaration.parameter(name).dtypes:
            raise errors.wrong_dtype(declaration.function, name, declaration.parameter(name).dtypes, tensor.dtype)
    for group in declaration.same_dtype:
        first, *others = [name for name in group if name in tensors]
        for name in others:
            if tensors[name].dtype != tensors[first].dtype:
                raise errors.dtypes_disagree(
                    declaration.function, name, tensors[name].dtype, first, tensors[first].dtype
                )


def _check_devices(declaration, tensors, packed) -> torch.device:
    """All on one device; cu_seqlens may stay on the host, and its host copy must."""
    (first, tensor), *others = tensors.items()
    for name, other in others:
        if name.endswith(HOST_COPY):
            if other.device.type != "cpu":
                raise errors.must_be_on_host(declaration.function, name, other.device)
        elif other.device != tensor.device and not (other is packed and other.device.type == "cpu"):
            raise errors.devices_disagree(declaration.function, name, other.device, first, tensor.device)
    return tensor.device


def _facts(declaration, tensors, options, sizes, device, traced) -> Facts:
    described = {}
    for name, tensor in tensors.items():
        shapes = declaration.shapes_of(declaration.parameter(name), options)
        dims = next(shape for shape in shapes if len(shape) == tensor.dim())
        static = tuple(None if dim.varies else _integer(size) for dim, size in zip(dims, tensor.shape, strict=True))
        described[name] = TensorFacts(tensor.dtype, tensor.device, static)
    differentiable = [tensors[p.name] for p in declaration.tensors if p.differentiable and p.name in tensors]
    first = next(iter(tensors.values()))
    static_sizes = {letter: _integer(size) for letter, size in sizes.items() if letter not in VARYING}
    arch = first.arch if isinstance(first, Described) and first.arch else architecture(device)
    return Facts(
        declaration.function,
        declaration.operation,
        described,
        options,
        static_sizes,
        device,
        arch,
        _bucket(sizes.get("B"), sizes.get("T")),
        _bucket(sizes.get("N")),
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable),
        not torch.is_grad_enabled() if traced else torch.is_inference_mode_enabled(),
    )


def _integer(size):
    return None if size is None else int(size)


def _bucket(*sizes) -> int | None:
    """The power-of-two bucket of a product; None where a size is symbolic, so that no graph is tied to it."""
    product = 1
    for size in sizes:
        if size is None or isinstance(size, torch.SymInt):
            return None
        product *= size
    return product.bit_length()


def _check_rule(declaration, rule, options, facts, sizes):
    if rule.when is not None and not options[rule.when]:
        return
    values = {}
    for name in rule.names:
        if name in options:
            values[name] = options[name]
        elif name == "inference":
            values[name] = facts.inference
        elif name in sizes:
            values[name] = sizes[name]
        else:
            values[name] = facts.tensors.get(name)
    if rule.varies and None in (values[name] for name in rule.names if name in ("B", "T", "N")):
        return
    if not rule.holds(*values.values()):
        shown = {name: "given" if isinstance(value, TensorFacts) else value for name, value in values.items()}
        raise errors.rule_broken(declaration.function, rule.message, rule.condition, shown, rule.error)


def _check_packed(function, tensors, T):
    """By value, where that costs no device sync."""
    packed, host = tensors[PACKED], tensors.get(PACKED + HOST_COPY)
    on_host = {
        name: tensor
        for name, tensor in ((PACKED, packed), (PACKED + HOST_COPY, host))
        if isinstance(tensor, torch.Tensor) and not is_fake(tensor) and tensor.device.type == "cpu"
    }
    for name, tensor in on_host.items():
        offsets = tensor.tolist()
        check_offsets(function, name, offsets)
        if T is not None and offsets[-1] > T:
            raise errors.cu_seqlens_end(function, name, offsets[-1], T)
    if len(on_host) == 2 and packed.tolist() != host.tolist():
        raise errors.host_copy_differs(function, PACKED + HOST_COPY, PACKED)


def _bring_to_device(declaration, values, packed, device):
    """A host cu_seqlens of a call on an accelerator serves as its own host copy."""
    if not isinstance(packed, torch.Tensor) or packed.device == device:
        return
    values[declaration.parameter(PACKED).position] = packed.to(device, non_blocking=True)
    if PACKED + HOST_COPY in declaration.names:
        position = declaration.parameter(PACKED + HOST_COPY).position
        values[position] = packed if values[position] is None else values[position]


def key(facts: Facts) -> tuple:
    """What makes two calls share a decision."""
    return (
        *((name, t.dtype, t.device, t.shape) for name, t in facts.tensors.items()),
        *facts.options.values(),
        facts.arch,
        facts.tokens_bucket,
        facts.sequences_bucket,
        facts.needs_grad,
        facts.inference,
    )


__all__ = ["Described", "TensorParameter", "arrange", "check", "key"]
