"""Decayed products inside a chunk, for any gate, without cancellation.

Row i of a chunk reads what row j <= i wrote, after the gates of the rows in between:

    A[i, j] = sum_K read[i] * key[j] * exp(g[j+1] + ... + g[i])           (j <= i)

Splitting the exponential as exp(G[i]) * exp(-G[j]) overflows for strong gates, and a difference of long sums loses what
a weak gate says next to a strong one. So the chunk is halved recursively. A block whose rows lie in the second half of
a segment and whose columns lie in the first half is referenced at the boundary between them:

    since[i] = g[boundary] + ... + g[i]          sum from the start of the second half through row i
    until[j] = g[j+1] + ... + g[boundary-1]      sum behind row j to the end of the first half
    A[i, j]  = (read[i] * exp(since[i])) . (key[j] * exp(until[j]))

Both sums are <= 0 for gates <= 0, no sum is ever a difference, and every level is one batched matrix product. When two
segments join, `since` of the second grows by the total of the first, and `until` of the first by the total of the
second; at the top they are the decays from the start of the chunk through row i, and behind row j to its end.

The adjoint walks the same tree downwards. With X = read*exp(since), Y = key*exp(until):

    dX = dA Y,  dY = dA^T X,  dsince = dX*X,  duntil = dY*Y

and each join is undone: the total of the first segment (its last `since`) receives the sum of dsince over the second,
the total of the second receives the sum of duntil over the first. What reaches the single rows is the gradient of g.

Shapes: reads [n, R, C, K] (R reads per row that share the decay), keys [n, C, K], g [n, C, K], A [n, R, C, C]. C is a
power of two. ``tree`` is the list of what ``levels(g)`` yields.
"""

import functools
import math

import torch


def largest_exponent(dtype):
    """Where exp and its products with ordinary numbers are still finite, so that 0 * exp(x) is 0."""
    return math.log(torch.finfo(dtype).max) - 16


def bounded_exp(x):
    """exp(x), exactly 0 below the normal numbers (which exp is slow to reach), held at ``largest_exponent`` above.

    Only sums that amplify beyond 1e31 (fp32) or 1e301 (fp64) are held; they must not turn an empty state into NaN.
    """
    least, zero = _smallest(x.dtype, x.device)
    return x.clamp(least, largest_exponent(x.dtype)).exp_().sub_(zero)


@functools.cache
def _smallest(dtype, device):
    """(x, exp(x)) with exp(x) just above the smallest normal number, as ``device`` rounds it."""
    x = math.log(torch.finfo(dtype).tiny) + 1
    return x, torch.exp(torch.full((), x, dtype=dtype, device=device)).item()


def levels(g):
    """Walks up the tree: yields (exp(since), exp(until)) per level, the last pair [n, C, K] for the whole chunk.

    Below the top both are [n*C/(2*size), size, K]: exp(since) of the second halves, exp(until) of the first.
    """
    n, C, K = g.shape
    since, until = g.clone(), torch.zeros_like(g)
    size = 1
    while size < C:
        first_since, second_since = since.view(-1, 2, size, K).unbind(1)
        first_until = until.view(-1, 2, size, K)[:, 0]
        yield bounded_exp(second_since), bounded_exp(first_until)
        first_until += second_since[:, -1:]
        second_since += first_since[:, -1:]
        size *= 2
    yield bounded_exp(since), bounded_exp(until)


def blocks(A, size):
    """View of the blocks of ``A [n, R, C, C]`` at one level: [n, segments, R, size, size]."""
    n, R, C, _ = A.shape
    m = C // (2 * size)
    return A.view(n, R, m, 2, size, m, 2, size)[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)


def second_halves(reads, size):
    """View [n, segments, R, size, K] of the rows of ``reads [n, R, C, K]`` in the second halves."""
    return reads.unflatten(2, (-1, 2, size))[:, :, :, 1].transpose(1, 2)


def decayed_halves(reads, keys, since, until):
    """X [segments, R, size, K] and Y [segments, size, K] of one level, over all chunks."""
    size, K = since.shape[1:]
    reads = second_halves(reads, size)
    X = torch.empty(reads.shape, dtype=reads.dtype, device=reads.device)
    torch.mul(reads, since.view(len(reads), -1, 1, size, K), out=X)
    return X.flatten(0, 1), keys.view(-1, 2, size, K)[:, 0] * until


def _exact(x):
    """In fp64 where the device has it.

    Rows of equal keys round alike. In a delta rule with beta |key|^2 = 2, where nothing decays, that drift adds up.
    """
    return x.double() if x.device.type in ("cpu", "cuda") else x


def pair(reads, keys, tree):
    """A [n, R, C, C] of the formula above; entries above the diagonal are 0."""
    n, R, C, K = reads.shape
    A = reads.new_zeros(n, R, C, C)
    A.diagonal(dim1=2, dim2=3).copy_((reads * keys[:, None]).sum(-1))
    for since, until in tree[:-1]:
        size = since.shape[1]
        X, Y = decayed_halves(reads, keys, since, until)
        A_block = torch.bmm(_exact(X).flatten(1, 2), _exact(Y).transpose(1, 2))
        blocks(A, size).copy_(A_block.view(n, -1, R, size, size))
    return A


def pair_backward(reads, keys, tree, dA, dsince, duntil, dreads, dkeys):
    """Adds the gradients through A to ``dreads`` and ``dkeys``, and returns the gradient of g.

    ``dsince``, ``duntil`` [n, C, K] are the gradients of the top sums, from and to the ends of the chunk, and used up.
    """
    n, R, C, K = reads.shape
    diagonal = dA.diagonal(dim1=2, dim2=3)[..., None]
    dreads.addcmul_(diagonal, keys[:, None])
    for r in range(R):
        dkeys.addcmul_(diagonal[:, r], reads[:, r])
    for since, until in reversed(tree[:-1]):
        size = since.shape[1]
        first_dsince, second_dsince = dsince.view(-1, 2, size, K).unbind(1)
        first_duntil = duntil.view(-1, 2, size, K)[:, 0]
        first_total, second_total = second_dsince.sum(1), first_duntil.sum(1)
        first_dsince[:, -1] += first_total
        second_dsince[:, -1] += second_total
        X, Y = decayed_halves(reads, keys, since, until)
        dA_block = blocks(dA, size).reshape(-1, R * size, size)
        if size == 1:  # outer products, which bmm is slow at
            dX = dA_block[..., None] * Y[:, None]
            dY = (dA_block[..., None] * X).sum(1)
        else:
            dX = torch.bmm(dA_block, Y).view_as(X)
            dY = torch.bmm(dA_block.transpose(1, 2), X.flatten(1, 2))
        second_halves(dreads, size).addcmul_(dX.unflatten(0, (n, -1)), since.view(n, -1, 1, size, K))
        dkeys.view(-1, 2, size, K)[:, 0].addcmul_(dY, until)
        for r in range(R):
            second_dsince.addcmul_(dX[:, r], X[:, r])
        first_duntil.addcmul_(dY, Y)
    return dsince


def unit_lower_inverse(M):
    """(I + M)^-1 for strictly lower triangular ``M [n, C, C]``, by the same halving:

    [[A, 0], [L, B]]^-1 = [[A^-1, 0], [-B^-1 L A^-1, B^-1]]
    """
    n, C, _ = M.shape
    inverse = torch.eye(C, dtype=M.dtype, device=M.device).repeat(n, 1, 1)
    size = 1
    while size < C:
        m = C // (2 * size)
        segments = inverse.view(n, m, 2, size, m, 2, size).diagonal(dim1=1, dim2=4).movedim(-1, 1)
        L = blocks(M.view(n, 1, C, C), size).reshape(-1, size, size)
        A, B = (segments[:, :, half, :, half].reshape(-1, size, size) for half in (0, 1))
        corner = torch.bmm(torch.bmm(B, L), A).neg_()
        segments[:, :, 1, :, 0].copy_(corner.view(n, m, size, size))
        size *= 2
    return inverse
