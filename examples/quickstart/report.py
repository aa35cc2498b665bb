"""Per operator: who ran and why nobody else did, how far from the recurrence in fp64, how long."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from model import IN_OPERATOR, OPTIONS, LanguageModel
from torch import Tensor

import facade
import facade.ops as fla_ops
from facade import reference
from fla_dispatch import Route


@dataclass(frozen=True)
class Row:
    route: Route
    errors: dict[str, float]  # by result: RMS of the difference over RMS of the right value
    times: dict[str, float]  # by what was called: ms


def operands(model: LanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    """The tensors that the last KDA layer hands to its operator while the model reads tokens [B, T]."""
    with torch.no_grad():
        x = model.embed(tokens)
        *before, last = model.blocks
        for block in before:
            x, _ = block(x, None, fla_ops.chunk_kda)
        tensors, _ = last.kda.operands(last.before_kda(x))
    return {name: tensor.detach() for name, tensor in tensors.items()}


def routes(tensors: dict[str, Tensor]) -> list[Route]:
    """Who would run each operator. Raises ``ValueError`` when a backend is forced that nobody knows."""
    return [facade.explain(operator, **tensors, **options) for operator, options in OPTIONS.items()]


def measure(model: LanguageModel, tokens: Tensor) -> list[Row]:
    """Both operators on what the trained model hands them while it reads tokens [B, T]."""
    tensors = operands(model, tokens)
    exact = {name: tensor.double().cpu() for name, tensor in tensors.items()}
    right, right_gradients = differentiate(reference.kda.recurrent, exact)
    return [chunk_row(tensors, right, right_gradients), recurrent_row(tensors, right)]


def chunk_row(tensors, right, right_gradients) -> Row:
    results, gradients = differentiate(fla_ops.chunk_kda, tensors)
    route = facade.last_route()
    errors = {name: error(results[name], right[name]) for name in right}
    by_input = {name: error(gradients[name], right_gradients[name]) for name in right_gradients}
    worst = max(by_input, key=by_input.get)
    errors[f"gradients (worst: {worst})"] = by_input[worst]
    B, T = tensors["q"].shape[:2]
    with torch.no_grad():
        forward = milliseconds(lambda: call(fla_ops.chunk_kda, tensors))
    both = milliseconds(lambda: differentiate(fla_ops.chunk_kda, tensors))
    return Row(route, errors, {f"for {B} x {T} bytes": forward, "with backward": both})


@torch.no_grad()
def recurrent_row(tensors, right) -> Row:
    results = call(fla_ops.fused_recurrent_kda, tensors)
    route = facade.last_route()
    errors = {name: error(results[name], right[name]) for name in right}
    byte = {name: tensor[:1, -1:] if tensor.dim() > 2 else tensor for name, tensor in tensors.items()}
    state = results["state"][:1]
    return Row(route, errors,
               {"for 1 byte": milliseconds(lambda: call(fla_ops.fused_recurrent_kda, byte, initial_state=state))})


def call(operator, tensors, **options) -> dict[str, Tensor]:
    o, state = operator(**tensors, **OPTIONS.get(operator, IN_OPERATOR), output_final_state=True, **options)
    return {"output": o, "state": state}


def differentiate(operator, tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """→ (results, gradients of every input) for gradients of the results that are random and always the same."""
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    results = call(operator, inputs)
    random = torch.Generator().manual_seed(0)
    incoming = [torch.randn(x.shape, generator=random, dtype=torch.float32).to(x) for x in results.values()]
    gradients = torch.autograd.grad(list(results.values()), list(inputs.values()), incoming)
    return {name: x.detach() for name, x in results.items()}, dict(zip(inputs, gradients, strict=True))


def error(value: Tensor, right: Tensor) -> float:
    return ((value.double().cpu() - right).square().mean() / right.square().mean()).sqrt().item()


def milliseconds(run: Callable[[], object], repeats: int = 9) -> float:
    """Median time of a call."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    times = []
    for _ in range(repeats + 2):  # the first two warm up
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def table(rows: list[Row]) -> str:
    """One line per operator, and below it one per backend that did not run."""
    lines = [("operator", "backend", "error against fp64", "time per call")]
    for row in rows:
        errors = [f"{value:.1e} {name}" for name, value in row.errors.items()]
        times = [f"{value:.2f} ms {name}" for name, value in row.times.items()]
        lines.append((row.route.function, row.route.backend, ", ".join(errors), ", ".join(times)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = []
    for line, row in zip(lines, [None, *rows], strict=True):
        text.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
        if row is not None:
            text += [f"    not {name}: {reason}" for name, reason in row.route.refusals]
    return "\n".join(text)
