"""Reading a declaration: annotations to parameters, shapes to dimensions, and what derives from them."""

import dataclasses
from typing import Optional

import pytest
import torch
from jaxtyping import Bool, Float, Int32, Integer
from torch import Tensor

from fla_dispatch import ACCUMULATOR, Declaration, Result, Rule, bridge, dispatch, operator_of, operators
from fla_dispatch.declaration import FLOATS, INTEGERS, OptionParameter, TensorParameter, declare
from fla_dispatch.dims import DIMS, OUTER, Dim, alternatives, fitting, parse_shape


def toy_declared(
    q: Float[Tensor, "B T H K"],
    step: Float[Tensor, "B T H"] | Float[Tensor, "B T H K"],
    state: Float[Tensor, "N H K V"] | None = None,
    bias: Float[Tensor, "H * K"] | None = None,
    scale: float | None = None,
    causal: bool = True,
    dtype: torch.dtype = torch.float32,
    plan: object | None = None,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    *,
    window: int = 8,
):
    return q


RESULTS = {"o": Result("B T H K", "q"), "last": Result("N H K V", ACCUMULATOR, when="causal")}
LAYOUTS = {"causal": ("H K V", "H V K")}


def declared(**changes) -> Declaration:
    arguments = dict(returns=RESULTS, derive={"scale": "K ** -0.5"}, layouts=LAYOUTS) | changes
    return declare(toy_declared, "toy_declaration", **arguments)


# --- parameters ------------------------------------------------------------------------------------------------------


def test_tensor_parameter():
    q = declared().parameter("q")
    assert q == TensorParameter("q", 0, False, False, (parse_shape("B T H K"),), FLOATS)
    assert q.differentiable and q.shape_texts == ("B T H K",)


def test_optional_tensor():
    state = declared().parameter("state")
    assert state.optional and state.position == 2 and state.shape_texts == ("N H K V",)


def test_alternatives_by_rank():
    assert declared().parameter("step").shape_texts == ("B T H", "B T H K")


def test_integer_tensor():
    cu_seqlens = declared().parameter("cu_seqlens")
    assert cu_seqlens.dtypes == INTEGERS and not cu_seqlens.differentiable and cu_seqlens.shape_texts == ("N+1",)


@pytest.mark.parametrize(("name", "expected"), {
    "scale": OptionParameter("scale", 4, False, True, float, None, False),
    "causal": OptionParameter("causal", 5, False, False, bool, True, False),
    "dtype": OptionParameter("dtype", 6, False, False, torch.dtype, torch.float32, False),
    "plan": OptionParameter("plan", 7, False, True, object, None, False),
    "window": OptionParameter("window", 9, True, False, int, 8, False),
}.items())  # fmt: skip
def test_option(name, expected):
    assert declared().parameter(name) == expected


def test_order_and_keyword_only():
    names = "q step state bias scale causal dtype plan cu_seqlens window"
    assert declared().names == tuple(names.split())
    assert declared().positional == 9
    assert [p.name for p in declared().tensors] == ["q", "step", "state", "bias", "cu_seqlens"]


def test_typing_optional_is_the_same():
    def toy_old_style(x: Optional[Float[Tensor, "B T"]], y: Optional[int]): ...  # noqa: UP045

    x, y = declare(toy_old_style, "toy_declaration", returns=Result("B T", "x")).parameters
    assert x.optional and y.optional and y.required


def test_unreadable_annotations():
    def toy_bare(x: Tensor): ...

    def toy_mixed(x: Float[Tensor, "B T"] | int): ...

    def toy_several(x: int | str): ...

    def toy_starred(*x: int): ...

    def toy_swallowing(x: int, **more): ...

    for body, problem in {
        toy_bare: "toy_bare: cannot read the annotation .*Tensor.* of x",
        toy_mixed: "toy_mixed: cannot read the annotation .* of x",
        toy_several: "toy_several: cannot read the annotation .* of x",
        toy_starred: "toy_starred: parameter x must be an ordinary or keyword-only parameter",
        toy_swallowing: "toy_swallowing: parameter more must be an ordinary or keyword-only parameter",
    }.items():
        with pytest.raises(TypeError, match=problem):
            declare(body, "toy_declaration", returns=Result("B T", torch.float32))


def test_other_dtypes_are_refused_rather_than_widened():
    """A mask or an int32 table must not be declared as what Float or Integer take."""

    def toy_mask(x: Bool[Tensor, "B T"]): ...

    def toy_narrow(x: Int32[Tensor, "B T"]): ...

    for body in toy_mask, toy_narrow:
        with pytest.raises(TypeError, match=f"{body.__name__}: cannot read the annotation .* of x"):
            declare(body, "toy_declaration", returns=Result("B T", torch.float32))


@pytest.mark.parametrize(("wrong", "name"), [
    ({"rules": (Rule("windows > 0", "message"),)}, "windows"),
    ({"rules": (Rule("window > 0", "message", when="casual"),)}, "casual"),
    ({"same_dtype": [("q", "stat")]}, "stat"),
    ({"constants": ["stat"]}, "stat"),
    ({"composed": {"q": len}}, "q"),
    ({"layouts": {"casual": ("H K V", "H V K")}}, "casual"),
    ({"derive": {"scal": "K ** -0.5"}}, "scal"),
    ({"derive": {"scale": "D ** -0.5"}}, "D"),
    ({"derive": {"scale": "T ** -0.5"}}, "T"),
    ({"chunk_size": "chunk"}, "chunk"),
    ({"returns": Result("B T", "x")}, "x"),
    ({"returns": {"o": Result("B T", "q", when="casual")}}, "casual"),
])  # fmt: skip
def test_a_name_that_is_not_declared(wrong, name):
    """A slip of the pen in a declaration is found when it is declared, not in the call that needs it."""
    with pytest.raises((TypeError, ValueError), match=f"toy_declared: .*`{name}`"):
        declared(**wrong)


# --- dimensions ------------------------------------------------------------------------------------------------------


def test_parse_shape():
    assert parse_shape("B T HV K") == tuple(Dim(letter, (letter,)) for letter in ("B", "T", "HV", "K"))
    assert parse_shape("N+1") == (Dim("N+1", ("N",), 1),)
    assert parse_shape("HV*K") == (Dim("HV*K", ("HV", "K")),)
    assert parse_shape("H*K+2") == (Dim("H*K+2", ("H", "K"), 2),)
    assert parse_shape("") == ()


def test_spaces_around_a_product():
    assert declared().parameter("bias").shape_texts == ("H*K",)


def test_unknown_letter():
    with pytest.raises(ValueError, match="shape 'B T X': 'X' is not a dimension letter; known: B, T, H, HV"):
        parse_shape("B T X")


def test_alternatives():
    assert alternatives("B T H") == (parse_shape("B T H"),)
    assert alternatives("B T H | B T H K") == (parse_shape("B T H"), parse_shape("B T H K"))
    assert alternatives("...") == ((), *(parse_shape(" ".join(list(OUTER)[:n])) for n in range(1, 6)))
    assert alternatives("... M M")[2] == parse_shape("A1 A2 M M")
    assert fitting(alternatives("B T H | B T H K"), {"B", "T", "H"}) == parse_shape("B T H")
    assert fitting(alternatives("B T H | B T H K"), {"B", "T", "H", "K"}) == parse_shape("B T H K")
    assert fitting(alternatives("... K"), {"A1", "A2", "K"}) == parse_shape("A1 A2 K")
    assert all(dim.varies for dim in alternatives("...")[-1])


@dispatch("toy_rows", returns=Result("...", ("dtype", "x")))
def toy_rows(x: Float[Tensor, "... K"], y: Float[Tensor, "... K"], dtype: torch.dtype | None = None):
    """Rows of any shape."""
    return (x * y).sum(-1).to(dtype or x.dtype)


@pytest.mark.parametrize("outer", [(), (2,), (2, 3), (2, 1, 3, 1, 2)])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_any_axes_before_the_last(outer, dtype):
    """Eager, as fake tensors see it, and the same plan for other sizes of these axes."""
    x, y = torch.randn(*outer, 4), torch.randn(*outer, 4)
    found = toy_rows(x, y, dtype)
    torch.testing.assert_close(found, (x * y).sum(-1).to(dtype or x.dtype))
    (fake,) = torch.ops.fla.toy_rows(x.to("meta"), y.to("meta"), dtype, "reference", False)
    assert (fake.shape, fake.dtype) == (found.shape, found.dtype)
    plans = len(toy_rows.operator._plans)
    toy_rows(torch.randn(*(n + 1 for n in outer), 4), torch.randn(*(n + 1 for n in outer), 4), dtype)
    assert len(toy_rows.operator._plans) == plans


def test_size_of_a_dimension():
    sizes = {"N": 3, "HV": 4, "K": 5}
    assert [dim.size(sizes) for dim in parse_shape("N+1 HV*K K")] == [4, 20, 5]


def test_what_varies():
    assert [letter for letter in DIMS if parse_shape(letter)[0].varies] == ["B", "T", "N", "NT"]
    assert parse_shape("N+1")[0].varies and parse_shape("B*T")[0].varies and not parse_shape("HV*K")[0].varies


# --- results, layouts, derivations, rules ----------------------------------------------------------------------------


def test_results():
    assert declared().wanted({"causal": True}) == ("o", "last")
    assert declared().wanted({"causal": False}) == ("o",)
    assert tuple(declared(returns=Result("B T H K", "q")).results) == ("result",)


def test_layout():
    d = declared()
    (laid_out,) = d.shapes_of(d.parameter("state"), {"causal": True})
    assert [dim.text for dim in laid_out] == ["N", "H", "V", "K"]
    assert [dim.text for dim in d.result_dims(d.results["last"], {"causal": True})] == ["N", "H", "V", "K"]
    assert d.shapes_of(d.parameter("state"), {"causal": False}) == d.parameter("state").shapes
    assert d.shapes_of(d.parameter("q"), {"causal": True}) == d.parameter("q").shapes


def test_derived():
    assert declared().derived["scale"]({"K": 16, "T": 1}) == 0.25


def test_rule():
    rule = Rule("K % H == 0 and plan is None", "message")
    assert rule.names == ("K", "H", "plan") and not rule.varies
    assert rule.holds(6, 3, None) and not rule.holds(6, 4, None) and not rule.holds(6, 3, object())
    assert Rule("T >= window", "message").varies


def test_renamed_and_removed():
    assert declared().renamed == {} and "head_first" in declared().removed

    def toy_stateful(x: Float[Tensor, "B T"], state_v_first: bool = False): ...

    assert declare(toy_stateful, "toy_declaration", returns=Result("B T", "x")).renamed == {
        "transpose_state_layout": "state_v_first"}


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        declared().function = "other"


# --- what derives ----------------------------------------------------------------------------------------------------


def test_schema():
    assert bridge.schema(declared()) == (
        "Tensor q, Tensor step, Tensor? state, Tensor? bias, float? scale, bool causal, ScalarType dtype, "
        "Tensor? cu_seqlens, int window"
    )


def test_library_op_has_the_schema():
    dispatch("toy_declaration", returns=RESULTS)(toy_declared)
    assert str(torch.ops.fla.toy_declared.default._schema) == (
        f"fla::toy_declared({bridge.schema(declared())}, str backend, bool keep) -> Tensor[]"
    )


def test_declared_twice():
    """A notebook runs its cells again: the last declaration holds."""
    dispatch("toy_declaration", returns=RESULTS)(toy_declared)
    before = torch.ops.fla.toy_declared.default
    again = dispatch("toy_declaration", returns=RESULTS)(toy_declared)
    assert torch.ops.fla.toy_declared.default is not before
    assert operator_of("toy_declared") is again.operator and operators()["toy_declared"] is again.operator


def test_describe_stands_for_tensors():
    public = dispatch("toy_declaration", returns=RESULTS, layouts=LAYOUTS)(toy_declared)
    described = public.operator.describe(dict(B=2, T=7, H=3, K=4, V=5), dtype=torch.float16, device="cuda", arch="sm90",
                                         tensors=("state", "cu_seqlens"), requires_grad=True, window=2)
    assert set(described) == {"q", "step", "state", "cu_seqlens", "window"}
    assert described["state"].shape == (2, 3, 4, 5) and described["state"].requires_grad
    assert described["cu_seqlens"].dtype == torch.int64 and not described["cu_seqlens"].requires_grad
    assert described["q"].arch == "sm90" and described["q"].device == torch.device("cuda")
