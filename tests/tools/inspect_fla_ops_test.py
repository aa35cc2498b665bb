"""tools/inspect_fla_ops.py: what is public, with which signature, and who could run it."""

import inspect
import json

import pytest
import torch

import facade.ops
from facade.ops import kda
from fla_dispatch import Backend, register, unregister
from tools import inspect_fla_ops


@pytest.fixture
def gated():
    """A backend that is off, and one that wants a package that does not exist."""

    class Gated(Backend):
        name, operation, functions, priority = "gated", "kda", ("chunk_kda",), 3
        env, default_on = "FLA_TEST_GATED", False
        limits = {"dtype": (torch.bfloat16,), "K": range(16, 257, 16)}
        handles = frozenset({"cu_seqlens", "initial_state"})

        def probe(self, device):
            raise AssertionError("inspection asks no toolchain")

        forward = backward = probe

    class Absent(Gated):
        name, priority, package, env = "absent", 4, "no_such_toolchain", None

    register(Gated)
    register(Absent)
    yield
    unregister("gated", "kda")
    unregister("absent", "kda")


def test_lists_every_public_operator(program):
    ended = program(inspect_fla_ops.main)
    listed = {line.split()[0] for line in ended.out.splitlines()[1:]}
    assert ended.status == 0
    assert listed >= {*facade.ops.__all__, *kda.__all__}
    line = next(line for line in ended.out.splitlines() if line.startswith("chunk_kda "))
    assert "facade.ops.kda" in line and inspect.getdoc(kda.chunk_kda).splitlines()[0] in line


def test_filter(program):
    assert set(json.loads(program(inspect_fla_ops.main, "--filter", "GATE_CHUNK", "--json").out)["operators"]) == {
        "kda_gate_chunk_cumsum"
    }
    ended = program(inspect_fla_ops.main, "--filter", "nothing_like_it")
    assert ended.status == 2 and ended.out == "" and len(ended.err.splitlines()) == 1


def test_functions_that_are_no_operators(program):
    described = json.loads(program(inspect_fla_ops.main, "--filter", "utils.pack", "--json").out)["operators"]
    assert set(described) == {"pack_sequence", "unpack_sequence"}
    assert all(entry["backends"][0]["name"] == "plain PyTorch" for entry in described.values())


def test_signature_is_python_that_names_the_same_parameters(program):
    ended = program(inspect_fla_ops.main, "--signature", "chunk_kda", "--signature", "fused_kda_gate")
    assert ended.status == 0
    for text, function in zip(ended.out.split("\n\n"), (kda.chunk_kda, kda.fused_kda_gate), strict=True):
        scope = {name: getattr(kda, name) for name in ("torch", "Tensor", "Float", "Integer")}
        exec(f"def {text.strip()}: ...", scope)
        printed = inspect.signature(scope[function.__name__]).parameters.values()
        declared = inspect.signature(function).parameters.values()
        assert [(p.name, p.kind, p.default) for p in printed] == [(p.name, p.kind, p.default) for p in declared]
        assert [str(p.annotation) for p in printed] == [str(p.annotation) for p in declared]
    assert '    initial_state: Float[Tensor, "N HV K V"] | None = None,\n' in ended.out


def test_unknown_operator_names_the_nearest(program):
    ended = program(inspect_fla_ops.main, "--signature", "chunk_kad")
    assert ended.status == 2
    assert ended.err == "program: facade.ops has no operator `chunk_kad`; did you mean `chunk_kda`?\n"


def test_backends(program, gated, monkeypatch):
    monkeypatch.delenv("FLA_TEST_GATED", raising=False)
    ended = program(inspect_fla_ops.main, "--filter", "chunk_kda", "--backends")
    assert ended.status == 0
    assert "  gated: no: off by default (set FLA_TEST_GATED=1)\n" in ended.out
    assert "      priority 3; takes dtype bfloat16; K 16 to 256 in steps of 16\n" in ended.out
    assert "      handles cu_seqlens, initial_state\n" in ended.out
    assert "  absent: no: package no_such_toolchain is not installed\n" in ended.out
    assert "  reference: available\n" in ended.out
    monkeypatch.setenv("FLA_TEST_GATED", "1")
    assert "  gated: available\n" in program(inspect_fla_ops.main, "--filter", "chunk_kda", "--backends").out


def test_json_holds_all_of_it(program, gated):
    described = json.loads(program(inspect_fla_ops.main, "--json").out)
    chunk = described["operators"]["chunk_kda"]
    names = [p["name"] for p in chunk["parameters"]]
    assert names == list(inspect.signature(kda.chunk_kda).parameters)
    assert {"name": "chunk_size", "kind": "keyword_only", "annotation": "int", "default": "64"} in chunk["parameters"]
    gated = next(backend for backend in chunk["backends"] if backend["name"] == "gated")
    assert gated["priority"] == 3 and gated["available"] is False
    assert "gated" not in [b["name"] for b in described["operators"]["fused_kda_gate"]["backends"]]


def test_missing_package_is_one_line(program):
    ended = program(inspect_fla_ops.main, "--package", "no_such_package.ops")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("program: package no_such_package.ops is not installed here")
    assert len(ended.err.splitlines()) == 1


OTHER = {
    "other_fla/__init__.py": "",
    "other_fla/ops/__init__.py": """
from other_fla.ops.gla import chunk_gla
__all__ = ["chunk_gla", "VERSION"]
VERSION = 1
""",
    "other_fla/ops/gla.py": """
__all__ = ["chunk_gla", "gate"]
def chunk_gla(q, k, *args, scale=None, **kwargs):
    'Gated linear attention.'
    raise AssertionError("inspection runs nothing")
def gate(x): ...
""",
    "other_fla/ops/broken.py": "import no_such_toolchain",
}


def test_another_package(program, tree, monkeypatch, import_fresh):
    """Any package with ``__all__`` can be asked about; a module of it that cannot be imported is left out aloud."""
    monkeypatch.syspath_prepend(tree(OTHER))
    import_fresh("other_fla")
    ended = program(inspect_fla_ops.main, "--package", "other_fla.ops")
    assert ended.status == 0
    assert [line.split()[0] for line in ended.out.splitlines()[1:]] == ["chunk_gla", "gate"]
    assert ended.err == "left out: package other_fla.ops.broken needs no_such_toolchain, which is not installed here\n"
    ended = program(inspect_fla_ops.main, "--package", "other_fla.ops", "--signature", "chunk_gla")
    assert ended.out == "chunk_gla(\n    q,\n    k,\n    *args,\n    scale=None,\n    **kwargs,\n)\n"
    assert program(inspect_fla_ops.main, "--package", "other_fla.ops", "--backends").status == 2


def test_a_package_that_lacks_something_says_what(program, tree, monkeypatch, import_fresh):
    monkeypatch.syspath_prepend(
        tree(
            {
                "needy_fla/__init__.py": "import no_such_toolchain\n",
                "faulty_fla/__init__.py": "raise RuntimeError('no driver\\nmore')\n",
            }
        )
    )
    import_fresh("needy_fla")
    ended = program(inspect_fla_ops.main, "--package", "needy_fla")
    assert ended == (2, "", "program: package needy_fla needs no_such_toolchain, which is not installed here\n")
    ended = program(inspect_fla_ops.main, "--package", "faulty_fla")
    assert ended == (2, "", "program: package faulty_fla cannot be imported: RuntimeError: no driver\n")
