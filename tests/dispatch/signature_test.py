"""Names, order, defaults and keyword-ness equal ``fla.ops``. ``tests/data/fla_ops_signatures.json`` is its snapshot."""

import importlib
import inspect
import json
import pathlib

import pytest
import torch

import facade.ops
import facade.ops.utils
from fla_dispatch import explain, operator_of

SNAPSHOT = json.loads((pathlib.Path(__file__).parent.parent / "data" / "fla_ops_signatures.json").read_text())

# Public in ``fla.ops`` and not in the snapshot, which holds whole operators only, or there as a stub that raises.
LOCAL_CUMSUM = ("g, chunk_size, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float32, "
                "chunk_indices=None, use_graph=False")
BESIDE_THE_SNAPSHOT = {
    "fused_chunk_delta_rule": "q, k, v, beta, scale=None, initial_state=None, output_final_state=False, "
                              "use_qk_l2norm_in_kernel=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_size=64",
    "fused_chunk_gla": "q, k, v, g, scale=None, initial_state=None, output_final_state=False, state_v_first=False, "
                       "cu_seqlens=None, cu_seqlens_cpu=None",
    "addmm": "x, a, b, alpha=None, beta=None",
    "chunk_global_cumsum_scalar": "s, reverse=False, cu_seqlens=None, scale=None, output_dtype=torch.float32",
    "chunk_global_cumsum_vector": "s, reverse=False, cu_seqlens=None, scale=None, output_dtype=torch.float32",
    "chunk_local_cumsum_scalar": LOCAL_CUMSUM,
    "chunk_local_cumsum_vector": LOCAL_CUMSUM,
    "get_max_num_splits": "cu_seqlens, chunk_size, cu_seqlens_cpu=None",
    "matmul": "a, b, activation=''",
    "prepare_block_csr": "block_indices, block_counts, cu_seqlens, chunk_indices, num_blocks, block_size",
    "prepare_chunk_indices_static": "cu_seqlens, chunk_size, nt_max",
    "prepare_cu_seqlens_from_lens": "lens, dtype=torch.int32",
    "prepare_lens_from_mask": "mask",
    "softmax_bwd": "p, dp, dtype=torch.float32",
    "softplus": "x",
    "kda_gate_chunk_cumsum": "g, A_log=None, chunk_size=64, scale=None, dt_bias=None, cu_seqlens=None, "
                             "output_dtype=torch.float32, lower_bound=None",
}  # fmt: skip

ALIASES = {"chunk_gdn": "chunk_gated_delta_rule", "fused_recurrent_gdn": "fused_recurrent_gated_delta_rule"}
FAMILIES = ("delta_rule", "gated_delta_rule", "gla", "kda", "lightning_attn", "linear_attn", "retention", "rwkv6",
            "simple_gla")
# Of fla.ops.utils: those that are operators, and plain functions.
HELPERS = {name: getattr(facade.ops.utils, name) for name in facade.ops.utils.__all__}
PUBLIC = {name: getattr(module, name) for family in FAMILIES
          for module in [importlib.import_module(f"facade.ops.{family}")] for name in module.__all__} | HELPERS


def words(parameters) -> str:
    return ", ".join(f"{name}={default}" if default is not None else name for name, _, default in parameters)


SAME = {"torch.float": "torch.float32"}


def snapshot(name):
    """(name, kind, default) of every parameter of ``fla.ops``, less its ``**kwargs``."""
    named = [p for p in SNAPSHOT[name]["parameters"] if p["kind"] != "var_keyword"]
    return [(p["name"], p["kind"], SAME.get(p.get("default"), p.get("default"))) for p in named]


def ours(function):
    return [(p.name, p.kind.name.lower(), None if p.default is p.empty else repr(p.default))
            for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", PUBLIC)
def test_parity(name):
    """The parameters of ``fla.ops`` first and unchanged; behind them only keyword-only ones of ours."""
    parameters = ours(PUBLIC[name])
    if name in BESIDE_THE_SNAPSHOT:
        assert words(parameters) == BESIDE_THE_SNAPSHOT[name]
        return
    expected = snapshot(name)
    assert parameters[: len(expected)] == expected
    for parameter, kind, default in parameters[len(expected):]:
        assert kind == "keyword_only" and default is not None, f"{parameter} is not an optional keyword"


@pytest.mark.parametrize("name", PUBLIC)
def test_help(name):
    """One line, the arguments, what comes back, what is raised, and an example."""
    function = PUBLIC[name]
    first = inspect.getdoc(function).splitlines()[0]
    assert first.endswith(".") or first.endswith(",") or "``" in first
    for part in ("Returns:", "Raises:", "Example:"):
        assert part in function.__doc__
    assert function.__name__ == function.__qualname__ == ALIASES.get(name, name)
    assert function.__module__.startswith("facade.ops.")


@pytest.mark.parametrize("name", PUBLIC)
def test_every_argument_is_explained(name):
    document = PUBLIC[name].__doc__
    if "are those of ``chunk_kda``" in document:
        document += PUBLIC["chunk_kda"].__doc__
    missing = [p for p in inspect.signature(PUBLIC[name]).parameters if p not in document]
    assert not missing


def test_exports():
    """facade.ops exports what ``fla.ops`` does, of the operators that exist so far."""
    exported = {name for name in PUBLIC if SNAPSHOT.get(name, {}).get("exported")}
    assert set(facade.ops.__all__) == exported
    assert all(getattr(facade.ops, name) is PUBLIC[name] for name in exported)


def test_operator_behind_the_function():
    for name, function in PUBLIC.items():
        if name in HELPERS and not hasattr(function, "operator"):
            continue
        assert operator_of(function) is operator_of(ALIASES.get(name, name)) is function.operator
        assert function.operator.declaration.names == tuple(inspect.signature(function).parameters)


def test_positional_forms():
    """The forms of the last upstream minors: all positional, all by keyword, options by position (C089)."""
    q, k, v = torch.randn(3, 1, 4, 2, 8).unbind()
    g, beta = -torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2)
    expected = facade.ops.chunk_kda(q=q, k=k, v=v, g=g, beta=beta, scale=0.5, output_final_state=True)
    for o, state in (facade.ops.chunk_kda(q, k, v, g, beta, 0.5, None, True),
                     facade.ops.chunk_kda(q, k, v, g, beta, 0.5, output_final_state=True)):
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])


def test_deprecated_name_still_works():
    q, k = torch.randn(2, 1, 4, 2, 8).unbind()
    v, g, beta = torch.randn(1, 4, 2, 6), -torch.rand(1, 4, 2, 8), torch.rand(1, 4, 2)
    for function in facade.ops.chunk_kda, facade.ops.fused_recurrent_kda:
        expected = function(q, k, v, g, beta, output_final_state=True, state_v_first=True)
        with pytest.warns(DeprecationWarning, match="deprecated name of `state_v_first`"):
            o, state = function(q, k, v, g, beta, output_final_state=True, transpose_state_layout=True)
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1]) and state.shape == (1, 2, 6, 8)
        with pytest.warns(DeprecationWarning, match="deprecated name of `state_v_first`"):
            explain(function, q, k, v, g, beta, transpose_state_layout=True)
