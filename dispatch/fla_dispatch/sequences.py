"""How the tokens of a call divide into sequences and chunks.

Dense input holds B sequences of T tokens. Packed input holds one row of tokens and ``cu_seqlens`` [N+1], where sequence
i covers tokens cu_seqlens[i] to cu_seqlens[i+1]; tokens past the last entry belong to none. Chunks never cross a
sequence, so their boundaries count from the sequence's start.
"""

import weakref
from dataclasses import dataclass

import torch

from fla_dispatch import errors
from fla_dispatch.declaration import INTEGERS

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
        chunks = (torch.tensor(self.lengths, dtype=torch.long) + C - 1) // C
        host = torch.stack(enumerated(chunks), 1).to(torch.int32)
        return host.to(self.device, non_blocking=True)


def enumerated(counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of things that come in groups of ``counts``: (the group of each, its place in it)."""
    group = torch.arange(len(counts)).repeat_interleave(counts)
    return group, torch.arange(len(group)) - (counts.cumsum(0) - counts)[group]


def check_boundaries(function: str, cu_seqlens) -> torch.Tensor:
    """``cu_seqlens``, if it is a vector of integers with at least one entry."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise errors.not_a_tensor(function, "cu_seqlens", "N+1", cu_seqlens)
    if cu_seqlens.dtype not in INTEGERS:
        raise errors.wrong_dtype(function, "cu_seqlens", INTEGERS, cu_seqlens.dtype)
    if cu_seqlens.dim() != 1:
        raise errors.wrong_rank(function, "cu_seqlens", ("N+1",), cu_seqlens.shape)
    if len(cu_seqlens) == 0:
        raise errors.empty_cu_seqlens(function, "cu_seqlens")
    return cu_seqlens


def check_offsets(function: str, name: str, offsets) -> None:
    """Raise where boundaries on the host do not start at 0, or decrease."""
    if offsets[0] != 0:
        raise errors.cu_seqlens_start(function, name, offsets[0])
    for index in range(1, len(offsets)):
        if offsets[index] < offsets[index - 1]:
            raise errors.cu_seqlens_order(function, name, index, offsets[index - 1], offsets[index])


def offsets_on_host(
    function: str, cu_seqlens: torch.Tensor, cu_seqlens_cpu: torch.Tensor | None = None
) -> torch.Tensor:
    """The boundaries as int64 on the host, checked. Waits for the device as ``host_offsets`` does."""
    check_boundaries(function, cu_seqlens)
    if cu_seqlens_cpu is not None and cu_seqlens_cpu.device.type != "cpu":
        raise errors.must_be_on_host(function, "cu_seqlens_cpu", cu_seqlens_cpu.device)
    offsets = host_offsets(cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu)
    if cu_seqlens_cpu is not None and cu_seqlens.device.type == "cpu" and host_offsets(cu_seqlens) != offsets:
        raise errors.host_copy_differs(function, "cu_seqlens_cpu", "cu_seqlens")
    check_offsets(function, "cu_seqlens", offsets)
    return torch.tensor(offsets)


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
