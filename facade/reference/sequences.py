"""Tokens of many sequences, laid out in chunks, a cache-sized piece at a time.

A chunked operator walks along every sequence in chunks of C tokens, counted from the start of the sequence. A *span* is
a piece of that walk: some sequences, some consecutive steps. It moves rows between ``[B, T, H, D]`` and
``[slots, H, C, D]``, one slot per chunk, step by step: at each step one slot for every sequence that is still alive.
Rows that hold no token (behind the end of a sequence) are exactly 0. Spans come in an order in which every sequence
advances; sequences come in the order of the walk, longest first. So each step of a scan is one batched product over a
contiguous run of slots and the leading states of its span, and nothing loops over sequences.

Dense input has B sequences of T tokens, packed input (B = 1) has those of ``cu_seqlens``. Results never depend on which
other sequences are there, nor on how the walk is cut into spans.
"""

import torch


def sequences(x, cu_seqlens, size, limit):
    """The walk over ``x [B, T, ...]`` in chunks of ``size`` tokens, at most about ``limit`` chunks per span."""
    if cu_seqlens is None:
        return Dense(x.shape[0], x.shape[1], size, limit)
    return Packed(cu_seqlens, x.shape[1], size, limit, x.device)


def turn(x, cu_seqlens):
    """Tokens [B, T, ...] in the other direction; those behind the last sequence stay."""
    if x is None or cu_seqlens is None:
        return None if x is None else x.flip(1)
    end = int(cu_seqlens[-1])
    return torch.cat((x[:, :end].flip(1), x[:, end:]), 1)


def turn_boundaries(cu_seqlens):
    """Those of the sequences that ``turn`` makes."""
    return None if cu_seqlens is None else cu_seqlens[-1] - cu_seqlens.flip(0)


class Sequences:
    """``spans``; ``lengths`` in the caller's order, on the host; the methods below.

    enter(state)           [N, ...] in the order of the walk
    leave(state)           back to the caller's order
    new(x, *dims, dtype)   an output [B, T, *dims] for the spans to scatter into; rows of no sequence are 0
    """

    def starts(self, parts, every, state):
        """Sequence by sequence, the chunks that begin at a multiple of ``every`` tokens: [chunks, ...].

        ``parts`` holds one [slots, ...] per span, shaped beyond that like ``state [N, ...]``.
        """
        out = state.new_empty(int(self._chunks(every).sum()), *state.shape[1:])
        for span, part in zip(self.spans, parts):
            slots, places = (x.to(out.device) for x in self.places(span, every))
            out[places] = part[slots]
        return out

    def places(self, span, every):
        """(The slots of a span that begin at a multiple of ``every`` tokens, their places among all such chunks.)"""
        ratio, chunks = every // self.size, self._chunks(every)
        slots = (span.steps % ratio == 0).nonzero().flatten()
        return slots, (chunks.cumsum(0) - chunks)[span.sequences[slots]] + span.steps[slots] // ratio

    def _chunks(self, every):
        return (self.lengths + every - 1) // every


class Dense(Sequences):
    """B sequences of T tokens."""

    def __init__(self, batch, length, size, limit):
        self.batch, self.length, self.size = batch, length, size
        self.lengths = torch.full((batch,), length)
        width = max(1, min(batch, limit))
        tokens = max(1, limit // width) * size
        self.spans = [
            DenseSpan(slice(b, min(b + width, batch)), slice(t, min(t + tokens, length)), size)
            for b in range(0, batch, width)
            for t in range(0, length, tokens)
        ]

    def enter(self, state):
        return state

    def leave(self, state):
        return state

    def new(self, x, *dims, dtype):
        return x.new_empty(self.batch, self.length, *dims, dtype=dtype)


class Packed(Sequences):
    """The sequences of ``cu_seqlens`` in one row."""

    def __init__(self, cu_seqlens, length, size, limit, device):
        offsets = torch.tensor(cu_seqlens.tolist(), dtype=torch.long)  # the one wait for the device
        self.length, self.size, self.lengths = length, size, offsets.diff()
        self.covered = len(self.lengths) > 0 and int(offsets[-1]) == length
        chunks = (self.lengths + size - 1) // size
        order = chunks.argsort(descending=True, stable=True)
        self.order, self.rank = order.to(device), order.argsort().to(device)
        chunks, begin, end = chunks[order], offsets[:-1][order], offsets[1:][order]
        self.spans = []
        for low in range(0, len(order), limit):
            lane = slice(low, min(low + limit, len(order)))
            counts = (chunks[lane] > torch.arange(int(chunks[low]))[:, None]).sum(1).tolist()
            step = 0
            while step < len(counts):
                stop = step + max(1, limit // counts[step])
                part = counts[step:stop]
                self.spans.append(PackedSpan(lane, step, part, order[lane], begin[lane], end[lane], size, device))
                step = stop

    def enter(self, state):
        return state.index_select(0, self.order)

    def leave(self, state):
        return state.index_select(0, self.rank)

    def new(self, x, *dims, dtype):
        return (x.new_empty if self.covered else x.new_zeros)(1, self.length, *dims, dtype=dtype)


class Span:
    """A piece of the walk.

    states                 slice of the states, in the order of the walk
    first                  whether it starts its sequences
    counts                 sequences alive at each of its steps; never increasing
    slots                  their sum
    sequences, steps       of each slot, on the host, in the caller's order
    gather(x, dtype)       [B, T, H, D] -> a new [slots, H, C, D]
    scatter(y, x)          [slots, H, C, D] into x [B, T, H, D]
    clear(y)               0 for the rows of y [slots, H, C, D] that hold no token, in place
    """


class DenseSpan(Span):
    def __init__(self, states, tokens, size):
        self.states, self.tokens, self.size = states, tokens, size
        self.first = tokens.start == 0
        self.full, self.rest = divmod(tokens.stop - tokens.start, size)
        self.width = states.stop - states.start
        self.counts = [self.width] * (self.full + (self.rest > 0))
        self.slots = sum(self.counts)

    @property
    def sequences(self):
        return torch.arange(self.states.start, self.states.stop).repeat(len(self.counts))

    @property
    def steps(self):
        return (self.tokens.start // self.size + torch.arange(len(self.counts))).repeat_interleave(self.width)

    def gather(self, x, dtype):
        x = x[self.states, self.tokens]
        heads, dim, cut = *x.shape[2:], self.full * self.size
        y = x.new_empty(len(self.counts), self.width, heads, self.size, dim, dtype=dtype)
        y[: self.full] = x[:, :cut].unflatten(1, (self.full, self.size)).permute(1, 0, 3, 2, 4)
        if self.rest:
            y[-1, :, :, : self.rest] = x[:, cut:].transpose(1, 2)
            y[-1, :, :, self.rest :] = 0
        return y.flatten(0, 1)

    def scatter(self, y, x):
        x, cut = x[self.states, self.tokens], self.full * self.size
        y = y.unflatten(0, (-1, self.width))
        x[:, :cut].unflatten(1, (self.full, self.size)).copy_(y[: self.full].permute(1, 0, 3, 2, 4))
        if self.rest:
            x[:, cut:] = y[-1, :, :, : self.rest].transpose(1, 2)

    def clear(self, y):
        if self.rest:
            y[-self.width :, :, self.rest :] = 0


class PackedSpan(Span):
    def __init__(self, states, step, counts, order, begin, end, size, device):
        self.states, self.counts, self.size, self.slots = states, counts, size, sum(counts)
        self.first = step == 0
        alive = torch.tensor(counts)
        self.steps = step + torch.arange(len(counts)).repeat_interleave(alive)
        rank = torch.arange(self.slots) - (alive.cumsum(0) - alive).repeat_interleave(alive)
        self.sequences = order[rank]
        token = ((begin[rank] + self.steps * size)[:, None] + torch.arange(size)).flatten()
        row = (token < end[rank].repeat_interleave(size)).nonzero().flatten()
        self.full = len(row) == len(token)
        self.token, self.row = token[row].to(device), row.to(device)

    def gather(self, x, dtype):
        rows = x[0].index_select(0, self.token).to(dtype)
        if not self.full:
            rows = rows.new_zeros(self.slots * self.size, *rows.shape[1:]).index_copy_(0, self.row, rows)
        return rows.unflatten(0, (self.slots, self.size)).transpose(1, 2).contiguous()

    def scatter(self, y, x):
        rows = y.transpose(1, 2).flatten(0, 1)
        rows = rows if self.full else rows.index_select(0, self.row)
        x[0].index_copy_(0, self.token, rows.to(x.dtype))

    def clear(self, y):
        if not self.full:
            rows = torch.ones(self.slots * self.size, dtype=torch.bool, device=y.device).index_fill_(0, self.row, False)
            y.masked_fill_(rows.view(self.slots, 1, self.size, 1), 0)
