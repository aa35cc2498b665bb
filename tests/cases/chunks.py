"""Sums, means and inverses chunk by chunk: how to make inputs, and what is right."""

import torch
from harness.hazard import collect
from harness.subject import Subject

from cases import packed, tokens, training
from facade.ops.utils import chunk_global_cumsum, chunk_local_cumsum, mean_pooling, solve_tril


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Tiles whose inverses stay small, with something above the diagonal; other values of any kind."""
    x = torch.randn(shape, generator=generator)
    return x / 8 if name == "A" else x


def chunks_of(x, chunk_size, cu_seqlens) -> list[range]:
    """The tokens of every chunk; chunk_size None: of every sequence."""
    offsets = [0, x.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    size = chunk_size or x.shape[1]
    return [range(t, min(t + size, end)) for start, end in zip(offsets, offsets[1:]) for t in range(start, end, size)]


def summed(x, chunk_size, cu_seqlens, reverse=False) -> torch.Tensor:
    """Sums from the start of each chunk (reverse: the end) through each token, token by token."""
    sums = [torch.zeros_like(x[:, 0])] * x.shape[1]
    for chunk in chunks_of(x, chunk_size, cu_seqlens):
        total = torch.zeros_like(x[:, 0])
        for t in reversed(chunk) if reverse else chunk:
            total = sums[t] = total + x[:, t]
    return torch.stack(sums, 1)


def sums(function: str, arguments: dict, dtype: torch.dtype):
    """Of fp32 tokens, or fp64 ones."""
    x = arguments["g" if function == "chunk_local_cumsum" else "s"].to(torch.promote_types(dtype, torch.float32))
    found = summed(x, arguments.get("chunk_size"), arguments.get("cu_seqlens"), arguments["reverse"])
    scale = arguments.get("scale")
    return found * (1 if scale is None else scale)


def means(function: str, arguments: dict, dtype: torch.dtype):
    """Chunk by chunk, in the dtype of x."""
    x = arguments["x"]
    wide = x.to(torch.promote_types(dtype, torch.float32))
    found = [wide[:, chunk.start : chunk.stop].mean(1)
             for chunk in chunks_of(x, arguments["chunk_size"], arguments.get("cu_seqlens"))]
    return torch.stack(found, 1).to(x.dtype)


def inverses(function: str, arguments: dict, dtype: torch.dtype):
    """Row by row: what (I + A) X = I says of the next row of X."""
    A = arguments["A"].to(torch.promote_types(dtype, torch.float32))
    C = A.shape[3]
    unit = torch.eye(C, dtype=A.dtype)
    rows = [torch.zeros_like(A[:, 0])] * A.shape[1]
    for chunk in chunks_of(A, C, arguments.get("cu_seqlens")):
        for i, t in enumerate(chunk):
            known = [A[:, t, :, j, None] * rows[chunk[j]] for j in range(i)]
            rows[t] = unit[i].expand_as(A[:, t]) - sum(known, 0 * A[:, t])
    return torch.stack(rows, 1)


SUMS = {"chunk_size": [64, 16, 2], "scale": [None, 1.442695], "output_dtype": [torch.float32]}
FORWARD = {"chunk_size": 64, "reverse": False}
# Pooled tokens are chunks, which the other hazards of tokens do not know how to cut.
POOLED = (tokens.repeated_calls_agree, tokens.memory_layout_is_invisible, tokens.nothing_beside_the_tensors_matters,
          tokens.inputs_stay_as_they_are, tokens.broadcast_inputs_and_gradients, packed.rows_past_the_last_sequence,
          packed.boundaries_of_every_type, packed.boundaries_changed_in_place)
HAZARDS = collect(tokens, packed, training)

SUBJECTS = (
    Subject("cumsum", (chunk_local_cumsum, chunk_global_cumsum), make, sums, SUMS, variants={"forward": FORWARD},
            hazards=HAZARDS),
    Subject("mean_pooling", (mean_pooling,), make, means, {"chunk_size": [64, 16, 5]},
            variants={"plain": {"chunk_size": 64}, "odd": {"chunk_size": 7}}, hazards=(*POOLED, *collect(training))),
    Subject("solve_tril", (solve_tril,), make, inverses, {"output_dtype": [torch.float32]}, sizes={"C": 16},
            hazards=HAZARDS),
)
