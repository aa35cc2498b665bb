"""C059, C061, C063: torch.compile(fullgraph=True) of calls that kernels run: the bits of eager, and few graphs."""

import pytest
import torch
import torch._dynamo.utils
from harness.trial import STATES, same

import facade
from device.calls import layer, trial

LENGTHS = (70, 100, 333, 2048)
FUNCTIONS = ("chunk_kda", "fused_recurrent_kda", "fused_kda_gate", "kda_gate_chunk_cumsum")
PACKABLE = ("chunk_kda", "fused_recurrent_kda", "kda_gate_chunk_cumsum")


class Both:
    """An operator with fixed options, compiled and eager."""

    def __init__(self, trial):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.trial = trial

    @property
    def graphs(self) -> int:
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def check(self, arguments, gradients: bool):
        arguments = self.trial.place(arguments)
        options = {name: x for name, x in arguments.items() if not isinstance(x, torch.Tensor)}
        tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
        public = self.trial.operator.public

        def call(tensors):
            returned = public(**tensors, **options)
            return returned if isinstance(returned, tuple) else (returned,)

        if not hasattr(self, "compiled"):
            self.compiled = torch.compile(call, fullgraph=True)
        same(self._found(self.compiled, tensors, gradients), self._found(call, tensors, gradients))

    def _found(self, function, tensors, gradients):
        names = self.trial.differentiable(tensors)
        leaves = {name: tensors[name].detach().clone().requires_grad_(gradients) for name in names}
        with facade.use_backend("triton"), torch.set_grad_enabled(gradients):
            results = [x for x in function({**tensors, **leaves}) if x is not None]
        found = {f"result {index}": x.detach() for index, x in enumerate(results)}
        if not gradients:
            return found
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(x.shape, generator=generator).to(x) for x in results]
        return found | dict(zip(names, torch.autograd.grad(results, list(leaves.values()), upstream)))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward"])
def test_dense_of_any_length(function, gradients):
    """The second length makes T dynamic; none after it compiles again."""
    both = Both(t := trial(function))
    for T in LENGTHS:
        both.check(t.arguments(layer(t), dtype="bf16", T=T, K=64, V=64, **STATES), gradients)
    assert both.graphs <= 2


@pytest.mark.parametrize("function", PACKABLE)
@pytest.mark.parametrize("gradients", [True, False], ids=["training", "forward"])
def test_packed_with_any_boundaries(function, gradients):
    """Boundaries are data: other ones, and other lengths of the row, need at most one more graph."""
    both = Both(t := trial(function))
    for offsets in ([0, 0, 30, 70], [0, 1, 64, 70], [0, 65, 65, 100], [0, 100, 200, 333]):
        both.check(t.arguments(layer(t), dtype="bf16", offsets=offsets, K=64, V=64, **STATES), gradients)
    assert both.graphs <= 2
