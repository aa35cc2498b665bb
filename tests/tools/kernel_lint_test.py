"""tools/lint/kernels.py: each rule fires on what it is against, and is silent on the right way to write it."""

import pytest

from tools.lint import finding, kernels
from tools.repository import ROOT, Source, sources

TRITON = "kernels/cuda_triton/fla_triton/kda/kernel.py"
GLUON = "kernels/gluon/fla_gluon/kda/kernel.py"
ASCEND = "kernels/ascend/fla_ascend/kda/kernel.py"
OUTSIDE = "facade/reference/kda.py"


def in_kernel(body: str) -> str:
    return (
        f"import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(x, T, K: tl.constexpr):\n    {body}\n"
    )


def in_host(body: str) -> str:
    return f"def forward(call):\n    {body}\n"


def found(rule, text: str, path: str = TRITON) -> list[int]:
    return [line for line, _ in rule(Source(path, text))]


FIRES = [
    (kernels.program_id_is_wide, in_kernel("i = tl.program_id(0)")),
    (kernels.program_id_is_wide, in_kernel("i = tl.program_id(0) * 64 + tl.arange(0, 64)")),
    (kernels.program_id_is_wide, in_kernel("i, j = tl.program_id(0).to(tl.int64), tl.program_id(1)")),
    (kernels.program_id_is_wide, in_kernel("i = (tl.program_id(0) * 64).to(tl.int64)")),
    (kernels.no_block_pointers, in_kernel("p = tl.make_block_ptr(x, (T, K), (K, 1), (0, 0), (64, K), (1, 0))")),
    (kernels.no_block_pointers, in_kernel("x = tl.advance(x, (64, 0))")),
    (kernels.no_block_pointers, "from triton.language import *\np = make_block_ptr(x)\n"),
    (kernels.no_contiguous, in_host("return call.q.contiguous()")),
    (kernels.no_checks, in_host("assert call.q.is_contiguous()")),
    (kernels.no_checks, in_host("if call.q.shape[-1] > 256:\n        raise ValueError('K')")),
    (kernels.no_checks, in_host("if call.q.dtype != call.k.dtype:\n        raise TypeError('dtype')")),
    (kernels.no_exp_of_a_sum, in_kernel("d = tl.exp(x + K)")),
    (kernels.no_exp_of_a_sum, in_kernel("d = x * tl.exp2(x[:, None] + x[None, :])")),
    (kernels.dot_names_its_precision, in_kernel("a = tl.dot(x, x)")),
    (kernels.dot_names_its_precision, in_kernel("a = tl.dot(x, x, acc=x, allow_tf32=True)")),
    (kernels.dot_names_its_precision, in_kernel("a = tl.dot(x, x, input_precision='tf32')")),
    (kernels.nothing_is_timed, "@triton.autotune(configs=[], key=[])\n@triton.jit\ndef kernel(x): pass\n"),
    (kernels.imports_follow_the_arrows, "from facade.reference import kda\n"),
    (kernels.imports_follow_the_arrows, "def f():\n    import fla_gluon.kda\n"),
    (kernels.imports_follow_the_arrows, "from tests.cases import kda\n"),
]

SILENT = [
    (kernels.program_id_is_wide, in_kernel("i, j = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int32)")),
    (kernels.no_block_pointers, in_kernel("p = x + tl.arange(0, 64)[:, None] * K")),
    (kernels.no_block_pointers, in_host("call.cursor.advance()")),
    (kernels.no_contiguous, in_host("return call.q.is_contiguous()")),
    (kernels.no_checks, in_kernel("tl.static_assert(K <= 256)")),
    (kernels.no_checks, in_host("if call.q.shape[-1] > 128:\n        return two_passes(call)")),
    (kernels.no_checks, in_host("if call.version < 3:\n        raise RuntimeError('triton 3.6 or later is needed')")),
    (kernels.no_exp_of_a_sum, in_kernel("d = tl.exp(x - K)")),
    (kernels.no_exp_of_a_sum, in_kernel("d = tl.exp(-x + K) + tl.exp(tl.minimum(x, 0.)) * tl.exp(x)")),
    (kernels.no_exp_of_a_sum, in_kernel("d = tl.log(1 + tl.exp(x + K)) / (tl.exp(x + K) + 1)")),
    (kernels.no_exp_of_a_sum, in_kernel("d = tl.exp((x[:, None] - x[None, :]) + K)")),
    (kernels.dot_names_its_precision, in_kernel("a = tl.dot(x, x, input_precision=PRECISION)")),
    (kernels.dot_names_its_precision, in_kernel("a = tl.dot(x, x, input_precision='tf32x3')")),
    (kernels.dot_names_its_precision, in_kernel("a = tl.dot(x, x, allow_tf32=False) + torch.dot(x, x)")),
    (kernels.nothing_is_timed, "@triton.heuristics({})\n@triton.jit\ndef kernel(x): pass\n"),
    (
        kernels.imports_follow_the_arrows,
        "import torch\nimport triton\nfrom fla_dispatch import Backend\n"
        "from fla_triton.primitives import solve\nfrom . import kernel\n",
    ),
]


@pytest.mark.parametrize(("rule", "text"), FIRES)
def test_fires(rule, text):
    assert len(found(rule, text)) == 1


@pytest.mark.parametrize(("rule", "text"), SILENT)
def test_is_silent(rule, text):
    assert found(rule, text) == []


def test_every_rule_was_seen_to_fire_and_to_be_silent():
    assert {rule for rule, _ in FIRES} == {rule for rule, _ in SILENT} == set(kernels.RULES)


def test_gluon_is_written_by_the_same_rules():
    assert found(kernels.program_id_is_wide, "i = gl.program_id(0)\n", GLUON) == [1]
    assert found(kernels.program_id_is_wide, "i = gl.program_id(0).to(gl.int32)  # a TMA coordinate\n", GLUON) == []


def test_ascend_may_use_block_pointers():
    text = in_kernel("x = tl.advance(tl.make_block_ptr(x, (T,), (1,), (0,), (64,), (0,)), (64,))")
    assert found(kernels.no_block_pointers, text, ASCEND) == []
    assert len(found(kernels.no_block_pointers, text, TRITON)) == 2


def test_kernel_rules_are_for_kernel_trees():
    for rule, text in FIRES:
        if rule is not kernels.imports_follow_the_arrows:
            assert found(rule, text, OUTSIDE) == []


@pytest.mark.parametrize(
    ("path", "module", "allowed"),
    [
        (GLUON, "fla_triton.primitives", True),
        (TRITON, "fla_gluon", False),
        (ASCEND, "fla_triton", False),
        ("kernels/tilelang/fla_tilelang/kda.py", "fla_triton", False),
        ("dispatch/fla_dispatch/bind.py", "facade", False),
        ("dispatch/fla_dispatch/bind.py", "fla_triton", False),
        ("dispatch/fla_dispatch/bind.py", "fla_dispatch.errors", True),
        ("facade/ops/kda.py", "fla_triton", False),
        ("facade/ops/kda.py", "fla_dispatch", True),
        ("facade/ops/kda.py", "tests", False),
        ("tests/op_test.py", "fla_triton", True),
        ("benchmarks/kda.py", "fla_triton", True),
    ],
)
def test_arrows(path, module, allowed):
    for text in (f"import {module}\n", f"from {module} import name\n"):
        assert (found(kernels.imports_follow_the_arrows, text, path) == []) is allowed


def test_program(program, tree, monkeypatch):
    root = tree({TRITON: in_kernel("i = tl.program_id(0)"), ASCEND: in_host("return call.q.contiguous()")})

    def lint(*arguments):
        return program(lambda: finding.main(kernels.__doc__, kernels.RULES), "--root", root, *arguments)

    ended = lint()
    assert ended.status == 1
    assert f"{TRITON}:6: program_id_is_wide: write tl.program_id(0).to(tl.int64)\n" in ended.out
    assert ended.out.endswith("2 found in 2 files by 8 rules\n")
    assert lint("kernels/ascend").out.endswith("1 found in 1 files by 8 rules\n")
    assert lint("kernels/tilelang").status == 2
    (root / TRITON).write_text(in_kernel("pass"))
    assert lint("kernels/cuda_triton/") == (0, "0 found in 1 files by 8 rules\n", "")


def test_this_repository():
    assert finding.check(kernels.RULES, sources(ROOT)) == []
