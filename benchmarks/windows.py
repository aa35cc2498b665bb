"""Holding a long call against the fp64 recurrence, cheaply: some tokens of two heads, exactly.

Tokens far apart do not know of each other where gates forget: what lies ``MARGIN`` tokens before or behind changes a
token's results and gradients by less than rounding (tests/benchmarks shows it). So the recurrence is run over windows
at the beginning, in the middle and at the end of a sequence, and what lies at least ``MARGIN`` from an edge that is no
end of the sequence is compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from benchmarks.oracle import SUBJECTS, bounds
from benchmarks.workloads import GATED, Workload
from facade import reference

MARGIN = 128
INSIDE = 64
WIDTH = INSIDE + 2 * MARGIN


@dataclass(frozen=True)
class Window:
    """Tokens ``begin`` to ``end`` of a row; ``first`` to ``last`` are to be compared."""

    row: int
    begin: int
    end: int
    first: int
    last: int


def windows(workload: Workload) -> list[Window]:
    """Three of the longest sequence, one of the first and one of the last."""
    offsets = workload.offsets
    if offsets is None:
        T = workload.sizes["T"]
        sequences = [(row, 0, T) for row in sorted({0, workload.sizes["B"] - 1})]
    else:
        sequences = [(0, start, end) for start, end in zip(offsets, offsets[1:]) if end > start]
    longest = max(sequences, key=lambda s: s[2] - s[1])
    found = []
    for row, start, end in dict.fromkeys((longest, sequences[0], sequences[-1])):
        begins = [start, (start + end - WIDTH) // 2, end - WIDTH] if (row, start, end) == longest else [end - WIDTH]
        for begin in dict.fromkeys(max(start, begin) for begin in begins):
            stop = min(end, begin + WIDTH)
            first = begin if begin == start else begin + MARGIN
            found.append(Window(row, begin, stop, first, stop if stop == end else stop - MARGIN))
    return found


def right(workload: Workload, inputs: Mapping, cotangent: torch.Tensor | None) -> list[dict]:
    """The fp64 results, and gradients where ``cotangent`` of the first result is given: one dict per part.

    A part is {"where": indices that lead to the values, one after the other, by name; "right": those values}.
    """
    with torch.enable_grad():
        if set(GATED) & set(inputs):
            return [_gate(workload, inputs, cotangent)]
        return [_window(workload, inputs, cotangent, window) for window in windows(workload)]


def _heads(workload) -> tuple[list[int], list[int]]:
    """The first and the last value head, and the query/key heads they use."""
    H, HV = workload.sizes["H"], workload.sizes["HV"]
    chosen = sorted({0, HV - 1})
    return chosen, [head * H // HV for head in chosen]


def _window(workload, inputs, cotangent, window: Window) -> dict:
    values, keys = _heads(workload)
    rows, tokens = window.row, slice(window.begin, window.end)
    leaves = {}
    for name in workload.tensors:
        x = inputs[name]
        if name == "initial_state":
            leaves[name] = x[rows, values][None]
        else:
            leaves[name] = x[rows, tokens][:, keys if name in ("q", "k") else values][None]
    leaves = {name: x.detach().double().requires_grad_(cotangent is not None) for name, x in leaves.items()}
    subject = SUBJECTS[workload.name]
    results = subject.oracle(workload.name, {**workload.options, **leaves}, torch.float64)
    names = workload.operator.declaration.results
    results = {name: x for name, x in zip(names, results) if x is not None}
    compared = slice(window.first, window.last)
    inside = slice(window.first - window.begin, window.last - window.begin)
    found = {"o": results["o"].detach()[0, inside]}
    place = ((rows, compared), (slice(None), values))
    where = {"o": place}
    if "final_state" in results:
        found["final_state"], where["final_state"] = results["final_state"].detach()[0], (rows, values)
    if cotangent is not None:
        given = cotangent[rows, tokens][:, values][None].double()
        gradients = torch.autograd.grad(results["o"], list(leaves.values()), given)
        heads = values if workload.sizes["H"] == workload.sizes["HV"] else None
        for name, gradient in zip(leaves, gradients):
            if name in ("q", "k") and heads is None:
                continue  # a sum over value heads that are not all here
            found[f"d{name}"] = gradient[0, inside]
            where[f"d{name}"] = place
    return {"where": where, "right": found}


def _gate(workload, inputs, cotangent) -> dict:
    """All of it: a gate knows no neighbours beyond its chunk."""
    leaves = {name: inputs[name].detach().double().requires_grad_(cotangent is not None) for name in workload.tensors}
    body = reference.kda.gate if workload.name == "fused_kda_gate" else reference.kda.gate_chunk_cumsum
    result = body(**leaves, output_dtype=torch.float64)
    found = {"result": result.detach()}
    if cotangent is not None:
        gradients = torch.autograd.grad(result, list(leaves.values()), cotangent.double())
        found |= {f"d{name}": gradient for name, gradient in zip(leaves, gradients)}
    return {"where": {name: () for name in found}, "right": found}


def errors(found: Mapping[str, torch.Tensor], parts: list[dict]) -> dict[str, float]:
    """The largest relative RMS error of each of ``found`` over the parts."""
    worst: dict[str, float] = {}
    for part in parts:
        for name, expected in part["right"].items():
            if name in found:
                x = found[name].detach()
                for index in part["where"][name]:
                    x = x[index]
                worst[name] = max(worst.get(name, 0.0), bounds.error(x, expected))
    return worst


def problem(workload: Workload, measured: Mapping[str, float], dtype=torch.bfloat16) -> str | None:
    """What is wrong with the errors of a call, or None; what was not compared is wrong too."""
    if not measured:
        return "nothing was compared"
    tolerance = workload.operator.declaration.tolerance
    wrong = [
        f"{name} {error:.2g} (at most {limit:.2g})"
        for name, error in measured.items()
        if not error <= (limit := bounds.ceiling(tolerance, name, dtype))
    ]
    return "error of " + ", ".join(wrong) if wrong else None
