"""Gradients through the bridge: by name, once, in the autocast state and on the backend of the forward pass."""

import pytest
import torch
from jaxtyping import Float, Integer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import facade
import facade.ops
import fla_dispatch
from fla_dispatch import ACCUMULATOR, Backend, Result, Saved, dispatch

B, T, H, K = 2, 5, 2, 16


@dispatch("toy_autograd",
          returns={"y": Result("B T H", "x"), "total": Result("B H", ACCUMULATOR, when="output_total")},
          same_dtype=[("x", "w")])
def toy_scale(x: Float[Tensor, "B T H"], w: Float[Tensor, "B T H"], bias: Float[Tensor, "H"] | None = None,
              output_total: bool = False, cu_seqlens: Integer[Tensor, "N+1"] | None = None):
    """y = x * w + bias, total = sum over T of x in float32."""
    y = x * w if bias is None else x * w + bias.to(x.dtype)
    return y, x.float().sum(1) if output_total else None


class Toy(Backend):
    """toy_scale with a backward of its own, which keeps what it was given."""

    name, operation = "toy_scale", "toy_autograd"
    handles = frozenset({"bias", "output_total", "cu_seqlens"})
    saves = {"product": Saved("B T H", "x")}

    def __init__(self, **changes):
        self.seen = []
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, call):
        y = call.x * call.w
        total = call.x.float().sum(1) if "total" in call.wanted else None
        return (y if call.bias is None else y + call.bias.to(y.dtype), total), (y,)

    def backward(self, call, saved, grads):
        self.seen.append((call, saved, grads))
        dy = grads["y"].float()
        dx = dy * call.w
        if grads["total"] is not None:
            dx = dx + grads["total"][:, None]
        gradients = {"x": dx, "w": dy * call.x}
        return gradients if call.bias is None else gradients | {"bias": dy.sum((0, 1))}


def leaf(*shape, dtype=torch.float32):
    return torch.randn(shape or (B, T, H), dtype=dtype).requires_grad_()


@pytest.fixture
def backend(register):
    toy = Toy()
    register(toy)
    return toy


def gradients(function, loss, *inputs):
    return torch.autograd.grad(loss(function(*inputs)), inputs, allow_unused=True)


# --- what a backward gets and gives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", [
    lambda r: r[0].square().sum(), lambda r: r[1].square().sum(), lambda r: (r[0][:, 1:].sum() * r[1].sum()),
], ids=["y", "total", "both"])  # fmt: skip
def test_gradients_by_name(backend, bias, loss):
    """Equal to autograd's through the body, also with a loss on the second result alone."""
    inputs = [leaf(), leaf(), *([leaf(H)] if bias else [])]

    def run(*inputs):
        return toy_scale(*inputs, output_total=True)

    ours = gradients(run, loss, *inputs)
    assert facade.last_route().backend == "toy_scale"
    with facade.use_backend("reference"):
        theirs = gradients(run, loss, *inputs)
    for mine, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(mine) if right is None else right)


def test_what_a_backward_gets(backend):
    x, w = leaf(), leaf()
    toy_scale(x, w, output_total=True)[0].sum().backward()
    ((call, saved, grads),) = backend.seen
    assert torch.equal(call.x, x) and torch.equal(call.w, w) and call.bias is None and call.output_total is True
    assert set(saved) == {"product"} and torch.equal(saved["product"], x * w)
    assert set(grads) == {"y", "total"} and grads["total"] is None


def test_gradients_of_results_are_contiguous(backend):
    """An expanded or transposed gradient of a loss reaches no kernel as such."""
    for loss in lambda y: y.sum(), lambda y: (y.transpose(1, 2) * torch.ones(B, H, T)).sum():
        loss(toy_scale(leaf(), leaf())[0]).backward()
        assert backend.seen[-1][2]["y"].is_contiguous() and backend.seen[-1][2]["y"].stride() == (T * H, H, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_their_input(backend, dtype):
    """Whatever a backward computes in."""
    x, w, bias = leaf(dtype=dtype), leaf(dtype=dtype), leaf(H, dtype=torch.float64)
    toy_scale(x, w, bias)[0].sum().backward()
    assert (x.grad.dtype, w.grad.dtype, bias.grad.dtype) == (dtype, dtype, torch.float64)


def test_only_what_is_asked_for(backend):
    x, w = leaf(), leaf().detach()
    toy_scale(x, w)[0].sum().backward()
    assert x.grad is not None and w.grad is None


def test_no_gradient_for_an_input(register):
    """None is a gradient of zero that costs nothing."""
    register(Toy(backward=lambda call, saved, grads: {"x": grads["y"], "w": None}))
    x, w = leaf(), leaf()
    toy_scale(x, w)[0].sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) and w.grad is None


@pytest.mark.parametrize(("returned", "message"), [
    ({"x": None}, r"backend `toy_scale` returned no gradient of \['w'\]"),
    ({"x": None, "w": None, "bias": None}, r"returned gradients of \['bias'\], which are not inputs"),
    ({"x": None, "w": None, "cu_seqlens": None}, r"returned gradients of \['cu_seqlens'\], which are not inputs"),
])  # fmt: skip
def test_wrong_names(register, returned, message):
    register(Toy(backward=lambda call, saved, grads: returned))
    y, _ = toy_scale(leaf(1, T, H), leaf(1, T, H), cu_seqlens=torch.tensor([0, T]))
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_exceptions_of_a_backward_propagate(register):
    def backward(call, saved, grads):
        raise RuntimeError("out of shared memory")

    register(Toy(backward=backward))
    with pytest.raises(RuntimeError, match="out of shared memory"):
        toy_scale(leaf(), leaf())[0].sum().backward()


def test_strided_inputs(backend):
    """The gradient of a view reaches the tensor behind it."""
    x, w = leaf(B, H, T), leaf(B, T, 2 * H)
    toy_scale(x.transpose(1, 2), w[..., ::2])[0].sum().backward()
    assert torch.equal(x.grad, w.detach()[..., ::2].transpose(1, 2)) and w.grad[..., 1::2].abs().max() == 0


def test_no_graph_without_gradients(backend):
    assert not toy_scale(leaf().detach(), leaf().detach())[0].requires_grad
    with torch.no_grad():
        assert not toy_scale(leaf(), leaf())[0].requires_grad
    with torch.inference_mode():
        assert toy_scale(leaf(), leaf())[0].is_inference()
    assert toy_scale(leaf().detach(), leaf())[0].requires_grad


def test_an_input_changed_before_backward(backend):
    """What was saved is watched over, as everywhere in torch."""
    x, w = leaf(), leaf()
    y, _ = toy_scale(x, w)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_is_kept_after_backward(backend):
    y, _ = toy_scale(leaf(), leaf())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


def test_a_backward_gets_what_hooks_unpacked(backend):
    """Offloading and compression hand back other tensors; the graph itself keeps none of its own."""
    x, w = leaf(), leaf()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: 3 * t):
        y, _ = toy_scale(x, w)
    assert [value for value in y.grad_fn.call.values if isinstance(value, torch.Tensor)] == []
    y.sum().backward()
    assert torch.equal(x.grad, 3 * w) and torch.equal(w.grad, 3 * x)


@dispatch("toy_constant", returns={"y": Result("B T H", "x")}, constants=("rate",))
def toy_decay(x: Float[Tensor, "B T H"], rate: Float[Tensor, "H"]):
    """y = x * rate, by which it cannot be differentiated."""
    return (x * rate.detach(),)


class Decay(Backend):
    name, operation = "toy_decay", "toy_constant"

    def forward(self, call):
        return (call.x * call.rate,), ()

    def backward(self, call, saved, grads):
        return {"x": grads["y"] * call.rate}


def test_a_constant_has_no_gradient_and_asks_for_none(register):
    register(Decay())
    x, rate = leaf(), leaf(H)
    (y,) = toy_decay(x, rate)
    assert facade.last_route().backend == "toy_decay"
    y.sum().backward()
    assert torch.equal(x.grad, rate.expand(B, T, H)) and rate.grad is None
    assert not toy_decay(x.detach(), rate)[0].requires_grad


# --- twice -----------------------------------------------------------------------------------------------------------


def kda(dtype=torch.float32, rows=1, tokens=9):
    q, k, v = torch.randn(3, rows, tokens, H, K, dtype=dtype).unbind()
    g, beta = -torch.rand(rows, tokens, H, K, dtype=dtype), torch.rand(rows, tokens, H, dtype=dtype)
    return [x.requires_grad_() for x in (q, torch.nn.functional.normalize(k, dim=-1), v, g, beta)]


def run_kda(*inputs, **options):
    return facade.ops.chunk_kda(*inputs, **options)


@pytest.mark.parametrize("function", [toy_scale, facade.ops.chunk_kda, facade.ops.fused_recurrent_kda],
                         ids=lambda f: f.__name__)
def test_double_backward_says_so(backend, function):
    inputs = [leaf(), leaf()] if function is toy_scale else kda()
    first = torch.autograd.grad(function(*inputs)[0].square().sum(), inputs, create_graph=True)
    assert all(g.requires_grad for g in first)
    for gradient in first:
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(gradient.sum(), inputs, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("function", [toy_scale, facade.ops.chunk_kda], ids=lambda f: f.__name__)
def test_create_graph_alone_does_no_harm(backend, function):
    inputs = [leaf(), leaf()] if function is toy_scale else kda()
    loss = function(*inputs)[0].square().sum()
    plain = torch.autograd.grad(loss, inputs, retain_graph=True)
    watched = torch.autograd.grad(loss, inputs, create_graph=True)
    assert all(map(torch.equal, plain, watched))


# --- autocast (C077, C079) -------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Projections in the autocast dtype around chunk_kda; float32 parameters."""

    def __init__(self, width=24):
        super().__init__()
        self.projections = torch.nn.ModuleDict({name: torch.nn.Linear(width, H * K) for name in "qkvg"})
        self.beta = torch.nn.Linear(width, H)
        self.out = torch.nn.Linear(H * K, width)

    def forward(self, x, cu_seqlens=None, cast=lambda x: x):
        x = cast(x)
        q, k, v, g = (cast(self.projections[name])(x).unflatten(-1, (H, K)) for name in "qkvg")
        beta = cast(self.beta)(x).sigmoid()
        g = torch.nn.functional.logsigmoid(g.float())
        o, _ = facade.ops.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens)
        return cast(self.out)(o.flatten(-2))


def manual(dtype):
    """Casts by hand what autocast casts by itself: weights and inputs of linear layers."""
    def cast(thing):
        if isinstance(thing, Tensor):
            return thing.to(dtype)
        weight, bias = thing.weight.to(dtype), thing.bias.to(dtype)
        return lambda x: torch.nn.functional.linear(x, weight, bias)

    return cast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """Backward outside the context; gradients float32 on the leaves, equal to those of casting by hand."""
    layer, x = Layer(), torch.randn(2, 9, 24).requires_grad_()
    leaves = [x, *layer.parameters()]
    with torch.autocast("cpu", dtype=dtype):
        y = layer(x)
    assert y.dtype == dtype
    ours = torch.autograd.grad(y.float().square().sum(), leaves)
    theirs = torch.autograd.grad(layer(x, cast=manual(dtype)).float().square().sum(), leaves)
    for mine, right in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32 and mine.isfinite().all()
        assert torch.equal(mine, right)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_leaves_the_arithmetic_alone(dtype):
    """float32 inputs are not rounded because the caller is under autocast: an operator knows its own precision."""
    inputs = kda()
    expected = gradients(run_kda, lambda r: r[0].square().sum(), *inputs)
    with torch.autocast("cpu", dtype=dtype):
        o, _ = facade.ops.chunk_kda(*inputs)
        ours = torch.autograd.grad(o.square().sum(), inputs)
    assert o.dtype == torch.float32 and all(map(torch.equal, ours, expected))


class Autocast(Toy):
    """Notes the autocast state of its forward and of its backward."""

    @staticmethod
    def state():
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    def forward(self, call):
        self.seen.append(self.state())
        return super().forward(call)

    def backward(self, call, saved, grads):
        self.seen.append(self.state())
        return {"x": grads["y"] * call.w, "w": grads["y"] * call.x}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backward_reenters_the_autocast_state_of_forward(register, dtype):
    toy = Autocast()
    register(toy)
    with torch.autocast("cpu", dtype=dtype):
        y, _ = toy_scale(leaf(), leaf())
    y.sum().backward()
    assert toy.seen == [(True, dtype), (True, dtype)]
    del toy.seen[:]
    y, _ = toy_scale(leaf(), leaf())
    with torch.autocast("cpu", dtype=dtype):
        y.sum().backward()
    assert [enabled for enabled, _ in toy.seen] == [False, False]


def test_recompute_under_autocast(register):
    """bf16 again in a recomputed forward and in backward: gradients of 1e5, too much for fp16, stay finite (C079)."""
    toy = Autocast()
    register(toy)
    x, linear = leaf(B, T, H), torch.nn.Linear(H, H)

    def block(x):
        projected = linear(x)
        return toy_scale(projected, projected)[0]

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(block, x, use_reentrant=True)
    y.backward(torch.full_like(y, 1e5))
    assert y.dtype == torch.bfloat16
    assert toy.seen == [(True, torch.bfloat16)] * 3
    assert x.grad.isfinite().all() and linear.weight.grad.abs().max() > 65504


# --- gradient checkpointing (C080, C082) -----------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_keeps_every_bit(use_reentrant):
    """With ``cu_seqlens`` by keyword where torch allows it, and enclosed where it does not."""
    layer, x = Layer(), torch.randn(1, 40, 24).requires_grad_()
    cu_seqlens = torch.tensor([0, 3, 3, 30, 38])
    leaves = [x, *layer.parameters()]

    def loss(y):
        return y[:, :38].square().sum()

    expected = torch.autograd.grad(loss(layer(x, cu_seqlens=cu_seqlens)), leaves)
    if use_reentrant:
        y = checkpoint(lambda x, cu_seqlens: layer(x, cu_seqlens=cu_seqlens), x, cu_seqlens, use_reentrant=True)
    else:
        y = checkpoint(layer, x, cu_seqlens=cu_seqlens, use_reentrant=False)
    loss(y).backward()
    assert all(map(torch.equal, expected, (p.grad for p in leaves)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_backend(backend, use_reentrant):
    x, w = leaf(), leaf()
    expected = gradients(lambda *inputs: toy_scale(*inputs)[0], lambda y: y.square().sum(), x, w)
    checkpoint(lambda x, w: toy_scale(x, w)[0], x, w, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(w.grad, expected[1])


def test_the_backend_of_forward_runs_backward(register, monkeypatch):
    """Gates, forcing and registrations between the two change nothing."""
    toy = Toy(env="FLA_TOY_AUTOGRAD")
    register(toy)
    x, w = leaf(), leaf()
    ran = [toy_scale(x, w)[0]]
    monkeypatch.setenv("FLA_TOY_AUTOGRAD", "0")
    ran[0].sum().backward()
    assert len(toy.seen) == 1
    ran = toy_scale(x, w)[0]
    assert facade.last_route().backend == "reference"
    monkeypatch.setenv("FLA_TOY_AUTOGRAD", "1")
    ran.sum().backward()
    assert len(toy.seen) == 1
    ran = toy_scale(x, w)[0]
    fla_dispatch.unregister("toy_scale", "toy_autograd")
    with facade.use_backend("reference"):
        ran.sum().backward()
    assert len(toy.seen) == 2


def test_what_is_saved_does_not_depend_on_gates_between_forward_and_recompute(register):
    """Same tensors in a recomputed forward whatever ran in between, or checkpointing gives up (C082)."""
    toy = Toy(env="FLA_TOY_AUTOGRAD")
    register(toy)
    x, w = leaf(), leaf()
    expected = gradients(lambda *inputs: toy_scale(*inputs)[0], lambda y: y.square().sum(), x, w)
    y = checkpoint(lambda x, w: toy_scale(x, w)[0], x, w, use_reentrant=False)
    with facade.use_backend("reference"):
        toy_scale(x, w), toy_scale(leaf(1, 50, H), leaf(1, 50, H))
    y.square().sum().backward()
    assert torch.equal(x.grad, expected[0]) and torch.equal(w.grad, expected[1])


# --- the same for kernels from outside -------------------------------------------------------------------------------


def test_input_guard():
    seen = {}

    @fla_dispatch.input_guard
    def kernel(x, y, *more, scale=1.0, z=None):
        """Multiplies."""
        seen.update(x=x, y=y, more=more, scale=scale, z=z)
        return x

    strided = torch.randn(4, 3).t()
    kernel(strided, None, strided, scale=2.0, z=strided)
    assert kernel.__doc__ == "Multiplies." and seen["y"] is None and seen["scale"] == 2.0
    for guarded in seen["x"], *seen["more"], seen["z"]:
        assert guarded.is_contiguous() and torch.equal(guarded, strided)
    contiguous = torch.randn(3)
    assert kernel(contiguous, None) is contiguous


def test_input_guard_spares():
    @fla_dispatch.input_guard(no_guard_contiguous=("y",))
    def kernel(x, y):
        return x.is_contiguous(), y.is_contiguous()

    @fla_dispatch.input_guard(no_guard_contiguous=True)
    def free(x):
        return x.is_contiguous()

    strided = torch.randn(4, 3).t()
    assert kernel(strided, strided) == (True, False) == kernel(strided, y=strided)
    assert free(strided) is False


def test_autocast_of_outside_functions():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        @fla_dispatch.autocast_custom_fwd(device_type="cpu")
        def forward(ctx, x):
            seen.append((torch.is_autocast_enabled("cpu"), x.dtype))
            return x * 2

        @staticmethod
        @fla_dispatch.autocast_custom_bwd(device_type="cpu")
        def backward(ctx, dy):
            seen.append((torch.is_autocast_enabled("cpu"), dy.dtype))
            return dy * 2

    x = leaf()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = Function.apply(x)
    y.sum().backward()
    assert seen == [(True, torch.float32)] * 2 and x.grad.max() == 2
