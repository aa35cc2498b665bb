"""What a backend gets: one immutable ``Call`` whose values it may trust, bound alike by both paths."""

import random

import pytest
import torch
from jaxtyping import Float, Integer
from torch import Tensor

import facade
from fla_dispatch import ACCUMULATOR, Backend, Result, Rule, Sequences, dispatch, sequences

B, T, H, K, V = 2, 5, 2, 16, 8


@dispatch(
    "toy_call",
    returns={
        "y": Result("B T H K", "x"),
        "last": Result("N H K V", ACCUMULATOR, when="output_last"),
        "starts": Result("B NT H K", "x", when="output_starts", omitted=True),
    },
    rules=(Rule("H <= 4", "at most four heads"), Rule("size in (32, 64)", "`size` must be 32 or 64", when="flag")),
    derive={"scale": "K ** -0.5"},
    layouts={"state_v_first": ("H K V", "H V K")},
    same_dtype=[("x", "w")],
    chunk_size="size",
)
def toy_call(
    x: Float[Tensor, "B T H K"],
    w: Float[Tensor, "B T H"] | Float[Tensor, "B T H K"] | None = None,
    v: Float[Tensor, "B T H V"] | None = None,
    state: Float[Tensor, "N H K V"] | None = None,
    bias: Float[Tensor, "H*K"] | None = None,
    scale: float | None = None,
    flag: bool = False,
    size: int = 64,
    output_last: bool = False,
    output_starts: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    plan_hint: object | None = None,
):
    return "body", x, w, v, state, bias, scale, flag, size, state_v_first, cu_seqlens, cu_seqlens_cpu, dtype, plan_hint


class Keeper(Backend):
    """Keeps the calls it gets."""

    name, operation = "toy_keeper", "toy_call"
    handles = frozenset(toy_call.operator.declaration.names)

    def __init__(self):
        self.calls = []

    def forward(self, call):
        self.calls.append(call)
        return tuple(call.x if name in call.wanted else None for name in call.plan.returned), ()


@pytest.fixture
def call(register):
    """→ the ``Call`` that ``toy_call(*args, **kwargs)`` becomes."""
    keeper = Keeper()
    register(keeper)

    def make(*args, **kwargs):
        toy_call(*args, **kwargs)
        return keeper.calls.pop()

    return make


def x(*shape):
    return torch.randn(shape or (B, T, H, K))


def offsets(*entries):
    return torch.tensor(entries)


# --- what it holds ---------------------------------------------------------------------------------------------------


def test_attributes(call):
    values = dict(x=x(), w=torch.randn(B, T, H), scale=0.5, flag=True, size=32)
    made = call(**values)
    assert made.function == "toy_call" and made.device == torch.device("cpu")
    for name, value in values.items():
        assert getattr(made, name) is value
    assert made.v is None and made.dtype is torch.float32 and made.plan_hint is None
    with pytest.raises(AttributeError, match="toy_call has no argument `y`"):
        _ = made.y


def test_arguments_in_the_order_of_the_declaration(call):
    made = call(x())
    assert tuple(made.arguments) == toy_call.operator.declaration.names
    assert made.arguments["x"] is made.x


def test_immutable(call):
    made = call(x())
    for name in "x", "scale", "plan", "values", "other":
        with pytest.raises(AttributeError, match="a Call is immutable"):
            setattr(made, name, None)
        with pytest.raises(AttributeError, match="a Call is immutable"):
            delattr(made, name)
    for mapping in made.arguments, made.dims:
        with pytest.raises(TypeError):
            mapping["x"] = None
    assert not hasattr(made, "__dict__")


def test_dims(call):
    assert call(x()).dims == {"B": B, "T": T, "H": H, "K": K, "N": B}
    assert call(x(), v=torch.randn(B, T, H, V)).dims == {"B": B, "T": T, "H": H, "K": K, "V": V, "N": B}
    assert call(x(1, 70, H, K), cu_seqlens=offsets(0, 1, 66, 70)).dims == {"B": 1, "T": 70, "H": H, "K": K, "N": 3}


def test_dims_of_calls_that_share_a_decision(call):
    first, second = call(x(2, 33, H, K)), call(x(1, 64, H, K))
    assert (first.dims["B"], first.dims["T"], second.dims["B"], second.dims["T"]) == (2, 33, 1, 64)


def test_number_of_chunks(call):
    assert call(x(1, 70, H, K), output_starts=True).dims["NT"] == 2
    assert call(x(1, 70, H, K), output_starts=True, size=32).dims["NT"] == 3
    packed = call(x(1, 70, H, K), output_starts=True, size=32, cu_seqlens=offsets(0, 1, 1, 66, 70))
    assert packed.dims["NT"] == 1 + 0 + 3 + 1


def test_dims_of_empty_input(call):
    assert call(x(1, 0, H, K)).dims["T"] == 0
    assert call(x(0, 3, H, K)).dims["N"] == 0


def test_defaults_and_derived_values(call):
    for _ in range(2):  # decided, and remembered
        assert call(x()).scale == K ** -0.5
        assert call(x(), scale=None).scale == K ** -0.5
        assert call(x(B, T, H, 64)).scale == 0.125
        assert call(x(), scale=3).scale == 3.0 and type(call(x(), scale=3).scale) is float


def test_options_arrive_in_their_own_type(call):
    numpy = pytest.importorskip("numpy")
    made = call(x(), flag=1, size=numpy.int32(32), scale=numpy.float32(0.5))
    assert made.flag is True and type(made.size) is int and type(made.scale) is float and made.scale == 0.5


def test_wanted(call):
    assert call(x()).wanted == ("y",)
    assert call(x(), v=x(B, T, H, V), output_last=True).wanted == ("y", "last")
    assert call(x(), output_starts=True).wanted == ("y", "starts")
    assert call(x()).plan.returned == ("y", "last")


def test_results_that_were_not_asked_for(register):
    register(Keeper())
    assert [r is None for r in toy_call(x())] == [False, True]
    assert [r is None for r in toy_call(x(), output_starts=True)] == [False, True, False]
    assert [r is None for r in toy_call(x(), v=x(B, T, H, V), output_last=True)] == [False, False]


# --- what a kernel may rely on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strided", {
    "transposed": torch.randn(B, H, T, K).transpose(1, 2),
    "sliced": torch.randn(B, T, H, 2 * K)[..., ::2],
    "offset": torch.randn(B, T + 1, H, K)[:, 1:],
    "expanded": torch.randn(1, 1, H, K).expand(B, T, H, K),
    "imaginary": torch.randn(B, T, H, K, dtype=torch.complex64).conj().imag,
}.items(), ids=lambda pair: pair[0])  # fmt: skip
def test_inputs_are_plain(call, strided):
    """Contiguous, and what memory holds is what the tensor says."""
    _, given = strided
    for _ in range(2):
        made = call(given)
        assert made.x.is_contiguous() and not made.x.is_neg() and torch.equal(made.x, given)


def test_one_element_that_is_negated(call):
    """Contiguous whatever its strides say, so that only the sign bit tells."""
    given = torch.ones(1, 1, 1, 1, dtype=torch.complex64).mul_(1j).conj().imag
    assert given.is_neg() and given.is_contiguous()
    for _ in range(2):
        assert not call(given).x.is_neg() and call(given).x.item() == -1


def test_plain_inputs_are_not_copied(call):
    given = x()
    assert call(given).x is given


def test_parameters_and_subclasses(call):
    class Tagged(torch.Tensor):
        pass

    for given in torch.nn.Parameter(x()), x().as_subclass(Tagged):
        with torch.no_grad():
            assert torch.equal(call(given).x, given)


def test_layout(call):
    assert call(x(), state=x(B, H, K, V)).dims["V"] == V
    assert call(x(), state=x(B, H, V, K), state_v_first=True).dims["V"] == V


def test_with_tensors(call):
    made, other = call(x(), scale=0.25), x()
    changed = made.with_tensors({"x": other})
    assert changed.x is other and changed.scale == 0.25 and made.x is not other and changed.plan is made.plan


# --- sequences -------------------------------------------------------------------------------------------------------


def test_dense_sequences(call):
    found = call(x(2, 70, H, K)).sequences
    assert found.offsets == (0, 70, 140) and found.lengths == (70, 70)
    assert found.chunk_count(64) == 2 and found.chunk_count(32) == 3
    assert found.chunk_indices(64).tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert found.chunk_indices(64).dtype == torch.int32


def test_packed_sequences(call):
    found = call(x(1, 70, H, K), cu_seqlens=offsets(0, 1, 1, 66, 69)).sequences
    assert found.offsets == (0, 1, 1, 66, 69) and found.lengths == (1, 0, 65, 3)
    assert found.chunk_count(64) == 1 + 0 + 2 + 1
    assert found.chunk_indices(64).tolist() == [[0, 0], [2, 0], [2, 1], [3, 0]]


def test_empty_sequences(call):
    assert call(x(2, 0, H, K)).sequences.lengths == (0, 0)
    nothing = call(x(1, 0, H, K), cu_seqlens=offsets(0)).sequences
    assert nothing.lengths == () and nothing.chunk_count(64) == 0 and nothing.chunk_indices(64).shape == (0, 2)


def test_dtypes_of_boundaries(call):
    """int32 and int64, with a host copy of either: the same boundaries."""
    for dtype in torch.int32, torch.int64:
        for host in None, torch.int32, torch.int64:
            cu_seqlens = offsets(0, 2, 5)
            made = call(x(1, 5, H, K), cu_seqlens=cu_seqlens.to(dtype),
                        cu_seqlens_cpu=None if host is None else cu_seqlens.to(host))
            assert made.sequences.offsets == (0, 2, 5)


def test_boundaries_that_change_are_read_again(call):
    """A host tensor is read at every call, also when it was changed in place."""
    cu_seqlens = offsets(0, 2, 5)
    assert call(x(1, 5, H, K), cu_seqlens=cu_seqlens).sequences.offsets == (0, 2, 5)
    cu_seqlens[1] = 3
    assert call(x(1, 5, H, K), cu_seqlens=cu_seqlens).sequences.offsets == (0, 3, 5)
    cu_seqlens[1] = 7
    with pytest.raises(ValueError, match="must not decrease"):
        call(x(1, 5, H, K), cu_seqlens=cu_seqlens)


class OnDevice(torch.Tensor):
    """A host tensor that claims to be on a device, and counts how often the host had to wait for it."""

    waits = 0
    device = torch.device("cuda", 0)

    def tolist(self):
        OnDevice.waits += 1
        return self.as_subclass(torch.Tensor).tolist()


@pytest.fixture
def on_device(monkeypatch):
    monkeypatch.setattr(OnDevice, "waits", 0)
    monkeypatch.setattr(sequences, "_HOST_OFFSETS", {})
    return offsets(0, 2, 5).as_subclass(OnDevice)


def test_one_wait_for_boundaries_on_a_device(on_device):
    """Remembered by identity and version until they change or die."""
    for _ in range(3):
        assert Sequences(1, 5, on_device.device, on_device).offsets == (0, 2, 5)
    assert OnDevice.waits == 1
    on_device[1] = 4
    assert Sequences(1, 5, on_device.device, on_device).offsets == (0, 4, 5)
    assert OnDevice.waits == 2
    assert len(sequences._HOST_OFFSETS) == 1
    del on_device


def test_forgotten_with_their_tensor(monkeypatch):
    monkeypatch.setattr(sequences, "_HOST_OFFSETS", {})
    for end in range(100):
        tensor = offsets(0, end).as_subclass(OnDevice)
        assert Sequences(1, 100, tensor.device, tensor).offsets == (0, end)
        del tensor
        assert not sequences._HOST_OFFSETS


def test_no_wait_with_a_host_copy(on_device):
    host = offsets(0, 2, 5)
    assert Sequences(1, 5, on_device.device, on_device, host).lengths == (2, 3)
    assert OnDevice.waits == 0


def test_inference_tensors_are_not_remembered(monkeypatch):
    monkeypatch.setattr(sequences, "_HOST_OFFSETS", {})
    with torch.inference_mode():
        tensor = offsets(0, 2, 5).as_subclass(OnDevice)
        assert Sequences(1, 5, tensor.device, tensor).offsets == (0, 2, 5)
        tensor[1] = 4
        assert Sequences(1, 5, tensor.device, tensor).offsets == (0, 4, 5)
    assert not sequences._HOST_OFFSETS


def test_sequences_on_the_device_of_the_call(call):
    assert call(x(1, 5, H, K), cu_seqlens=offsets(0, 5)).sequences.chunk_indices(64).device == torch.device("cpu")


# --- both paths bind alike -------------------------------------------------------------------------------------------


class Dice:
    """Random calls of toy_call: valid ones, and ones with something wrong."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def odds(self, chance):
        return self.random.random() < chance

    def pick(self, *choices):
        return self.random.choice(choices)

    def tensor(self, *shape):
        dice = self.random.random()
        if dice < 0.03:
            shape = shape[:-1]
        elif dice < 0.06:
            axis = self.random.randrange(len(shape))
            shape = (*shape[:axis], shape[axis] + 1, *shape[axis + 1:])
        elif dice < 0.07:
            return self.pick(None, 1.5, [1.0], "tensor", object)
        kind = self.pick(*["float32"] * 24, "float16", "bfloat16", "float64", "int64", "bool", "complex64")
        device = "meta" if self.odds(0.02) else "cpu"
        made = torch.zeros(shape, dtype=getattr(torch, kind), device=device)
        if self.odds(0.2) and len(shape) > 1:
            made = made.transpose(0, 1).contiguous().transpose(0, 1)
        if self.odds(0.1) and made.is_floating_point():
            made = torch.nn.Parameter(made)
        return made

    def boundaries(self, tokens):
        entries = sorted(self.random.randint(0, tokens) for _ in range(self.random.randint(0, 3)))
        entries = [0, *entries, tokens]
        if self.odds(0.2):
            entries[self.random.randrange(len(entries))] += self.pick(-1, 1, 3)
        if self.odds(0.03):
            entries = []
        return torch.tensor(entries, dtype=self.pick(torch.int64, torch.int32, torch.int64, torch.float32))

    def call(self):
        rows, tokens, heads, k, v = self.pick(1, 1, 2, 0), self.pick(1, 5, 64, 0), self.pick(1, 2, 4, 5), 4, 3
        arguments = {"x": self.tensor(rows, tokens, heads, k)}
        optional = {
            "w": lambda: self.tensor(rows, tokens, heads, *([k] if self.odds(0.5) else [])),
            "v": lambda: self.tensor(rows, tokens, heads, v),
            "state": lambda: self.tensor(rows, heads, *self.pick((k, v), (v, k))),
            "bias": lambda: self.tensor(heads * k),
            "scale": lambda: self.pick(0.5, 2, None, -0.0, float("inf"), True, "1", 10**400),
            "flag": lambda: self.pick(True, False, 1, 0, 2, None, "yes"),
            "size": lambda: self.pick(32, 64, 48, 64.0, True, None, 2**70),
            "output_last": lambda: self.pick(True, False),
            "output_starts": lambda: self.pick(True, False),
            "state_v_first": lambda: self.pick(True, False),
            "cu_seqlens": lambda: self.boundaries(tokens),
            "cu_seqlens_cpu": lambda: self.boundaries(tokens),
            "dtype": lambda: self.pick(torch.float32, torch.int8, "float32"),
            "plan_hint": lambda: self.pick(None, object(), "ring"),
            "sise": lambda: 64,
            "head_first": lambda: self.pick(True, False),
        }
        rare = {"cu_seqlens_cpu": 0.1, "plan_hint": 0.1, "sise": 0.03, "head_first": 0.03}
        for name, make in optional.items():
            if self.odds(rare.get(name, 0.25)):
                arguments[name] = make()
        if "cu_seqlens" in arguments and self.odds(0.3):
            arguments["cu_seqlens_cpu"] = arguments["cu_seqlens"].clone()
        return arguments


def outcome(function, arguments):
    """What a call comes to: results as comparable values, or the exception; and who ran it."""
    try:
        results = function(**arguments)
    except Exception as error:
        return type(error), str(error)
    return facade.last_route().backend, tuple(map(comparable, results))


def comparable(value):
    if isinstance(value, torch.Tensor):
        values = None if value.device.type == "meta" else value.tolist()
        return type(value), value.dtype, value.shape, value.is_contiguous(), values
    return type(value), repr(value)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("backend", [False, True], ids=["body", "backend"])
def test_both_paths_bind_alike(register, backend, seed):
    """Random calls, valid or not: the same results, or the same exception with the same message."""
    if backend:
        register(Recorder())
    dice, right = Dice(seed), 0
    for _ in range(500):
        arguments = dice.call()
        with torch.set_grad_enabled(dice.odds(0.5)):
            expected = outcome(toy_call.operator.call_in_python, arguments)
            for _ in range(2):  # decided, and remembered
                assert outcome(toy_call, arguments) == expected, arguments
        right += expected[0] in ("reference", "toy_recorder")
    assert 80 < right < 420


class Recorder(Backend):
    """Its results are what it was given."""

    name, operation = "toy_recorder", "toy_call"
    handles = frozenset(toy_call.operator.declaration.names)
    differentiable = False

    def forward(self, call):
        return (*call.values, sorted(call.dims.items()), call.wanted), ()


ROW = dict(x=torch.zeros(1, 65, H, K))  # 65 to 127 tokens share a decision, as do 2 and 3 sequences
PACKED = ROW | {"cu_seqlens": offsets(0, 5, 65)}
WITH_COPY = PACKED | {"cu_seqlens_cpu": offsets(0, 5, 65)}
SPOILT = {
    "T": (ROW | {"w": torch.zeros(1, 65, H)}, {"w": torch.zeros(1, 66, H)}),
    "B": (ROW | {"w": torch.zeros(1, 65, H)}, {"w": torch.zeros(2, 65, H)}),
    "N": ({"x": torch.zeros(2, 65, H, K), "state": torch.zeros(2, H, K, V)}, {"state": torch.zeros(3, H, K, V)}),
    "N_packed": (PACKED | {"state": torch.zeros(2, H, K, V)}, {"state": torch.zeros(3, H, K, V)}),
    "N_of_copy": (WITH_COPY, {"cu_seqlens_cpu": offsets(0, 5, 9, 65)}),
    "dtype": (ROW, {"x": torch.zeros(1, 65, H, K, dtype=torch.int32)}),
    "batch": (PACKED, {"x": torch.zeros(2, 33, H, K), "cu_seqlens": offsets(0, 5, 33)}),
    "start": (PACKED, {"cu_seqlens": offsets(1, 5, 65)}),
    "order": (PACKED, {"cu_seqlens": offsets(0, 66, 65)}),
    "end": (PACKED, {"cu_seqlens": offsets(0, 5, 66)}),
    "end_int32": (PACKED | {"cu_seqlens": offsets(0, 5, 65).int()}, {"cu_seqlens": offsets(0, 5, 66).int()}),
    "end_strided": (PACKED, {"cu_seqlens": offsets(0, 9, 5, 9, 66, 9)[::2]}),
    "end_of_both": (WITH_COPY, {"cu_seqlens": offsets(0, 5, 66), "cu_seqlens_cpu": offsets(0, 5, 66)}),
    "copy_differs": (WITH_COPY, {"cu_seqlens_cpu": offsets(0, 6, 65)}),
    "copy_alone": (WITH_COPY, {"cu_seqlens": None}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_a_remembered_decision_lets_nothing_wrong_through(call, name):
    """What differs between calls of one decision is checked in each of them."""
    right, change = SPOILT[name]
    wrong = right | change
    for _ in range(2):
        call(**right)
    with pytest.raises((ValueError, TypeError)) as said:
        toy_call.operator.call_in_python(**wrong)
    assert outcome(toy_call, wrong) == (said.type, str(said.value))
    call(**right)


def test_sizes_that_only_their_product_ties(register):
    """Calls that share a decision are checked as closely as the first one was."""
    @dispatch("toy_product", returns={"y": Result("B T", "x")})
    def toy_product(x: Float[Tensor, "B T"], flat: Float[Tensor, "B*T"]):
        return x

    toy_product(torch.zeros(2, 33), torch.zeros(66))
    with pytest.raises(ValueError, match="`flat` .* must have B.T = 68 in axis 0"):
        toy_product(torch.zeros(2, 34), torch.zeros(66))


NARROW_BOUNDARIES = """
import ctypes, mmap, torch
from fla_dispatch import Result, dispatch
from jaxtyping import Float, Integer
from torch import Tensor

@dispatch("toy_narrow", returns=Result("B T", "x"))
def toy_narrow(x: Float[Tensor, "B T"], cu_seqlens: Integer[Tensor, "N+1"]):
    return x

pages, size = mmap.mmap(-1, 2 * mmap.PAGESIZE), mmap.PAGESIZE
after = ctypes.addressof(ctypes.c_char.from_buffer(pages)) + size
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(after), ctypes.c_size_t(size), 0) == 0  # nobody may read on
try:
    toy_narrow(torch.zeros(1, 8), torch.frombuffer(pages, dtype=torch.int8, count=size))
except TypeError as error:
    print(error)
"""


def test_boundaries_of_another_width(fresh_python):
    """One-byte boundaries are refused before anyone reads them four bytes at a time, past their end."""
    assert fresh_python(NARROW_BOUNDARIES) == "toy_narrow: `cu_seqlens` must be int32 or int64, not int8\n"
