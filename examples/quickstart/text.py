"""The text to learn, as bytes. Its last tenth is held out: never trained on, only measured."""

import re
from pathlib import Path

import torch
from torch import Tensor

SHORTEST = 20_000  # bytes; of less, a tenth is too little to measure on
SMOOTHING = 0.03  # added to every count of byte pairs


class UnusableText(Exception):
    """The message says why, and what to do."""


def load(path: Path | None) -> Tensor:
    """Bytes [n] of a file; without one, of the manual that comes with Python. Raises ``UnusableText``."""
    if path is None:
        return tensor(python_manual())
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UnusableText(f"cannot read {path}: {error.strerror}; give --text a plain text file") from error
    if b"\0" in data:
        raise UnusableText(f"{path} holds zero bytes, so it is no text; give --text a plain text file")
    if len(data) < SHORTEST:
        raise UnusableText(f"{path} is too short: {len(data):,} bytes; at least {SHORTEST:,} are needed")
    return tensor(data)


def python_manual() -> bytes:
    """What ``help()`` shows about keywords and topics. Topics quote each other; a repeated paragraph is kept once."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UnusableText("this Python comes without its manual (the module pydoc_data), which is the default text; "
                           "give another one with --text FILE") from error
    paragraphs = dict.fromkeys(p for name in sorted(topics) for p in re.split(r"\n{2,}", topics[name].strip("\n")))
    return "\n\n".join(paragraphs).encode()


def tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def split(text: Tensor) -> tuple[Tensor, Tensor]:
    """→ (to train on, held out)"""
    cut = len(text) * 9 // 10
    return text[:cut], text[cut:]


def windows(text: Tensor, length: int, count: int | None = None) -> Tensor:
    """[n, length + 1]: side by side, each ending with the first byte of the next; at most ``count``, spread out."""
    available = (len(text) - 1) // length
    chosen = torch.arange(available)
    if count is not None and count < available:
        chosen = torch.arange(count) * available // count
    return text[chosen[:, None] * length + torch.arange(length + 1)]


def bigram_loss(train: Tensor, held_out: Tensor) -> float:
    """Nats per held-out byte of the best that can be said from one byte before: counts of pairs in ``train``."""
    counts = torch.full((256, 256), SMOOTHING, dtype=torch.float64)
    counts.index_put_((train[:-1], train[1:]), torch.ones((), dtype=torch.float64), accumulate=True)
    probability = counts / counts.sum(1, keepdim=True)
    return -probability[held_out[:-1], held_out[1:]].log().mean().item()
