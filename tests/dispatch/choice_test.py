"""Who runs a call: priorities, refusals, gates, forcing, registration, and the answers to "why?"."""

import importlib.metadata
import logging
import threading

import pytest
import torch
from jaxtyping import Float, Integer
from torch import Tensor

import facade
import facade.ops
import fla_dispatch
from fla_dispatch import Backend, BackendRefused, Described, Result, Saved, dispatch, registry

B, T, H, K, V = 1, 5, 2, 16, 8


@dispatch("toy_choice", returns={"y": Result("B T H K", "x")})
def toy_choice(x: Float[Tensor, "B T H K"], v: Float[Tensor, "B T H V"] | None = None, flag: bool = False,
               size: int = 64, scale: float | None = None, cu_seqlens: Integer[Tensor, "N+1"] | None = None):
    return x.clone()


@dispatch("toy_choice", returns={"y": Result("B T H K", "x")})
def toy_choice_other(x: Float[Tensor, "B T H K"]):
    return x.clone()


class Toy(Backend):
    """Takes everything; its result is ones."""

    name, operation = "toy_all", "toy_choice"
    handles = frozenset({"v", "flag", "size", "scale", "cu_seqlens"})

    def __init__(self, **changes):
        for name, value in changes.items():
            setattr(self, name, value)

    def forward(self, call):
        return (torch.ones_like(call.x),), ()


def toy(name="toy_all", **changes) -> Toy:
    return Toy(name=name, **changes)


def x(*shape, dtype=torch.float32):
    return torch.zeros(shape or (B, T, H, K), dtype=dtype)


def runs(*args, **kwargs) -> str:
    """Who ran this call; explain foretells it."""
    expected = facade.explain(toy_choice, *args, **kwargs).backend
    (y,) = toy_choice(*args, **kwargs)
    route = facade.last_route()
    assert route.function == "toy_choice" and route.backend == expected
    assert bool(y.any()) is (route.backend != "reference")
    return route.backend


def would_run(*, arch=None, device="cuda", dtype=torch.bfloat16, shape=(B, T, H, K), **options):
    """The same of a call on a device that is not here."""
    described = Described(shape, dtype, torch.device(device), arch=arch)
    return facade.explain(toy_choice, described, **options)


def reason(route, name) -> str:
    return dict(route.refusals)[name]


# --- order -----------------------------------------------------------------------------------------------------------


def test_body_without_backends():
    assert runs(x()) == "reference"


def test_priority(register):
    register(toy("toy_second", priority=5), toy("toy_first", priority=1), toy("toy_third", priority=9))
    assert runs(x()) == "toy_first"
    assert facade.last_route().refusals[-2:] == (("toy_second", "comes after toy_first"),
                                                 ("toy_third", "comes after toy_first"))


def test_equal_priorities_keep_the_order_of_registration(register):
    register(toy("toy_one"), toy("toy_two"))
    assert runs(x()) == "toy_one"


def test_rank_by_facts(register):
    register(toy("toy_short", rank=lambda facts: facts.tokens_bucket), toy("toy_long", rank=lambda facts: 8))
    assert runs(x(1, 100, H, K)) == "toy_short"
    assert runs(x(1, 1000, H, K)) == "toy_long"
    assert runs(x(1, 100, H, K)) == "toy_short"


@pytest.mark.parametrize("member", ["rank", "also_refuses"])
@pytest.mark.parametrize("name", ["x", "values", "shape", "T", "arguments", "sequences"])
def test_decisions_may_read_facts_only(register, member, name):
    register(Toy(**{member: lambda facts: getattr(facts, name)}))
    with pytest.raises(AttributeError, match=f"a decision may not depend on `{name}`; it may read function, operation"):
        toy_choice(x())


@pytest.mark.parametrize(("name", "one", "other"), [
    ("flag", False, True), ("size", 64, 32), ("scale", 0.5, 0.25), ("scale", None, 0.5),
    ("v", None, torch.zeros(B, T, H, V)),
    ("x", torch.zeros(B, T, H, K), torch.zeros(B, T, H, K, dtype=torch.float64)),
    ("x", torch.zeros(B, T, H, K).half(), torch.zeros(B, T, H, K).bfloat16()),
])  # fmt: skip
def test_whatever_facts_hold_can_decide(register, name, one, other):
    """Two calls that differ in it never share a decision."""
    def of(facts):
        return facts.dtype if name == "x" else facts.options.get(name, name in facts.tensors)

    first = []
    register(toy(also_refuses=lambda facts: [] if of(facts) == first[0] else ["another"]))
    first.append(one.dtype if name == "x" else False if name == "v" else one)
    for _ in range(2):
        assert runs(**{"x": x()} | {name: one}) == "toy_all"
        assert runs(**{"x": x()} | {name: other}) == "reference"


def test_modes_decide(register):
    register(toy(also_refuses=lambda facts: ["inference"] if facts.inference else []))
    for _ in range(2):
        with torch.no_grad():
            assert runs(x()) == "toy_all"
        with torch.inference_mode():
            assert runs(x()) == "reference"


def test_facts_hold_no_value_that_varies(register):
    seen = []
    register(toy(also_refuses=lambda facts: seen.append(facts) or ()))
    toy_choice(x(1, 100, H, K), flag=True)
    toy_choice(x(1, 127, H, K), flag=True)  # the same bucket: nobody is asked again
    (facts,) = seen
    assert facts.tensors["x"].shape == (None, None, H, K) and facts.dims == {"H": H, "K": K}
    assert facts.tokens_bucket == 7 and facts.sequences_bucket == 1 and facts.options["flag"] is True
    assert facts.dtype == torch.float32 and facts.arch == "cpu" and not facts.packed and not facts.needs_grad


def test_a_rank_that_breaks(register):
    register(toy(rank=lambda facts: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        toy_choice(x())


def test_functions_of_an_operation(register):
    register(toy(functions=("toy_choice_other",)))
    assert runs(x()) == "reference"
    toy_choice_other(x())
    assert facade.last_route().backend == "toy_all"


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("taken", "arch", "takes"), [
    (("sm90",), "sm90", True), (("sm90",), "sm100", False), (("sm90",), "sm80", False),
    (("sm80+",), "sm80", True), (("sm80+",), "sm90", True), (("sm80+",), "sm100", True), (("sm80+",), "sm75", False),
    (("sm90+",), "sm100", True), (("sm100+",), "sm90", False), (("sm80+",), "gfx942", False),
    (("gfx942",), "gfx942", True), (("gfx90a+",), "gfx942", True), (("gfx942+",), "gfx90a", False),
    (("gfx942+",), "sm100", False), (("sm90", "gfx942"), "gfx942", True), (("sm80+",), "cpu", False),
    (("cpu",), "cpu", True),
])  # fmt: skip
def test_arch(register, taken, arch, takes):
    register(toy(limits={"arch": taken}))
    route = would_run(arch=arch)
    assert route.backend == ("toy_all" if takes else "reference")
    if not takes:
        assert reason(route, "toy_all") == f"arch={arch} (takes {', '.join(taken)})"


@pytest.mark.parametrize(("limits", "call", "reason_given"), [
    ({"device": ("cuda",)}, {"device": "cpu"}, "device=cpu (takes cuda)"),
    ({"device": ("cuda", "cpu")}, {"device": "cpu"}, None),
    ({"dtype": (torch.float16, torch.bfloat16)}, {"dtype": torch.float32},
     "dtype=torch.float32 (takes torch.float16, torch.bfloat16)"),
    ({"dtype": (torch.float16, torch.bfloat16)}, {"dtype": torch.bfloat16}, None),
    ({"K": range(16, 129, 16)}, {"shape": (B, T, H, 24)}, "K=24 (takes 16 to 128 in steps of 16)"),
    ({"K": range(16, 129, 16)}, {"shape": (B, T, H, 128)}, None),
    ({"K": range(1, 257)}, {"shape": (B, T, H, 257)}, "K=257 (takes 1 to 256)"),
    ({"K": (64, 128)}, {"shape": (B, T, H, 96)}, "K=96 (takes 64, 128)"),
    ({"V": (64,)}, {"v": Described((B, T, H, V), torch.bfloat16, torch.device("cuda"))}, "V=8 (takes 64)"),
    ({"V": (64,)}, {}, None),
    ({"H": {2, 4}}, {}, None),
])  # fmt: skip
def test_limits(register, limits, call, reason_given):
    register(toy(limits=limits))
    route = would_run(**call)
    assert route.backend == ("reference" if reason_given else "toy_all")
    if reason_given:
        assert reason(route, "toy_all") == reason_given


# --- handles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "reason_given"), [
    ({"flag": True}, "option flag=True is not implemented"),
    ({"flag": False}, None),
    ({"size": 32}, "option size=32 is not implemented"),
    ({"size": 64}, None),
    ({"scale": 0.5}, "option scale=0.5 is not implemented"),
    ({"v": torch.zeros(B, T, H, V)}, "optional tensor v is not implemented"),
    ({"cu_seqlens": torch.tensor([0, T])}, "optional tensor cu_seqlens is not implemented"),
])  # fmt: skip
def test_what_is_not_handled_is_refused(register, call, reason_given):
    register(toy(handles=frozenset()))
    assert runs(x(), **call) == ("reference" if reason_given else "toy_all")
    if reason_given:
        assert reason(facade.last_route(), "toy_all") == reason_given


def test_what_is_handled_is_taken(register):
    register(toy())
    everything = dict(v=torch.zeros(B, T, H, V), flag=True, size=3, scale=2, cu_seqlens=torch.tensor([0, T]))
    assert runs(x(), **everything) == "toy_all"


def test_gradients(register):
    register(toy(differentiable=False))
    leaf = x().requires_grad_()
    assert runs(x()) == "toy_all"
    assert runs(leaf) == "reference"
    assert reason(facade.last_route(), "toy_all") == "gradients are not implemented"
    with torch.no_grad():
        assert runs(leaf) == "toy_all"


# --- verifiers -------------------------------------------------------------------------------------------------------


def test_verify_returns_a_pair(register):
    backend = toy("toy_picky", limits={"K": (64,)}, handles=frozenset(), differentiable=False,
                  also_refuses=lambda facts: ["the moon is full", "the tide is high"])
    seen = []
    register(toy("toy_witness", also_refuses=lambda facts: seen.append(facts) or ()))
    toy_choice(x().requires_grad_(), flag=True)
    defaults = toy_choice.operator.defaults
    assert backend.verify(seen[0], defaults) == (
        False, "K=16 (takes 64); option flag=True is not implemented; gradients are not implemented; the moon is full; "
        "the tide is high")
    assert toy("toy_easy").verify(seen[0], defaults) == (True, None)


def test_also_refuses(register):
    register(toy(also_refuses=lambda facts: ["odd heads"] if facts.dims["H"] % 2 else []))
    assert runs(x(B, T, 2, K)) == "toy_all"
    assert runs(x(B, T, 3, K)) == "reference"
    assert reason(facade.last_route(), "toy_all") == "odd heads"


def test_a_verifier_that_breaks_is_a_bug(register):
    def broken(facts):
        raise KeyError("V")

    register(toy("toy_broken", also_refuses=broken, priority=20), toy("toy_fine"))
    for _ in range(2):
        with pytest.raises(KeyError):
            toy_choice(x())
    with pytest.raises(KeyError):
        facade.explain(toy_choice, x())


# --- falling through -------------------------------------------------------------------------------------------------


def test_falls_through_to_the_next_and_to_the_body(register):
    register(toy("toy_64", priority=1, limits={"K": (64,)}), toy("toy_32", priority=2, limits={"K": (32, 64)}))
    assert runs(x(B, T, H, 64)) == "toy_64"
    assert runs(x(B, T, H, 32)) == "toy_32"
    assert runs(x(B, T, H, 16)) == "reference"
    assert [name for name, _ in facade.last_route().refusals if name.startswith("toy_")] == ["toy_64", "toy_32"]


def test_exceptions_of_a_backend_propagate(register):
    entered = []

    def broken(call):
        entered.append(call)
        raise RuntimeError("out of shared memory")

    register(toy("toy_broken", priority=1, forward=broken), toy("toy_next", forward=lambda call: entered.append(call)))
    with pytest.raises(RuntimeError, match="out of shared memory"):
        toy_choice(x())
    with pytest.raises(RuntimeError, match="out of shared memory"):
        toy_choice(x().requires_grad_())
    assert len(entered) == 2


def test_whether_a_toolchain_works_is_probed_before_it_is_chosen(register):
    """An importable package whose compiler does not know the device is a refusal, not a crash in training (C140)."""
    asked = []

    def probe(device):
        asked.append(device)
        return False, "no compiler for this device"

    register(toy("toy_probed", probe=probe, priority=1), toy())
    assert runs(x()) == "toy_all"
    assert runs(x(B, T, H, 64)) == "toy_all"
    assert reason(facade.last_route(), "toy_probed") == "no compiler for this device"
    assert asked == [torch.device("cpu")]
    would_run(device="cuda:0"), would_run(device="cuda:1"), would_run(device="cuda:1")  # each device for itself (C072)
    assert asked[1:] == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_package(register):
    register(toy("toy_missing", package="toy_package_that_nobody_has", priority=1),
             toy("toy_present", package="json", priority=2))
    assert runs(x()) == "toy_present"
    assert reason(facade.last_route(), "toy_missing") == "package toy_package_that_nobody_has is not installed"


# --- registration from outside ---------------------------------------------------------------------------------------


def test_class_decorator():
    @fla_dispatch.register
    class Outside(Backend):
        name, operation = "toy_outside", "toy_choice"

        def forward(self, call):
            return (torch.ones_like(call.x),), ()

    assert isinstance(Outside, type)
    assert runs(x()) == "toy_outside"
    fla_dispatch.unregister("toy_outside", "toy_choice")
    assert runs(x()) == "reference"
    fla_dispatch.unregister("toy_outside", "toy_choice")  # nothing to do


def test_replaced_by_its_namesake(register):
    register(toy(forward=lambda call: ((torch.full_like(call.x, 2),), ())))
    assert toy_choice(x())[0].max() == 2
    register(toy(forward=lambda call: ((torch.full_like(call.x, 3),), ())))
    assert toy_choice(x())[0].max() == 3
    assert len([b for b in registry.backends("toy_choice", "toy_choice") if b.name == "toy_all"]) == 1


def test_namesakes_of_other_functions_live_together(register):
    register(toy(functions=("toy_choice",)), toy(functions=("toy_choice_other",)))
    assert runs(x()) == "toy_all"
    toy_choice_other(x())
    assert facade.last_route().backend == "toy_all"


@pytest.mark.parametrize(("backend", "problem"), [
    (object(), "<object object at .*> is not a Backend"),
    (int, "<class 'int'> is not a Backend"),
    (Backend(), "Backend.name must be a string"),
    (toy(name=None), "Toy.name must be a string"),
    (toy(operation=7), "Toy.operation must be a string"),
    (toy("reference"), "the name 'reference' belongs to the PyTorch fallback"),
    (toy(limits={"arch": "sm80+"}), "Toy.limits.*arch.* must be a collection or a range"),
    (toy(saves={"y": Saved("B T X", "x")}), "shape 'B T X': 'X' is not a dimension letter"),
], ids=["object", "int", "Backend", "name", "operation", "reference", "limits", "saves"])
def test_wrong_registrations(backend, problem):
    with pytest.raises(TypeError, match=f"fla_dispatch.register: .*{problem}"):
        try:
            fla_dispatch.register(backend)
        finally:
            fla_dispatch.unregister("toy_all", "toy_choice")


@dispatch("toy_entries", returns={"y": Result("B T", "x")})
def toy_entries(x: Float[Tensor, "B T"]):
    return x


class Entry:
    value = "toy_third_party:Backend"

    def __init__(self, load):
        self.load = load


def test_entry_points(monkeypatch):
    """Third parties name an entry point after the operation; a broken one is a refusal with its reason."""
    def broken():
        raise ImportError("no module named toy_toolchain")

    asked = []

    def entry_points(**selection):
        asked.append(selection)
        return [Entry(lambda: type("Third", (Toy,), {"name": "toy_third", "operation": "toy_entries"})), Entry(broken)]

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)
    for _ in range(2):
        toy_entries(torch.zeros(1, 2))
        assert facade.last_route().backend == "toy_third"
    assert asked == [{"group": "fla.backends", "name": "toy_entries"}]
    assert reason(facade.last_route(), "toy_third_party:Backend") == (
        "entry point cannot be imported: ImportError: no module named toy_toolchain")


TREE_PROGRAM = """
import torch, facade, fla_dispatch
from fla_dispatch import dispatch, Result
from jaxtyping import Float
from torch import Tensor

for operation in "toy_whole", "toy_broken", "toy_absent":
    def body(x: Float[Tensor, "B T"]):
        return x
    body.__name__ = operation
    dispatch(operation, returns={"y": Result("B T", "x")})(body)
    assert "fla_triton" not in __import__("sys").modules or operation != "toy_whole"

for operation in "toy_whole", "toy_broken", "toy_absent":
    fla_dispatch.operator_of(operation).public(torch.zeros(1, 2))
    print(facade.last_route())
try:
    with facade.use_backend("triton"):
        fla_dispatch.operator_of("toy_broken").public(torch.zeros(1, 2))
except facade.BackendRefused as refusal:
    print(refusal)
"""


def test_kernel_trees(tmp_path, fresh_python):
    """A tree is found by name and loaded when first considered; one that fails to import says why."""
    tree = tmp_path / "fla_triton"
    tree.mkdir()
    (tree / "__init__.py").write_text(
        'OPERATIONS = {"toy_whole": "fla_triton.whole", "toy_broken": "fla_triton.broken"}\n')
    (tree / "broken.py").write_text("import toy_toolchain_that_nobody_has\n")
    (tree / "whole.py").write_text(
        "import fla_dispatch\n"
        "@fla_dispatch.register\n"
        "class Whole(fla_dispatch.Backend):\n"
        "    name, operation = 'triton', 'toy_whole'\n"
        "    def forward(self, call):\n"
        "        return (call.x,), ()\n")
    other = "".join(f"\n  {name} refuses: kernel tree fla_{name} is not installed"
                    for name in ("gluon", "tilelang", "ascend"))
    why = "fla_triton cannot be imported: ModuleNotFoundError: No module named 'toy_toolchain_that_nobody_has'"
    assert fresh_python(TREE_PROGRAM, tmp_path) == (
        f"toy_whole → triton{other}\n"
        f"toy_broken → reference\n  triton refuses: {why}{other}\n"
        f"toy_absent → reference\n  triton refuses: kernel tree fla_triton does not have toy_absent{other}\n"
        f'toy_broken: backend `triton` was forced by use_backend("triton") and refuses:\n  - {why}\n')


# --- questions -------------------------------------------------------------------------------------------------------


def test_explain_runs_nothing(register, caplog):
    entered = []
    register(toy(forward=lambda call: entered.append(call) or ((call.x,), ())))
    toy_choice_other(x())
    before = facade.last_route()
    del entered[:]
    with caplog.at_level(logging.INFO, "fla_dispatch"):
        route = facade.explain(toy_choice, x(), flag=True)
    assert route.backend == "toy_all" and route.forced_by is None and entered == [] and not caplog.records
    assert facade.last_route() is before
    assert facade.explain("toy_choice", x()).backend == "toy_all"


def test_explain_a_forced_refusal(register):
    register(toy("toy_64", limits={"K": (64,)}))
    with facade.use_backend("toy_64"):
        route = facade.explain(toy_choice, x())
    assert route.backend == "none" and "K=16 (takes 64)" in reason(route, "forced")


def test_route_reads_well(register):
    register(toy("toy_64", limits={"K": (64,)}), toy())
    with facade.use_backend("toy_all"):
        assert str(facade.explain(toy_choice, x())) == 'toy_choice → toy_all, forced by use_backend("toy_all")'
    lines = str(facade.explain(toy_choice, x())).splitlines()
    assert lines[0] == "toy_choice → toy_all" and "  toy_64 refuses: K=16 (takes 64)" in lines


def test_last_route_is_the_threads_own(register):
    register(toy())
    toy_choice(x())
    seen = []
    thread = threading.Thread(target=lambda: seen.append(facade.last_route()))
    thread.start()
    thread.join()
    assert seen == [None] and facade.last_route().backend == "toy_all"


def test_last_route_of_chunk_kda():
    q, k, v = torch.zeros(3, B, T, H, K).unbind()
    facade.ops.chunk_kda(q, k, v, q, q[..., 0])
    assert facade.last_route().function == "chunk_kda" and facade.last_route().backend == "reference"


def test_the_first_use_of_a_route_is_logged(register, caplog):
    register(toy("toy_logged"))
    with caplog.at_level(logging.INFO, "fla_dispatch"):
        toy_choice(x())
        toy_choice(x(B, T, H, 32))
    assert [r.getMessage().splitlines()[0] for r in caplog.records] == ["toy_choice → toy_logged"]


def test_the_fallback_on_an_accelerator_warns_once(monkeypatch, recwarn):
    @dispatch("toy_slow", returns={"y": Result("B T", "x")})
    def toy_slow(x: Float[Tensor, "B T"]):
        return x

    toy_slow(torch.zeros(1, 1))  # a use on the CPU, or one that was asked for, does not spend the warning
    monkeypatch.setattr("fla_dispatch.bind._check_devices", lambda *_: torch.device("cuda"))
    with facade.use_backend("reference"):
        toy_slow(torch.zeros(1, 1))
    assert not recwarn.list
    for size in 2, 10, 100:
        toy_slow(torch.zeros(1, size))
    assert [str(w.message).splitlines()[0] for w in recwarn] == [
        "toy_slow runs its PyTorch fallback on cuda, which is slow; the backends refused:"]


def test_the_fallback_asked_for_does_not_warn(monkeypatch, recwarn):
    @dispatch("toy_slow", returns={"y": Result("B T", "x")})
    def toy_slow(x: Float[Tensor, "B T"]):
        return x

    monkeypatch.setattr("fla_dispatch.bind._check_devices", lambda *_: torch.device("cuda"))
    with facade.use_backend("reference"):
        toy_slow(torch.zeros(1, 2))
    assert not recwarn.list


# --- forcing ---------------------------------------------------------------------------------------------------------


def test_use_backend(register):
    register(toy("toy_a", priority=1), toy("toy_b", priority=2))
    with facade.use_backend("toy_b"):
        assert runs(x()) == "toy_b"
        with facade.use_backend("reference"):
            assert runs(x()) == "reference"
            assert facade.last_route().forced_by == 'use_backend("reference")'
        assert runs(x()) == "toy_b"
    assert runs(x()) == "toy_a"


def test_use_backend_ends_with_an_exception(register):
    register(toy())
    with pytest.raises(KeyError), facade.use_backend("reference"):
        raise KeyError
    assert runs(x()) == "toy_all"


def test_use_backend_holds_in_its_own_thread(register):
    register(toy("toy_a", priority=1), toy("toy_b", priority=2))
    inside, checked, seen = threading.Event(), threading.Event(), []

    def forcing():
        with facade.use_backend("toy_b"):
            inside.set()
            checked.wait(10)
            seen.append(runs(x()))

    thread = threading.Thread(target=forcing)
    thread.start()
    inside.wait(10)
    seen.append(runs(x()))
    checked.set()
    thread.join()
    assert seen == ["toy_a", "toy_b"]


def test_forced_by_environment(register, monkeypatch):
    register(toy("toy_a", priority=1), toy("toy_b", priority=2))
    for _ in range(2):  # a flip takes effect in the next call
        monkeypatch.setenv("FLA_BACKEND", "toy_b")
        assert runs(x()) == "toy_b" and facade.last_route().forced_by == "FLA_BACKEND=toy_b"
        monkeypatch.setenv("FLA_BACKEND", "reference")
        assert runs(x()) == "reference"
        monkeypatch.setenv("FLA_BACKEND", "")
        assert runs(x()) == "toy_a"
        monkeypatch.delenv("FLA_BACKEND")
        assert runs(x()) == "toy_a"
    monkeypatch.setenv("FLA_BACKEND", "toy_a")
    with facade.use_backend("toy_b"):
        assert runs(x()) == "toy_b"


def test_a_forced_refusal_holds_every_reason(register):
    register(toy("toy_64", limits={"K": (64,)}, handles=frozenset(), also_refuses=lambda facts: ["the moon is full"]))
    with facade.use_backend("toy_64"), pytest.raises(BackendRefused) as raised:
        toy_choice(x(), flag=True)
    for text in "K=16 (takes 64)", "option flag=True is not implemented", "the moon is full":
        assert text in str(raised.value)


def test_an_unknown_backend(register, monkeypatch):
    register(toy())
    with facade.use_backend("toy_nobody"), pytest.raises(ValueError, match="known: .*toy_all.*reference"):
        toy_choice(x())
    monkeypatch.setenv("FLA_BACKEND", "toy_nobody")
    with pytest.raises(ValueError, match="FLA_BACKEND=toy_nobody asks for `toy_nobody`"):
        toy_choice(x())


def test_a_tree_that_is_not_there_is_refused_with_its_reason(monkeypatch):
    refusals = {"toy_choice": [("gluon", "kernel tree fla_gluon is not installed")]}
    monkeypatch.setattr(registry, "_tree_refusals", refusals)
    toy_choice.operator.forget()
    with facade.use_backend("gluon"), pytest.raises(BackendRefused, match="kernel tree fla_gluon is not installed"):
        toy_choice(x())


# --- gates -----------------------------------------------------------------------------------------------------------


def test_dispatch_disabled(register, monkeypatch):
    register(toy())
    assert runs(x()) == "toy_all"
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert runs(x()) == "reference"
    assert reason(facade.last_route(), "toy_all") == "FLA_DISABLE_BACKEND_DISPATCH=1"
    with facade.use_backend("toy_all"), pytest.raises(BackendRefused, match="FLA_DISABLE_BACKEND_DISPATCH=1"):
        toy_choice(x())
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "0")
    assert runs(x()) == "toy_all"


def test_a_gate_is_read_at_every_call(register, monkeypatch):
    register(toy("toy_gated", env="FLA_TOY_CHOICE", priority=1), toy())
    for _ in range(3):
        monkeypatch.delenv("FLA_TOY_CHOICE", raising=False)
        assert runs(x()) == "toy_gated"
        monkeypatch.setenv("FLA_TOY_CHOICE", "0")
        assert runs(x()) == "toy_all"
        assert reason(facade.last_route(), "toy_gated") == "FLA_TOY_CHOICE=0"
        monkeypatch.setenv("FLA_TOY_CHOICE", "1")
        assert runs(x()) == "toy_gated"
        monkeypatch.setenv("FLA_TOY_CHOICE", "")
        assert runs(x()) == "toy_gated"


def test_a_gate_that_is_off_by_default(register, monkeypatch):
    register(toy("toy_opt_in", env="FLA_TOY_OPT_IN", default_on=False, priority=1), toy())
    assert runs(x()) == "toy_all"
    assert reason(facade.last_route(), "toy_opt_in") == "off by default (set FLA_TOY_OPT_IN=1)"
    monkeypatch.setenv("FLA_TOY_OPT_IN", "1")
    assert runs(x()) == "toy_opt_in"


@pytest.mark.parametrize("value", ["2", "true", "on", " 1", "01"])
def test_wrong_gate_values(register, monkeypatch, value):
    register(toy(env="FLA_TOY_CHOICE"))
    assert runs(x()) == "toy_all"
    monkeypatch.setenv("FLA_TOY_CHOICE", value)
    with pytest.raises(ValueError, match=f"FLA_TOY_CHOICE must be 0 or 1, not '{value}'"):
        toy_choice(x())


def test_a_gate_flipped_while_a_decision_is_made(register, monkeypatch):
    """The decision belongs to the gates it was made under, not to those that were read first."""
    register(toy(env="FLA_TOY_CHOICE"))
    monkeypatch.setenv("FLA_TOY_CHOICE", "1")
    choose = registry.choose

    def flip_and_choose(*args, **kwargs):
        monkeypatch.setenv("FLA_TOY_CHOICE", "0")
        return choose(*args, **kwargs)

    monkeypatch.setattr(registry, "choose", flip_and_choose)
    toy_choice(x(), size=7)
    monkeypatch.setattr(registry, "choose", choose)
    monkeypatch.setenv("FLA_TOY_CHOICE", "1")
    assert runs(x(), size=7) == "toy_all"
    monkeypatch.setenv("FLA_TOY_CHOICE", "0")
    assert runs(x(), size=7) == "reference"


def test_a_registration_while_a_decision_is_made(register, monkeypatch):
    choose = registry.choose

    def choose_and_register(*args, **kwargs):
        chosen = choose(*args, **kwargs)
        register(toy())
        return chosen

    monkeypatch.setattr(registry, "choose", choose_and_register)
    toy_choice(x(), size=9)
    monkeypatch.setattr(registry, "choose", choose)
    assert runs(x(), size=9) == "toy_all"
