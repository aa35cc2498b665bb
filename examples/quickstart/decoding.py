"""Writing byte by byte with ``fused_recurrent_kda``, from the states that ``chunk_kda`` left behind a prompt."""

import torch
from model import LanguageModel
from torch import Tensor

import facade.ops as fla_ops

# Largest difference of a logit, in fp32, where logits reach 10 to 20.
TOLERANCE = 1e-3


@torch.no_grad()
def disagreement(model: LanguageModel, tokens: Tensor) -> float:
    """Largest difference of a logit between one chunked pass over tokens [B, T] and two other ways to the same place.

    Byte by byte from nothing, and byte by byte from the states of a chunked pass over the first half.
    """
    whole, _ = model(tokens)
    half = tokens.shape[1] // 2
    _, states = model(tokens[:, :half])
    from_nothing = walk(model, tokens, None)
    from_states = walk(model, tokens[:, half:], states)
    return max((from_nothing - whole).abs().max().item(), (from_states - whole[:, half:]).abs().max().item())


def walk(model: LanguageModel, tokens: Tensor, states: list[Tensor] | None) -> Tensor:
    """Logits behind every byte, each computed from one byte and the states of the one before."""
    logits = []
    for token in tokens.split(1, dim=1):
        step, states = model(token, states, fla_ops.fused_recurrent_kda)
        logits.append(step)
    return torch.cat(logits, 1)


@torch.no_grad()
def sample(model: LanguageModel, prompt: bytes, count: int, temperature: float = 0.7, seed: int = 0) -> str:
    """``prompt`` and ``count`` bytes that continue it."""
    random = torch.Generator().manual_seed(seed)
    device = model.head.weight.device
    written = list(prompt)
    logits, states = model(torch.tensor([written], device=device))
    for _ in range(count):
        chances = (logits[0, -1] / temperature).softmax(-1).cpu()
        written.append(torch.multinomial(chances, 1, generator=random).item())
        logits, states = model(torch.tensor([written[-1:]], device=device), states, fla_ops.fused_recurrent_kda)
    return bytes(written).decode(errors="replace")
