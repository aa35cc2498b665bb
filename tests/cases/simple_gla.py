"""Simple GLA, retention and lightning attention: how to make inputs, and what is right."""

import torch
from harness.hazard import collect
from harness.subject import Subject

from cases import attentions, packed, states, tokens, training
from facade import reference
from facade.ops.lightning_attn import chunk_lightning_attn, fused_recurrent_lightning_attn
from facade.ops.retention import chunk_retention, fused_chunk_retention, fused_recurrent_retention, parallel_retention
from facade.ops.simple_gla import (
    chunk_simple_gla,
    fused_chunk_simple_gla,
    fused_recurrent_simple_gla,
    parallel_simple_gla,
)

NOT_OF_TOKENS = ("cu_seqlens_cpu", "chunk_size", "output_attentions")


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Values a trained layer could have."""
    x = torch.randn(shape, generator=generator)
    if name in ("g", "g_gamma"):
        return torch.nn.functional.logsigmoid(3 * x)
    return x / 2 if name == "initial_state" else x


def recurrence(function: str, arguments: dict, dtype: torch.dtype):
    """The token recurrence, with the decay that a parametrisation stands for."""
    arguments = {name: value for name, value in arguments.items() if name not in NOT_OF_TOKENS}
    H, device = arguments["q"].shape[2], arguments["q"].device
    if "retention" in function:
        arguments["g_gamma"] = reference.simple_gla.retention_rates(H, device)
    if "lightning" in function:
        layer = arguments.pop("layer_idx"), arguments.pop("num_layers")
        arguments["g_gamma"] = reference.simple_gla.lightning_rates(H, *layer, device)
    return reference.simple_gla.recurrent(**arguments, compute_dtype=dtype)


AXES = {"scale": [None, 0.3], "chunk_size": [64, 16, 2], "layer_idx": [0, 7], "num_layers": [12]}
VARIANTS = {"given": {"g": True}, "constant": {"g_gamma": True}}
LAYER = {"plain": {"layer_idx": 3, "num_layers": 12}}
HAZARDS = collect(tokens, packed, states, training, attentions)
BY_HAZARDS = frozenset({"output_attentions"})

SUBJECTS = (
    Subject("simple_gla", (chunk_simple_gla, fused_chunk_simple_gla, fused_recurrent_simple_gla, parallel_simple_gla),
            make, recurrence, AXES, excluded=BY_HAZARDS, variants=VARIANTS, hazards=HAZARDS),
    Subject("retention", (chunk_retention, fused_chunk_retention, fused_recurrent_retention, parallel_retention), make,
            recurrence, AXES, excluded=BY_HAZARDS, hazards=HAZARDS),
    Subject("lightning_attn", (chunk_lightning_attn, fused_recurrent_lightning_attn), make, recurrence, AXES,
            variants=LAYER, hazards=HAZARDS),
)
