"""What a family's cases module says about its operators, and how a call and its oracle are run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import facade
import torch
from fla_dispatch import Operator, operator_of

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Subject:
    """``make(name, shape, options, generator)`` → fp32 values of an input; ``oracle(function, arguments, dtype)`` runs
    the mathematics, eagerly in ``dtype``; ``axes`` are options whose values a declaration cannot know."""

    name: str
    functions: tuple[Callable, ...]
    make: Callable
    oracle: Callable
    axes: Mapping[str, list] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()  # options that a test of their own covers
    causal: bool = True  # a later token may change an earlier output only if this is False

    def operators(self) -> list[Operator]:
        return [operator_of(function) for function in self.functions]


# Packed layouts: empty sequences first, in the middle and last; lengths 1, C - 1, C, C + 1; rows past the end.
PACKED = {
    "mixed": [0, 0, 5, 5, 69, 70, 70],
    "chunks": [0, 63, 127, 192],
    "slack": [0, 1, 40],
}
SLACK_ROWS = 7

TOKENS = [1, 13, 63, 64, 65, 150]
HEADS = [(2, 2), (2, 4), (1, 3)]
CHANNELS = [(24, 40), (33, 20), (64, 16)]


def axes_of(subject: Subject, operator: Operator) -> dict[str, list]:
    """Dtype, sizes, every option, every optional tensor, packing, memory layout and what the loss reads."""
    declaration = operator.declaration
    axes = {"dtype": ["fp32", "bf16", "fp16"], "heads": HEADS, "channels": CHANNELS, "layout": ["plain", "strided"]}
    packable = "cu_seqlens" in declaration.names
    axes["tokens"] = TOKENS + (list(PACKED) if packable else [])
    for p in declaration.options:
        if p.name in subject.axes:
            axes[p.name] = subject.axes[p.name]
        elif p.type is bool and p.name not in subject.excluded:
            axes[p.name] = [False, True]
    for p in declaration.tensors:
        if p.optional and p.name != "cu_seqlens" and p.name not in subject.excluded:
            axes[p.name] = [False, True]
        if len(p.shapes) > 1:
            axes[f"{p.name} rank"] = list(range(len(p.shapes)))
    if len(declaration.results) > 1:
        axes["loss"] = ["all", "first", "last"]
    return axes


def arguments(subject: Subject, operator: Operator, case: Mapping, seed: int = 0) -> dict[str, object]:
    """Build a case's arguments on the CPU, floats as fp32 values that its dtype can hold."""
    declaration, generator = operator.declaration, torch.Generator().manual_seed(seed)
    options = {p.name: case[p.name] for p in declaration.options if p.name in case}
    (H, HV), (K, V), tokens = case["heads"], case["channels"], case["tokens"]
    offsets = PACKED.get(tokens)
    B, T, N = (1, offsets[-1] + SLACK_ROWS, len(offsets) - 1) if offsets else (2, tokens, 2)
    sizes = {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V, "N": N}
    built = dict(options)
    for p in declaration.tensors:
        if p.name.startswith("cu_seqlens"):
            if offsets and (p.name == "cu_seqlens" or case.get(p.name)):
                built[p.name] = torch.tensor(offsets, dtype=torch.int32 if p.name == "cu_seqlens" else torch.int64)
            continue
        if p.optional and not case.get(p.name, False):
            continue
        dims = declaration.shapes_of(p, options)[case.get(f"{p.name} rank", 0)]
        shape = [dim.size(sizes) for dim in dims]
        built[p.name] = subject.make(p.name, shape, options, generator).to(FLOATS[case["dtype"]])
    return built


def is_valid(subject: Subject, operator: Operator, case: Mapping) -> bool:
    """Whether the operator's own rules allow the case."""
    packed = case["tokens"] in PACKED
    if case.get("cu_seqlens_cpu") and not packed:
        return False
    (H, HV), (K, V) = case["heads"], case["channels"]
    known = {p.name: p.default for p in operator.declaration.options}
    known |= case | {"H": H, "HV": HV, "K": K, "V": V, "cu_seqlens": packed or None, "inference": False}
    known |= {p.name: True if case.get(p.name) else None for p in operator.declaration.tensors if p.optional
              and p.name != "cu_seqlens"}
    return all(rule.when and not known[rule.when] or rule.varies or rule.holds(*(known[name] for name in rule.names))
               for rule in operator.declaration.rules)


@dataclass
class Outcome:
    """Results by name, and gradients by "d<input>"."""

    tensors: dict[str, torch.Tensor]
    route: str | None = None


def differentiable(operator: Operator, built: Mapping) -> list[str]:
    return [p.name for p in operator.declaration.tensors if p.differentiable and p.name in built]


def cotangents(results: Mapping[str, torch.Tensor], loss: str, seed: int = 1) -> dict[str, torch.Tensor]:
    """Fixed random gradients of the results that the loss reads."""
    generator = torch.Generator().manual_seed(seed)
    names = list(results)
    read = {"all": names, "first": names[:1], "last": names[-1:]}[loss]
    return {name: torch.randn(results[name].shape, generator=generator).to(results[name].dtype) for name in read}


def results_of(operator: Operator, returned) -> dict[str, torch.Tensor]:
    returned = returned if isinstance(returned, tuple) else (returned,)
    return {name: x for name, x in zip(operator.declaration.results, returned, strict=False) if x is not None}


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of something wider, every stride off."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., 1 : 2 * x.shape[-1] + 1 : 2] = x
    return wide[..., 1 : 2 * x.shape[-1] + 1 : 2]


def run(operator: Operator, backend: str, device, built: Mapping, case: Mapping) -> Outcome:
    """Forward and backward of the operator itself on one backend, as a user would call it."""
    names = differentiable(operator, built)
    leaves = {name: built[name].to(device).requires_grad_() for name in names}
    given = {name: leaves.get(name, x.to(device) if isinstance(x, torch.Tensor) and not name.endswith("_cpu") else x)
             for name, x in built.items()}
    if case.get("layout") == "strided":
        given |= {name: strided(leaves[name]) for name in names}
    with facade.use_backend(backend):
        results = results_of(operator, operator.public(**given))
    route = facade.last_route().backend
    grads = cotangents(results, case.get("loss", "all"))
    if case.get("layout") == "strided":
        grads = {name: strided(grad) for name, grad in grads.items()}
    return Outcome(_with_gradients(results, leaves, grads, device), route)


def run_oracle(subject: Subject, operator: Operator, built: Mapping, case: Mapping, dtype: torch.dtype) -> Outcome:
    """The recurrence in ``dtype``, with autograd's gradients for the same cotangents, rounded as the operator's."""
    input_dtype = dtype if dtype == torch.float64 else None
    leaves = {name: (built[name] if input_dtype is None else built[name].to(input_dtype)).clone().requires_grad_()
              for name in differentiable(operator, built)}
    results = results_of(operator, subject.oracle(operator.declaration.function, {**built, **leaves}, dtype))
    rounded = {name: built_like(operator, name, x, built) for name, x in results.items()}
    grads = {name: grad.to(results[name].dtype) for name, grad in cotangents(rounded, case.get("loss", "all")).items()}
    return Outcome(_with_gradients(results, leaves, grads, "cpu"))


def built_like(operator, name, x, built):
    """``x`` in the dtype the operator returns for the built inputs."""
    dtype = operator.declaration.results[name].dtype
    if dtype in built and isinstance(built[dtype], torch.Tensor):
        return x.to(built[dtype].dtype)
    return x.float()


def _with_gradients(results, leaves, grads, device):
    outputs = [results[name] for name in grads]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [g.to(device) for g in grads.values()],
                                    allow_unused=True)
    tensors = {name: x.detach() for name, x in results.items()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        tensors[f"d{name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return tensors
