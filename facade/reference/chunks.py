"""What is done chunk by chunk without a state: sums of tokens, their means, inverses of triangular tiles.

Chunks count from the start of each sequence. Tokens behind the last sequence of ``cu_seqlens`` give 0 and get 0.
"""

import torch

from facade.reference.arithmetic import no_autocast, running_sum, working_dtype
from facade.reference.decay import unit_lower_inverse
from facade.reference.gates import SPAN
from facade.reference.sequences import sequences, turn, turn_boundaries
from fla_dispatch import refuse_double_backward

STRIDE = 64  # tokens that are summed at once where sums go on to the end of a sequence


def cumsum(function, x, chunk_size=None, reverse=False, scale=None, cu_seqlens=None, output_dtype=torch.float32):
    """Sums of ``x [B, T, H]`` or ``[B, T, H, D]`` from the start of each chunk through each token, times ``scale``.

    chunk_size None: from the start of each sequence. reverse: from each token through the end. Computed in fp32 (fp64
    for fp64 ``x``), returned as ``output_dtype``, None being x's. Its gradient is the sum in the other direction.
    """
    scale = 1 if scale is None else scale
    return _Sums.apply(function, x, chunk_size, reverse, scale, cu_seqlens, output_dtype or x.dtype)


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, chunk_size, reverse, scale, cu_seqlens, output_dtype):
        ctx.function, ctx.dtype, ctx.options = function, x.dtype, (chunk_size, not reverse, scale, cu_seqlens)
        with torch.no_grad(), no_autocast(x):
            return _sums(x, chunk_size, reverse, scale, cu_seqlens, output_dtype)

    @staticmethod
    def backward(ctx, d):
        with torch.no_grad(), no_autocast(d):
            dx = _sums(d, *ctx.options, ctx.dtype)
        (dx,) = refuse_double_backward(ctx.function, (dx,), d)
        return None, dx, None, None, None, None, None


def _sums(x, chunk_size, reverse, scale, cu_seqlens, output_dtype):
    if chunk_size is None and reverse:  # forward, in the other direction
        sums = _sums(turn(x, cu_seqlens), None, False, scale, turn_boundaries(cu_seqlens), output_dtype)
        return turn(sums, cu_seqlens)
    dtype = torch.promote_types(torch.promote_types(x.dtype, output_dtype), torch.float32)
    walk = _walk(x, cu_seqlens, chunk_size or STRIDE)
    out = walk.new(x, *x.shape[2:], dtype=output_dtype)
    x, rows_of_out = (y.view(*y.shape[:3], *(y.shape[3:] or (1,))) for y in (x, out))
    before = x.new_zeros(len(walk.lengths), *x.shape[2:], dtype=dtype)  # what each sequence has come to
    for span in walk.spans:
        rows = running_sum(span.gather(x, dtype), 2, reverse)
        if chunk_size is None:
            for step, alive in zip(rows.split(span.counts), span.counts):
                total = before[span.states][:alive]
                step += total[:, :, None]
                total.copy_(step[:, :, -1])
        span.scatter(rows.mul_(scale), rows_of_out)
    return out


def mean(function, x, chunk_size, cu_seqlens=None):
    """Means [B, NT, H, D] of the chunks of ``x [B, T, H, D]``, in its dtype; of packed sequences one after another."""
    return _Means.apply(function, x, chunk_size, cu_seqlens)


class _Means(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x, chunk_size, cu_seqlens):
        ctx.function = function
        ctx.walk, ctx.like = _walk(x, cu_seqlens, chunk_size), x.new_empty(0)
        dtype = working_dtype(x)
        with torch.no_grad(), no_autocast(x):
            parts = [
                span.gather(x, dtype).sum(2).div_(_lengths(ctx.walk, span, x.device)).to(x.dtype)
                for span in ctx.walk.spans
            ]
            out = ctx.walk.starts(parts, chunk_size, x.new_empty(0, *x.shape[2:]))
            return out.unflatten(0, (len(x), len(out) // max(len(x), 1)))

    @staticmethod
    def backward(ctx, d):
        walk = ctx.walk
        with torch.no_grad():
            dx = walk.new(ctx.like, *d.shape[2:], dtype=ctx.like.dtype)
            for span in walk.spans:
                _, places = walk.places(span, walk.size)
                rows = d.flatten(0, 1)[places.to(d.device)].to(working_dtype(d)) / _lengths(walk, span, d.device)
                span.scatter(rows[:, :, None].expand(-1, -1, walk.size, -1), dx)
        (dx,) = refuse_double_backward(ctx.function, (dx,), d)
        return None, dx, None, None


def _lengths(walk, span, device):
    """How many tokens the chunk of each slot has: [slots, 1, 1]."""
    lengths = (walk.lengths[span.sequences] - span.steps * walk.size).clamp(max=walk.size)
    return lengths.to(device)[:, None, None]


def unit_lower(function, A, cu_seqlens=None, output_dtype=torch.float32):
    """(I + A)^-1 of the strictly lower triangle of each tile of ``A [B, T, H, C]``, whose row t is row t mod C of its
    chunk. Rows and columns that a short last chunk does not have are 0. Computed in fp32 (fp64 for fp64 ``A``)."""
    return _Inverse.apply(function, A, cu_seqlens, output_dtype or A.dtype)


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, A, cu_seqlens, output_dtype):
        ctx.function, ctx.walk = function, _walk(A, cu_seqlens, A.shape[3])
        out, kept = ctx.walk.new(A, *A.shape[2:], dtype=output_dtype), []
        with torch.no_grad(), no_autocast(A):
            for span in ctx.walk.spans:
                tiles = span.gather(A, working_dtype(A)).flatten(0, 1)
                kept.append(unit_lower_inverse(tiles.tril_(-1)))
                span.scatter(kept[-1].unflatten(0, (span.slots, -1)), out)
        ctx.save_for_backward(A, *kept)
        return out

    @staticmethod
    def backward(ctx, d):
        A, *kept = ctx.saved_tensors
        dA = ctx.walk.new(A, *A.shape[2:], dtype=A.dtype)
        with torch.no_grad(), no_autocast(A):
            for span, X in zip(ctx.walk.spans, kept):
                dX = span.gather(d, X.dtype).flatten(0, 1)
                tiles = torch.bmm(torch.bmm(X.mT, dX), X.mT).neg_().tril_(-1)
                span.scatter(tiles.unflatten(0, (span.slots, -1)), dA)
        (dA,) = refuse_double_backward(ctx.function, (dA,), A, d)
        return None, dA, None, None


def _walk(x, cu_seqlens, chunk_size):
    chunk = chunk_size * max(x[:1, :1].numel(), 1)
    return sequences(x, cu_seqlens, chunk_size, max(1, SPAN // chunk))
