"""Where the tokens and chunks of packed sequences lie: every helper against loops over sequences."""

import pytest
import torch

from facade.ops.utils import (
    get_max_num_splits,
    prepare_block_csr,
    prepare_chunk_indices,
    prepare_chunk_indices_static,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_lens,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_lens_from_mask,
    prepare_position_ids,
    prepare_sequence_ids,
    prepare_token_indices,
)
from facade.ops.utils.index import prepare_split_cu_seqlens

PACKINGS = ([0], [0, 0], [0, 5], [0, 0, 5, 5, 69, 70, 70], [0, 63, 127, 191], [0, 1, 2, 3], [0, 0, 0, 130])
DTYPES = (torch.int32, torch.int64)
each_packing = pytest.mark.parametrize("offsets", PACKINGS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def sequences(offsets):
    return list(zip(offsets, offsets[1:]))


def chunks(offsets, size):
    """(sequence, chunk in it) of every chunk."""
    return [[n, c] for n, (a, b) in enumerate(sequences(offsets)) for c in range(len(range(a, b, size)))]


def equal(found, right, dtype):
    expected = torch.tensor(right, dtype=dtype)
    assert found.dtype == dtype and torch.equal(found, expected.view_as(found) if not right else expected)


@each_packing
@each_dtype
def test_tokens(offsets, dtype):
    """Empty sequences keep their numbers, first, in the middle and last."""
    cu_seqlens, each = torch.tensor(offsets, dtype=dtype), sequences(offsets)
    equal(prepare_lens(cu_seqlens), [b - a for a, b in each], dtype)
    right = [[n, t] for n, (a, b) in enumerate(each) for t in range(b - a)]
    for host in (None, torch.tensor(offsets)):
        equal(prepare_sequence_ids(cu_seqlens, host), [n for n, _ in right], dtype)
        equal(prepare_position_ids(cu_seqlens, host), [t for _, t in right], dtype)
        equal(prepare_token_indices(cu_seqlens, host), right, dtype)


@each_packing
@each_dtype
@pytest.mark.parametrize("size", [1, 3, 64])
def test_chunks(offsets, dtype, size):
    cu_seqlens, right = torch.tensor(offsets, dtype=dtype), chunks(offsets, size)
    counts = [sum(n == m for m, _ in right) for n in range(len(offsets) - 1)]
    before = [sum(counts[:n]) for n in range(len(offsets))]
    for host in (None, torch.tensor(offsets)):
        equal(prepare_chunk_indices(cu_seqlens, size, host), right, dtype)
        assert get_max_num_splits(cu_seqlens, size, host) == max(counts, default=0)
    equal(prepare_chunk_offsets(cu_seqlens, size), before, dtype)
    for surplus in (0, 3):
        indices, found = prepare_chunk_indices_static(cu_seqlens, size, len(right) + surplus)
        equal(indices, right + [[-1, 0]] * surplus, dtype)
        equal(found, before, dtype)
    pieces = prepare_split_cu_seqlens(split_size=size, cu_seqlens=cu_seqlens)
    equal(pieces, [offsets[n] + c * size for n, c in right] + offsets[-1:], torch.int32)


def test_chunks_that_do_not_fit():
    with pytest.raises(ValueError, match="makes 3 chunks, more than nt_max=2"):
        prepare_chunk_indices_static(torch.tensor([0, 5, 8]), 4, 2)


def test_pieces_of_a_batch():
    found = prepare_split_cu_seqlens(batch_size=2, seq_len=7, split_size=3, dtype=torch.int64)
    equal(found, [0, 3, 6, 7, 10, 13, 14], torch.int64)
    for missing in ({"batch_size": 2, "seq_len": 7}, {"batch_size": 2, "split_size": 3}, {}):
        with pytest.raises(TypeError, match="prepare_split_cu_seqlens: missing"):
            prepare_split_cu_seqlens(**missing)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, None])
def test_from_lengths_and_masks(dtype):
    lens, mask = torch.tensor([2, 0, 3]), torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1]])
    equal(prepare_cu_seqlens_from_lens(lens, dtype=dtype), [0, 2, 2, 5], dtype or torch.int64)
    for form in (mask, mask.bool()):
        equal(prepare_lens_from_mask(form), [2, 0, 3], torch.int32)
        equal(prepare_cu_seqlens_from_mask(form, dtype=dtype), [0, 2, 2, 5], dtype or torch.int32)
    equal(prepare_cu_seqlens_from_lens(lens.int()), [0, 2, 2, 5], torch.int32)
    for function, wrong in (
        (prepare_cu_seqlens_from_lens, mask), (prepare_lens_from_mask, lens), (prepare_cu_seqlens_from_mask, lens)
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"{function.__name__}: `"):
            function(wrong)


OF_BOUNDARIES = (prepare_position_ids, prepare_sequence_ids, prepare_token_indices,
                 lambda *x: prepare_chunk_indices(x[0], 4, *x[1:]), lambda *x: get_max_num_splits(x[0], 4, *x[1:]))


@pytest.mark.parametrize("function", OF_BOUNDARIES)
def test_boundaries_that_are_none(function):
    for wrong, error, message in (
        (torch.tensor([1, 2]), ValueError, "must start at 0, not at 1"),
        (torch.tensor([0, 3, 2]), ValueError, "entry 2 is 2, the one before is 3"),
        (torch.tensor([], dtype=torch.long), ValueError, "at least the entry 0"),
        (torch.tensor([[0, 1]]), ValueError, r"is \[N\+1\], but"),
        (torch.tensor([0.0, 1.0]), TypeError, "must be int32 or int64, not float32"),
        ([0, 1], TypeError, r"must be a tensor \[N\+1\], not list"),
    ):
        with pytest.raises(error, match=message):
            function(wrong)
    with pytest.raises(ValueError, match="hold different values"):
        function(torch.tensor([0, 2]), torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="must be on the CPU"):
        function(torch.tensor([0, 2]), torch.zeros(2, dtype=torch.long, device="meta"))


def test_sizes_that_are_none():
    boundaries = torch.tensor([0, 4])
    for function in (prepare_chunk_indices, prepare_chunk_offsets, get_max_num_splits):
        with pytest.raises(ValueError, match="`chunk_size` must be positive, not 0"):
            function(boundaries, 0)
        with pytest.raises(TypeError, match="`chunk_size` must be int, not float 4.0"):
            function(boundaries, 4.0)
    with pytest.raises(ValueError, match="`split_size` must be positive"):
        prepare_split_cu_seqlens(1, 4, 0)


def test_boundaries_changed_in_place():
    """Nothing is remembered of what they were."""
    boundaries = torch.tensor([0, 2, 5])
    first = prepare_sequence_ids(boundaries)
    boundaries.copy_(torch.tensor([0, 4, 5]))
    assert first.tolist() == [0, 0, 1, 1, 1] and prepare_sequence_ids(boundaries).tolist() == [0, 0, 0, 0, 1]


# --- blocks chosen by tokens -----------------------------------------------------------------------------------------

BLOCK = 4


def selection(B, T, H, S, offsets):
    """Random numbers of blocks of each token's sequence, some of them -1."""
    chosen = torch.full((B, T, H, S), 99)  # of tokens of no sequence: never read
    for a, b in sequences(offsets):
        chosen[:, a:b] = torch.randint(-1, len(range(a, b, BLOCK)), (B, b - a, H, S)) if a < b else 0
    return chosen


@pytest.mark.parametrize("offsets", [None, [0, 0, 5, 5, 18, 19]], ids=["dense", "packed"])
@pytest.mark.parametrize("counts", [None, 2, "each"])
def test_block_csr(offsets, counts):
    B, T, H, S = (2, 19, 3, 4) if offsets is None else (1, 21, 3, 4)
    bounds = offsets or [0, T]
    chosen = selection(B, T, H, S, bounds)
    counts = torch.randint(0, S + 1, (B, T, H)) if counts == "each" else counts
    blocks = chunks(bounds, BLOCK)
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    found, tokens = prepare_block_csr(chosen, counts, cu_seqlens, None, len(blocks), BLOCK)
    assert found.dtype == tokens.dtype == torch.int32 and len(found) == B * H * len(blocks) + 1
    row = 0
    for b in range(B):
        for h in range(H):
            for n, block in blocks:
                right = []
                for t in range(bounds[n], bounds[n + 1]):
                    taken = S if counts is None else counts if isinstance(counts, int) else int(counts[b, t, h])
                    right += [t] * chosen[b, t, h, :taken].tolist().count(block)
                assert tokens[found[row] : found[row + 1]].tolist() == right
                row += 1
    assert found[0] == 0 and found[-1] == len(tokens)


def test_block_csr_of_what_disagrees():
    chosen = torch.zeros(2, 8, 1, 2, dtype=torch.long)
    for arguments, message in (
        ((chosen[0], 2, None, None, 2, 4), r"`block_indices` is \[B, T, H, S\]"),
        ((chosen, torch.ones(2, 8), None, None, 2, 4), r"`block_counts` must be \[2, 8, 1\]"),
        ((chosen, 2, torch.tensor([0, 8]), None, 2, 4), "batch size must be 1"),
        ((chosen[:1], 2, torch.tensor([0, 9]), None, 3, 4), "ends at 9, past the T=8"),
        ((chosen, 2, None, None, 3, 4), "have 2 blocks, not num_blocks=3"),
        ((chosen + 2, 2, None, None, 2, 4), "a block that its sequence does not have"),
        ((chosen, 2, None, None, 2, 0), "`block_size` must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_block_csr(*arguments)
