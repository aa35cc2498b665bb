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


# From steps taken and seconds spent to the part of the training that is done, 0 to 1.
Progress = Callable[[int, float], float]


def by_steps(count: int) -> Progress:
    return lambda steps, seconds: steps / count


def by_time(limit: float) -> Progress:
    return lambda steps, seconds: min(seconds / limit, 1)


@dataclass(frozen=True)
class Step:
    number: int  # from 1
    seconds: float  # spent in steps so far; the first does not count, torch loads modules meanwhile
    done: float  # part of the training
    loss: float  # nats per byte, before the step

    @property
    def speed(self) -> float:
        """Tokens per second so far."""
        return (self.number - 1) * BATCH * LENGTH / self.seconds if self.seconds else 0


def train(model: LanguageModel, text: Tensor, progress: Progress, seed: int = 0) -> Iterator[Step]:
    """Take steps until ``progress`` is 1 and yield each. Learning rates fall with progress, to 0."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in model.blocks.parameters() if p.requires_grad and p.dim() == 2]
    others = [p for p in trained if all(p is not matrix for matrix in matrices)]
    optimizers = [Muon(matrices, lr=MUON_RATE),
                  torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0)]
    number, seconds, done = 0, 0.0, 0.0
    schedules = [LambdaLR(optimizer, lambda step: min((step + 1) / WARM_UP, 1) * (1 - done))
                 for optimizer in optimizers]
    random = torch.Generator().manual_seed(seed)
    while done < 1:
        began = time.monotonic()
        start = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=random)
        loss = model.loss(text[(start + torch.arange(LENGTH + 1)).to(text.device)])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        nats = loss.item()
        number += 1
        if number > 1:
            seconds += time.monotonic() - began
        done = progress(number, seconds)
        for schedule in schedules:
            schedule.step()
        yield Step(number, seconds, done, nats)


@torch.no_grad()
def evaluate(model: LanguageModel, tokens: Tensor) -> float:
    """Nats per byte of tokens [n, T + 1], a few windows at a time."""
    parts = tokens.split(max(1, 8192 // tokens.shape[1]))
    return sum(model.loss(part).item() * len(part) for part in parts) / len(tokens)
