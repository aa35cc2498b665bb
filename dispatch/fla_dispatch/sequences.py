"""How the tokens of a call divide into sequences and chunks.

Dense input holds B sequences of T tokens. Packed input holds one row of tokens and ``cu_seqlens`` [N+1], where sequence
i covers tokens cu_seqlens[i] to cu_seqlens[i+1]; tokens past the last entry belong to none. Chunks never cross a
sequence, so their boundaries count from the sequence's start.
"""

import weakref
from dataclasses import dataclass

import torch

_HOST_OFFSETS: dict[int, tuple[weakref.ref, int, tuple[int, ...]]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    B: int
    T: int
    device: torch.device
    cu_seqlens: torch.Tensor | None = None
    cu_seqlens_cpu: torch.Tensor | None = None

    @property
    def offsets(self) -> tuple[int, ...]:
        """cu_seqlens on the host. Costs a device sync the first time a device tensor is seen without its host copy."""
        if self.cu_seqlens is None:
            return tuple(range(0, (self.B + 1) * self.T, self.T)) if self.T else (0,) * (self.B + 1)
        return host_offsets(self.cu_seqlens if self.cu_seqlens_cpu is None else self.cu_seqlens_cpu)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(end - start for start, end in zip(self.offsets, self.offsets[1:], strict=False))

    def chunk_count(self, C: int) -> int:
        """NT: chunks of a batch row, or of all packed sequences together."""
        if self.cu_seqlens is None:
            return -(-self.T // C)
        return sum(-(-length // C) for length in self.lengths)

    def chunk_indices(self, C: int) -> torch.Tensor:
        """[chunks, 2] int32 on the device: each chunk's sequence and its place in it."""
        pairs = [(n, c) for n, length in enumerate(self.lengths) for c in range(-(-length // C))]
        host = torch.tensor(pairs, dtype=torch.int32).reshape(-1, 2)
        return host.to(self.device, non_blocking=True)


def host_offsets(cu_seqlens: torch.Tensor) -> tuple[int, ...]:
    """``cu_seqlens.tolist()``, remembered for device tensors until they change or die.

    Keyed by the tensor's identity and version counter. Inference tensors have no version, and under CUDA graph capture
    a sync is an error of its own: neither is remembered.
    """
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference():
        return tuple(cu_seqlens.tolist())
    key, version = id(cu_seqlens), cu_seqlens._version
    entry = _HOST_OFFSETS.get(key)
    if entry is not None and entry[0]() is cu_seqlens and entry[1] == version:
        return entry[2]
    offsets = tuple(cu_seqlens.tolist())
    forget = weakref.ref(cu_seqlens, lambda _: _HOST_OFFSETS.pop(key, None))
    _HOST_OFFSETS[key] = (forget, version, offsets)
    return offsets
