"""tools/explain.py: the same answer as the registry's, for calls that nobody could make here."""

import json

import pytest
import torch

import facade
from fla_dispatch import Backend, register, registry, unregister
from tools import explain


@pytest.fixture(autouse=True)
def backends(monkeypatch):
    """Two machines this one is not; and no kernel tree, whose answers change as it learns."""
    for tree in registry.TREES:
        monkeypatch.setenv(tree.upper(), "0")

    class Hopper(Backend):
        name, operation, functions, priority = "hopper", "kda", ("chunk_kda",), 1
        limits = {"arch": ("sm90",), "dtype": (torch.bfloat16, torch.float16), "K": (64, 128)}
        handles = frozenset({"cu_seqlens", "initial_state"})

    class Anywhere(Backend):
        name, operation, functions, priority = "anywhere", "kda", ("chunk_kda",), 2
        limits = {"device": ("cuda",)}
        handles = frozenset({"cu_seqlens", "initial_state", "use_gate_in_kernel", "A_log", "lower_bound"})
        differentiable = False

    for backend in (Hopper, Anywhere):
        register(backend)
    yield
    for backend in (Hopper, Anywhere):
        unregister(backend.name, "kda")


@pytest.fixture
def asked(program):
    def ask(*arguments):
        ended = program(explain.main, "chunk_kda", "--json", *arguments)
        return json.loads(ended.out) if ended.status != 2 else ended.err

    return ask


def test_the_described_call_is_chosen_for_as_a_real_one(asked):
    answer = asked("--B", 1, "--T", 8192, "--H", 32, "--K", 128, "--arch", "sm90", "--with", "initial_state,cu_seqlens")
    assert answer["backend"] == "hopper"
    assert answer["call"]["dims"] == {"B": 1, "T": 8192, "H": 32, "HV": 32, "K": 128, "V": 128, "N": 1}
    assert {"backend": "anywhere", "reason": "comes after hopper"} in answer["refusals"]


def test_every_refusal_has_all_its_reasons(asked):
    answer = asked(
        "--K", 256, "--arch", "sm80", "--dtype", "fp32", "--grad", "--with", "A_log", "--set", "use_gate_in_kernel=True"
    )
    reasons = {refusal["backend"]: refusal["reason"].split("; ") for refusal in answer["refusals"]}
    assert answer["backend"] == "reference"
    assert reasons["hopper"] == [
        "arch=sm80 (takes sm90)",
        "dtype=torch.float32 (takes torch.bfloat16, torch.float16)",
        "K=256 (takes 64, 128)",
        "option use_gate_in_kernel=True is not implemented",
        "optional tensor A_log is not implemented",
    ]
    assert reasons["anywhere"] == ["gradients are not implemented"]


def test_agrees_with_a_real_call(asked):
    q = torch.zeros(1, 5, 2, 8)
    real = facade.explain("chunk_kda", q, q, q, q, q[..., 0])
    answer = asked("--dtype", "fp32", "--T", 5, "--H", 2, "--K", 8, "--V", 8)
    assert answer["backend"] == real.backend
    assert tuple((refusal["backend"], refusal["reason"]) for refusal in answer["refusals"]) == real.refusals


def test_sizes_come_from_a_named_shape(asked):
    shapes = facade.ops.chunk_kda.operator.declaration.named_shapes
    for name, shape in shapes.items():
        dims = asked("--shape", name)["call"]["dims"]
        assert {letter: dims[letter] for letter in shape} == shape
        assert dims["N"] == shape.get("N", shape["B"])
    assert asked()["call"]["shape"] == "train_8k"
    assert asked("--H", 8)["call"]["dims"]["HV"] == 8
    assert asked("--H", 8, "--HV", 16)["call"]["dims"]["HV"] == 16
    assert "no shape `train_9k`; did you mean `train_8k`?" in asked("--shape", "train_9k")


def test_gates_and_forcing(asked, monkeypatch):
    assert asked("--arch", "sm90", "--backend", "anywhere")["forced_by"] == 'use_backend("anywhere")'
    refused = asked("--backend", "hopper")
    assert refused["backend"] is None and "arch=cpu" in refused["refusals"][0]["reason"]
    assert "no one registered" in asked("--backend", "nobody")
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    assert asked("--arch", "sm90")["backend"] == "reference"


def test_status(program):
    assert program(explain.main, "chunk_kda").status == 0
    assert program(explain.main, "chunk_kda", "--backend", "hopper").status == 1
    assert program(explain.main, "chunk_kda", "--HV", "33").status == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--H", "32", "--HV", "33"],
            "chunk_kda: the number of value heads must be a multiple of the number of query/key",
        ),
        (["--with", "cu_seqlens", "--B", "2"], "chunk_kda: the batch size must be 1 with `cu_seqlens`, not 2"),
        (["--set", "chunk_sise=64"], "chunk_kda: unknown keyword `chunk_sise`; did you mean `chunk_size`?"),
        (["--set", "head_first=True"], "chunk_kda: `head_first` has been removed"),
        (["--set", "cp_context=1"], "chunk_kda: context parallelism is not implemented"),
        (["--set", "cu_seqlens=3"], "--set cu_seqlens=3: `cu_seqlens` is a tensor; say --with cu_seqlens"),
        (["--set", "scale"], "--set scale: write OPTION=VALUE"),
        (["--with", "initial_stat"], "chunk_kda has no such optional tensor; did you mean `initial_state`?"),
        (["--M", "4"], "no tensor of chunk_kda has the dimension M; they have B, T, H, HV, K, V, N"),
        (["--device", "abacus"], "--device abacus: torch knows no such device"),
    ],
)
def test_mistakes_are_one_line(program, arguments, message):
    ended = program(explain.main, "chunk_kda", *arguments)
    assert (ended.status, ended.out) == (2, "")
    assert message in ended.err and len(ended.err.splitlines()) == 1


def test_unknown_operator(program):
    assert "did you mean `chunk_kda`?" in program(explain.main, "chunk_kd").err


def test_cuda_without_a_gpu_needs_an_architecture(program, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "add --arch" in program(explain.main, "chunk_kda", "--device", "cuda").err


def test_inference_mode(asked):
    options = ("--set", "return_intermediate_states=True")
    assert "torch.inference_mode()" in asked(*options)
    assert asked("--inference", *options)["call"]["inference"] is True


def test_options_that_are_dtypes(program):
    ended = program(explain.main, "fused_kda_gate", "--with", "A_log", "--set", "output_dtype=bf16", "--json")
    assert json.loads(ended.out)["call"]["options"] == {"output_dtype": "torch.bfloat16"}


def test_table(program):
    ended = program(
        explain.main,
        "chunk_kda",
        "--K",
        "256",
        "--arch",
        "sm90",
        "--with",
        "initial_state",
        "--set",
        "allow_neg_eigval=True",
        "--set",
        "use_beta_sigmoid_in_kernel=True",
    )
    lines = ended.out.splitlines()
    assert lines[0] == "chunk_kda: B=1 T=8192 H=32 HV=32 K=256 V=128 N=1 (train_8k for what is not given)"
    assert lines[1].startswith("  bfloat16 on sm90, with initial_state, allow_neg_eigval=True")
    first = next(i for i, line in enumerate(lines) if "hopper" in line)
    assert lines[first].split() == ["hopper", "refuses", "K=256", "(takes", "64,", "128)"]
    assert lines[first + 1].strip() == "option use_beta_sigmoid_in_kernel=True is not implemented"
    assert lines[3].split()[:2] == ["reference", "runs"]
