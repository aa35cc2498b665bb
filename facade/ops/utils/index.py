"""Where the tokens and chunks of packed sequences lie.

Sequence n of a packed row holds tokens cu_seqlens[n] to cu_seqlens[n + 1]. What these functions return is on the device
of cu_seqlens and, unless they say otherwise, in its dtype. Where the size of a result is in the boundaries, they are
read on the host: pass cu_seqlens_cpu to spare a wait for the device; without it they are read once, and again only
after they changed.
"""

import torch
from torch import Tensor

from fla_dispatch import errors
from fla_dispatch.sequences import check_boundaries, enumerated, offsets_on_host

__all__ = [
    "get_max_num_splits",
    "prepare_block_csr",
    "prepare_chunk_indices",
    "prepare_chunk_indices_static",
    "prepare_chunk_offsets",
    "prepare_cu_seqlens_from_lens",
    "prepare_cu_seqlens_from_mask",
    "prepare_lens",
    "prepare_lens_from_mask",
    "prepare_position_ids",
    "prepare_sequence_ids",
    "prepare_split_cu_seqlens",
    "prepare_token_indices",
]


CPU = torch.device("cpu")


def prepare_lens(cu_seqlens: Tensor) -> Tensor:
    """Lengths of packed sequences.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64.

    Returns:
        [N].

    Raises:
        ValueError, TypeError: cu_seqlens is not a vector of integers with at least one entry.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_lens
        >>> prepare_lens(torch.tensor([0, 2, 2, 5])).tolist()
        [2, 0, 3]
    """
    return check_boundaries("prepare_lens", cu_seqlens).diff()


def prepare_lens_from_mask(mask: Tensor) -> Tensor:
    """How many tokens each row of a mask keeps.

    Args:
        mask: [B, T], bool or 0 and 1.

    Returns:
        [B], int32.

    Raises:
        ValueError: mask is not [B, T].

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_lens_from_mask
        >>> prepare_lens_from_mask(torch.tensor([[0, 1, 1], [1, 0, 0]])).tolist()
        [2, 1]
    """
    if mask.dim() != 2:
        raise errors.wrong_rank("prepare_lens_from_mask", "mask", ("B T",), mask.shape)
    return mask.sum(-1, dtype=torch.int32)


def prepare_cu_seqlens_from_lens(lens: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Boundaries of sequences of given lengths.

    Args:
        lens: [N].
        dtype: of the result; None: that of lens.

    Returns:
        cu_seqlens [N+1].

    Raises:
        ValueError: lens is not [N].

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_cu_seqlens_from_lens
        >>> prepare_cu_seqlens_from_lens(torch.tensor([2, 0, 3])).tolist()
        [0, 2, 2, 5]
    """
    if lens.dim() != 1:
        raise errors.wrong_rank("prepare_cu_seqlens_from_lens", "lens", ("N",), lens.shape)
    return _summed(lens, dtype or lens.dtype)


def prepare_cu_seqlens_from_mask(mask: Tensor, dtype: torch.dtype | None = torch.int32) -> Tensor:
    """Boundaries of the sequences that a mask keeps.

    Args:
        mask: [B, T], bool or 0 and 1.
        dtype: of the result; None: int32.

    Returns:
        cu_seqlens [B+1].

    Raises:
        ValueError: mask is not [B, T].

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_cu_seqlens_from_mask
        >>> prepare_cu_seqlens_from_mask(torch.tensor([[0, 1, 1], [1, 0, 0]])).tolist()
        [0, 2, 3]
    """
    if mask.dim() != 2:
        raise errors.wrong_rank("prepare_cu_seqlens_from_mask", "mask", ("B T",), mask.shape)
    return prepare_cu_seqlens_from_lens(prepare_lens_from_mask(mask), dtype)


def prepare_position_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """The place of every token in its sequence.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64, first 0, not decreasing.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.

    Returns:
        [T], T = cu_seqlens[-1].

    Raises:
        ValueError, TypeError: boundaries that are none; the message says why.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_position_ids
        >>> prepare_position_ids(torch.tensor([0, 2, 2, 5])).tolist()
        [0, 1, 0, 1, 2]
    """
    return _to(cu_seqlens, enumerated(offsets_on_host("prepare_position_ids", cu_seqlens, cu_seqlens_cpu).diff())[1])


def prepare_sequence_ids(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """The sequence of every token.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64, first 0, not decreasing.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.

    Returns:
        [T], T = cu_seqlens[-1].

    Raises:
        ValueError, TypeError: boundaries that are none; the message says why.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_sequence_ids
        >>> prepare_sequence_ids(torch.tensor([0, 2, 2, 5])).tolist()
        [0, 0, 2, 2, 2]

    Where this differs from ``fla.ops.utils.prepare_sequence_ids``: an empty sequence keeps its number, as in
    ``prepare_chunk_indices``; there the sequences behind it move up.
    """
    return _to(cu_seqlens, enumerated(offsets_on_host("prepare_sequence_ids", cu_seqlens, cu_seqlens_cpu).diff())[0])


def prepare_token_indices(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """The sequence of every token, and its place in it.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64, first 0, not decreasing.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.

    Returns:
        [T, 2], T = cu_seqlens[-1].

    Raises:
        ValueError, TypeError: boundaries that are none; the message says why.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_token_indices
        >>> prepare_token_indices(torch.tensor([0, 2, 2, 3])).tolist()
        [[0, 0], [0, 1], [2, 0]]

    Where this differs from ``fla.ops.utils.prepare_token_indices``: an empty sequence keeps its number.
    """
    lens = offsets_on_host("prepare_token_indices", cu_seqlens, cu_seqlens_cpu).diff()
    return _to(cu_seqlens, torch.stack(enumerated(lens), 1))


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> Tensor:
    """The sequence of every chunk, and its place in it.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64, first 0, not decreasing.
        chunk_size: tokens of a chunk; chunks count from the start of each sequence, and an empty one has none.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.

    Returns:
        [NT, 2], NT being the sum of ceil(length / chunk_size).

    Raises:
        ValueError, TypeError: boundaries that are none, or a chunk_size below 1; the message says why.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_chunk_indices
        >>> prepare_chunk_indices(torch.tensor([0, 5, 5, 8]), 4).tolist()
        [[0, 0], [0, 1], [2, 0]]
    """
    lens = offsets_on_host("prepare_chunk_indices", cu_seqlens, cu_seqlens_cpu).diff()
    return _to(cu_seqlens, torch.stack(enumerated(_chunks("prepare_chunk_indices", lens, chunk_size)), 1))


def prepare_chunk_indices_static(cu_seqlens: Tensor, chunk_size: int, nt_max: int) -> tuple[Tensor, Tensor]:
    """``prepare_chunk_indices`` and ``prepare_chunk_offsets`` by operations of the device alone, for CUDA graphs.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64; they may hold other values at every replay.
        chunk_size: tokens of a chunk.
        nt_max: how many chunks there may be. If the boundaries make more, and are on a device, the last are left out.

    Returns:
        (indices [nt_max, 2], rows behind the last chunk being (-1, 0); offsets [N+1]).

    Raises:
        ValueError, TypeError: boundaries that are none, a chunk_size below 1, or (of boundaries on the host) more than
        nt_max chunks.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_chunk_indices_static
        >>> indices, offsets = prepare_chunk_indices_static(torch.tensor([0, 5, 5, 8]), 4, 4)
        >>> indices.tolist(), offsets.tolist()
        ([[0, 0], [0, 1], [2, 0], [-1, 0]], [0, 2, 2, 3])
    """
    offsets = prepare_chunk_offsets(cu_seqlens, chunk_size)
    if offsets.device.type == "cpu" and offsets[-1] > nt_max:
        raise ValueError(
            f"prepare_chunk_indices_static: `cu_seqlens` makes {int(offsets[-1])} chunks, more than nt_max={nt_max}"
        )
    chunk = torch.arange(nt_max, dtype=offsets.dtype, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), chunk, right=True)
    indices = torch.stack((sequence.to(offsets.dtype), chunk - offsets[sequence]), 1)
    surplus = torch.tensor((-1, 0), dtype=offsets.dtype).to(offsets.device, non_blocking=True)
    return torch.where((chunk < offsets[-1])[:, None], indices, surplus), offsets


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """How many chunks lie before each sequence, and how many there are.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64.
        chunk_size: tokens of a chunk.

    Returns:
        [N+1]. The device is not waited for.

    Raises:
        ValueError, TypeError: cu_seqlens is not a vector of integers with at least one entry, or chunk_size is below 1.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_chunk_offsets
        >>> prepare_chunk_offsets(torch.tensor([0, 5, 5, 8]), 4).tolist()
        [0, 2, 2, 3]
    """
    lens = check_boundaries("prepare_chunk_offsets", cu_seqlens).diff()
    return _summed(_chunks("prepare_chunk_offsets", lens, chunk_size), cu_seqlens.dtype)


def get_max_num_splits(cu_seqlens: Tensor, chunk_size: int, cu_seqlens_cpu: Tensor | None = None) -> int:
    """The number of chunks of the longest sequence.

    Args:
        cu_seqlens: boundaries [N+1], int32 or int64, first 0, not decreasing.
        chunk_size: tokens of a chunk.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.

    Returns:
        An int; 0 where there is no token.

    Raises:
        ValueError, TypeError: boundaries that are none, or a chunk_size below 1; the message says why.

    Example:
        >>> import torch
        >>> from facade.ops.utils import get_max_num_splits
        >>> get_max_num_splits(torch.tensor([0, 5, 5, 8]), 4)
        2
    """
    lens = offsets_on_host("get_max_num_splits", cu_seqlens, cu_seqlens_cpu).diff()
    return max(_chunks("get_max_num_splits", lens, chunk_size).tolist(), default=0)


def prepare_split_cu_seqlens(
    batch_size: int | None = None,
    seq_len: int | None = None,
    split_size: int | None = None,
    cu_seqlens: Tensor | None = None,
    dtype: torch.dtype | None = torch.int32,
    device: torch.device | None = CPU,
) -> Tensor:
    """Boundaries of the pieces that sequences fall into when each is cut every split_size tokens.

    Args:
        batch_size, seq_len: of a dense batch, whose rows follow each other; unless cu_seqlens is given.
        split_size: tokens of a piece; the last of a sequence may be shorter.
        cu_seqlens: boundaries [N+1] of packed sequences. An empty one has no piece.
        dtype, device: of the result.

    Returns:
        [pieces + 1].

    Raises:
        TypeError: split_size is missing, or both cu_seqlens and one of batch_size and seq_len.
        ValueError: boundaries that are none, or a split_size below 1.

    Example:
        >>> import torch
        >>> from facade.ops.utils.index import prepare_split_cu_seqlens
        >>> prepare_split_cu_seqlens(2, 5, 3).tolist()
        [0, 3, 5, 8, 10]
        >>> prepare_split_cu_seqlens(split_size=3, cu_seqlens=torch.tensor([0, 4, 4, 6])).tolist()
        [0, 3, 4, 6]
    """
    function = "prepare_split_cu_seqlens"
    given = {"split_size": split_size}
    if cu_seqlens is None:
        given |= {"batch_size": batch_size, "seq_len": seq_len}
    if missing := [name for name, value in given.items() if value is None]:
        raise errors.missing(function, missing)
    if cu_seqlens is None:
        offsets = torch.arange(batch_size + 1) * seq_len
    else:
        offsets = offsets_on_host(function, cu_seqlens)
    which, place = enumerated(_chunks(function, offsets.diff(), split_size, "split_size"))
    pieces = torch.cat((offsets[which] + place * split_size, offsets[-1:]))
    return pieces.to(device=device, dtype=dtype, non_blocking=True)


def prepare_block_csr(
    block_indices: Tensor,
    block_counts: Tensor | int | None,
    cu_seqlens: Tensor | None,
    chunk_indices: Tensor | None,
    num_blocks: int,
    block_size: int,
) -> tuple[Tensor, Tensor]:
    """Which tokens selected each block: a selection of blocks by tokens, turned round.

    Args:
        block_indices: [B, T, H, S], for each token and head up to S numbers of blocks inside the token's sequence;
            negative ones stand for nothing.
        block_counts: how many of the S numbers count: [B, T, H], one for all, or None for all S.
        cu_seqlens: boundaries [N+1] of packed sequences, or None; B must be 1 with them. Blocks count from the start of
            each sequence. What tokens past the last entry select is left out.
        chunk_indices: what ``fla.ops`` would otherwise compute from cu_seqlens; nothing here needs it.
        num_blocks: of a row of the batch, or of all packed sequences one after another.
        block_size: tokens of a block.

    Returns:
        (offsets [B * H * num_blocks + 1], tokens), both int32, in compressed sparse rows: block j of row b and head h
        is row r = (b * H + h) * num_blocks + j, and tokens[offsets[r] : offsets[r + 1]] selected it, in their order.

    Raises:
        ValueError, TypeError: shapes that disagree, a num_blocks that is not what the sequences have, or a number of a
        block that is not there.

    Example:
        >>> import torch
        >>> from facade.ops.utils import prepare_block_csr
        >>> chosen = torch.tensor([[0, -1], [0, -1], [1, 0]]).view(1, 3, 1, 2)  # by tokens 0, 1 and 2
        >>> offsets, tokens = prepare_block_csr(chosen, 2, None, None, num_blocks=2, block_size=2)
        >>> offsets.tolist(), tokens.tolist()
        ([0, 3, 4], [0, 1, 2, 2])
    """
    function = "prepare_block_csr"
    if block_indices.dim() != 4:
        raise errors.wrong_rank(function, "block_indices", ("B T H S",), block_indices.shape)
    B, T, H, S = block_indices.shape
    if isinstance(block_counts, Tensor) and block_counts.shape != (B, T, H):
        raise ValueError(
            f"{function}: `block_counts` must be [{B}, {T}, {H}] as `block_indices` is, not {list(block_counts.shape)}"
        )
    if cu_seqlens is not None and B != 1:
        raise errors.packed_batch(function, B)
    offsets = torch.tensor([0, T]) if cu_seqlens is None else offsets_on_host(function, cu_seqlens)
    if offsets[-1] > T:
        raise errors.cu_seqlens_end(function, "cu_seqlens", int(offsets[-1]), T)
    blocks = _chunks(function, offsets.diff(), block_size, "block_size")
    if int(blocks.sum()) != num_blocks:
        raise ValueError(f"{function}: the sequences have {int(blocks.sum())} blocks, not num_blocks={num_blocks}")
    end, device = int(offsets[-1]), block_indices.device
    sequence = enumerated(offsets.diff())[0]
    first, last = (x[sequence].to(device)[:, None, None] for x in (blocks.cumsum(0) - blocks, blocks))
    chosen = block_indices[:, :end].long()
    counts = S if block_counts is None else block_counts
    counts = counts[:, :end, :, None] if isinstance(counts, Tensor) else counts
    counted = (chosen >= 0) & (torch.arange(S, device=device) < counts)
    if bool((counted & (chosen >= last)).any()):
        raise ValueError(f"{function}: `block_indices` names a block that its sequence does not have")
    row = torch.arange(B * H, device=device).view(B, 1, H, 1) * num_blocks + first + chosen
    row, counted = (x.transpose(1, 2).reshape(B * H, end, S) for x in (row, counted))  # tokens in order, head by head
    token = torch.arange(end, dtype=torch.int32, device=device)[:, None].expand_as(row)
    row, token = row[counted], token[counted]
    sizes = torch.bincount(row, minlength=B * H * num_blocks)
    return _summed(sizes, torch.int32), token[row.argsort(stable=True)]


# --- what they share -------------------------------------------------------------------------------------------------


def _chunks(function, lens, chunk_size, name="chunk_size"):
    if not isinstance(chunk_size, int) or isinstance(chunk_size, bool):
        raise errors.wrong_option(function, name, "int", chunk_size)
    if chunk_size < 1:
        raise ValueError(f"{function}: `{name}` must be positive, not {chunk_size}")
    return (lens + chunk_size - 1) // chunk_size


def _summed(counts, dtype):
    """0, and the sums through each."""
    return torch.cat((counts.new_zeros(1), counts)).cumsum(0, dtype=dtype)


def _to(cu_seqlens, x):
    return x.to(device=cu_seqlens.device, dtype=cu_seqlens.dtype, non_blocking=True)
