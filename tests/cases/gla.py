"""Gated linear attention: how to make inputs, and what is right."""

import torch
from harness.hazard import collect
from harness.subject import Subject

from cases import packed, states, tokens, training
from facade import reference
from facade.ops.gla import chunk_gla, fused_chunk_gla, fused_recurrent_gla


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Values a trained layer could have."""
    x = torch.randn(shape, generator=generator)
    if name in ("g", "gk", "gv"):
        return torch.nn.functional.logsigmoid(3 * x)
    return x / 2 if name == "initial_state" else x


def recurrence(function: str, arguments: dict, dtype: torch.dtype):
    """The token recurrence."""
    arguments = {"gk" if name == "g" else name: value for name, value in arguments.items() if name != "cu_seqlens_cpu"}
    return reference.gla.recurrent(**arguments, compute_dtype=dtype)


HAZARDS = collect(tokens, packed, states, training)
SUBJECTS = (
    Subject("gla", (chunk_gla, fused_chunk_gla, fused_recurrent_gla), make, recurrence, {"scale": [None, 0.3]},
            variants={"keys": {"gk": True}, "both": {"gk": True, "gv": True}}, hazards=HAZARDS),
)
