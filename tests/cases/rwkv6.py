"""RWKV-6: how to make inputs, and what is right."""

import torch
from harness.hazard import collect
from harness.subject import Subject

from cases import packed, states, tokens, training
from facade import reference
from facade.ops.rwkv6 import chunk_rwkv6, fused_recurrent_rwkv6

NOT_OF_TOKENS = ("cu_seqlens_cpu", "chunk_size")


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Values a trained layer could have."""
    x = torch.randn(shape, generator=generator)
    if name == "w":
        return torch.nn.functional.logsigmoid(3 * x)
    return x / 2 if name == "initial_state" else x


def recurrence(function: str, arguments: dict, dtype: torch.dtype):
    """The token recurrence."""
    arguments = {name: value for name, value in arguments.items() if name not in NOT_OF_TOKENS}
    return reference.rwkv6.recurrent(**arguments, compute_dtype=dtype)


AXES = {"scale": [None, 0.3], "chunk_size": [64, 16, 1]}
HAZARDS = collect(tokens, packed, states, training)
SUBJECTS = (Subject("rwkv6", (chunk_rwkv6, fused_recurrent_rwkv6), make, recurrence, AXES, hazards=HAZARDS),)
