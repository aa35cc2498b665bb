"""Training on random windows of the text: Muon for the matrices, AdamW for the rest."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from model import LanguageModel
from muon import Muon
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

BATCH, LENGTH = 8, 128  # windows of a step, bytes of a window
MUON_RATE, ADAMW_RATE = 0.05, 0.01
WARM_UP = 5  # steps


@dataclass(frozen=True)
class Step:
    number: int  # from 1
    progress: float  # of the whole training, 0 to 1
    loss: float  # nats per byte, before the step


def by_steps(count: int) -> Callable[[int], float]:
    """Progress of a training of ``count`` steps."""
    return lambda steps: steps / count


def by_time(seconds: float) -> Callable[[int], float]:
    """Progress of a training that takes ``seconds`` from its second step; during the first, torch loads modules."""
    start = None

    def progress(steps):
        nonlocal start
        if steps == 0:
            return 0.0
        start = start or time.monotonic()
        return min((time.monotonic() - start) / seconds, 1)

    return progress


def train(model: LanguageModel, text: Tensor, progress: Callable[[int], float], seed: int = 0) -> Iterator[Step]:
    """Take steps until ``progress(steps taken)`` is 1; yields each. Learning rates fall with progress, to 0."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in model.blocks.parameters() if p.requires_grad and p.dim() == 2]
    others = [p for p in trained if all(p is not matrix for matrix in matrices)]
    optimizers = [Muon(matrices, lr=MUON_RATE),
                  torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0)]
    schedules = [LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1) * (1 - progress(step)))
                 for optimizer in optimizers]
    random = torch.Generator().manual_seed(seed)
    number, done = 0, 0.0
    while done < 1:
        start = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        loss = model.loss(text[(start + torch.arange(LENGTH + 1)).to(text.device)])
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        number += 1
        done = progress(number)
        yield Step(number, done, loss.item())


@torch.no_grad()
def evaluate(model: LanguageModel, tokens: Tensor) -> float:
    """Nats per byte of tokens [n, T + 1], a few windows at a time."""
    parts = tokens.split(max(1, 8192 // tokens.shape[1]))
    return sum(model.loss(part).item() * len(part) for part in parts) / len(tokens)
