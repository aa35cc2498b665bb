"""Linear attention: nothing is forgotten; if asked, what is read is divided by the weights it was read with.

Per sequence and head, with a state S [K, V] and, to normalise, the sum of the keys z [K]:

    S_t = S_{t-1} + k_t v_t^T        z_t = z_{t-1} + k_t
    o_t = scale S_t^T q_t            normalised: o_t / (scale z_t . q_t + 1e-10)

The recurrence and its chunk form are those of ``simple_gla.py``, without decay. z is what a value channel of ones would
make of the state, and its weight what that channel would read: so normalising is one more channel, and a division.
"""

import itertools

import torch
import torch.nn.functional as F

from facade.reference import simple_gla
from facade.reference.arithmetic import no_autocast, running_sum, working_dtype
from fla_dispatch import errors
from fla_dispatch.declaration import FLOATS

EPS = 1e-10


def recurrent(
    q, k, v, scale=None, initial_state=None, output_final_state=False, reverse=False, normalize=False, cu_seqlens=None,
    compute_dtype=None,
):  # fmt: skip
    """``simple_gla.recurrent`` without decay: the oracle. With ``normalize`` it takes the state as (S, z) too, z
    [N, 1, H, K], and returns (o, (S or None, z)); z and the weights are summed over the tokens here."""
    S, z = initial_state if isinstance(initial_state, (tuple, list)) else (initial_state, None)
    o, S = simple_gla.recurrent(
        q, k, v, None, None, scale, S, output_final_state, reverse, False, cu_seqlens, compute_dtype
    )
    if not normalize:
        return o, S
    compute_dtype = compute_dtype or working_dtype(q)
    dtype = torch.float64 if compute_dtype == torch.float64 else torch.float32
    B, T, H, K = q.shape
    bounds = [0, T] if cu_seqlens is None else cu_seqlens.tolist()
    N = B if cu_seqlens is None else len(bounds) - 1

    def rounded(x):
        return x if compute_dtype == dtype else x.to(compute_dtype).to(dtype)

    with no_autocast(q):
        z = q.new_zeros(N, 1, H, K, dtype=dtype) if z is None else z.to(dtype)
        sums, last = [], []
        for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
            z0 = z if cu_seqlens is None else z[n : n + 1]
            keys = k[:, start:stop].to(dtype)
            each = z0 + running_sum(keys, 1, reverse)
            sums.append(each)
            last.append(z0 if start == stop else each[:, :1] if reverse else each[:, -1:])
        z = torch.cat([z[:0], *last])
        weights = (torch.cat([z.new_zeros(B, 0, H, K), *sums], 1) * q[:, : bounds[-1]].to(dtype)).sum(-1, keepdim=True)
        weights = rounded(weights * (K**-0.5 if scale is None else scale))
        o = rounded(o[:, : bounds[-1]].to(dtype) / (weights + EPS))
        return F.pad(o, (0, 0, 0, 0, 0, T - bounds[-1])).to(q.dtype), (S, z)


def normalised(
    run, q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True, cu_seqlens=None, **options
):  # fmt: skip
    """(o, (S or None, z)) of the call with ``normalize``, made of one of ``run`` without it.

    16-bit inputs are computed in fp32: what is divided may not fit in fp16, and what comes back through the quotient is
    a difference of two gradients, which cancel for the most part and must not be rounded before they do.
    """
    S, z = _halves(run.__name__, initial_state, q, cu_seqlens)
    dtype = q.dtype
    q, k, v = (x.to(working_dtype(x)) for x in (q, k, v))
    if S is not None or z is not None:
        N, H, K, V = len(z if S is None else S), q.shape[2], q.shape[3], v.shape[3]
        S = z.new_zeros(N, H, K, V) if S is None else S
        z = S.new_zeros(N, 1, H, K) if z is None else z
        S = torch.cat((S, z.permute(0, 2, 3, 1)), -1)
    read, S = run(
        q=q, k=k, v=F.pad(v, (0, 1), value=1.0), scale=scale, initial_state=S, output_final_state=True,
        normalize=False, cu_seqlens=cu_seqlens, **options,
    )  # fmt: skip
    o = (read[..., :-1] / (read[..., -1:] + EPS)).to(dtype)
    z = S[..., -1:].permute(0, 3, 1, 2).contiguous()
    return o, (S[..., :-1].contiguous() if output_final_state else None, z)


def _halves(function, state, q, cu_seqlens):
    """S and z of a state that may be S alone, or nothing; z is checked, which the operator itself does not see."""
    if not isinstance(state, (tuple, list)):
        return state, None
    if len(state) != 2:
        raise errors.wrong_pair(function, "initial_state", "(S, z)", len(state))
    z, name, dims = state[1], "initial_state[1]", "N 1 H K"
    if z is None:
        return state
    if not isinstance(z, torch.Tensor):
        raise errors.not_a_tensor(function, name, dims, z)
    N = len(q) if cu_seqlens is None else len(cu_seqlens) - 1
    if z.shape != (N, 1, *q.shape[2:]):
        raise errors.wrong_rank(function, name, (f"N={N} 1 H={q.shape[2]} K={q.shape[3]}",), z.shape)
    if not z.is_floating_point():
        raise errors.wrong_dtype(function, name, FLOATS, z.dtype)
    if z.device != q.device:
        raise errors.devices_disagree(function, name, z.device, "q", q.device)
    return state
