"""Linear recurrences over tokens with a state S [K, V] that maps keys to values: token by token, and in chunks.

Per sequence and value head, with log-space gates g (per key channel, per head, or none), and for delta rules (erase) a
step size beta:

    S   <- diag(exp(g_t)) S                       forget
    u_t  = v_t                                    what to add, or (erase)
    u_t  = beta_t (v_t - S^T k_t)                 what the state gets wrong about k_t
    S   <- S + k_t u_t^T                          add it
    o_t  = scale S^T q_t                          read

Value head j reads with q and k of head j // (HV / H); state_v_first stores [V, K].

With a bonus [HV, K] (RWKV-6, without erase) a token reads before it forgets and adds, and itself by the bonus:

    o_t  = scale (S + (bonus k_t) v_t^T)^T q_t    read
    S   <- diag(exp(g_t)) S + k_t v_t^T           forget, add

Chunk form. A chunk of C rows starts from the state h. With `since` = sum of the gates from the start of the chunk
through a row, `until` = sum behind a row to the end, and the decayed products of `decay.py` (q already scaled)

    A[i, j] = q_i . k_j decayed, j <= i           N[i, j] = k_i . k_j decayed, j < i

the rows of the chunk solve one triangular system instead of waiting for each other:

    r  = v - (k exp(since)) h                     R = (I + beta N)^-1
    u  = R beta r                                 o = (q exp(since)) h + A u
    h' = exp(total) h + (k exp(until))^T u

(without erase u = v, and there is no N). Backward, from do and dh':

    du = A^T do + (k exp(until)) dh'              y = R^T du,  dr = beta y = dv        (without erase dv = du)
    dh = exp(total) dh' + (q exp(since))^T do - (k exp(since))^T dr
    dA = do u^T (j <= i),  dN = -dr u^T (j < i),  dbeta = y . (r - N u)
    d(q exp(since)) = do h^T,  d(k exp(since)) = -dr h^T,  d(k exp(until)) = u dh'^T,  dtotal = exp(total) sum_V h dh'

q and k are two reads that share one decay, with output gradients do and -dr, so most lines are one product over both.

With a bonus row i reads what row i - 1 would: q moves up by one row, what is read moves back down, and (q_i . (bonus
k_i)) v_i is added. The first row, which reads h as it is, takes the place of the last: `since` is 0 there, and so is A.
"""

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F

from facade.reference import decay
from facade.reference.arithmetic import ALIGN, aligned, no_autocast, sigmoid, unit, unit_backward, working_dtype
from facade.reference.gates import SPAN, activation, activation_backward
from facade.reference.sequences import sequences, turn, turn_boundaries
from fla_dispatch import refuse_double_backward

TILE = 32  # rows per chunk inside; divides the public chunk sizes


# ---------------------------------------------------------------------------------------------------------------------
# The token recurrence


def recurrent(
    q, k, v, g=None, beta=None, gv=None, *, erase, bonus=None, scale=None, initial_state=None,
    output_final_state=False, norm=False, reverse=False, state_v_first=False, cu_seqlens=None, compute_dtype=None,
):  # fmt: skip
    """The recurrence of the module docstring, token by token: the oracle. Returns (o, final_state or None).

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K], [B, T, HV], [HV] (the same for every token) or None; gv
    [B, T, HV, V], by which value channels are forgotten too, or None; with erase beta [B, T, HV], or [B, T, HV, V] with
    a step size per value channel; bonus [HV, K] or None; states [N, HV, K, V] ([N, HV, V, K] with state_v_first).
    ``reverse``: from the last token to the first. Plain torch operations, differentiable by autograd. ``o`` has q's
    dtype, the state is fp32 (fp64 when computed in fp64).

    compute_dtype: fp32, or fp64 for fp64 q, when None. With bf16 or fp16 every vector of a token is rounded to it,
    while the state stays fp32: the error of this run is what an eager implementation in that dtype would have.
    """
    with no_autocast(q):
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        o_dtype, compute_dtype = q.dtype, compute_dtype or working_dtype(q)
        dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        bounds = None if cu_seqlens is None else cu_seqlens.tolist()
        end = T if bounds is None else bounds[-1]  # rows behind it belong to no sequence and are never read
        q, k, v = (x[:, :end].to(dtype) for x in (q, k, v))
        g = _every_channel(g, q, HV, end)
        if norm:
            q, k = unit(q), unit(k)
        q = q * (K**-0.5 if scale is None else scale)
        q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))

        def rounded(x):
            return x if compute_dtype == dtype else x.to(compute_dtype).to(dtype)

        def kept(gates):  # a growth beyond the largest number would make 0 * inf of an empty state
            return rounded(aligned(torch.exp(gates.clamp(max=decay.largest_exponent(dtype)))))

        tokens = [*(rounded(aligned(x)) for x in (q, k, v)), kept(g)]
        tokens.append(None if gv is None else kept(gv[:, :end].to(dtype)))
        tokens.append(None if bonus is None else rounded(aligned(bonus.to(dtype) * k)))
        if erase:
            beta = beta[:, :end].to(dtype)
            tokens.append(rounded(aligned(beta if beta.dim() == 4 else beta[..., None].expand_as(v))))
        if initial_state is None:
            S = q.new_zeros(B if bounds is None else len(bounds) - 1, HV, K, V)
        else:
            S = initial_state.to(dtype)
            S = S.transpose(-1, -2) if state_v_first else S
        S = aligned(aligned(S).transpose(-1, -2)).transpose(-1, -2)

        lengths = None if bounds is None else [stop - start for start, stop in itertools.pairwise(bounds)]
        if bounds is None:
            o, S = _walk(tokens, S, rounded, reverse)
        elif end and len(set(lengths)) == 1:  # decoding: one token each, all sequences at once
            each = [None if x is None else x[0].unflatten(0, (len(lengths), -1)) for x in tokens]
            o, S = _walk(each, S, rounded, reverse)
            o = o.flatten(0, 1)[None]
        else:
            split = ([None] * len(lengths) if x is None else x.split(lengths, 1) for x in tokens)
            rows = zip(zip(*split), S.split([1] * len(S)))
            runs = [_walk(*sequence, rounded, reverse) for sequence in rows]
            o = torch.cat([tokens[2][:, :0], *(o for o, _ in runs)], 1)
            S = torch.cat([S[:0], *(S for _, S in runs)])
        o = F.pad(rounded(o)[..., :V], (0, 0, 0, 0, 0, T - end)).to(o_dtype)
        if not output_final_state:
            return o, None
        S = S[..., :K, :V]
        return o, (S.transpose(-1, -2) if state_v_first else S).contiguous()


def _every_channel(g, like, HV, end):
    """Gates [B, T, HV, K] of any form of g, in the dtype of ``like [B, T, H, K]``."""
    B, T, _, K = like.shape
    if g is None:
        return like.new_zeros(B, T, HV, K)
    g = g.to(like.dtype)
    g = g if g.dim() == 1 else g[:, :end]
    g = g if g.dim() == 4 else g[..., None]
    return g.expand(B, T, HV, K)


def _walk(tokens, S, rounded, reverse):
    """(q, k, v, exp(g), exp(gv) or None, bonus * k or None, and for a delta rule beta) [B, T, HV, ...], from
    S [B, HV, K, V]; returns (o, S)."""
    q, k, v, alpha, alpha_v, own, *step = tokens
    B, T, HV, V = v.shape

    def each(x, axis):
        return [None] * T if x is None else x.transpose(0, 1).flatten(1, 2).unsqueeze(axis).unbind()

    columns = [each(x, 3) for x in (own, k, alpha)]
    rows = [each(x, 2) for x in (alpha_v, q, k, v, *step)]
    state, outputs = S.flatten(0, 1), []
    order = list(zip(*columns, *rows))
    for own_t, k_column, alpha_t, alpha_v_t, q_t, k_t, u, *beta_t in reversed(order) if reverse else order:
        if own is not None:
            outputs.append(torch.bmm(q_t, torch.baddbmm(state, own_t, u)))
        state = alpha_t * state
        if alpha_v_t is not None:
            state = state * alpha_v_t
        if beta_t:
            u = rounded(beta_t[0] * rounded(u - rounded(torch.bmm(k_t, state))))
        state = torch.baddbmm(state, k_column, u)
        if own is None:
            outputs.append(torch.bmm(q_t, state))
    outputs = outputs[::-1] if reverse else outputs
    o = torch.stack(outputs).view(T, B, HV, V).transpose(0, 1) if outputs else v
    return o, state.view(S.shape)


def by_token(function: str, run, inputs, chunk=None, rows: int | None = None):
    """``run(*inputs)``, token by token; where a gradient may be asked for ``chunk(*inputs)``, the same function in
    chunks, or without one ``tokenwise``."""
    if not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in inputs):
        return run(*inputs)
    return tokenwise(function, run, *inputs, rows=rows) if chunk is None else chunk(*inputs)


def tokenwise(function: str, run, *tensors, rows: int | None = None):
    """``run(*tensors)``, a token recurrence, as one Function: backward runs it again under autograd.

    For what has no chunk form. ``function`` is who asks, for messages. ``rows``: how many of the tensors have a batch,
    to be run row by row, for how autograd's products round depends on how many there are; None: run as they are."""

    def each(*tensors):
        B = len(tensors[0])
        split = zip(*([None] * B if x is None else x.split(1) for x in tensors[:rows]))
        runs = [run(*row, *tensors[rows:]) for row in split]
        return tuple(None if y[0] is None else torch.cat(y) for y in zip(*runs))

    by_row = rows is not None and len(tensors[0]) > 1
    return _Tokenwise.apply(function, each if by_row else run, *tensors)


class _Tokenwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, run, *tensors):
        ctx.function, ctx.run = function, run
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return run(*tensors)

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        with torch.enable_grad():
            # Wide, or what several rows add to a parameter's gradient would be rounded each time.
            wide = [x if x is None else x.detach().to(working_dtype(x)) for x in saved]
            leaves = [x if x is None else x.requires_grad_(n) for x, n in zip(wide, needed)]
            results = ctx.run(*leaves)
        pairs = [
            (y, d.to(y.dtype)) for y, d in zip(results, grads) if y is not None and d is not None and y.requires_grad
        ]
        wanted = [x for x, n in zip(leaves, needed) if n]
        found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [d for _, d in pairs], allow_unused=True))
        given = tuple(
            None if not n else torch.zeros_like(x) if (d := next(found)) is None else d.to(x.dtype)
            for x, n in zip(saved, needed)
        )
        return None, None, *refuse_double_backward(ctx.function, given, *saved, *grads)


# ---------------------------------------------------------------------------------------------------------------------
# The chunk form


class Options(NamedTuple):
    """What a call of ``chunk`` is, beside its tensors."""

    function: str  # for messages
    erase: bool  # a delta rule
    scale: float
    norm: bool = False  # q and k are L2-normalised here
    gate: bool = False  # g is raw
    lower_bound: float | None = None
    sigmoid: bool = False  # beta is raw
    beta_max: int = 1
    final: bool = False  # return the final state
    v_first: bool = False  # states are [V, K]
    every: int | None = None  # return the states at multiples of this many tokens
    keep: bool = False  # save everything that backward reads
    tile: int = TILE  # rows per chunk
    reverse: bool = False  # from the last token of each sequence to the first


def chunk(
    options, q, k, v, g=None, beta=None, initial_state=None, A_log=None, dt_bias=None, cu_seqlens=None, bonus=None
):
    """The same function as ``recurrent``, in chunks, with its own backward. Returns (o, final_state or None).

    g [B, T, HV, K], [B, T, HV], [HV] (the same for every token, and no gradient) or None. With ``every`` also h
    [B, NT, HV, K, V] in k's dtype, the states at the starts of the chunks of that many tokens (packed: B = 1,
    NT = sum of ceil(length / chunk_size)); h carries no gradient.

    Exact for any gate. Arithmetic in fp32 (fp64 for fp64 q) whatever the ambient autocast; ``o`` has q's dtype, the
    final state is fp32 (fp64), every gradient has the dtype of its input.

    Saved for backward: the inputs, the matrices A, N and R of each chunk (C numbers each per token and head, C = 32)
    and the state at the start of each span; the rest is recomputed span by span. With ``keep`` everything that backward
    reads is saved, about twenty times the size of q.
    """
    grad = torch.is_grad_enabled()
    o, S, h = _Chunk.apply(q, k, v, g, beta, initial_state, A_log, dt_bias, bonus, cu_seqlens, options, grad)
    return (o, S, h) if options.every else (o, S)


def attention(options, q, k, v, g=None, beta=None):
    """P [B, HV, T, T] in q's dtype, with which o = P v where sequences start from no state: A, or (erase) A R beta, of
    a chunk that holds the whole sequence. Carries no gradient."""
    T = q.shape[1]
    inputs = _Inputs(q, k, v, g, beta, initial_state=None, A_log=None, dt_bias=None, bonus=None)
    with torch.no_grad(), no_autocast(q):
        P = q.new_empty(len(q), v.shape[2], T, T)
        for span in sequences(q, None, 1 << max(T - 1, 0).bit_length(), limit=1).spans:
            rows = _rows(span, inputs, options)
            _, pairs, inverse = _pairs(rows)
            whole = pairs[:, 0] if inverse is None else torch.bmm(pairs[:, 0], inverse * rows.beta.transpose(1, 2))
            P[span.states] = _by_slot(span, whole)[..., :T, :T].to(P.dtype)
    return P


class _Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    initial_state: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    bonus: torch.Tensor | None


class _Rows(NamedTuple):
    """The rows of a span; n = slots * HV."""

    reads: torch.Tensor  # [n, R, C, K]  q (scaled; with a bonus, moved up by one row) and, to erase, k
    keys: torch.Tensor  # [n, C, K]
    v: torch.Tensor  # [n, C, V]
    g: torch.Tensor  # [n, C, K]
    beta: torch.Tensor | None  # [n, C, 1 or V]
    bonus: torch.Tensor | None  # [n, 1, K]


class _States(NamedTuple):
    """What the scan over the chunks of a span used and found."""

    reads: torch.Tensor  # [n, R, C, K]  reads * exp(since)
    keys: torch.Tensor  # [n, C, K]  keys * exp(until)
    total: torch.Tensor  # [n, K, 1]  exp(total)
    h: torch.Tensor  # [n, K, V]  state at the start of each chunk
    r: torch.Tensor | None  # [n, C, V]
    u: torch.Tensor  # [n, C, V]


class _Chunk(torch.autograd.Function):
    """One Function on the raw arguments, so that it differentiates where autograd sees nothing but Functions."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, A_log, dt_bias, bonus, cu_seqlens, options, grad):
        inputs = _Inputs(q, k, v, g, beta, initial_state, A_log, dt_bias, bonus)
        if options.reverse:
            inputs, cu_seqlens = _turned(inputs, cu_seqlens)
        B, K, V = len(q), q.shape[3], v.shape[3]
        with torch.no_grad(), no_autocast(q):
            walk = _walk_of(inputs, cu_seqlens, options)
            o = walk.new(q, *v.shape[2:], dtype=q.dtype)
            S = _enter(walk, inputs.initial_state, inputs, options)
            kept, starts = [], []
            for span in walk.spans:
                state = S[span.states].flatten(0, 1)
                start = state.clone()
                rows = _rows(span, inputs, options)
                tree, pairs, inverse = _pairs(rows)
                states = _scan(span, rows, tree[-1], pairs, inverse, state)
                read = torch.bmm(pairs[:, 0], states.u).baddbmm_(states.reads[:, 0], states.h)
                if rows.bonus is not None:
                    read = _own(rows)[1].mul(rows.v).add_(read.roll(1, 1))
                span.scatter(_by_slot(span, read)[..., :V], o)
                if grad and any(ctx.needs_input_grad):
                    kept += [pairs, inverse, start]
                    if options.keep:
                        kept += [*rows, *states, *itertools.chain.from_iterable(tree)]
                if options.every:
                    starts.append(_by_slot(span, states.h)[..., :K, :V])
            h = None
            if options.every:
                h = walk.starts(starts, options.every, S[..., :K, :V]).to(k.dtype)
                h = _oriented(h.unflatten(0, (B, len(h) // max(B, 1))), options)
                ctx.mark_non_differentiable(h)
            S = _leave(walk, S, inputs, options) if options.final else None
            if options.reverse:
                o, S = turn(o, cu_seqlens), _turn_states(S, cu_seqlens)
        ctx.set_materialize_grads(False)
        ctx.walk, ctx.options, ctx.boundaries = walk, options, cu_seqlens
        ctx.save_for_backward(*inputs, *kept)
        return o, S, h

    @staticmethod
    def backward(ctx, do, dS, dh):
        saved, fields = ctx.saved_tensors, len(_Inputs._fields)
        inputs, kept = _Inputs(*saved[:fields]), saved[fields:]
        with torch.no_grad(), no_autocast(inputs.q):
            if ctx.options.reverse:
                do, dS = turn(do, ctx.boundaries), _turn_states(dS, ctx.boundaries)
            grads = _chunk_backward(ctx.walk, ctx.options, inputs, kept, do, dS)
            if ctx.options.reverse:
                grads, _ = _turned(_Inputs(*grads), ctx.boundaries)
        grads = tuple(x if needed else None for x, needed in zip(grads, ctx.needs_input_grad))
        return *refuse_double_backward(ctx.options.function, grads, *inputs, do, dS), None, None, None


def _turned(inputs, cu_seqlens):
    """Inputs, or their gradients, and the boundaries of sequences that run from the last token to the first."""
    tokens = (x if x is None or x.dim() == 1 else turn(x, cu_seqlens) for x in inputs[:5])
    turned = _Inputs(*tokens, _turn_states(inputs.initial_state, cu_seqlens), *inputs[6:])
    return turned, turn_boundaries(cu_seqlens)


def _turn_states(S, cu_seqlens):
    return S if S is None or cu_seqlens is None else S.flip(0)


def _chunk_backward(walk, options, inputs, kept, do, dS):
    """Gradients of all inputs, span by span from the last."""
    q, k, v, g, beta, initial_state, A_log, dt_bias, bonus = inputs
    dtype = working_dtype(q)
    per_token = q, k, v, (None if g is None or g.dim() == 1 else g), beta
    grads = [None if x is None else walk.new(x, *x.shape[2:], dtype=x.dtype) for x in per_token]
    parameters = A_log, dt_bias, bonus
    sums = [None if x is None else torch.zeros_like(x, dtype=dtype) for x in parameters]
    dS = _enter(walk, dS, inputs, options)
    per_span = len(kept) // max(len(walk.spans), 1)
    for index, span in reversed(list(enumerate(walk.spans))):
        pairs, inverse, start, *rest = kept[index * per_span : (index + 1) * per_span]
        if rest:
            rest = iter(rest)
            rows, states = (kind(*itertools.islice(rest, len(kind._fields))) for kind in (_Rows, _States))
            tree = list(zip(rest, rest))
        else:
            rows = _rows(span, inputs, options)
            tree = list(decay.levels(rows.g))
            states = _scan(span, rows, tree[-1], pairs, inverse, start.clone())
        dread = None if do is None else aligned(span.gather(do, dtype)).flatten(0, 1)
        moved = dread if dread is None or bonus is None else dread.roll(-1, 1)
        drows = _span_backward(span, rows, tree, pairs, inverse, states, moved, dS[span.states].flatten(0, 1))
        dbonus = None if bonus is None else _bonus_backward(span, rows, dread, *drows[:3])
        for total, part in zip(sums, (*_rows_backward(span, options, inputs, rows, *drows, grads), dbonus)):
            if part is not None:
                total += part[..., : total.shape[-1]]
    dS = None if initial_state is None else _leave(walk, dS, inputs, options).to(initial_state.dtype)
    return *grads, dS, *(None if x is None else d.to(x.dtype) for x, d in zip(parameters, sums))


def _pairs(rows):
    """(the tree of the gates, A and N, R or None) of the rows."""
    tree = list(decay.levels(rows.g))
    pairs = decay.pair(rows.reads, rows.keys, tree)
    if rows.bonus is not None:
        pairs[:, 0, -1] = 0  # the first row, which reads no other
    if rows.beta is None:
        return tree, pairs, None
    pairs[:, 1].diagonal(dim1=1, dim2=2).zero_()  # N is strict
    return tree, pairs, None if _per_channel(rows) else decay.unit_lower_inverse(rows.beta * pairs[:, 1])


def _rows(span, inputs, options):
    """Gathers the rows of a span; activates, aligns, normalises and scales them."""
    q, k, v, g, beta, initial_state, A_log, dt_bias, bonus = inputs
    dtype, group, K = working_dtype(q), v.shape[2] // q.shape[2], q.shape[3]
    g = _gates(span, inputs, dtype)
    q, k, v, beta = (None if x is None else span.gather(_four(x), dtype) for x in (q, k, v, beta))
    if options.gate:
        g = activation(g.transpose(1, 2), A_log, dt_bias, options.lower_bound).transpose(1, 2).contiguous()
        span.clear(g)
    if g.shape[3] != K:
        g = g.expand(-1, -1, -1, K).contiguous()
    if options.sigmoid:
        beta = sigmoid(beta) * options.beta_max
    q, k, v, g = aligned(q), aligned(k), aligned(v), aligned(g)
    if span.first and initial_state is None:
        g[: span.counts[0], :, 0] = 0  # there is nothing to forget yet
    if options.norm:
        q, k = unit(q), unit(k)
    q = q * options.scale
    if group > 1:
        q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    q, k, v, g = (x.flatten(0, 1) for x in (q, k, v, g))
    if bonus is not None:
        q = q.roll(-1, 1)
        bonus = aligned(bonus.to(dtype)).repeat(span.slots, 1)[:, None]
    if not options.erase:
        return _Rows(q[:, None], k, v, g, None, bonus)
    beta = (aligned(beta) if beta.shape[3] > 1 else beta).flatten(0, 1)
    return _Rows(torch.stack((q, k), 1), k, v, g, beta, None)


def _own(rows):
    """With a bonus: q, and by how much each row reads itself [n, C, 1]."""
    q = rows.reads[:, 0].roll(1, 1)
    return q, (q * rows.bonus * rows.keys).sum(-1, keepdim=True)


def _bonus_backward(span, rows, dread, dreads, dkeys, dv):
    """Moves the gradient of q back to its rows, adds to it and to those of the keys and values what comes through what
    each row reads of itself, and returns the gradient of the bonus [HV, aligned K]; None where nothing was read."""
    dq = dreads[:, 0].roll(1, 1)
    dreads[:, 0] = dq
    if dread is None:
        return None
    q, weight = _own(rows)
    dweight = (dread * rows.v).sum(-1, keepdim=True)
    dv.addcmul_(weight, dread)
    dreads[:, 0].addcmul_(dweight, rows.bonus * rows.keys)
    dkeys.addcmul_(dweight, rows.bonus * q)
    return _by_slot(span, (dweight * q * rows.keys).sum(1)).sum(0)


def _four(x):
    """[B, T, HV, 1] of what has one number per head."""
    return x if x.dim() == 4 else x[..., None]


def _gates(span, inputs, dtype):
    """Gates [slots, HV, C, K or 1] of any form of g; 0 for rows that hold no token."""
    q, _, v, g, *_ = inputs
    if g is not None and g.dim() > 1:
        return span.gather(_four(g), dtype)
    gates = q.new_zeros(span.slots, v.shape[2], span.size, 1, dtype=dtype)
    if g is not None:
        gates += g.to(dtype)[:, None, None]
        span.clear(gates)
    return gates


def _rows_backward(span, options, inputs, rows, dreads, dkeys, dv, dg, dbeta, grads):
    """Scatters the gradients of q, k, v, g, beta into ``grads``; returns those of A_log and dt_bias, of this span."""
    q, k, v, g, _, _, A_log, dt_bias, _ = inputs
    dtype, group = working_dtype(q), v.shape[2] // q.shape[2]
    if options.erase:
        dkeys = dkeys.add_(dreads[:, 1])
    dq, dk, dv, dg = (_by_slot(span, x) for x in (dreads[:, 0], dkeys, dv, dg))
    if group > 1:
        dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq, dk))
    dq = dq * options.scale
    if options.norm:
        dq, dk = (unit_backward(aligned(span.gather(x, dtype)), dx) for x, dx in ((q, dq), (k, dk)))
    dA_log = ddt_bias = None
    if g is not None and g.dim() == 3:
        dg = dg.sum(-1, keepdim=True)
    if options.gate:
        dg = dg[..., : _four(g).shape[3]]
        span.clear(dg)
        raw = span.gather(_four(g), dtype).transpose(1, 2)
        dg, dA_log, ddt_bias = activation_backward(raw, A_log, dt_bias, options.lower_bound, dg.transpose(1, 2))
        dg = dg.transpose(1, 2)
    if options.erase:
        dbeta = _by_slot(span, dbeta)
        if options.sigmoid:
            effective = _by_slot(span, rows.beta)
            dbeta = dbeta * effective * (1 - effective / options.beta_max)
    for d, x in zip((dq, dk, dv, dg, dbeta), grads):
        if x is not None:
            span.scatter(d[..., : _four(x).shape[3]], _four(x))
    return dA_log, ddt_bias


def _scan(span, rows, top, pairs, inverse, S):
    """Runs the chunks of a span from the states ``S [sequences*HV, K, V]``, which end as the states behind it."""
    since, until = top
    n, C, K = rows.keys.shape
    erase = rows.beta is not None
    states = _States(
        reads=rows.reads * _reach(rows, since)[:, None],
        keys=rows.keys * until,
        total=since[:, -1, :, None],
        h=S.new_empty(n, K, S.shape[-1]),
        r=torch.empty_like(rows.v) if erase else None,
        u=torch.empty_like(rows.v) if erase else rows.v,
    )
    if not erase:
        for u, keys, total, h in _by_step(span, rows.v, states.keys, states.total, states.h):
            state = S[: len(h)]
            h.copy_(state)
            state.mul_(total).baddbmm_(keys.transpose(1, 2), u)
        return states
    if inverse is None:
        solve, solver = _substitute, (pairs[:, 1], rows.beta)
    else:
        solve, solver = torch.bmm, (inverse * rows.beta.transpose(1, 2),)
    steps = _by_step(span, rows.v, states.reads[:, 1], states.keys, states.total, states.h, states.r, states.u, *solver)
    for v, read, keys, total, h, r, u, *solver in steps:
        state = S[: len(h)]
        h.copy_(state)
        torch.baddbmm(v, read, state, alpha=-1, out=r)
        solve(*solver, r, out=u)
        state.mul_(total).baddbmm_(keys.transpose(1, 2), u)
    return states


def _span_backward(span, rows, tree, pairs, inverse, states, do, dS):
    """Gradients of reads, keys, v, g, beta; ``dS`` enters as the gradient behind the span, ends as that before it."""
    n, C, V = rows.v.shape
    R = rows.reads.shape[1]
    dout = rows.v.new_empty(n, R, C, V)  # do and, to erase, -dr
    dout[:, 0] = 0 if do is None else do
    du = torch.bmm(pairs[:, 0].transpose(1, 2), dout[:, 0])
    dend = torch.empty_like(states.h)
    if R == 1:
        for du_c, dout_c, dend_c, read, keys, total in reversed(
            _by_step(span, du, dout[:, 0], dend, states.reads[:, 0], states.keys, states.total)
        ):
            state = dS[: len(dend_c)]
            dend_c.copy_(state)
            du_c.baddbmm_(keys, state)
            state.mul_(total).baddbmm_(read.transpose(1, 2), dout_c)
        return _decay_backward(rows, tree, states, dout, dend, du, None)
    y = torch.empty_like(rows.v)
    if inverse is None:
        solve, solver = _substitute_transposed, (pairs[:, 1], rows.beta)
    else:
        solve, solver = torch.bmm, (inverse.transpose(1, 2),)
    steps = _by_step(span, du, y, dout, -rows.beta, dend, states.reads, states.keys, states.total, *solver)
    for du_c, y_c, dout_c, minus_beta, dend_c, read, keys, total, *solver in reversed(steps):
        state = dS[: len(dend_c)]
        dend_c.copy_(state)
        solve(*solver, du_c.baddbmm_(keys, state), out=y_c)
        torch.mul(y_c, minus_beta, out=dout_c[:, 1])
        state.mul_(total).baddbmm_(read.flatten(1, 2).transpose(1, 2), dout_c.flatten(1, 2))

    dbeta = torch.baddbmm(states.r, pairs[:, 1], states.u, alpha=-1).mul_(y)
    dbeta = dbeta if _per_channel(rows) else dbeta.sum(-1, keepdim=True)
    return _decay_backward(rows, tree, states, dout, dend, -dout[:, 1], dbeta)


def _decay_backward(rows, tree, states, dout, dend, dv, dbeta):
    """What ``_span_backward`` returns, given the gradients of what the reads read and of the states behind chunks."""
    n, R, C, V = dout.shape
    dout = dout.flatten(1, 2)
    dpairs = torch.bmm(dout, states.u.transpose(1, 2)).unflatten(1, (R, C))
    dpairs[:, 0].tril_()
    if rows.bonus is not None:
        dpairs[:, 0, -1] = 0
    dpairs[:, 1:].tril_(-1)

    since, until = tree[-1]
    dreads = torch.bmm(dout, states.h.transpose(1, 2)).unflatten(1, (R, C))
    dsince = dreads[:, 0] * states.reads[:, 0]
    if rows.bonus is not None:
        dsince[:, -1] = 0
    for read in range(1, R):
        dsince.addcmul_(dreads[:, read], states.reads[:, read])
    dsince[:, -1] += (states.h * dend).sum(-1) * states.total[..., 0]
    dreads *= _reach(rows, since)[:, None]
    dkeys = torch.bmm(states.u, dend.transpose(1, 2))
    duntil = dkeys * states.keys
    dkeys *= until
    dg = decay.pair_backward(rows.reads, rows.keys, tree, dpairs, dsince, duntil, dreads, dkeys)
    return dreads, dkeys, dv, dg, dbeta


def _reach(rows, since):
    """exp(since) of the reads."""
    if rows.bonus is None:
        return since
    return torch.cat((since[:, :-1], torch.ones_like(since[:, -1:])), 1)


def _substitute(N, beta, r, out):
    """out = u of (I + beta N) u = beta r, where every value channel has its own beta [n, C, V]."""
    for i in range(r.shape[1]):
        known = torch.bmm(N[:, i : i + 1, :i], out[:, :i])
        torch.mul(beta[:, i], r[:, i] - known[:, 0], out=out[:, i])


def _substitute_transposed(N, beta, du, out):
    """out = y of (I + beta N)^T y = du."""
    for i in reversed(range(du.shape[1])):
        known = torch.bmm(N[:, i + 1 :, i : i + 1].transpose(1, 2), (beta * out)[:, i + 1 :])
        torch.sub(du[:, i], known[:, 0], out=out[:, i])


def _per_channel(rows):
    return rows.beta.shape[-1] > 1


def _walk_of(inputs, cu_seqlens, options):
    q, v = inputs.q, inputs.v
    chunk = options.tile * v.shape[2] * max(q.shape[3], v.shape[3])
    return sequences(q, cu_seqlens, options.tile, max(1, SPAN // chunk))


def _by_slot(span, x):
    return x.unflatten(0, (span.slots, -1))


def _by_step(span, *tensors):
    """For each step of the span, the part of every tensor [n, ...] that belongs to it."""
    heads = len(tensors[0]) // span.slots
    return list(zip(*(x.split([count * heads for count in span.counts]) for x in tensors)))


def _oriented(state, options):
    """[..., K, V] from or to the orientation of the caller."""
    return state.transpose(-1, -2).contiguous() if options.v_first else state


def _enter(walk, state, inputs, options):
    """A new state [N, HV, K, V] in the order of the walk, K and V aligned; zeros when ``state`` is None."""
    q, v = inputs.q, inputs.v
    K, V = (-(-x.shape[3] // ALIGN) * ALIGN for x in (q, v))
    S = q.new_zeros(len(walk.lengths), v.shape[2], K, V, dtype=working_dtype(q))
    if state is not None:
        S[..., : q.shape[3], : v.shape[3]] = _oriented(walk.enter(state), options)
    return S


def _leave(walk, S, inputs, options):
    return _oriented(walk.leave(S)[..., : inputs.q.shape[3], : inputs.v.shape[3]], options).contiguous()
