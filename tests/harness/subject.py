"""What a family's cases module says about its operators, and how a case becomes arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fla_dispatch import Operator, operator_of
from harness.axes import pairwise
from harness.hazard import Hazard

FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class Subject:
    """``make(name, shape, options, generator)`` → fp32 values of an input; ``oracle(function, arguments, dtype)`` runs
    the mathematics, eagerly in ``dtype``; ``axes`` are options whose values a declaration cannot know, ``sizes`` those
    of letters that only these operators have."""

    name: str
    functions: tuple[Callable, ...]
    make: Callable
    oracle: Callable
    axes: Mapping[str, list] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()  # options that a hazard of their own covers
    variants: Mapping[str, Mapping] = field(default_factory=lambda: {"plain": {}})  # options that hazards run under
    hazards: tuple[Hazard, ...] = ()

    def operators(self) -> list[Operator]:
        return [operator_of(function) for function in self.functions]


# Packed layouts: empty sequences first, in the middle and last; lengths 1, C - 1, C, C + 1; rows past the end.
PACKED = {
    "mixed": [0, 0, 5, 5, 69, 70, 70],
    "chunks": [0, 63, 127, 192],
    "slack": [0, 1, 40],
}
SLACK_ROWS = 7


@dataclass(frozen=True)
class Sizes:
    """How large a test is: the axes of the declaration, and what a hazard gets that asks for nothing special."""

    tokens: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    channels: tuple[tuple[int, int], ...] = ((24, 40), (33, 20), (64, 16))
    default: Mapping[str, int] = field(default_factory=dict)


FULL = Sizes((1, 13, 63, 64, 65, 150), ((2, 2), (2, 4), (1, 3)),
             default={"B": 2, "T": 65, "H": 2, "HV": 4, "K": 24, "V": 40})
# Where kernels are interpreted each chunk of each head costs a tenth of a second; channels cost nothing.
BRIEF = Sizes((1, 63, 65), ((2, 2), (1, 2)), default={"B": 1, "T": 65, "H": 1, "HV": 2, "K": 24, "V": 40})


def axes_of(subject: Subject, operator: Operator, sizes: Sizes = FULL) -> dict[str, list]:
    """Dtype, sizes, every option, every optional tensor, packing, memory layout and what the loss reads."""
    declaration = operator.declaration
    axes = {"dtype": ["fp32", "bf16", "fp16"], "heads": list(sizes.heads), "channels": list(sizes.channels),
            "layout": ["plain", "strided"]}
    packable = "cu_seqlens" in declaration.names
    axes["tokens"] = [*sizes.tokens, *(PACKED if packable else ())]
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


def cases_of(subject: Subject, operator: Operator, sizes: Sizes = FULL, **restricted: list) -> list[dict]:
    """Pairwise over the axes; packing, states and groups of heads meet in every way."""
    axes = axes_of(subject, operator, sizes)
    axes |= {name: values for name, values in restricted.items() if name in axes}
    return pairwise(axes, lambda case: is_valid(subject, operator, case), traits)


def traits(case: Mapping) -> tuple[bool, bool, bool]:
    """Whether sequences are packed, start from a state, and share query heads."""
    return case["tokens"] in PACKED, case.get("initial_state", False), case["heads"][0] < case["heads"][1]


def arguments(subject: Subject, operator: Operator, case: Mapping, seed: int = 0) -> dict[str, object]:
    """The arguments of a case."""
    (H, HV), (K, V), offsets = case["heads"], case["channels"], PACKED.get(case["tokens"])
    B, T = (1, offsets[-1] + SLACK_ROWS) if offsets else (2, case["tokens"])
    if T == 1:  # else few numbers make the eager error of a step size, which its error is compared with
        B = 8
    return build(subject, operator, {"B": B, "T": T, "H": H, "HV": HV, "K": K, "V": V}, case, offsets, seed)


def build(subject: Subject, operator: Operator, sizes: Mapping[str, int], given: Mapping,
          offsets: Sequence[int] | None = None, seed: int = 0) -> dict[str, object]:
    """Arguments on the CPU: ``given`` holds the dtype, options, and True for every optional tensor that is present."""
    declaration, generator = operator.declaration, torch.Generator().manual_seed(seed)
    options = {p.name: given[p.name] for p in declaration.options if p.name in given}
    if "dtype" in options:  # of the results: an option here, while the case's is that of the inputs
        options["dtype"] = torch.promote_types(FLOATS[given["dtype"]], torch.float32)
    built = dict(options)
    sizes = {"N": len(offsets) - 1 if offsets else sizes["B"], **sizes, **subject.sizes}
    for p in declaration.tensors:
        if p.name.startswith("cu_seqlens"):
            if offsets and (p.name == "cu_seqlens" or given.get(p.name)):
                built[p.name] = torch.tensor(offsets, dtype=torch.int32 if p.name == "cu_seqlens" else torch.int64)
            continue
        if p.optional and not given.get(p.name, False):
            continue
        dims = declaration.shapes_of(p, options)[given.get(f"{p.name} rank", 0)]
        values = subject.make(p.name, [dim.size(sizes) for dim in dims], options, generator)
        built[p.name] = values.to(FLOATS[given["dtype"]])
    return built


def is_valid(subject: Subject, operator: Operator, case: Mapping) -> bool:
    """Whether the operator's own rules allow the case."""
    packed = case["tokens"] in PACKED
    if case.get("cu_seqlens_cpu") and not packed:
        return False
    (H, HV), (K, V) = case["heads"], case["channels"]
    known = {p.name: p.default for p in operator.declaration.options}
    ranks = {case[f"{p.name} rank"] for p in operator.declaration.tensors if p.has_outer and f"{p.name} rank" in case}
    if len(ranks) > 1:  # `...` stands for the same axes of every tensor
        return False
    known |= case | subject.sizes | {"H": H, "HV": HV, "K": K, "V": V, "cu_seqlens": packed or None, "inference": False}
    known |= {p.name: True if case.get(p.name) else None for p in operator.declaration.tensors if p.optional
              and p.name != "cu_seqlens"}
    return all(rule.when and not known[rule.when] or rule.varies or rule.holds(*(known[name] for name in rule.names))
               for rule in operator.declaration.rules)
