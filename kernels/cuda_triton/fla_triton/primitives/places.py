"""Where chunks and sequences lie in a row of tokens.

Dense input: B sequences of T tokens, NT chunks each. Packed input: ``chunk_table`` has filled

    chunks [slots, 4]      first token, tokens, sequence, index in the sequence
    sequences [N + 1, 3]   first token, tokens, slot of the first chunk

where slots = ceil(T / C) + N + 1 is enough whatever the boundaries. The tokens behind the last sequence are sequence N,
whose chunks carry -1 as their sequence: outputs there are zeros. Unused slots have no tokens.
"""

import triton
import triton.language as tl


@triton.jit
def chunk_place(slot, chunks, T, NT, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token, tokens, sequence, index in the sequence) of the chunk in ``slot``."""
    if PACKED:
        first = tl.load(chunks + slot * 4).to(tl.int64)
        count = tl.load(chunks + slot * 4 + 1).to(tl.int64)
        sequence = tl.load(chunks + slot * 4 + 2).to(tl.int64)
        index = tl.load(chunks + slot * 4 + 3).to(tl.int64)
    else:
        sequence = slot // NT
        index = slot % NT
        first = sequence * T + index * C
        count = tl.minimum(T - index * C, C)
    return first, count, sequence, index


@triton.jit
def sequence_place(n, sequences, T, NT, span, segments, C: tl.constexpr, PACKED: tl.constexpr):
    """(first token, tokens, slot of the first chunk) of sequence ``n``, or of segment ``n`` where dense sequences are
    worked on in ``segments`` of ``span`` tokens (multiples of C; span = T, segments = 1 otherwise)."""
    if PACKED:
        first = tl.load(sequences + n * 3).to(tl.int64)
        count = tl.load(sequences + n * 3 + 1).to(tl.int64)
        slot = tl.load(sequences + n * 3 + 2).to(tl.int64)
    else:
        before = n % segments * span
        first = n // segments * T + before
        count = tl.minimum(T - before, span)
        slot = n // segments * NT + before // C
    return first, count, slot


@triton.jit
def boundary(cu_seqlens, n, N, T):
    """cu_seqlens[n], never outside of [0, T]."""
    return tl.maximum(tl.minimum(tl.load(cu_seqlens + tl.minimum(n, N)).to(tl.int64), T), 0)


@triton.jit(do_not_specialize=["T", "N", "slots"])
def chunk_table(
    cu_seqlens, chunks, sequences, T: tl.int64, N: tl.int64, slots: tl.int64, C: tl.constexpr, BLOCK: tl.constexpr
):
    """Fills the two tables; program n writes sequence n, program N the tokens behind the last and the unused slots.

    A boundary below an earlier one counts as that one: bad boundaries give wrong numbers but touch no other memory.
    """
    n = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK).to(tl.int64)
    slot = tl.zeros((), tl.int64)
    first = tl.zeros((), tl.int64)  # the largest boundary so far
    for m in range(0, n, BLOCK):
        index = m + lane
        here = boundary(cu_seqlens, index, N, T)
        start = tl.maximum(tl.max(tl.where(lane[None, :] <= lane[:, None], here[None, :], 0), 1), first)
        end = tl.maximum(boundary(cu_seqlens, index + 1, N, T), start)
        before = index < n
        slot += tl.sum(tl.where(before, (end - start + C - 1) // C, 0))
        first = tl.maximum(first, tl.max(tl.where(before, end, 0)))
    first = tl.maximum(first, boundary(cu_seqlens, n, N, T))
    last = n == N
    end = tl.where(last, T, tl.maximum(boundary(cu_seqlens, n + 1, N, T), first))
    count = end - first
    tl.store(sequences + n * 3, first)
    tl.store(sequences + n * 3 + 1, count)
    tl.store(sequences + n * 3 + 2, slot)
    written = tl.where(last, slots - slot, (count + C - 1) // C)
    for c in range(0, written, BLOCK):
        index = c + lane
        mask = (index < written) & (slot + index < slots)
        row = chunks + (slot + index) * 4
        tl.store(row, first + index * C, mask=mask)
        tl.store(row + 1, tl.maximum(tl.minimum(count - index * C, C), 0), mask=mask)
        tl.store(row + 2, tl.where(last, -1, n), mask=mask)
        tl.store(row + 3, index, mask=mask)
