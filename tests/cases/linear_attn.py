"""Linear attention: how to make inputs, and what is right."""

import torch
from harness.hazard import collect
from harness.subject import Subject

from cases import normaliser, packed, states, tokens, training
from facade import reference
from facade.ops.linear_attn import chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Values a trained layer could have; normalised, queries and keys are those of a positive feature map."""
    x = torch.randn(shape, generator=generator)
    if name in ("q", "k") and options.get("normalize"):
        return torch.nn.functional.elu(x) + 1
    return x / 2 if name == "initial_state" else x


def recurrence(function: str, arguments: dict, dtype: torch.dtype):
    """The token recurrence."""
    return reference.linear_attn.recurrent(**arguments, compute_dtype=dtype)


# What normalises is composed of calls that do not, which are all that a backend sees; it has hazards of its own.
PLAIN = {"plain": {"normalize": False}}
AXES = {"scale": [None, 0.3], "normalize": [False]}
HAZARDS = collect(tokens, packed, states, training, normaliser)
SUBJECTS = (
    Subject("linear_attn", (chunk_linear_attn, fused_chunk_linear_attn, fused_recurrent_linear_attn), make, recurrence,
            AXES, variants=PLAIN, hazards=HAZARDS),
)
