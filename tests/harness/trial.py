"""An operator on the backend and device under test: how it is called, and what it is held against."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from unittest import mock

import torch

import facade
from fla_dispatch import Operator, operators
from harness import bounds
from harness.poison import poisoned_allocations
from harness.subject import BRIEF, FULL, Sizes, Subject, build

STATES = {"initial_state": True, "output_final_state": True}


@dataclass(frozen=True)
class Trial:
    """Results and gradients travel as one dict: results by name, gradients as "d<input>", all on the CPU."""

    subject: Subject
    operator: Operator
    backend: str
    device: torch.device
    brief: bool = False  # sizes are small, because kernels are interpreted

    @property
    def sizes(self) -> Sizes:
        return BRIEF if self.brief else FULL

    def sized(self, full, brief):
        """What a hazard that needs a size of its own asks for."""
        return brief if self.brief else full

    @property
    def names(self) -> tuple[str, ...]:
        return self.operator.declaration.names

    def arguments(self, variant: str | None = None, *, dtype: str = "fp32", offsets: Sequence[int] | None = None,
                  seed: int = 0, **given) -> dict[str, object]:
        """Arguments on the CPU: the variant's options (by default the subject's first), and from ``given`` sizes (B, T,
        H, HV, K, V), options and optional tensors (True). What this operator does not have is left out."""
        sizes = self.sizes.default | ({} if offsets is None else {"B": 1, "T": offsets[-1]})
        sizes |= {name: size for name in sizes if (size := given.pop(name, None)) is not None}
        if unknown := set(given) - {name for operator in operators().values() for name in operator.declaration.names}:
            raise TypeError(f"no operator has {', '.join(sorted(unknown))}")
        given = {"dtype": dtype, **self.subject.variants[variant or next(iter(self.subject.variants))], **given}
        return build(self.subject, self.operator, sizes, given, offsets, seed)

    def shape_of(self, name: str) -> str:
        """The declared shape of a parameter, a result or a gradient: "B T H K"; "" of an option."""
        declaration = self.operator.declaration
        if name in declaration.results:
            return declaration.results[name].shape
        parameter = declaration.parameter(name if name in self.names else name.removeprefix("d"))
        return parameter.shape_texts[0] if hasattr(parameter, "shape_texts") else ""

    def has_tokens(self, name: str) -> bool:
        return self.shape_of(name).startswith("B T")

    def has_sequences(self, name: str) -> bool:
        return self.shape_of(name).startswith("N ")

    def part(self, tensors: Mapping, rows: slice, tokens: slice, sequences: slice) -> dict[str, object]:
        """Of arguments, results or gradients, what belongs to some rows, tokens and sequences; the rest as it is."""
        return {name: x[rows, tokens] if self.has_tokens(name) else x[sequences] if self.has_sequences(name) else x
                for name, x in tensors.items()}

    def differentiable(self, arguments: Mapping) -> list[str]:
        return [p.name for p in self.operator.declaration.tensors if p.differentiable and p.name in arguments]

    # --- the operator ---

    def place(self, arguments: Mapping) -> dict[str, object]:
        """The arguments on the device, except what belongs on the host."""
        return {name: x.to(self.device) if isinstance(x, torch.Tensor) and not name.endswith("_cpu") else x
                for name, x in arguments.items()}

    def call(self, **arguments) -> dict[str, torch.Tensor]:
        """Results by name, as a user gets them; runs on the backend under test or raises ``BackendRefused``."""
        with facade.use_backend(self.backend):
            returned = self.operator.public(**self.place(arguments))
        route = facade.last_route()
        assert (route.function, route.backend) == (self.operator.declaration.function, self.backend), str(route)
        return self.named(returned)

    def named(self, returned) -> dict[str, torch.Tensor]:
        returned = returned if isinstance(returned, tuple) else (returned,)
        results = zip(self.operator.declaration.results, returned, strict=False)
        return {name: x for name, x in results if x is not None}

    def refusal(self, arguments: Mapping, *, gradients: bool = False) -> str | None:
        """Why the backend does not take the call, or not with gradients; None if it does."""
        placed = self.place(arguments)
        if gradients:
            placed |= {name: placed[name].detach().requires_grad_() for name in self.differentiable(arguments)}
        with facade.use_backend(self.backend):
            route = self.operator.explain(**placed)
        return None if route.backend == self.backend else route.refusals[0][1].splitlines()[-1].strip(" -")

    def run(self, arguments: Mapping, *, gradients: bool = True, loss: str = "all", cotangents: Mapping | None = None,
            layout: Callable | None = None, wrt: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Forward, and backward from ``cotangents`` (by default random ones of the results that the loss reads).

        ``layout`` lays inputs and cotangents out in memory; ``wrt`` names the inputs that require gradients.
        """
        leaves = {name: arguments[name].detach().to(self.device, copy=True) for name in self.differentiable(arguments)}
        wanted = {name: leaves[name].requires_grad_(gradients) for name in (leaves if wrt is None else wrt)}
        results = self.call(**{**arguments, **{name: layout(x) if layout else x for name, x in leaves.items()}})
        found = {name: x.detach().cpu() for name, x in results.items()}
        if not gradients:
            return found
        cotangents = self.cotangents(found, loss) if cotangents is None else cotangents
        cotangents = {name: x.to(self.device) for name, x in cotangents.items()}
        if layout:
            cotangents = {name: layout(x) for name, x in cotangents.items()}
        return found | {name: x.cpu() for name, x in backward(results, wanted, cotangents).items()}

    def cotangents(self, found: Mapping[str, torch.Tensor], loss: str = "all") -> dict[str, torch.Tensor]:
        """Fixed random gradients of the results that the loss reads: "all", the "first" or the "last"."""
        generator = torch.Generator().manual_seed(1)
        names = [name for name in found if name in self.operator.declaration.results]
        read = {"all": names, "first": names[:1], "last": names[-1:]}[loss]
        return {name: torch.randn(found[name].shape, generator=generator).to(found[name].dtype) for name in read}

    # --- what is right ---

    def oracle(self, arguments: Mapping, cotangents: Mapping = {}, dtype=torch.float64) -> dict[str, torch.Tensor]:
        """The recurrence in ``dtype``, with autograd's gradients."""
        leaves = {name: arguments[name].detach().clone() for name in self.differentiable(arguments)}
        leaves = {name: (x.double() if dtype == torch.float64 else x).requires_grad_() for name, x in leaves.items()}
        function = self.operator.declaration.function
        results = self.named(self.subject.oracle(function, {**arguments, **leaves}, dtype))
        right = {name: x.detach() for name, x in results.items()}
        cotangents = {name: x.to(results[name].dtype) for name, x in cotangents.items()}
        return right | (backward(results, leaves, cotangents) if cotangents else {})

    def compare(self, arguments: Mapping, cotangents: Mapping, *outcomes: Mapping) -> None:
        """Raises ``AssertionError`` with every tensor of ``outcomes`` that is further from the oracle than allowed."""
        dtype = arguments[self.differentiable(arguments)[0]].dtype
        right, eager = (self.oracle(arguments, cotangents, compute) for compute in (torch.float64, dtype))
        problems = [bounds.check(name, x, right[name], self.operator.declaration.tolerance, dtype, eager[name])
                    for found in outcomes for name, x in found.items()]
        assert not any(problems), "\n".join(filter(None, problems))

    def examine(self, arguments: Mapping, *, loss: str = "all", cotangents: Mapping | None = None,
                layout: Callable | None = None) -> dict[str, torch.Tensor]:
        """Run in poisoned memory, with gradients and without, and compare with the oracle; → what was found."""
        with poisoned_allocations():
            plain = self.run(arguments, gradients=False, layout=layout)
            cotangents = self.cotangents(plain, loss) if cotangents is None else cotangents
            found = self.run(arguments, cotangents=cotangents, layout=layout)
        self.compare(arguments, cotangents, plain, found)
        for name in self.differentiable(arguments):
            assert found[f"d{name}"].dtype == arguments[name].dtype, f"d{name} is {found[f'd{name}'].dtype}"
        return found


@contextmanager
def short_calls() -> Iterator[None]:
    """Where no sequence is long enough to be split: a first call in Triton does not make ready for one that is, which
    is a third of what it compiles."""
    engine = sys.modules.get("fla_triton.engine")
    with mock.patch.object(engine, "FEW", 0) if engine else nullcontext():
        yield


def backward(results: Mapping, leaves: Mapping, cotangents: Mapping) -> dict[str, torch.Tensor]:
    """The gradient of every leaf, by "d<name>"."""
    gradients = torch.autograd.grad([results[name] for name in cotangents], list(leaves.values()),
                                    list(cotangents.values()), allow_unused=True)
    return {f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
            for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True)}


def same(found: Mapping, expected: Mapping, names: Iterable[str] | None = None) -> None:
    """Raises ``AssertionError`` with every tensor of ``expected`` (or of ``names``) that differs in any bit's worth."""
    problems = []
    for name in expected if names is None else names:
        x, y = found[name], expected[name]
        if x.shape != y.shape or x.dtype != y.dtype:
            problems.append(f"{name}: {tuple(x.shape)} {x.dtype}, not {tuple(y.shape)} {y.dtype}")
        elif not torch.equal(x, y):
            problems.append(f"{name}: {(x != y).sum()} of {x.numel()} elements differ, by {(x - y).abs().max():.3g}")
    assert not problems, "\n".join(problems)
