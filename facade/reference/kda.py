"""Kimi Delta Attention: the gate, the token recurrence and the chunk form.

Kimi Linear: An Expressive, Efficient Attention Architecture, arXiv 2510.26692. Per sequence and value head, with a
state S [K, V] that maps keys to values (state_v_first stores [V, K]), log-space gates g [K] <= 0 and a step size beta:

    S   <- diag(exp(g_t)) S                       forget
    u_t  = beta_t (v_t - S^T k_t)                 what the state gets wrong about k_t
    S   <- S + k_t u_t^T                          correct it
    o_t  = scale S^T q_t                          read

Value head j reads with q and k of head j // (HV / H).

Chunk form. A chunk of C rows starts from the state h. With `since` = sum of the gates from the start of the chunk
through a row, `until` = sum behind a row to the end, and the decayed products of `decay.py` (q already scaled)

    A[i, j] = q_i . k_j decayed, j <= i           N[i, j] = k_i . k_j decayed, j < i

the rows of the chunk solve one triangular system instead of waiting for each other:

    r  = v - (k exp(since)) h                     R = (I + beta N)^-1
    u  = R beta r                                 o = (q exp(since)) h + A u
    h' = exp(total) h + (k exp(until))^T u

Backward, from do and dh':

    du = A^T do + (k exp(until)) dh'              y = R^T du,  dr = beta y = dv
    dh = exp(total) dh' + (q exp(since))^T do - (k exp(since))^T dr
    dA = do u^T (j <= i),  dN = -dr u^T (j < i),  dbeta = y . (r - N u)
    d(q exp(since)) = do h^T,  d(k exp(since)) = -dr h^T,  d(k exp(until)) = u dh'^T,  dtotal = exp(total) sum_V h dh'

q and k are two reads that share one decay, with output gradients do and -dr, so most lines are one product over both.
"""

import itertools
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F

from facade.reference import decay
from facade.reference.sequences import sequences
from fla_dispatch import refuse_double_backward

NORM_EPS = 1e-6
TILE = 32  # rows per chunk inside; divides the public chunk sizes
SPAN = 1 << 18  # elements of one tensor of a span, so that what a span works on stays in cache
ALIGN = 16  # elements; a cache line of fp32


# ---------------------------------------------------------------------------------------------------------------------
# The gate


def gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """Log-space gate of raw ``g [B, T, HV, K]``; ``A_log [HV]``, ``dt_bias [HV*K]``; differentiable in all three.

    lower_bound None:   -exp(A_log) * softplus(g + dt_bias)
    otherwise:          lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), A_log None counting as 0

    Computed in fp32 (fp64 for fp64 ``g``), returned as ``output_dtype``.
    """
    return _Gate.apply(g, A_log, dt_bias, lower_bound, output_dtype, None)


def gate_chunk_cumsum(
    g, A_log=None, chunk_size=64, scale=None, dt_bias=None, cu_seqlens=None, output_dtype=torch.float32,
    lower_bound=None,
):  # fmt: skip
    """``gate`` summed from the start of each chunk of a sequence through each token, times ``scale``.

    Tokens behind the last sequence of ``cu_seqlens`` give 0.
    """
    sums = sequences(g, cu_seqlens, chunk_size, SPAN), 1 if scale is None else scale
    return _Gate.apply(g, A_log, dt_bias, lower_bound, output_dtype, sums)


class _Gate(torch.autograd.Function):
    """``sums`` is (the walk over the chunks to sum in, factor), or None for the gate itself."""

    @staticmethod
    def forward(ctx, g, A_log, dt_bias, lower_bound, output_dtype, sums):
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound, ctx.sums = lower_bound, sums
        dtype = _compute_dtype(g)
        with _no_autocast(g):
            if sums is None:
                return _gate(g.to(dtype), A_log, dt_bias, lower_bound).to(output_dtype)
            walk, factor = sums
            out = walk.new(g, *g.shape[2:], dtype=output_dtype)
            for span in walk.spans:
                rows = span.gather(g, dtype).transpose(1, 2)
                span.scatter(_gate(rows, A_log, dt_bias, lower_bound).cumsum(1).mul_(factor).transpose(1, 2), out)
            return out

    @staticmethod
    def backward(ctx, d):
        g, A_log, dt_bias = ctx.saved_tensors
        dtype = _compute_dtype(g)
        with torch.no_grad(), _no_autocast(g):
            if ctx.sums is None:
                dg, *parameters = _gate_backward(g.to(dtype), A_log, dt_bias, ctx.lower_bound, d.to(dtype))
                parts = [parameters]
            else:
                walk, factor = ctx.sums
                dg, parts = walk.new(g, *g.shape[2:], dtype=dtype), []
                for span in walk.spans:
                    rows, drows = (span.gather(x, dtype).transpose(1, 2) for x in (g, d))
                    drows = drows.flip(1).cumsum(1).flip(1).mul_(factor)
                    drows, *parameters = _gate_backward(rows, A_log, dt_bias, ctx.lower_bound, drows)
                    span.scatter(drows.transpose(1, 2), dg)
                    parts.append(parameters)
            dA_log, ddt_bias = (
                None if x is None else sum((part[i] for part in parts), torch.zeros_like(x, dtype=dtype)).to(x.dtype)
                for i, x in enumerate((A_log, dt_bias))
            )
        grads = dg.to(g.dtype), dA_log, ddt_bias
        return *refuse_double_backward("fused_kda_gate", grads, g, A_log, dt_bias, d), None, None, None


def _gate(g, A_log, dt_bias, lower_bound):
    """The formula of ``gate``, in the dtype of ``g [..., HV, K]`` and by autograd."""
    x, rate = _gate_input(g, A_log, dt_bias)
    if lower_bound is None:
        return -rate * _softplus(x)
    return lower_bound * _sigmoid(x if rate is None else rate * x)


def _gate_backward(g, A_log, dt_bias, lower_bound, d):
    """Gradients of g, A_log and dt_bias, given ``d`` of the gate."""
    x, rate = _gate_input(g, A_log, dt_bias)
    if lower_bound is None:
        dx = -rate * _sigmoid(x) * d
        dlog_rate = -rate * _softplus(x) * d
    else:
        z = x if rate is None else rate * x
        dz = lower_bound * _sigmoid(z) * _sigmoid(-z) * d
        dx = dz if rate is None else rate * dz
        dlog_rate = z * dz
    dA_log = None if A_log is None else dlog_rate.flatten(0, -3).sum((0, 2)).view(A_log.shape)
    ddt_bias = None if dt_bias is None else dx.flatten(0, -3).sum(0).view(dt_bias.shape)
    return dx, dA_log, ddt_bias


def _gate_input(g, A_log, dt_bias):
    """(g + dt_bias, exp(A_log)) broadcast over [..., HV, K]."""
    x = g if dt_bias is None else g + dt_bias.to(g.dtype).view(g.shape[-2:])
    return x, None if A_log is None else A_log.to(g.dtype).view(-1, 1).exp()


# torch.sigmoid and log1p round differently in the last elements of a tensor than elsewhere; exp and log do not, and a
# packed sequence has to give the bits of the same sequence alone.


def _sigmoid(x):
    y = _exp_of_minus_abs(x)
    return torch.where(x > 0, 1, y) / (1 + y)


def _softplus(x):
    y = _exp_of_minus_abs(x)
    sum_ = 1 + y
    log1p = torch.log(sum_) + (y - (sum_ - 1)) / sum_  # the second term is what rounding took from the sum
    return torch.where(x > 0, x + log1p, log1p)


def _exp_of_minus_abs(x):
    return torch.exp(torch.where(x > 0, -x, x))  # written so that autograd is right at 0


# ---------------------------------------------------------------------------------------------------------------------
# What all forms share


def _no_autocast(x):
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def _compute_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _norm(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def _norm_backward(x, dunit):
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    unit = x * inverse
    return (dunit - unit * (unit * dunit).sum(-1, keepdim=True)) * inverse


def _aligned(x):
    """The last dimension padded with zeros to whole cache lines: then a product rounds alike in any batch."""
    return F.pad(x, (0, -x.shape[-1] % ALIGN)) if x.shape[-1] % ALIGN else x


# ---------------------------------------------------------------------------------------------------------------------
# The token recurrence


def recurrent(
    q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, initial_state=None, output_final_state=False,
    use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
    lower_bound=None, state_v_first=False, cu_seqlens=None, compute_dtype=None,
):  # fmt: skip
    """The recurrence of the module docstring, token by token: the oracle. Returns (o, final_state or None).

    q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV, K] in log space (raw with use_gate_in_kernel); beta [B, T, HV], or
    [B, T, HV, V] with a step size per value channel; states [N, HV, K, V] ([N, HV, V, K] with state_v_first). Plain
    torch operations, differentiable by autograd. ``o`` has q's dtype, the state is fp32 (fp64 when computed in fp64).

    compute_dtype: fp32, or fp64 for fp64 q, when None. With bf16 or fp16 every vector of a token is rounded to it,
    while the state stays fp32: the error of this run is what an eager implementation in that dtype would have.
    """
    with _no_autocast(q):
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        o_dtype, compute_dtype = q.dtype, compute_dtype or _compute_dtype(q)
        dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
        bounds = None if cu_seqlens is None else cu_seqlens.tolist()
        end = T if bounds is None else bounds[-1]  # rows behind it belong to no sequence and are never read
        q, k, v, g, beta = (x[:, :end].to(dtype) for x in (q, k, v, g, beta))
        if use_gate_in_kernel:
            g = _gate(g, A_log, dt_bias, lower_bound)
        if use_beta_sigmoid_in_kernel:
            beta = _sigmoid(beta) * (2 if allow_neg_eigval else 1)
        if use_qk_l2norm_in_kernel:
            q, k = _norm(q), _norm(k)
        q = q * (K**-0.5 if scale is None else scale)
        q, k = (x.repeat_interleave(HV // H, 2) for x in (q, k))
        beta = beta if beta.dim() == 4 else beta[..., None].expand_as(v)

        def rounded(x):
            return x if compute_dtype == dtype else x.to(compute_dtype).to(dtype)

        alpha = torch.exp(g.clamp(max=decay.largest_exponent(dtype)))
        tokens = [rounded(_aligned(x)) for x in (q, k, v, alpha, beta)]
        if initial_state is None:
            S = q.new_zeros(B if bounds is None else len(bounds) - 1, HV, K, V)
        else:
            S = initial_state.to(dtype)
            S = S.transpose(-1, -2) if state_v_first else S
        S = _aligned(_aligned(S).transpose(-1, -2)).transpose(-1, -2)

        lengths = None if bounds is None else [stop - start for start, stop in itertools.pairwise(bounds)]
        if bounds is None:
            o, S = _walk(*tokens, S, rounded)
        elif end and len(set(lengths)) == 1:  # decoding: one token each, all sequences at once
            o, S = _walk(*(x[0].unflatten(0, (len(lengths), -1)) for x in tokens), S, rounded)
            o = o.flatten(0, 1)[None]
        else:
            rows = zip(*(x.split(lengths, 1) for x in tokens), S.split([1] * len(S)))
            runs = [_walk(*sequence, rounded) for sequence in rows]
            o = torch.cat([tokens[2][:, :0], *(o for o, _ in runs)], 1)
            S = torch.cat([S[:0], *(S for _, S in runs)])
        o = F.pad(rounded(o)[..., :V], (0, 0, 0, 0, 0, T - end)).to(o_dtype)
        if not output_final_state:
            return o, None
        S = S[..., :K, :V]
        return o, (S.transpose(-1, -2) if state_v_first else S).contiguous()


def _walk(q, k, v, alpha, beta, S, rounded):
    """Tokens [B, T, HV, ...] with alpha = exp(g), from S [B, HV, K, V]; returns (o, S)."""
    B, T, HV, V = v.shape
    rows = [x.transpose(0, 1).reshape(T, B * HV, 1, x.shape[3]).unbind() for x in (q, k, v, beta)]
    columns = [x.transpose(0, 1).reshape(T, B * HV, x.shape[3], 1).unbind() for x in (k, alpha)]
    state, outputs = S.flatten(0, 1), []
    for q_t, k_t, v_t, beta_t, k_column, alpha_t in zip(*rows, *columns):
        state = alpha_t * state
        u = rounded(beta_t * rounded(v_t - rounded(torch.bmm(k_t, state))))
        state = torch.baddbmm(state, k_column, u)
        outputs.append(torch.bmm(q_t, state))
    o = torch.stack(outputs).view(T, B, HV, V).transpose(0, 1) if outputs else v
    return o, state.view(S.shape)


# ---------------------------------------------------------------------------------------------------------------------
# The chunk form


def chunk(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    *, A_log=None, dt_bias=None, chunk_size=64,
):  # fmt: skip
    """The same function as ``recurrent``, in chunks, with its own backward. Returns (o, final_state or None).

    With return_intermediate_states also h [B, NT, HV, K, V] in k's dtype, the states at the starts of the chunks of
    ``chunk_size`` tokens (packed: B = 1, NT = sum of ceil(length / chunk_size)); h carries no gradient.

    Exact for any gate, so safe_gate changes nothing. Arithmetic in fp32 (fp64 for fp64 q) whatever the ambient
    autocast; ``o`` has q's dtype, the final state is fp32 (fp64), every gradient has the dtype of its input.

    Saved for backward: the inputs, the matrices A, N and R of each chunk (3 C numbers per token and head, C = 32) and
    the state at the start of each span; the rest is recomputed span by span. With disable_recompute everything that
    backward reads is saved, about twenty times the size of q.
    """
    options = _Options(
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        final=output_final_state, norm=use_qk_l2norm_in_kernel, gate=use_gate_in_kernel,
        sigmoid=use_beta_sigmoid_in_kernel, beta_max=2 if allow_neg_eigval else 1, lower_bound=lower_bound,
        grad=torch.is_grad_enabled(), keep=disable_recompute, tile=min(TILE, chunk_size), v_first=state_v_first,
        every=chunk_size if return_intermediate_states else None,
    )  # fmt: skip
    o, S, h = _Chunk.apply(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, options)
    return (o, S, h) if return_intermediate_states else (o, S)


class _Options(NamedTuple):
    scale: float
    norm: bool  # q and k are L2-normalised here
    gate: bool  # g is raw
    lower_bound: float | None
    sigmoid: bool  # beta is raw
    beta_max: int
    final: bool  # return the final state
    v_first: bool  # states are [V, K]
    every: int | None  # return the states at multiples of this many tokens
    grad: bool  # backward may come
    keep: bool  # save everything that backward reads
    tile: int  # rows per chunk


class _Inputs(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    initial_state: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


class _Rows(NamedTuple):
    """The rows of a span; n = slots * HV."""

    reads: torch.Tensor  # [n, 2, C, K]  q (scaled) and k
    keys: torch.Tensor  # [n, C, K]
    v: torch.Tensor  # [n, C, V]
    g: torch.Tensor  # [n, C, K]
    beta: torch.Tensor  # [n, C, 1 or V]


class _States(NamedTuple):
    """What the scan over the chunks of a span used and found."""

    reads: torch.Tensor  # [n, 2, C, K]  reads * exp(since)
    keys: torch.Tensor  # [n, C, K]  keys * exp(until)
    total: torch.Tensor  # [n, K, 1]  exp(total)
    h: torch.Tensor  # [n, K, V]  state at the start of each chunk
    r: torch.Tensor  # [n, C, V]
    u: torch.Tensor  # [n, C, V]


class _Chunk(torch.autograd.Function):
    """One Function on the raw arguments, so that it differentiates where autograd sees nothing but Functions."""

    @staticmethod
    def forward(ctx, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, options):
        inputs = _Inputs(q, k, v, g, beta, initial_state, A_log, dt_bias)
        B, K, V = len(q), q.shape[3], v.shape[3]
        with torch.no_grad(), _no_autocast(q):
            walk = _walk_of(inputs, cu_seqlens, options)
            o = walk.new(q, *v.shape[2:], dtype=q.dtype)
            S = _enter(walk, initial_state, inputs, options)
            kept, starts = [], []
            for span in walk.spans:
                state = S[span.states].flatten(0, 1)
                start = state.clone()
                rows = _rows(span, inputs, options)
                tree = list(decay.levels(rows.g))
                pairs = decay.pair(rows.reads, rows.keys, tree)
                pairs[:, 1].diagonal(dim1=1, dim2=2).zero_()  # N is strict
                inverse = None if _per_channel(rows) else decay.unit_lower_inverse(rows.beta * pairs[:, 1])
                states = _scan(span, rows, tree[-1], pairs, inverse, state)
                read = torch.bmm(pairs[:, 0], states.u).baddbmm_(states.reads[:, 0], states.h)
                span.scatter(_by_slot(span, read)[..., :V], o)
                if options.grad and any(ctx.needs_input_grad):
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
        ctx.set_materialize_grads(False)
        ctx.walk, ctx.options = walk, options
        ctx.save_for_backward(*inputs, *kept)
        return o, S, h

    @staticmethod
    def backward(ctx, do, dS, dh):
        saved, fields = ctx.saved_tensors, len(_Inputs._fields)
        inputs, kept = _Inputs(*saved[:fields]), saved[fields:]
        with torch.no_grad(), _no_autocast(inputs.q):
            grads = _chunk_backward(ctx.walk, ctx.options, inputs, kept, do, dS)
        grads = tuple(x if needed else None for x, needed in zip(grads, ctx.needs_input_grad))
        return *refuse_double_backward("chunk_kda", grads, *inputs, do, dS), None, None


def _chunk_backward(walk, options, inputs, kept, do, dS):
    """Gradients of all inputs, span by span from the last."""
    q, k, v, g, beta, initial_state, A_log, dt_bias = inputs
    dtype = _compute_dtype(q)
    grads = [walk.new(x, *x.shape[2:], dtype=x.dtype) for x in (q, k, v, g, beta)]
    dA_log, ddt_bias = (None if x is None else torch.zeros_like(x, dtype=dtype) for x in (A_log, dt_bias))
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
        dread = None if do is None else _aligned(span.gather(do, dtype)).flatten(0, 1)
        drows = _span_backward(span, rows, tree, pairs, inverse, states, dread, dS[span.states].flatten(0, 1))
        dA_log_part, ddt_bias_part = _rows_backward(span, options, inputs, rows, *drows, grads)
        if dA_log_part is not None:
            dA_log += dA_log_part
        if ddt_bias_part is not None:
            ddt_bias += ddt_bias_part
    dS = None if initial_state is None else _leave(walk, dS, inputs, options).to(initial_state.dtype)
    dA_log, ddt_bias = (None if x is None else d.to(x.dtype) for x, d in ((A_log, dA_log), (dt_bias, ddt_bias)))
    return *grads, dS, dA_log, ddt_bias


def _rows(span, inputs, options):
    """Gathers the rows of a span; activates, aligns, normalises and scales them."""
    q, k, v, g, beta, initial_state, A_log, dt_bias = inputs
    dtype, group = _compute_dtype(q), g.shape[2] // q.shape[2]
    q, k, v, g, beta = (span.gather(x if x.dim() == 4 else x[..., None], dtype) for x in (q, k, v, g, beta))
    if options.gate:
        g = _gate(g.transpose(1, 2), A_log, dt_bias, options.lower_bound).transpose(1, 2).contiguous()
        span.clear(g)
    if options.sigmoid:
        beta = _sigmoid(beta) * options.beta_max
    q, k, v, g = _aligned(q), _aligned(k), _aligned(v), _aligned(g)
    beta = _aligned(beta) if beta.shape[3] > 1 else beta
    if span.first and initial_state is None:
        g[: span.counts[0], :, 0] = 0  # there is nothing to forget yet
    if options.norm:
        q, k = _norm(q), _norm(k)
    q = q * options.scale
    if group > 1:
        q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    q, k, v, g, beta = (x.flatten(0, 1) for x in (q, k, v, g, beta))
    return _Rows(torch.stack((q, k), 1), k, v, g, beta)


def _rows_backward(span, options, inputs, rows, dreads, dkeys, dv, dg, dbeta, grads):
    """Scatters the gradients of q, k, v, g, beta into ``grads``; returns those of A_log and dt_bias, of this span."""
    q, k, v, g, beta, _, A_log, dt_bias = inputs
    dtype, group = _compute_dtype(q), g.shape[2] // q.shape[2]
    dq, dk, dv, dg, dbeta = (_by_slot(span, x) for x in (dreads[:, 0], dkeys.add_(dreads[:, 1]), dv, dg, dbeta))
    if group > 1:
        dq, dk = (x.unflatten(1, (-1, group)).sum(2) for x in (dq, dk))
    dq = dq * options.scale
    if options.norm:
        dq, dk = (_norm_backward(_aligned(span.gather(x, dtype)), dx) for x, dx in ((q, dq), (k, dk)))
    dA_log = ddt_bias = None
    if options.gate:
        dg = dg[..., : g.shape[3]]
        span.clear(dg)
        raw = span.gather(g, dtype).transpose(1, 2)
        dg, dA_log, ddt_bias = _gate_backward(raw, A_log, dt_bias, options.lower_bound, dg.transpose(1, 2))
        dg = dg.transpose(1, 2)
    if options.sigmoid:
        effective = _by_slot(span, rows.beta)
        dbeta = dbeta * effective * (1 - effective / options.beta_max)
    for d, x in zip((dq, dk, dv, dg, dbeta), grads):
        x = x if x.dim() == 4 else x[..., None]
        span.scatter(d[..., : x.shape[3]], x)
    return dA_log, ddt_bias


def _scan(span, rows, top, pairs, inverse, S):
    """Runs the chunks of a span from the states ``S [sequences*HV, K, V]``, which end as the states behind it."""
    since, until = top
    n, C, K = rows.keys.shape
    states = _States(
        reads=rows.reads * since[:, None],
        keys=rows.keys * until,
        total=since[:, -1, :, None],
        h=S.new_empty(n, K, S.shape[-1]),
        r=torch.empty_like(rows.v),
        u=torch.empty_like(rows.v),
    )
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
    dout = rows.v.new_empty(n, 2, C, V)  # do and -dr
    dout[:, 0] = 0 if do is None else do
    du = torch.bmm(pairs[:, 0].transpose(1, 2), dout[:, 0])
    dend = torch.empty_like(states.h)
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
    dv = -dout[:, 1]
    dout = dout.flatten(1, 2)
    dpairs = torch.bmm(dout, states.u.transpose(1, 2)).unflatten(1, (2, C))
    dpairs[:, 0].tril_()
    dpairs[:, 1].tril_(-1)

    since, until = tree[-1]
    dreads = torch.bmm(dout, states.h.transpose(1, 2)).unflatten(1, (2, C))
    dsince = dreads[:, 0] * states.reads[:, 0]
    dsince.addcmul_(dreads[:, 1], states.reads[:, 1])
    dsince[:, -1] += (states.h * dend).sum(-1) * states.total[..., 0]
    dreads *= since[:, None]
    dkeys = torch.bmm(states.u, dend.transpose(1, 2))
    duntil = dkeys * states.keys
    dkeys *= until
    dg = decay.pair_backward(rows.reads, rows.keys, tree, dpairs, dsince, duntil, dreads, dkeys)
    return dreads, dkeys, dv, dg, dbeta


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
    S = q.new_zeros(len(walk.lengths), v.shape[2], K, V, dtype=_compute_dtype(q))
    if state is not None:
        S[..., : q.shape[3], : v.shape[3]] = _oriented(walk.enter(state), options)
    return S


def _leave(walk, S, inputs, options):
    return _oriented(walk.leave(S)[..., : inputs.q.shape[3], : inputs.v.shape[3]], options).contiguous()
