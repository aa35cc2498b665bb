"""Allocations that show what a kernel forgot to write, and what it wrote beside its outputs."""

from contextlib import contextmanager
from unittest import mock

import torch

GUARD = 64  # elements before and after every allocation
CANARY = -1.5e4


@contextmanager
def poisoned_allocations():
    """Fill every ``torch.empty``, ``empty_like``, ``new_empty`` with NaN between guards; check the guards at the end.

    Integer and boolean allocations are filled with their largest value.
    """
    allocations = []
    empty = torch.empty

    def allocate(size, dtype, device):
        count = 1
        for extent in size:
            count *= extent
        buffer = empty(count + 2 * GUARD, dtype=dtype, device=device)
        floating = dtype.is_floating_point or dtype.is_complex
        canary = CANARY if floating else torch.iinfo(dtype).max // 3 if dtype != torch.bool else True
        buffer.fill_(canary)
        inside = buffer[GUARD : GUARD + count]
        inside.fill_(float("nan") if floating else torch.iinfo(dtype).max if dtype != torch.bool else True)
        allocations.append((buffer, count, canary))
        return inside.view(size)

    def plain(**options):
        """Whether the allocation is of the plain kind that kernels make."""
        return not torch.compiler.is_compiling() and not any(
            options.get(name) for name in ("out", "requires_grad", "pin_memory", "memory_format")
        ) and options.get("layout") in (None, torch.strided)

    def poisoned_empty(*size, dtype=None, device=None, **options):
        size = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        if not plain(**options) or any(not isinstance(extent, int) for extent in size):
            return empty(size, dtype=dtype, device=device, **options)
        return allocate(tuple(size), dtype or torch.get_default_dtype(), device)

    def poisoned_empty_like(tensor, *, dtype=None, device=None, **options):
        options.pop("memory_format", None)
        return poisoned_empty(tuple(tensor.shape), dtype=dtype or tensor.dtype, device=device or tensor.device,
                              **options)

    def poisoned_new_empty(tensor, *size, dtype=None, device=None, **options):
        return poisoned_empty(*size, dtype=dtype or tensor.dtype, device=device or tensor.device, **options)

    with mock.patch.object(torch, "empty", poisoned_empty), \
            mock.patch.object(torch, "empty_like", poisoned_empty_like), \
            mock.patch.object(torch.Tensor, "new_empty", poisoned_new_empty):
        yield allocations
    for buffer, count, canary in allocations:
        guards = torch.cat([buffer[:GUARD], buffer[GUARD + count :]])
        if not (guards == canary).all():
            raise AssertionError(f"memory beside an allocation of {count} {buffer.dtype} was overwritten")
