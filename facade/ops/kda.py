"""Kimi Delta Attention (KDA): a delta rule whose state forgets per key channel.

Yang et al., "Kimi Linear: An Expressive, Efficient Attention Architecture", arXiv:2510.26692.
"""

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from fla_dispatch import ACCUMULATOR, Result, Rule, dispatch

__all__ = ["chunk_kda", "fused_kda_gate", "fused_recurrent_kda", "kda_gate_chunk_cumsum"]

LAYOUTS = {"state_v_first": ("HV K V", "HV V K")}  # of every state, whatever it is one per

RETURNS = {
    "o": Result("B T HV V", "q"),
    "final_state": Result("N HV K V", ACCUMULATOR, when="output_final_state"),
}
NO_CONTEXT = Rule(
    "cp_context is None",
    "context parallelism is not implemented; pass cp_context=None",
    error=NotImplementedError,
)
HEADS = Rule("HV % H == 0", "the number of value heads must be a multiple of the number of query/key heads")
KEY_CHANNELS = Rule("K <= 256", "a head has at most 256 key channels")
CHUNK_SIZE = Rule("chunk_size in (32, 64)", "`chunk_size` must be either 32 or 64")
BETA_RANGE = Rule(
    "use_beta_sigmoid_in_kernel",
    "`allow_neg_eigval` doubles the sigmoid of beta and needs it in the kernel: set use_beta_sigmoid_in_kernel=True",
    when="allow_neg_eigval",
)
GATE_INPUTS = Rule(
    "A_log is not None or lower_bound is not None",
    "the gate in the kernel needs `A_log` or `lower_bound`",
    when="use_gate_in_kernel",
)
GATE_OF_KERNEL = Rule(
    "use_gate_in_kernel or A_log is None and dt_bias is None",
    "`A_log` and `dt_bias` belong to the gate in the kernel: set use_gate_in_kernel=True",
)

SHAPES = {
    "ci": dict(B=1, T=63, H=2, HV=4, K=24, V=40),
    "train_8k": dict(B=1, T=8192, H=32, HV=32, K=128, V=128),
    "batch_2k": dict(B=8, T=2048, H=16, HV=16, K=128, V=128),
    "long_64k": dict(B=1, T=65536, H=8, HV=8, K=128, V=128),
    "wide_4k": dict(B=4, T=4096, H=64, HV=64, K=128, V=128),
    "packed_32k": dict(B=1, T=32768, N=16, H=16, HV=16, K=128, V=128),
}
DECODING = {f"decode_{B}": dict(B=B, T=1, H=32, HV=32, K=128, V=128) for B in (1, 8, 64, 256)}


@dispatch(
    "kda",
    returns=RETURNS
    | {
        "h": Result("B NT HV K V", "k", when="return_intermediate_states", omitted=True),
    },
    rules=(
        NO_CONTEXT,
        HEADS,
        KEY_CHANNELS,
        CHUNK_SIZE,
        BETA_RANGE,
        GATE_INPUTS,
        GATE_OF_KERNEL,
        Rule(
            "not use_gate_in_kernel or lower_bound is not None and -5 <= lower_bound < 0",
            "`safe_gate` with the gate in the kernel needs `lower_bound` in [-5, 0)",
            when="safe_gate",
        ),
        Rule(
            "inference",
            "`return_intermediate_states` works under torch.inference_mode() only",
            when="return_intermediate_states",
        ),
        Rule(
            "not disable_recompute",
            "`return_intermediate_states` and `disable_recompute` exclude each other",
            when="return_intermediate_states",
        ),
        Rule(
            "cu_seqlens is not None",
            "`use_graph` fixes the shape of packed input and needs `cu_seqlens`",
            when="use_graph",
        ),
        Rule("use_graph", "`max_num_seqs` belongs to graph mode: set use_graph=True", when="max_num_seqs"),
        Rule(
            "N == max_num_seqs",
            "in graph mode `cu_seqlens` must be padded with empty sequences to max_num_seqs + 1 entries",
            when="max_num_seqs",
        ),
    ),
    derive={"scale": "K ** -0.5"},
    layouts=LAYOUTS,
    same_dtype=[("q", "k", "v")],
    chunk_size="chunk_size",
    tolerance="delta_rule",
    shapes=SHAPES,
)
def chunk_kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV*K"] | None = None,
    chunk_size: int = 64,
):
    r"""Kimi Delta Attention over whole sequences, in chunks: for training and prefill.

    Per sequence and value head, with a state S [K, V]::

        S_t = diag(exp(g_t)) S_{t-1} + beta_t k_t (v_t - (diag(exp(g_t)) S_{t-1})^T k_t)^T
        o_t = scale * S_t^T q_t

    Value head j uses query/key head j // (HV / H).

    Args:
        q, k: queries and keys [B, T, H, K]. Unless use_qk_l2norm_in_kernel is set, keep beta * |k|^2 below 2: beyond
            that the recurrence itself grows without bound.
        v: values [B, T, HV, V]; o has their shape and q's dtype.
        g: decay [B, T, HV, K] in log space (natural logarithm, normally <= 0): the state is multiplied by exp(g).
            With use_gate_in_kernel the raw input of the gate.
        beta: step size [B, T, HV], normally in [0, 1], or [0, 2] for negative eigenvalues. With
            use_beta_sigmoid_in_kernel its logit.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V] in any float dtype ([N, HV, V, K] with state_v_first); zeros if None. N is the
            batch, or the number of packed sequences.
        output_final_state: return the state after the last token of each sequence, float32.
        use_qk_l2norm_in_kernel: q and k are first divided by sqrt(sum of squares + 1e-6).
        use_gate_in_kernel: g is computed here. Without lower_bound g = -exp(A_log) * softplus(g + dt_bias); with it
            g = lower_bound * sigmoid(exp(A_log) * (g + dt_bias)), where A_log may be None (taken as 0). The bounded
            form is used whenever lower_bound is set, with safe_gate or without.
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta), or 2 * sigmoid(beta) with allow_neg_eigval.
        safe_gate: the caller's promise that gates lie in [-5, 0) (above lower_bound, if it is set), which lets backends
            take a faster path. Gates that are given are neither checked nor clamped.
        disable_recompute: keep intermediate results for backward instead of computing them again: more memory, less
            time.
        return_intermediate_states: also return h [B, NT, HV, K, V] in k's dtype: the state at the start of every chunk
            of chunk_size tokens. Under torch.inference_mode() only.
        state_v_first: states are [.., V, K] instead of [.., K, V].
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Empty sequences are
            allowed. Tokens past the last entry belong to no sequence: their outputs and gradients are 0.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        cp_context: context parallelism; only None is implemented.
        use_graph, max_num_seqs: the call will be captured in a CUDA graph and replayed with other boundaries written
            into cu_seqlens, which is padded with empty sequences to max_num_seqs + 1 entries.
        A_log, dt_bias: [HV] and [HV * K], parameters of the gate in the kernel.
        chunk_size: 32 or 64; the result does not depend on it beyond rounding.

    Returns:
        (o [B, T, HV, V], final_state or None), or (o, final_state, h) with return_intermediate_states. Differentiable
        in q, k, v, g, beta, initial_state, A_log and dt_bias, also through final_state, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.
        NotImplementedError: cp_context is not None.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> B, T, H, K, V = 1, 100, 2, 32, 64
        >>> q, k, v = torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)
        >>> g = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K))
        >>> beta = torch.rand(B, T, H)
        >>> o, state = fla_ops.chunk_kda(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape, state.dtype
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 32, 64]), torch.float32)

    Where this differs from ``fla.ops.chunk_kda``: unknown keywords (head_first too) are errors, initial_state may have
    any float dtype, and faults that are assertions there are ``ValueError`` here.
    """
    return reference.kda.chunk(
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel,
        use_beta_sigmoid_in_kernel, allow_neg_eigval, safe_gate, lower_bound, disable_recompute,
        return_intermediate_states, state_v_first, cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu,
        A_log=A_log, dt_bias=dt_bias, chunk_size=chunk_size,
    )  # fmt: skip


@dispatch(
    "kda",
    returns=RETURNS,
    rules=(HEADS, KEY_CHANNELS, BETA_RANGE, GATE_INPUTS, GATE_OF_KERNEL),
    derive={"scale": "K ** -0.5"},
    layouts=LAYOUTS,
    same_dtype=[("q", "k", "v")],
    tolerance="delta_rule",
    shapes=SHAPES | DECODING,
)
def fused_recurrent_kda(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"] | Float[Tensor, "B T HV V"],
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV*K"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""Kimi Delta Attention token by token: for decoding and short sequences.

    Gradients come from the chunk form: the same function, the same values. Without gradients the tokens are walked one
    by one, so that decoding with ``initial_state`` and ``output_final_state`` costs one step per token.

    Args:
        q, k, v, g, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log,
            dt_bias, lower_bound, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens: as for
            ``chunk_kda``.
        beta: step size [B, T, HV], or [B, T, HV, V] with one for every value channel.

    Returns:
        (o [B, T, HV, V], final_state [N, HV, K, V] float32 or None).

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them. With use_gate_in_kernel and neither
        A_log nor lower_bound the gate is undefined, which is an error here and a silent exp(0) in ``fla.ops``.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> B, H, K, V = 2, 2, 32, 64
        >>> state = torch.zeros(B, H, K, V)
        >>> for _ in range(3):
        ...     q, k, v = torch.randn(B, 1, H, K), torch.randn(B, 1, H, K), torch.randn(B, 1, H, V)
        ...     g, beta = -torch.rand(B, 1, H, K), torch.rand(B, 1, H)
        ...     o, state = fla_ops.fused_recurrent_kda(
        ...         q, k, v, g, beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 64]), torch.Size([2, 2, 32, 64]))
    """
    return reference.kda.tokens(
        q, k, v, g, beta, A_log, dt_bias, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens,
    )  # fmt: skip


GATE_PARAMETERS = Rule("A_log is not None or lower_bound is not None", "the gate needs `A_log` or `lower_bound`")


@dispatch(
    "kda",
    returns=Result("B T HV K", "output_dtype"),
    rules=(GATE_PARAMETERS,),
    tolerance="gate",
    shapes=SHAPES,
)
def fused_kda_gate(
    g: Float[Tensor, "B T HV K"],
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV*K"] | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
):
    r"""The gate of KDA: from a raw projection to a log-space decay.

    Without lower_bound ``-exp(A_log) * softplus(g + dt_bias)``, unbounded below; with it
    ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))`` in (lower_bound, 0), where A_log may be None (taken as 0).

    Args:
        g: raw input [B, T, HV, K].
        A_log: [HV], logarithm of the rate of each head.
        dt_bias: [HV * K], added to g.
        lower_bound: the most negative decay, natural logarithm.
        output_dtype: of the result; the arithmetic is float32 (float64 for float64 input).

    Returns:
        The decay [B, T, HV, K], for ``g`` of ``chunk_kda``. Differentiable in g, A_log and dt_bias.

    Raises:
        ValueError, TypeError: arguments that disagree, or neither A_log nor lower_bound.

    Example:
        >>> import torch
        >>> from facade.ops.kda import fused_kda_gate
        >>> g = fused_kda_gate(torch.zeros(1, 4, 2, 8), A_log=torch.zeros(2))
        >>> round(g.min().item(), 4)  # -log(2)
        -0.6931
    """
    return reference.kda.gate(g, A_log, dt_bias, lower_bound, output_dtype)


@dispatch(
    "kda",
    returns=Result("B T HV K", "output_dtype"),
    rules=(GATE_PARAMETERS, CHUNK_SIZE),
    tolerance="gate",
    shapes=SHAPES,
)
def kda_gate_chunk_cumsum(
    g: Float[Tensor, "B T HV K"],
    A_log: Float[Tensor, "HV"] | None = None,
    chunk_size: int = 64,
    scale: float | None = None,
    dt_bias: Float[Tensor, "HV*K"] | None = None,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    output_dtype: torch.dtype = torch.float32,
    lower_bound: float | None = None,
):
    r"""``fused_kda_gate`` summed from the start of each chunk of a sequence through each token, times ``scale``.

    Args:
        g, A_log, dt_bias, lower_bound, output_dtype: as for ``fused_kda_gate``.
        chunk_size: 32 or 64; sums start anew every chunk_size tokens and at the start of every packed sequence.
        scale: factor on the result; 1 / ln(2) turns natural into binary logarithms. None: 1.
        cu_seqlens: boundaries [N+1] of packed sequences; tokens past the last entry give 0.

    Returns:
        The sums [B, T, HV, K]. Differentiable in g, A_log and dt_bias.

    Raises:
        ValueError, TypeError: arguments that disagree, or neither A_log nor lower_bound.

    Example:
        >>> import torch
        >>> from facade.ops.kda import kda_gate_chunk_cumsum
        >>> sums = kda_gate_chunk_cumsum(torch.zeros(1, 65, 1, 2), A_log=torch.zeros(1))
        >>> [round(x, 3) for x in sums[0, [0, 63, 64], 0, 0].tolist()]  # multiples of -log(2), anew at token 64
        [-0.693, -44.361, -0.693]
    """
    return reference.kda.gate_chunk_cumsum(g, A_log, chunk_size, scale, dt_bias, cu_seqlens, output_dtype, lower_bound)
