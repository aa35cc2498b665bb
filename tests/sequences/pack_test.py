"""From padded batches to packed rows of tokens, and back: values, gradients, and what does not fit."""

import pytest
import torch

from facade.ops.utils import pack_sequence, unpack_sequence

PACKINGS = ([0], [0, 0], [0, 3], [0, 0, 2, 2, 7, 8, 8])
SIDES = ("left", "right")
each = pytest.mark.parametrize
FINE = {"rtol": 0, "atol": 0}


def padded(rows, lens, S, side):
    """[N, S, ...] of packed rows, sequence by sequence."""
    out = rows.new_zeros(len(lens), S, *rows.shape[1:])
    start = 0
    for n, length in enumerate(lens):
        place = slice(S - length, S) if side == "left" else slice(0, length)
        out[n, place] = rows[start : start + length]
        start += length
    return out


@each("offsets", PACKINGS, ids=str)
@each("side", SIDES)
@each("rest", [(), (3,), (2, 3)])
@each("spare", [0, 2])
@each("dtype", [torch.int32, torch.int64])
def test_there_and_back(offsets, side, rest, spare, dtype):
    """Tokens behind the last sequence come from nowhere and go nowhere; padding is never read."""
    lens = [b - a for a, b in zip(offsets, offsets[1:])]
    S, T = max(lens, default=0) + spare, offsets[-1]
    cu_seqlens, rows = torch.tensor(offsets, dtype=dtype), torch.randn(T + 2, *rest)
    right = padded(rows, lens, S, side)
    found = unpack_sequence(rows, cu_seqlens, side, (len(lens), S, *rest) if spare else None)
    torch.testing.assert_close(found, right, **FINE)
    held = padded(torch.ones(T), lens, S, side).view(len(lens), S, *[1] * len(rest)) > 0
    soiled = right.where(held, torch.nan)
    torch.testing.assert_close(pack_sequence(soiled, cu_seqlens, side), rows[:T], **FINE)


@each("side", SIDES)
def test_gradients(side):
    cu_seqlens = torch.tensor([0, 2, 2, 5])
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    y = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: unpack_sequence(x, cu_seqlens, side, (3, 4, 2)), x)
    assert torch.autograd.gradcheck(lambda y: pack_sequence(y, cu_seqlens, side), y)
    assert torch.autograd.gradgradcheck(lambda y: pack_sequence(y, cu_seqlens, side).square(), y)


def test_left_is_the_default():
    cu_seqlens = torch.tensor([0, 1, 3])
    assert unpack_sequence(torch.tensor([1, 2, 3]), cu_seqlens).tolist() == [[0, 1], [2, 3]]
    assert pack_sequence(torch.tensor([[0, 1], [2, 3]]), cu_seqlens).tolist() == [1, 2, 3]


def test_what_does_not_fit():
    boundaries, x = torch.tensor([0, 1, 4]), torch.zeros(4, 2)
    for call, message in (
        (lambda: pack_sequence(torch.zeros(2, 2), boundaries), "a sequence of 3 tokens does not fit into rows of 2"),
        (lambda: pack_sequence(torch.zeros(3, 3), boundaries), "describes 2 sequences, while the batch holds 3"),
        (lambda: pack_sequence(torch.zeros(3), boundaries), r"`x` is \[N, S, ...\]"),
        (lambda: pack_sequence(torch.zeros(2, 3), boundaries, "top"), "must be 'left' or 'right', not 'top'"),
        (lambda: pack_sequence(torch.zeros(2, 3), torch.tensor([0, 3, 2])), "must not decrease"),
        (lambda: unpack_sequence(x, boundaries, "top"), "must be 'left' or 'right', not 'top'"),
        (lambda: unpack_sequence(x[:3], boundaries), "ends at 4, past the T=3"),
        (lambda: unpack_sequence(torch.tensor(1.0), boundaries), r"`x` is \[T, ...\]"),
        (lambda: unpack_sequence(x, boundaries, desired_shape=(2, 2, 2)), "3 tokens does not fit into rows of 2"),
        (lambda: unpack_sequence(x, boundaries, desired_shape=(3, 3, 2)), "while the batch holds 3"),
        (lambda: unpack_sequence(x, boundaries, desired_shape=(2, 3, 5)), r"must be \[N, S, 2\], not \[2, 3, 5\]"),
        (lambda: unpack_sequence(x, boundaries, desired_shape=(2, 3)), r"must be \[N, S, 2\], not \[2, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
