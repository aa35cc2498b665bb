"""Kimi Delta Attention: how to make inputs, and what is right."""

import torch
from harness.hazard import collect
from harness.subject import Subject

from cases import kda_gates, kda_rule, packed, states, tokens, training
from cases.chunks import summed
from facade import reference
from facade.ops.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda, kda_gate_chunk_cumsum

CHUNK_ONLY = ("safe_gate", "disable_recompute", "return_intermediate_states", "cu_seqlens_cpu", "cp_context",
              "use_graph", "max_num_seqs", "chunk_size")


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Values a trained layer could have. Keys are normalised unless the op does it: else the recurrence diverges."""
    x = torch.randn(shape, generator=generator)
    if name in ("q", "k"):
        return x if options.get("use_qk_l2norm_in_kernel") else torch.nn.functional.normalize(x, dim=-1)
    if name == "g":
        return x if options.get("use_gate_in_kernel") else torch.nn.functional.logsigmoid(3 * x)
    if name == "beta":
        return x if options.get("use_beta_sigmoid_in_kernel") else torch.rand(shape, generator=generator)
    if name == "A_log":
        return torch.rand(shape, generator=generator) * 2 - 1
    if name == "initial_state":
        return x / 2
    return x


def make_raw(name: str, shape, options, generator) -> torch.Tensor:
    """The same for operators that compute the gate."""
    return make(name, shape, {"use_gate_in_kernel": True}, generator)


def recurrence(function: str, arguments: dict, dtype: torch.dtype):
    """The token recurrence, with fp64 arithmetic for fp64 and rounded vectors for 16-bit dtypes."""
    arguments = {name: value for name, value in arguments.items() if name not in CHUNK_ONLY}
    return reference.kda.recurrent(**arguments, compute_dtype=dtype)


def gate(function: str, arguments: dict, dtype: torch.dtype):
    """The gate, and its sums from the start of each chunk, token by token."""
    arguments = dict(arguments)
    chunk_size, scale = arguments.pop("chunk_size", 64), arguments.pop("scale", None)
    cu_seqlens = arguments.pop("cu_seqlens", None)
    arguments["output_dtype"] = torch.promote_types(dtype, torch.float32)
    g = reference.kda.gate(**arguments)
    if function == "fused_kda_gate":
        return g
    return summed(g, chunk_size, cu_seqlens) * (1 if scale is None else scale)


RECURRENCE_AXES = {"scale": [None, 0.3], "lower_bound": [None, -5.0], "chunk_size": [64, 32]}
ACTIVATIONS = {"use_gate_in_kernel": True, "A_log": True, "dt_bias": True, "use_qk_l2norm_in_kernel": True,
               "use_beta_sigmoid_in_kernel": True}
RECURRENCE_VARIANTS = {
    "given": {},
    "activated": ACTIVATIONS,
    "bounded": {**ACTIVATIONS, "allow_neg_eigval": True, "lower_bound": -5.0, "safe_gate": True, "chunk_size": 32},
}
GATE_VARIANTS = {
    "softplus": {"A_log": True, "dt_bias": True},
    "bounded": {"A_log": True, "dt_bias": True, "lower_bound": -5.0},
    "without_rate": {"lower_bound": -5.0},
}
HAZARDS = collect(tokens, packed, states, training, kda_gates, kda_rule)

SUBJECTS = (
    Subject("chunk_kda", (chunk_kda,), make, recurrence, RECURRENCE_AXES,
            excluded=frozenset({"return_intermediate_states"}), variants=RECURRENCE_VARIANTS, hazards=HAZARDS),
    Subject("fused_recurrent_kda", (fused_recurrent_kda,), make, recurrence, RECURRENCE_AXES,
            variants=RECURRENCE_VARIANTS, hazards=HAZARDS),
    Subject("kda_gate", (fused_kda_gate, kda_gate_chunk_cumsum), make_raw, gate,
            {"lower_bound": [None, -5.0], "scale": [None, 1.442695], "chunk_size": [64, 32],
             "output_dtype": [torch.float32]}, variants=GATE_VARIANTS, hazards=HAZARDS),
)
