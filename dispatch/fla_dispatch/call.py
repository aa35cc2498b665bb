"""What a call becomes: ``Facts``, which a decision may depend on, and the immutable ``Call`` that a backend gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from fla_dispatch.extension import BoundCall
from fla_dispatch.sequences import Sequences


@dataclass(frozen=True, slots=True)
class TensorFacts:
    dtype: torch.dtype
    device: torch.device
    shape: tuple[int | None, ...]  # None where the size varies between calls that share a decision


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a verifier or a rank may read: equal facts, equal answer. No tensor, no value, no environment."""

    function: str
    operation: str
    tensors: Mapping[str, TensorFacts]  # present tensors only
    options: Mapping[str, object]
    dims: Mapping[str, int]  # sizes that do not vary
    device: torch.device
    arch: str  # "sm90", "gfx942", "cpu" …
    tokens_bucket: int | None  # bit length of B·T; None while it is symbolic
    sequences_bucket: int | None
    needs_grad: bool
    inference: bool  # under torch.inference_mode

    @property
    def packed(self) -> bool:
        return "cu_seqlens" in self.tensors

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.tensors.values())).dtype

    def __getattr__(self, name):
        raise AttributeError(
            f"a decision may not depend on `{name}`; it may read {', '.join(type(self).__dataclass_fields__)}"
        )


class Call(BoundCall):
    """One checked call: ``call.q``, ``call.scale``, ``call.dims["K"]``. Immutable; all tensors are contiguous."""

    __slots__ = ()

    def __getattr__(self, name):
        try:
            return self.values[self.plan.index[name]]
        except KeyError:
            raise AttributeError(f"{self.plan.function} has no argument `{name}`") from None

    def __setattr__(self, name, value):
        raise AttributeError("a Call is immutable")

    def __delattr__(self, name):
        raise AttributeError("a Call is immutable")

    @property
    def function(self) -> str:
        return self.plan.function

    @property
    def facts(self) -> Facts:
        return self.plan.facts

    @property
    def device(self) -> torch.device:
        return self.plan.facts.device

    @property
    def dims(self) -> Mapping[str, int]:
        """Every letter's size in this call."""
        return MappingProxyType(self.plan.sizes(self.values))

    @property
    def arguments(self) -> Mapping[str, object]:
        return MappingProxyType(dict(zip(self.plan.names, self.values, strict=True)))

    @property
    def wanted(self) -> tuple[str, ...]:
        """Names of the results that are asked for."""
        return self.plan.wanted

    @property
    def sequences(self) -> Sequences:
        """How the tokens divide into sequences and chunks."""
        arguments = self.arguments
        return Sequences(
            self.dims["B"], self.dims["T"], self.device, arguments.get("cu_seqlens"), arguments.get("cu_seqlens_cpu")
        )

    def with_tensors(self, tensors: Mapping[str, torch.Tensor | None]) -> "Call":
        """The same call over other tensors of the same shapes (saved ones, in a backward pass)."""
        values = list(self.values)
        for name, tensor in tensors.items():
            values[self.plan.index[name]] = tensor
        return type(self)(self.plan, tuple(values))
