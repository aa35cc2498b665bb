"""The gated delta rule (GDN): a delta rule whose state forgets by one number per head.

Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv:2412.06464.
"""

from jaxtyping import Float, Integer
from torch import Tensor

from facade import reference
from facade.ops import kda
from facade.ops.delta_rule import CHUNK_SIZE
from facade.ops.kda import BETA_RANGE, GATE_OF_KERNEL, HEADS, KEY_CHANNELS, LAYOUTS, NO_CONTEXT, RETURNS
from fla_dispatch import Rule, dispatch

__all__ = ["chunk_gated_delta_rule", "chunk_gdn", "fused_recurrent_gated_delta_rule", "fused_recurrent_gdn"]

GATE_INPUTS = Rule("A_log is not None", "the gate in the kernel needs `A_log`", when="use_gate_in_kernel")


@dispatch(
    "gated_delta_rule",
    returns=RETURNS,
    rules=(
        NO_CONTEXT,
        HEADS,
        KEY_CHANNELS,
        CHUNK_SIZE,
        BETA_RANGE,
        GATE_INPUTS,
        GATE_OF_KERNEL,
    ),
    derive={"scale": "K ** -0.5"},
    layouts=LAYOUTS,
    same_dtype=[("q", "k", "v")],
    chunk_size="chunk_size",
    tolerance="delta_rule",
    shapes=kda.SHAPES,
)
def chunk_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
    cu_seqlens_cpu: Integer[Tensor, "N+1"] | None = None,
    chunk_indices: object | None = None,
    cp_context: object | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV"] | None = None,
    chunk_size: int = 64,
):
    r"""The gated delta rule over whole sequences, in chunks: for training and prefill.

    Per sequence and value head, with a state S [K, V]::

        S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
        o_t = scale * S_t^T q_t

    Value head j uses query/key head j // (HV / H).

    Args:
        q, k: queries and keys [B, T, H, K]. Unless use_qk_l2norm_in_kernel is set, keep beta * |k|^2 below 2: beyond
            that the recurrence itself grows without bound.
        v: values [B, T, HV, V]; o has their shape and q's dtype.
        g: decay [B, T, HV] in log space (natural logarithm, normally <= 0): the state is multiplied by exp(g). With
            use_gate_in_kernel the raw input of the gate.
        beta: step size [B, T, HV], normally in [0, 1], or [0, 2] for negative eigenvalues. With
            use_beta_sigmoid_in_kernel its logit.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V] in any float dtype ([N, HV, V, K] with state_v_first); zeros if None. N is the
            batch, or the number of packed sequences.
        output_final_state: return the state after the last token of each sequence, float32.
        use_qk_l2norm_in_kernel: q and k are first divided by sqrt(sum of squares + 1e-6).
        use_beta_sigmoid_in_kernel: beta = sigmoid(beta), or 2 * sigmoid(beta) with allow_neg_eigval.
        state_v_first: states are [.., V, K] instead of [.., K, V].
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1. Empty sequences are
            allowed. Tokens past the last entry belong to no sequence: their outputs and gradients are 0.
        cu_seqlens_cpu: the same on the host, which saves a device synchronisation.
        chunk_indices: what ``fla.ops`` would otherwise compute from cu_seqlens; nothing here needs it.
        cp_context: context parallelism; only None is implemented.
        use_gate_in_kernel: g = -exp(A_log) * softplus(g + dt_bias), computed here.
        A_log, dt_bias: [HV], parameters of the gate in the kernel; dt_bias None counts as 0.
        chunk_size: 16, 32 or 64; the result does not depend on it beyond rounding.

    Returns:
        (o [B, T, HV, V], final_state or None). Differentiable in q, k, v, g, beta, initial_state, A_log and dt_bias,
        also through final_state, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.
        NotImplementedError: cp_context is not None.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> q, k, v = torch.randn(1, 100, 2, 32), torch.randn(1, 100, 2, 32), torch.randn(1, 100, 4, 64)
        >>> g, beta = torch.nn.functional.logsigmoid(torch.randn(1, 100, 4)), torch.rand(1, 100, 4)
        >>> o, state = fla_ops.chunk_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape, state.dtype
        (torch.Size([1, 100, 4, 64]), torch.Size([1, 4, 32, 64]), torch.float32)
    """
    return reference.delta_rule.chunk(
        "chunk_gated_delta_rule", q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel,
        use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first,
        cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu, chunk_size,
    )  # fmt: skip


@dispatch(
    "gated_delta_rule", returns=RETURNS,
    rules=(
        HEADS, KEY_CHANNELS, BETA_RANGE, GATE_INPUTS, GATE_OF_KERNEL,
        Rule("g is not None", "the gate in the kernel is computed from `g`", when="use_gate_in_kernel"),
        Rule("beta is not None", "there is no `beta` to take the sigmoid of", when="use_beta_sigmoid_in_kernel"),
    ),
    derive={"scale": "K ** -0.5"}, layouts=LAYOUTS, same_dtype=[("q", "k", "v")], tolerance="delta_rule",
    shapes=kda.SHAPES | kda.DECODING,
)  # fmt: skip
def fused_recurrent_gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    g: Float[Tensor, "B T HV"] | None = None,
    gk: Float[Tensor, "B T HV K"] | None = None,
    gv: Float[Tensor, "B T HV V"] | None = None,
    beta: Float[Tensor, "B T HV"] | Float[Tensor, "B T HV V"] | None = None,
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Float[Tensor, "HV"] | None = None,
    dt_bias: Float[Tensor, "HV"] | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""The gated delta rule token by token: for decoding and short sequences.

    Per sequence and value head, with a state S [K, V]::

        S   <- exp(g_t) diag(exp(gk_t)) S_{t-1} diag(exp(gv_t))
        S_t  = S + beta_t k_t (v_t - S^T k_t)^T
        o_t  = scale * S_t^T q_t

    Args:
        q, k, v, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
            use_beta_sigmoid_in_kernel, allow_neg_eigval, state_v_first, cu_seqlens: as for ``chunk_gated_delta_rule``.
        g: decay [B, T, HV] in log space; none if None.
        gk, gv: decays [B, T, HV, K] of key channels and [B, T, HV, V] of value channels in log space; none if None.
        beta: step size [B, T, HV], or [B, T, HV, V] with one for every value channel; 1 if None.

    Returns:
        (o [B, T, HV, V], final_state [N, HV, K, V] float32 or None). Differentiable like ``chunk_gated_delta_rule``,
        and in gk and gv.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch, facade.ops as fla_ops
        >>> state = torch.zeros(2, 2, 8, 16)
        >>> for _ in range(3):
        ...     q, k, v = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 16)
        ...     o, state = fla_ops.fused_recurrent_gated_delta_rule(
        ...         q, k, v, g=-torch.rand(2, 1, 2), beta=torch.rand(2, 1, 2), initial_state=state,
        ...         output_final_state=True, use_qk_l2norm_in_kernel=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 16]), torch.Size([2, 2, 8, 16]))

    Where this differs from ``fla.ops``: it has gradients; without beta every value head has step size 1.
    """
    return reference.delta_rule.tokens(
        "fused_recurrent_gated_delta_rule", q, k, v, g, gk, gv, beta, scale, initial_state, output_final_state,
        use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias, use_beta_sigmoid_in_kernel, allow_neg_eigval,
        state_v_first, cu_seqlens,
    )  # fmt: skip


chunk_gdn, fused_recurrent_gdn = chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
