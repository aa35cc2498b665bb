"""From padded batches to packed rows of tokens, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fla_dispatch import errors
from fla_dispatch.sequences import enumerated, offsets_on_host

__all__ = ["pack_sequence", "unpack_sequence"]

SIDES = ("left", "right")


def pack_sequence(x: Tensor, cu_seqlens: Tensor, padding_side: str = "left") -> Tensor:
    """The tokens of a padded batch in one row, sequence after sequence.

    Args:
        x: [N, S, ...], a sequence a row; what is padding is not read.
        cu_seqlens: boundaries [N+1] of the sequences in the row, int32 or int64, first 0, not decreasing.
        padding_side: "left" or "right" of the tokens.

    Returns:
        [cu_seqlens[-1], ...]. Differentiable in x, any number of times.

    Raises:
        ValueError, TypeError: arguments that disagree, or a sequence longer than S; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import pack_sequence
        >>> pack_sequence(torch.tensor([[0, 0, 1], [2, 3, 4]]), torch.tensor([0, 1, 4])).tolist()
        [1, 2, 3, 4]
    """
    _check_side("pack_sequence", padding_side)
    if x.dim() < 2:
        raise ValueError(f"pack_sequence: `x` is [N, S, ...], but a tensor of shape {list(x.shape)} was given")
    offsets = offsets_on_host("pack_sequence", cu_seqlens)
    lens, (N, S) = offsets.diff(), x.shape[:2]
    _check_count("pack_sequence", N, lens)
    _check_room("pack_sequence", S, lens)
    sequence, place = enumerated(lens)
    place = place + sequence * S + (S - lens[sequence] if padding_side == "left" else 0)
    return x.flatten(0, 1)[place.to(x.device, non_blocking=True)]


def unpack_sequence(
    x: Tensor, cu_seqlens: Tensor, padding_side: str = "left", desired_shape: Sequence[int] | None = None
) -> Tensor:
    """A row of packed tokens as a batch with a sequence a row, padded with zeros.

    Args:
        x: [T, ...], packed tokens; those past the last boundary belong to no sequence.
        cu_seqlens: boundaries [N+1], int32 or int64, first 0, not decreasing.
        padding_side: "left" or "right" of the tokens.
        desired_shape: shape of the result, [N, S, ...] with S at least the longest length, which it is if None.

    Returns:
        [N, S, ...]. Differentiable in x, any number of times.

    Raises:
        ValueError, TypeError: arguments that disagree, or a sequence longer than S; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import unpack_sequence
        >>> unpack_sequence(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 4])).tolist()
        [[0, 0, 1], [2, 3, 4]]
    """
    _check_side("unpack_sequence", padding_side)
    if x.dim() < 1:
        raise ValueError("unpack_sequence: `x` is [T, ...], but a number was given")
    offsets = offsets_on_host("unpack_sequence", cu_seqlens)
    if offsets[-1] > len(x):
        raise errors.cu_seqlens_end("unpack_sequence", "cu_seqlens", int(offsets[-1]), len(x))
    lens = offsets.diff()
    S = max(lens.tolist(), default=0)
    if desired_shape is not None:
        wanted = tuple(desired_shape)
        if len(wanted) != x.dim() + 1 or wanted[2:] != x.shape[1:]:
            raise ValueError(
                f"unpack_sequence: `desired_shape` must be [N, S{''.join(f', {size}' for size in x.shape[1:])}], "
                f"not {list(wanted)}"
            )
        _check_count("unpack_sequence", wanted[0], lens)
        _check_room("unpack_sequence", wanted[1], lens)
        S = wanted[1]
    place = torch.arange(S) - (S - lens[:, None] if padding_side == "left" else 0)
    held = (place >= 0) & (place < lens[:, None])
    token, held = (y.to(x.device, non_blocking=True) for y in ((offsets[:-1, None] + place)[held], held))
    out = x.new_zeros(len(lens), S, *x.shape[1:])
    return out.masked_scatter(held.view(*held.shape, *[1] * (x.dim() - 1)).expand_as(out), x[token])


def _check_side(function, side):
    if side not in SIDES:
        raise ValueError(f"{function}: `padding_side` must be 'left' or 'right', not {side!r}")


def _check_count(function, N, lens):
    if len(lens) != N:
        raise ValueError(f"{function}: `cu_seqlens` describes {len(lens)} sequences, while the batch holds {N}")


def _check_room(function, S, lens):
    if (longest := max(lens.tolist(), default=0)) > S:
        raise ValueError(f"{function}: a sequence of {longest} tokens does not fit into rows of {S}")
