"""The delta rule, gated and not: how to make inputs, and what is right."""

import torch
from harness.hazard import collect
from harness.subject import Subject

from cases import attentions, packed, states, tokens, training
from facade import reference
from facade.ops.delta_rule import (
    chunk_delta_rule,
    fused_chunk_delta_rule,
    fused_recurrent_delta_rule,
    parallel_delta_rule,
)
from facade.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

NOT_OF_TOKENS = ("cu_seqlens_cpu", "chunk_size", "chunk_indices", "cp_context", "output_attentions")


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Values a trained layer could have. Keys are normalised unless the op does it: else the recurrence diverges."""
    x = torch.randn(shape, generator=generator)
    if name in ("q", "k"):
        return x if options.get("use_qk_l2norm_in_kernel") else torch.nn.functional.normalize(x, dim=-1)
    if name in ("gk", "gv") or name == "g" and not options.get("use_gate_in_kernel"):
        return torch.nn.functional.logsigmoid(3 * x)
    if name == "beta":
        return x if options.get("use_beta_sigmoid_in_kernel") else torch.rand(shape, generator=generator)
    if name == "A_log":
        return torch.rand(shape, generator=generator) * 2 - 1
    return x / 2 if name == "initial_state" else x


def recurrence(function: str, arguments: dict, dtype: torch.dtype):
    """The token recurrence."""
    arguments = {name: value for name, value in arguments.items() if name not in NOT_OF_TOKENS}
    return reference.delta_rule.recurrent(**arguments, compute_dtype=dtype)


AXES = {"scale": [None, 0.3], "chunk_size": [64, 16]}
NORMED = {"use_qk_l2norm_in_kernel": True}
ACTIVATED = {**NORMED, "use_gate_in_kernel": True, "A_log": True, "dt_bias": True, "use_beta_sigmoid_in_kernel": True,
             "allow_neg_eigval": True, "g": True, "beta": True}
HAZARDS = collect(tokens, packed, states, training, attentions)
SUBJECTS = (
    Subject("delta_rule", (chunk_delta_rule, fused_chunk_delta_rule, fused_recurrent_delta_rule, parallel_delta_rule),
            make, recurrence, AXES, excluded=frozenset({"output_attentions"}),
            variants={"given": {"beta": True}, "normed": {**NORMED, "beta": True}}, hazards=HAZARDS),
    Subject("gated_delta_rule", (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule), make, recurrence, AXES,
            variants={"given": {"g": True, "beta": True}, "activated": ACTIVATED}, hazards=HAZARDS),
)
