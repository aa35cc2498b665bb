"""torch.compile: one node per operator, equal to eager, and few graphs. Takes its time, and wants to run alone."""

import re

import pytest
import torch
import torch._inductor.config
from jaxtyping import Float
from torch import Tensor
from torch._dynamo import lookup_backend
from torch._subclasses.fake_tensor import FakeTensorMode

import facade
import facade.ops
from facade.ops.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda, kda_gate_chunk_cumsum
from fla_dispatch import ACCUMULATOR, Backend, Result, Saved, dispatch

H, HV, K, V = 2, 4, 16, 24


@pytest.fixture(autouse=True)
def _fresh_compiler(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    torch.compiler.reset()
    with torch._inductor.config.patch("cpp.vec_isa_ok", True):  # spares a trial compilation per instruction set
        yield
    torch.compiler.reset()


class Graphs:
    """A compiler backend that counts the graphs it is given; what autograd does to them is traced as always."""

    def __init__(self, inner="aot_eager"):
        self.inner, self.count = inner, 0

    def __call__(self, graph, inputs):
        self.count += 1
        return lookup_backend(self.inner)(graph, inputs)


# --- a toy operator and its backend ----------------------------------------------------------------------------------


@dispatch("toy_compile",
          returns={"y": Result("B T H", "x"), "total": Result("B H", ACCUMULATOR, when="output_total")},
          same_dtype=[("x", "w")])
def toy_compile(x: Float[Tensor, "B T H"], w: Float[Tensor, "B T H"], bias: Float[Tensor, "H"] | None = None,
                output_total: bool = False):
    y = x * w if bias is None else x * w + bias.to(x.dtype)
    return y, x.float().sum(1) if output_total else None


class Toy(Backend):
    name, operation, env = "toy_compiled", "toy_compile", "FLA_TOY_COMPILE"
    handles = frozenset({"bias", "output_total"})
    saves = {"w2": Saved("B T H", "x"), "sums": Saved("N H", torch.float32)}

    def __init__(self):
        self.ran = []

    def note(self, step):
        self.ran.append((step, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    def forward(self, call):
        self.note("forward")
        y = call.x * call.w
        total = call.x.float().sum(1) if "total" in call.wanted else None
        y = y if call.bias is None else y + call.bias.to(y.dtype)
        return (y, total), (2 * call.w, call.x.float().sum(1))

    def backward(self, call, saved, grads):
        self.note("backward")
        assert torch.equal(saved["sums"], call.x.float().sum(1))
        dy = torch.zeros(call.x.shape) if grads["y"] is None else grads["y"].float()
        dx = dy * saved["w2"] / 2
        if grads["total"] is not None:
            dx = dx + grads["total"][:, None]
        gradients = {"x": dx, "w": dy * call.x}  # float32, whatever the inputs are
        return gradients if call.bias is None else gradients | {"bias": dy.sum((0, 1))}


class Thrifty(Toy):
    """Saves what exists already: a result and an input."""

    name = "toy_thrifty"
    saves = {"y": Saved("B T H", "x"), "x": Saved("B T H", "x")}

    def forward(self, call):
        outputs, _ = super().forward(call)
        return outputs, (outputs[0], call.x)

    def backward(self, call, saved, grads):
        dy = grads["y"]
        return {"x": dy * saved["y"] / saved["x"], "w": dy * saved["x"]}


@pytest.fixture
def toy(register):
    backend = Toy()
    register(backend)
    return backend


def toy_inputs(tokens=5, dtype=torch.float32):
    return {"x": torch.randn(2, tokens, H, dtype=dtype).requires_grad_(),
            "w": torch.randn(2, tokens, H, dtype=dtype).requires_grad_(), "bias": torch.randn(H).requires_grad_()}


# --- chunk_kda and how it is called ----------------------------------------------------------------------------------


def kda(rows=1, tokens=70, dtype=torch.float32, requires_grad=True, **changes):
    tensors = {
        "q": torch.randn(rows, tokens, H, K, dtype=dtype),
        "k": torch.nn.functional.normalize(torch.randn(rows, tokens, H, K), dim=-1).to(dtype),
        "v": torch.randn(rows, tokens, HV, V, dtype=dtype),
        "g": -torch.rand(rows, tokens, HV, K, dtype=dtype),
        "beta": torch.rand(rows, tokens, HV, dtype=dtype),
    } | {name: value for name, value in changes.items() if isinstance(value, Tensor)}
    return changes | {name: x.requires_grad_(requires_grad and x.is_floating_point()) for name, x in tensors.items()}


CALLS = {
    "dense": lambda: kda(rows=2),
    "bf16": lambda: kda(dtype=torch.bfloat16),
    "packed": lambda: kda(cu_seqlens=torch.tensor([0, 1, 1, 66, 69])),
    "packed_host_copy": lambda: kda(cu_seqlens=torch.tensor([0, 5, 70]), cu_seqlens_cpu=torch.tensor([0, 5, 70])),
    "options": lambda: kda(A_log=torch.randn(HV), dt_bias=torch.randn(HV * K), use_gate_in_kernel=True, scale=0.3,
                           use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
                           chunk_size=32),
    "bounded_gate": lambda: kda(use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0),
    "states": lambda: kda(rows=2, initial_state=torch.randn(2, HV, K, V), output_final_state=True),
    "states_v_first": lambda: kda(initial_state=torch.randn(2, HV, V, K), output_final_state=True, state_v_first=True,
                                  cu_seqlens=torch.tensor([0, 30, 70])),
    "final_state": lambda: kda(output_final_state=True, disable_recompute=True),
}  # fmt: skip


def leaves(arguments):
    return [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]


def run(function, arguments, loss):
    """→ results, and gradients of their loss."""
    results = function(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    gradients = torch.autograd.grad(loss(results), leaves(arguments), allow_unused=True)
    return *(r.detach() for r in results if r is not None), *gradients


def squares(results):
    return sum(r.float().square().sum() for r in results if r is not None)


def last_only(results):
    return results[-1].float().square().sum()


def assert_same(found, expected):
    assert len(found) == len(expected)
    for mine, right in zip(found, expected, strict=True):
        if mine is None or right is None:  # autograd may say zero either way
            assert all(x is None or not x.any() for x in (mine, right))
        else:
            assert mine.dtype == right.dtype and torch.equal(mine, right)


# --- equal to eager --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_chunk_kda_equals_eager(name):
    """Forward and every gradient, bit for bit, in one graph (C061)."""
    arguments = CALLS[name]()
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, arguments, squares), run(chunk_kda, arguments, squares))


def test_loss_on_the_final_state_alone():
    arguments = CALLS["final_state"]()
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, arguments, last_only), run(chunk_kda, arguments, last_only))


@pytest.mark.parametrize("function", [fused_recurrent_kda, fused_kda_gate, kda_gate_chunk_cumsum],
                         ids=lambda f: f.__name__)
def test_the_other_operators_equal_eager(function):
    arguments = kda() if function is fused_recurrent_kda else {
        "g": torch.randn(1, 70, HV, K).requires_grad_(), "A_log": torch.randn(HV).requires_grad_(),
        "dt_bias": torch.randn(HV * K).requires_grad_()}
    compiled = torch.compile(lambda **arguments: function(**arguments), fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, arguments, squares), run(function, arguments, squares))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["dense", "packed", "states"])
def test_without_gradients(mode, name):
    arguments = CALLS[name]()
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    with mode():
        found, expected = compiled(**arguments), chunk_kda(**arguments)
    assert torch.equal(found[0], expected[0]) and not found[0].requires_grad


@pytest.mark.parametrize("packed", [False, True])
def test_intermediate_states(packed):
    options = {"cu_seqlens": torch.tensor([0, 1, 70])} if packed else {}
    arguments = kda(requires_grad=False, return_intermediate_states=True, **options)
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        found, expected = compiled(**arguments), chunk_kda(**arguments)
    assert len(found) == 3 and torch.equal(found[2], expected[2])


class Layer(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.project = torch.nn.Linear(width, H * (2 * K + 1) + H * (K + V))
        self.out = torch.nn.Linear(H * V, width)

    def forward(self, x):
        q, k, v, g, beta = self.project(x).split([H * K, H * K, H * V, H * K, H], -1)
        q, k, v, g = (y.unflatten(-1, (H, -1)) for y in (q, k, v, g))
        g = torch.nn.functional.logsigmoid(g)
        o, _ = facade.ops.chunk_kda(q, k, v, g, beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return x + self.out(o.flatten(-2))


def test_through_inductor():
    """The code of the default compiler around the operator, whose inputs are slices of one fused projection."""
    def cut(projected):
        q, k, v, g, beta = projected.split([H * K, H * K, H * V, H * K, H], -1)
        q, k, v, g = (y.unflatten(-1, (H, -1)) for y in (q, k, v, g))
        return chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=-5.0,
                         use_beta_sigmoid_in_kernel=True)[0].relu()

    arguments = {"projected": torch.randn(2, 70, H * (3 * K + V + 1)).requires_grad_()}
    assert_same(run(torch.compile(cut, fullgraph=True), arguments, squares), run(cut, arguments, squares))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", [squares, last_only])
def test_a_backend_equals_eager(toy, compiler, dtype, loss):
    """With tensors kept for backward, an option and an optional tensor."""
    arguments = toy_inputs(dtype=dtype) | {"output_total": True}
    compiled = torch.compile(lambda **arguments: toy_compile(**arguments), fullgraph=True, backend=compiler)
    assert_same(run(compiled, arguments, loss), run(toy_compile, arguments, loss))
    assert [step for step, *_ in toy.ran] == ["forward", "backward"] * 2


def test_a_backend_that_saves_its_results(register):
    """Autograd may do what it likes with a result: what backward reads stays what it was."""
    register(Thrifty())
    arguments = toy_inputs()
    del arguments["bias"]
    op = torch.ops.fla.toy_compile.default
    torch.library.opcheck(op, in_schema(toy_compile, "toy_thrifty", True, **arguments))
    for compiler in "aot_eager", "inductor":
        compiled = torch.compile(lambda **a: toy_compile(**a)[0].mul_(3), fullgraph=True, backend=compiler)
        found = run(compiled, arguments, squares)
        assert_same(found, run(lambda **a: (toy_compile(**a)[0] * 3,), arguments, squares))


def test_a_body_of_plain_operations():
    """A body need not be an autograd.Function: third parties write theirs in plain PyTorch."""
    arguments = toy_inputs() | {"output_total": True}
    compiled = torch.compile(lambda **arguments: toy_compile(**arguments), fullgraph=True, backend="aot_eager")
    with facade.use_backend("reference"):
        assert_same(run(compiled, arguments, squares), run(toy_compile, arguments, squares))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_state_of_a_backward(toy, dtype):
    """That of forward. (A compiled graph runs with autocast off: its casts are in the graph.)"""
    compiled = torch.compile(lambda **arguments: toy_compile(**arguments)[0], fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=dtype):
        y = compiled(**toy_inputs())
    y.sum().backward()
    (_, *forward), (_, *backward) = toy.ran
    assert backward == forward or not (forward[0] or backward[0])


def test_autocast_around_a_layer():
    layer, x = Layer(), torch.randn(2, 70, 32).requires_grad_()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, right = compiled(x), layer(x)
    assert y.dtype == right.dtype and torch.equal(y, right)
    (dx,), (right_dx,) = (torch.autograd.grad(out.float().square().sum(), [x]) for out in (y, right))
    assert dx.dtype == torch.float32
    torch.testing.assert_close(dx, right_dx, rtol=2e-2, atol=2e-2)  # the two add bf16 gradients in different orders


# --- how many graphs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_gradients", [True, False], ids=["training", "inference"])
def test_at_most_one_recompile_over_lengths(with_gradients):
    graphs = Graphs()
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend=graphs)
    for tokens in 65, 130, 1000:
        arguments = kda(tokens=tokens, requires_grad=with_gradients)
        if with_gradients:
            assert_same(run(compiled, arguments, squares), run(chunk_kda, arguments, squares))
        else:
            assert torch.equal(compiled(**arguments)[0], chunk_kda(**arguments)[0])
    assert graphs.count <= 2


def test_no_recompile_with_mark_dynamic():
    graphs = Graphs()
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend=graphs)
    for tokens in 65, 130, 1000:
        arguments = kda(tokens=tokens)
        for tensor in arguments.values():
            torch._dynamo.mark_dynamic(tensor, 1)
        assert_same(run(compiled, arguments, squares), run(chunk_kda, arguments, squares))
    assert graphs.count == 1


def test_no_recompile_over_packings():
    """As many tokens and sequences in different places: one graph; other counts: one more."""
    graphs = Graphs()
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend=graphs)
    for entries in [0, 5, 70], [0, 66, 70], [0, 0, 69], [0, 1, 2, 70], [0, 1, 2, 3, 4, 70], [0, 10, 20, 30, 70]:
        arguments = kda(cu_seqlens=torch.tensor(entries))
        assert_same(run(compiled, arguments, squares), run(chunk_kda, arguments, squares))
    assert graphs.count <= 2


def test_options_that_vary():
    """A number that changes from call to call, be it an argument of the compiled function."""
    compiled = torch.compile(lambda scale, size, **a: chunk_kda(**a, scale=scale, chunk_size=size)[0], fullgraph=True,
                             backend="aot_eager")
    arguments = kda(requires_grad=False)
    for scale, size in (0.3, 64), (0.5, 64), (0.7, 32), (2, 64), (None, 64):
        assert torch.equal(compiled(scale, size, **arguments), chunk_kda(**arguments, scale=scale, chunk_size=size)[0])


FIRST_COMPILE = """
import os, time, torch, facade.ops

q, k, v = torch.randn(3, 1, 65, 2, 16).unbind()
inputs = [x.requires_grad_() for x in (q, k, v, -torch.rand(1, 65, 2, 16), torch.rand(1, 65, 2))]
step = torch.compile(lambda *inputs: facade.ops.chunk_kda(*inputs)[0], fullgraph=True)
start, start_of_work = time.perf_counter(), sum(os.times()[:4])
step(*inputs).sum().backward()
print(min(time.perf_counter() - start, sum(os.times()[:4]) - start_of_work))
"""


def test_first_compile_takes_20_seconds_at_most(fresh_python, tmp_path):
    """Forward and backward through the default compiler, in a new process with empty caches. Waiting does not count."""
    seconds = float(fresh_python(FIRST_COMPILE, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)))
    assert seconds <= 20


def test_a_graph_keeps_the_backend_it_was_traced_with(toy, monkeypatch):
    arguments = toy_inputs()
    compiled = torch.compile(lambda **arguments: toy_compile(**arguments)[0], fullgraph=True, backend="aot_eager")
    compiled(**arguments)
    monkeypatch.setenv("FLA_TOY_COMPILE", "0")
    for _ in range(2):
        compiled(**arguments).sum().backward()
    with facade.use_backend("reference"):
        compiled(**arguments)
    assert [step for step, *_ in toy.ran] == ["forward"] + ["forward", "backward"] * 2 + ["forward"]
    torch.compiler.reset()
    torch.compile(lambda **arguments: toy_compile(**arguments)[0], fullgraph=True, backend="aot_eager")(**arguments)
    assert len(toy.ran) == 6


# --- what torch.library asks of an operator --------------------------------------------------------------------------


def in_schema(function, backend, keep, **arguments):
    """Positional arguments of the torch.library op behind ``function``."""
    schema = getattr(torch.ops.fla, function.__name__).default._schema
    defaults = function.operator.defaults
    return *(arguments.get(a.name, defaults.get(a.name)) for a in schema.arguments[:-2]), backend, keep


@pytest.mark.parametrize("name", ["dense", "packed", "options", "states_v_first"])
def test_opcheck_of_chunk_kda(name):
    arguments = CALLS[name]()
    torch.library.opcheck(torch.ops.fla.chunk_kda.default, in_schema(chunk_kda, "reference", True, **arguments))


@pytest.mark.parametrize("function", [fused_kda_gate, kda_gate_chunk_cumsum], ids=lambda f: f.__name__)
def test_opcheck_of_the_gates(function):
    arguments = {"g": torch.randn(1, 5, HV, K).requires_grad_(), "A_log": torch.randn(HV).requires_grad_()}
    op = getattr(torch.ops.fla, function.__name__).default
    torch.library.opcheck(op, in_schema(function, "reference", True, **arguments))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total", [False, True])
def test_opcheck_of_a_backend(toy, total, dtype):
    arguments = toy_inputs(dtype=dtype) | {"output_total": total}
    op = torch.ops.fla.toy_compile.default
    torch.library.opcheck(op, in_schema(toy_compile, "toy_compiled", True, **arguments))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors(name):
    """Shapes, dtypes and strides without arithmetic."""
    arguments = CALLS[name]()
    expected = chunk_kda(**arguments)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in arguments.items()}
        found = chunk_kda(**fakes)
    for fake, real in zip(found, expected, strict=True):
        assert (fake is None) == (real is None)
        if fake is not None:
            assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    """A program for any number of tokens, with the operator as one node."""
    layer, x = Layer().eval(), torch.randn(2, 70, 32)
    dynamic = ({1: torch.export.Dim("T", min=2, max=4096)},)
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes=dynamic, strict=strict)
        targets = [str(node.target) for node in program.graph.nodes]
        assert targets.count("fla.chunk_kda.default") == 1
        for tokens in 70, 130:
            x = torch.randn(2, tokens, 32)
            torch.testing.assert_close(program.module()(x), layer(x))


LOADED = """
import torch, facade.ops
print(torch.export.load({!r}).module()(torch.ones(2, 70, 32)).double().sum().item())
"""


def test_an_exported_program_runs_in_another_process(fresh_python, tmp_path):
    """It asks for the operator by name, before anybody has called it."""
    layer, x, file = Layer().eval(), torch.ones(2, 70, 32), tmp_path / "layer.pt2"
    with torch.no_grad():
        torch.export.save(torch.export.export(layer, (x,)), file)
        found = fresh_python(LOADED.format(str(file)))
        assert float(found) == pytest.approx(layer(x).double().sum().item(), rel=1e-5)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "message"), [
    ({"k": torch.zeros(1, 4, H, K)}, "chunk_kda: `k` [B T H K] has T=4 (shape [1, 4, 2, 16]), while `q`"),
    ({"q": torch.zeros(5, H, K)}, "chunk_kda: `q` is [B, T, H, K], but a tensor of shape [5, 2, 16] was given"),
    ({"v": torch.zeros(1, 70, HV, V, dtype=torch.float16)}, "chunk_kda: `v` is float16 while `q` is float32"),
    ({"chunk_size": 16}, "chunk_kda: `chunk_size` must be either 32 or 64"),
    ({"inital_state": None}, "chunk_kda: unknown keyword `inital_state`; did you mean `initial_state`?"),
    ({"cp_context": "ring"}, "chunk_kda: context parallelism is not implemented"),
    ({"initial_state": torch.zeros(3, HV, K, V)}, "chunk_kda: `initial_state` holds 3 initial states, but the batch"),
], ids=["dims", "rank", "dtype", "rule", "keyword", "cp_context", "states"])  # fmt: skip
def test_errors_while_tracing_say_what_eager_says(changes, message):
    arguments = kda(requires_grad=False) | changes
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=re.escape(message)):  # Dynamo chooses the type
        compiled(**arguments)


def test_wrong_boundaries_are_found_when_the_graph_runs():
    arguments = kda(requires_grad=False, cu_seqlens=torch.tensor([0, 5, 70]))
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    compiled(**arguments)
    with pytest.raises(ValueError, match="`cu_seqlens` ends at 71, past the T=70 tokens given"):
        compiled(**arguments | {"cu_seqlens": torch.tensor([0, 5, 71])})


def test_a_forced_refusal_while_tracing(toy):
    toy.limits = {"dtype": (torch.bfloat16,)}
    compiled = torch.compile(lambda **arguments: toy_compile(**arguments), fullgraph=True, backend="aot_eager")
    with facade.use_backend("toy_compiled"), pytest.raises(Exception, match="takes torch.bfloat16"):
        compiled(**toy_inputs())


def test_the_deprecated_name_while_tracing():
    arguments = kda(requires_grad=False, initial_state=torch.randn(1, HV, V, K), output_final_state=True)
    compiled = torch.compile(lambda **arguments: chunk_kda(**arguments), fullgraph=True, backend="aot_eager")
    found = compiled(**arguments, transpose_state_layout=True)
    assert torch.equal(found[1], chunk_kda(**arguments, state_v_first=True)[1])


def test_the_operator_can_be_compiled_by_itself():
    """torch.compile(chunk_kda), without a function of the user's around it."""
    arguments = kda()
    compiled = torch.compile(chunk_kda, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, arguments, squares), run(chunk_kda, arguments, squares))
