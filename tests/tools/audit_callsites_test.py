"""tools/audit_callsites.py on a small house in the style of this one, and launches that fit their kernels or do not."""

import json
import textwrap

import pytest

from tools import audit_callsites
from tools.audit.launches import Index
from tools.audit.places import Audit
from tools.repository import Source, sources

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale_kernel(x, y, T, scale, D: tl.constexpr, BLOCK: tl.constexpr = 64, num_warps: tl.constexpr = 4):
    pass
"""

HOUSE = {
    "facade/ops/toy.py": '''
        from fla_dispatch import Rule, dispatch
        from facade import reference

        @dispatch("toy", rules=(Rule("scale is not None", "give `scale`"),))
        def chunk_toy(q, v, scale=None, initial_state=None):
            """Toy."""
            return reference.toy.chunk(q, v, scale, initial_state)

        @dispatch("toy")
        def toy_gate(g):
            return reference.toy.gate(g)
    ''',
    "facade/reference/toy.py": """
        def chunk(q, v, scale, initial_state=None):
            return q

        def gate(g):
            return g
    """,
    "kernels/cuda_triton/fla_triton/toy/__init__.py": """
        from fla_dispatch import Backend, Saved, register
        from fla_triton.toy.forward import run_forward
        from fla_triton.toy import backward

        @register
        class ToyTriton(Backend):
            name, priority = "triton", 10
            operation = "toy"
            functions = ("chunk_toy",)
            limits = {"device": ("cuda",)}
            handles = frozenset({"scale", "initial_state"})
            saves = {"A": Saved("B T H", "q")}

            def forward(self, call):
                o, A = run_forward(call)
                return (o,), (A,)

            def backward(self, call, saved, grads):
                dq, dv = backward.gradients(call, saved["A"], grads["o"])
                return {"q": dq, "v": dv, "initial_state": None}
    """,
    "kernels/cuda_triton/fla_triton/toy/kernel.py": """
        import triton
        import triton.language as tl

        @triton.jit
        def load_row(p, T, BLOCK: tl.constexpr):
            return p

        @triton.jit
        def toy_fwd_kernel(q, v, o, A, scale, T, BLOCK: tl.constexpr):
            row = load_row(q, T, BLOCK)

        @triton.jit
        def toy_bwd_kernel(do, A, dq, dv, T, BLOCK: tl.constexpr):
            row = load_row(do, T, BLOCK)
    """,
    "kernels/cuda_triton/fla_triton/toy/forward.py": """
        from fla_triton.toy.kernel import toy_fwd_kernel

        def run_forward(call):
            o = A = call.q
            toy_fwd_kernel[(1,)](call.q, call.v, o, A, call.scale, call.dims["T"], BLOCK=64)
            return o, A
    """,
    "kernels/cuda_triton/fla_triton/toy/backward.py": """
        from fla_triton.launch import launch
        from fla_triton.toy import kernel

        def gradients(call, A, do):
            dq = dv = do
            launch(kernel.toy_bwd_kernel, (1,), do, A, dq, dv, call.dims["T"], BLOCK=64, device=call.device)
            return dq, dv
    """,
    "kernels/cuda_triton/fla_triton/launch.py": """
        def launch(kernel, grid, *arguments, device=None, **meta):
            kernel[grid](*arguments, **meta)
    """,
    "tests/cases/toy.py": "AXES = {'initial_state': [None]}\nfrom facade.ops.toy import chunk_toy\n",
    "tests/dispatch/made_up.py": "@dispatch('made_up')\ndef made_up(x, initial_state=None): ...\n",
    "benchmarks/toy.py": "from facade.ops.toy import chunk_toy\nchunk_toy(q, v, initial_state=None)\n",
    "docs/toy.md": "`chunk_toy` takes `v` and an initial_state; a v of no kind.\n",
    "README.md": "Nothing of note.\n",
}


@pytest.fixture
def house(tree):
    return tree({path: textwrap.dedent(text) for path, text in HOUSE.items()})


def index_of(launches: str, kernel: str = KERNEL) -> Index:
    text = textwrap.dedent(kernel) + textwrap.dedent(launches)
    return Index([Source("kernels/cuda_triton/fla_triton/sample.py", text)])


def disagreements(launches: str, kernel: str = KERNEL) -> list[str]:
    """Of the only launch in the text."""
    (launch,) = index_of(launches, kernel).launches
    return launch.disagreements()


# --- launches that agree ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "launch",
    [
        "scale_kernel[(1,)](x, y, T, scale, D=64)",
        "scale_kernel[(1,)](x, y, T, scale, 64, 128)",
        "scale_kernel[lambda meta: (1,)](x, y, T=T, scale=1.0, D=64, BLOCK=32, num_warps=8, num_stages=2)",
        "scale_kernel[grid](*inputs, scale, D=64)",
        "scale_kernel[grid](x, y, T, **options)",
        "scale_kernel[grid](x, y, *(T, scale), **dict(D=64))",
        "scale_kernel[grid](x, y, T, scale, **{'D': 64})",
        "scale_kernel.run(x, y, T, scale, D=64, grid=(1,), warmup=False)",
        "scale_kernel.warmup(x, y, T, scale, D=64, grid=(1,))",
        "launch(scale_kernel, grid, x, y, T, scale, D=64)",
        "self.launcher.launch_cached(scale_kernel, grid, x, y, T, scale, D=64)",
        "cached = wrap(scale_kernel)\ncached[grid](x, y, T, scale, D=64)",
        "start = scale_kernel[grid]\nstart(x, y, T, scale, D=64)",
    ],
)
def test_agrees(launch):
    assert disagreements(launch) == []


@pytest.mark.parametrize(
    "call",
    [
        "functools.partial(scale_kernel, 1)",
        "compile(scale_kernel, signature='*fp32')",
        "print(scale_kernel)",
        "scale_kernel.device_caches",
        "tl.load(x, y)",
    ],
)
def test_is_no_launch(call):
    assert index_of(call).launches == []


# --- launches that disagree ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("launch", "problem"),
    [
        ("scale_kernel[(1,)](x, y, T, D=64)", "`scale` of scale_kernel"),
        ("scale_kernel[(1,)](x, y, T, scale)", "`D` of scale_kernel"),
        ("scale_kernel[(1,)](x, y, D=64)", "`T`, `scale` of scale_kernel"),
        ("scale_kernel[(1,)](x, y, T, scale, 64, 64, 4, 1)", "8 arguments are given by position, scale_kernel"),
        ("scale_kernel[(1,)](x, y, T, scale, D=64, BLOK=8)", "no parameter `BLOK`; did you mean `BLOCK`?"),
        ("scale_kernel[(1,)](x, y, T, scale, D=64, y=y)", "`y` is given by position (argument 2) and by keyword"),
        ("scale_kernel[(1,)](x, y, T, scale, D=64, D=64)", "`D` is given twice by keyword"),
        ("scale_kernel[grid](x, y, **options, BLOK=8)", "no parameter `BLOK`"),
        ("scale_kernel[grid](x, y, y=y, *rest)", "`y` is given by position (argument 2) and by keyword"),
        ("scale_kernel[grid](x, y, T, scale, **dict(d=64))", "no parameter `d`"),
        ("scale_kernel.run(x, y, T, D=64, grid=(1,))", "`scale` of scale_kernel"),
        ("launch(scale_kernel, grid, x, y, T, D=64)", "`scale` of scale_kernel"),
        ("start = scale_kernel[grid]\nstart(x, y, T, D=64)", "`scale` of scale_kernel"),
        ("scale_kernel(x, y, T, scale, D=64)", "called without a grid"),
    ],
)
def test_disagrees(launch, problem):
    found = disagreements(launch)
    assert problem in found[0], found


def test_a_wrapper_keeps_its_own_arguments():
    wrapper = "\ndef start(kernel, grid, device, *arguments, key=None, **meta): ...\n"
    assert disagreements(wrapper + "start(scale_kernel, grid, device, x, y, T, scale, D=64, key=1)") == []
    assert disagreements(wrapper + "start(scale_kernel, grid, x, y, T, scale, D=64)")  # no device: one short
    (found,) = disagreements(wrapper + "start(scale_kernel, grid, device, x, y, T, scale, D=64, keys=1)")
    assert "no parameter `keys`" in found


HALVES = """
class Plan:
    def __init__(self):
        self.step = SCALE.launch(problem, D=64, config=None)
        self.both = tuple(SCALE.launch(problem, **constants, D=D) for D in (32, 64))

    def run(self, x, y):
        arguments = (x, y, T, scale)
        {run}

def elsewhere(launch, x):
    launch(1, x, x, T, scale)

SCALE = Kernel(scale_kernel, candidates)
"""


@pytest.mark.parametrize(
    "run",
    [
        "self.step(1, x, y, T, scale)",
        "self.step(1, *arguments)",
        "[step] = [self.step]; self.step(grid, *unknown)",
        "for one in self.both: one(1, *arguments)",
        "elsewhere(self.step, x)",
        "self.step(*everything(x))",
        "both = (1, x, y, T, scale); self.step(*both)",
    ],
)
def test_a_launch_in_two_halves_agrees(run):
    launches = index_of(HALVES.replace("{run}", run)).launches
    assert {launch.half for launch in launches} == {"constants", "arguments"}
    assert not any(launch.disagreements() for launch in launches)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HALVES.replace("D=64", "d=64"), "fla_triton/sample.py:6) has no constant `d`"),
        (HALVES.replace("D=64", "T=64"), "has no constant `T`"),
        (HALVES.replace("{run}", "self.step(1, x, y, T)"), "3 arguments are given, scale_kernel"),
        (HALVES.replace("{run}", "self.step(1, *arguments, x)"), "5 arguments are given"),
        (HALVES.replace("{run}", "self.step(1, x, y, T, scale, D=8)"), "given by position; `D` is given by keyword"),
        (HALVES.replace("{run}", "for one in self.both: one(1, x)"), "1 arguments are given"),
        (HALVES.replace("{run}", "elsewhere(self.step, x)").replace("x, x, T", "x, T"), "3 arguments are given"),
    ],
)
def test_a_launch_in_two_halves_disagrees(text, problem):
    found = [words for launch in index_of(text.replace("{run}", "pass")).launches for words in launch.disagreements()]
    assert len(found) == 1 and problem in found[0], found


def test_autotune_and_heuristics_give_arguments():
    kernel = """
        import triton, triton.language as tl
        CONFIGS = [triton.Config({"BLOCK": b}, num_warps=w) for b in (32, 64) for w in (1, 4)]
        @triton.autotune(configs=CONFIGS, key=["T"])
        @triton.heuristics({"PACKED": lambda args: args["offsets"] is not None})
        @triton.jit
        def kernel(x, offsets, T, BLOCK: tl.constexpr, PACKED: tl.constexpr, D: tl.constexpr):
            pass
    """
    assert disagreements("kernel[grid](x, None, T, D=8)", kernel) == []
    assert "`D` of kernel" in disagreements("kernel[grid](x, None, T)", kernel)[0]
    assert disagreements("kernel[grid](x, None, T, BLOCK=8, D=8)", kernel) == [
        "`BLOCK` is given by the launch and by autotune"
    ]
    unreadable = kernel.replace("configs=CONFIGS", "configs=read_configs()")
    assert disagreements("kernel[grid](x, None, T)", unreadable) == []
    assert "`T` of kernel" in disagreements("kernel[grid](x, None, D=8)", unreadable)[0]


def test_gluon():
    kernel = """
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl

        @gluon.jit
        def load(x, T, BLOCK: gl.constexpr): return x

        @gluon.jit
        def compute(x, acc, BLOCK: gl.constexpr): return acc

        @gluon.jit
        def kernel(x, y, T, BLOCK: gl.constexpr, num_warps: gl.constexpr):
            gl.warp_specialize([(compute, (x, y, BLOCK)), (load, (x, T, BLOCK))], [4], [24])
    """
    index = index_of("kernel[(1,)](x, y, T, BLOCK=64, num_warps=4)", kernel)
    assert sorted(launch.kernels[0].name for launch in index.launches) == ["compute", "kernel", "load"]
    assert all(launch.disagreements() == [] for launch in index.launches)
    broken = index_of("kernel[(1,)](x, y, T, BLOCK=64)", kernel.replace("(x, T, BLOCK)", "(x, BLOCK)"))
    (problem,) = [found for launch in broken.launches for found in launch.disagreements()]
    assert "`BLOCK` of load" in problem


def test_device_functions_and_factories():
    kernel = """
        import tilelang, triton
        @triton.jit
        def square(x, scale): return x * x * scale
        @triton.jit
        def kernel(x):
            square(x)
        @tilelang.jit(out_idx=[-1])
        def factory(M, N, dtype="float16"): ...
    """
    calls = [launch for launch in index_of("factory(64, M=64)", kernel).launches]
    problems = {launch.kernels[0].name: launch.disagreements() for launch in calls}
    assert "`scale` of square" in problems["square"][0]
    assert "`M` is given by position (argument 1) and by keyword" in problems["factory"][0]


def test_either_of_two_kernels_and_names_of_another_tree():
    two = KERNEL + "\n@triton.jit\ndef other_kernel(x, y, T, scale, D: tl.constexpr): pass\n"
    assert disagreements("k = scale_kernel if a else other_kernel\nk[grid](x, y, T, scale, D=64)", two) == []
    assert disagreements("k = scale_kernel if a else other_kernel\nk[grid](x, y)", two)
    here = Source("kernels/gluon/fla_gluon/use.py", "from fla_gluon.kernel import k\nk[grid](x, y)")
    kernels = [
        Source(f"kernels/{tree}/fla_{tree}/kernel.py", f"import triton\n@triton.jit\ndef k({parameters}): ...")
        for tree, parameters in (("gluon", "a, b"), ("ascend", "a, b, c"))
    ]
    (launch,) = Index([*kernels, here]).launches
    assert launch.kernels[0].source.path.startswith("kernels/gluon") and launch.disagreements() == []


def test_someone_elses_function_is_no_kernel():
    """A device function called `sum` does not make kernels of tl.sum and torch.sum."""
    kernel = KERNEL + "\n@triton.jit\ndef sum(x, axis, BLOCK: tl.constexpr): return tl.sum(x, axis)\n"
    assert index_of("import torch\ntorch.sum(x)", kernel).launches == []


def test_launches_of_something_unknown_are_reported(program, tree):
    root = tree(
        {"kernels/cuda_triton/fla_triton/a.py": "def f(table, kernel):\n    kernel[1](2)\n    missing[grid](x)\n"}
    )
    ended = program(audit_callsites.main, "--root", root)
    assert ended.status == 0
    assert (
        "not checked, launches something unknown: kernels/cuda_triton/fla_triton/a.py:3: missing[grid](x)" in ended.out
    )
    assert ":2:" not in ended.out  # a wrapper's own parameter


# --- places ----------------------------------------------------------------------------------------------------------


def places(house, name):
    found = {}
    for place in Audit(sources(house)).places(name):
        found.setdefault(place.kind, []).append((place.path.rpartition("/")[2], place.text))
    return found


def test_operator(house):
    found = places(house, "chunk_toy")
    assert found["declaration"] == [("toy.py", "def chunk_toy(q, v, scale=None, initial_state=None):")]
    assert found["reference"] == [
        ("toy.py", "return reference.toy.chunk(q, v, scale, initial_state)"),
        ("toy.py", "def chunk(q, v, scale, initial_state=None):"),
    ]
    assert ("__init__.py", 'handles = frozenset({"scale", "initial_state"})') in found["backend"]
    assert found["saved"] == [
        ("__init__.py", 'saves = {"A": Saved("B T H", "q")}'),
        ("__init__.py", 'dq, dv = backward.gradients(call, saved["A"], grads["o"])'),
    ]
    assert found["forward return"] == [("__init__.py", "return (o,), (A,)")]
    assert found["backward return"] == [("__init__.py", 'return {"q": dq, "v": dv, "initial_state": None}')]
    assert [path for path, _ in found["launch"]] == ["backward.py", "forward.py"]
    assert found["test"] == [("toy.py", "from facade.ops.toy import chunk_toy")]
    assert [path for path, _ in found["benchmark"]] == ["toy.py", "toy.py"]
    assert [path for path, _ in found["doc"]] == ["toy.md"]
    assert "backend" not in places(house, "toy_gate")  # it serves chunk_toy alone


def test_kernel_with_the_order_of_its_arguments(house, program):
    found = places(house, "toy_fwd_kernel")
    assert [path for path, _ in found["kernel"]] == ["kernel.py"]
    assert [path for path, _ in found["backend"]] == ["__init__.py"]
    answer = json.loads(program(audit_callsites.main, "toy_bwd_kernel", "--root", house, "--json").out)
    (launch,) = [place for place in answer["places"] if place["kind"] == "launch"]
    assert launch["arguments"] == ["do=do", "A=A", "dq=dq", "dv=dv", "T=call.dims['T']", "BLOCK=64"]
    device = places(house, "load_row")
    assert [text for _, text in device["launch"]] == ["row = load_row(q, T, BLOCK)", "row = load_row(do, T, BLOCK)"]


def test_parameter(house):
    found = places(house, "initial_state")
    assert [path for path, _ in found["declaration"]] == ["toy.py"] * 2
    assert found["backend"] == [("__init__.py", 'handles = frozenset({"scale", "initial_state"})')]
    assert found["backward return"] == [("__init__.py", 'return {"q": dq, "v": dv, "initial_state": None}')]
    assert found["reference"] == [("toy.py", "def chunk(q, v, scale, initial_state=None):")]
    assert "made_up.py" not in [path for group in found.values() for path, _ in group]  # an operator of a test's own
    assert [path for path, _ in found["test"]] == ["toy.py"]
    assert [path for path, _ in found["benchmark"]] == ["toy.py"]
    scale = places(house, "scale")
    assert ("toy.py", '@dispatch("toy", rules=(Rule("scale is not None", "give `scale`"),))') in scale["declaration"]
    assert [path for path, _ in scale["launch"]] == ["forward.py"]
    assert [path for path, _ in scale["kernel"]] == ["kernel.py"]


def test_short_names_count_in_prose_where_they_are_code(house):
    assert len(places(house, "v")["doc"]) == 1
    (house / "docs/toy.md").write_text("a v of no kind\n")
    assert "doc" not in places(house, "v")


def test_saved_tensor(house):
    found = places(house, "A")
    assert [path for path, _ in found["saved"]] == ["__init__.py", "__init__.py"]
    assert [path for path, _ in found["launch"]] == ["backward.py", "forward.py"]


# --- the program -----------------------------------------------------------------------------------------------------


def test_status(house, program):
    ended = program(audit_callsites.main, "--root", house)
    assert (ended.status, ended.out.splitlines()[0]) == (0, "kernels/: 4 launches of 3 kernels")
    forward = house / "kernels/cuda_triton/fla_triton/toy/forward.py"
    forward.write_text(forward.read_text().replace("call.scale, ", ""))
    ended = program(audit_callsites.main, "--root", house)
    assert ended.status == 1
    assert (
        "DISAGREES: `T` of toy_fwd_kernel (kernels/cuda_triton/fla_triton/toy/kernel.py:10) is not given" in ended.out
    )
    assert "1 of 4 launches disagree" in ended.out
    assert program(audit_callsites.main, "toy_fwd_kernel", "--root", house).status == 1
    assert program(audit_callsites.main, "chunk_toy", "--root", house).status == 1
    assert program(audit_callsites.main, "toy_bwd_kernel", "--root", house).status == 0


def test_mistakes_are_one_line(house, program):
    ended = program(audit_callsites.main, "chunk_tay", "--root", house)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.endswith("is called `chunk_tay`; did you mean `chunk_toy`?\n")
    (house / "kernels/broken.py").write_text("def (:\n")
    ended = program(audit_callsites.main, "--root", house)
    assert ended.status == 2 and ended.err.startswith("program: kernels/broken.py:1: not valid Python")
    assert program(audit_callsites.main, "--root", house / "nowhere").status == 2


def test_this_repository(program):
    ended = program(audit_callsites.main)
    assert ended.status == 0, ended.out
    assert "not checked" not in ended.out
    found = json.loads(program(audit_callsites.main, "chunk_kda", "--json").out)["places"]
    assert {"declaration", "reference", "test"} <= {place["kind"] for place in found}
