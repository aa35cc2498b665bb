"""Every message of errors.py: how a user meets it, and its whole text."""

import contextlib
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from jaxtyping import Float, Integer
from torch import Tensor

import facade
import facade.ops
import fla_dispatch
from facade.ops.kda import fused_kda_gate, kda_gate_chunk_cumsum
from fla_dispatch import ACCUMULATOR, Backend, BackendRefused, Result, Saved, bind, dispatch, errors, registry

B, T, H, HV, K, V = 2, 5, 2, 4, 3, 6


# --- a toy operator, and backends that break the contract ------------------------------------------------------------


@dispatch("toy_errors", returns={"y": Result("B T H", "x"), "last": Result("N H", ACCUMULATOR, when="output_last")})
def toy_errors(x: Float[Tensor, "B T H"], output_last: bool = False, kernel: int | None = None,
               mode: torch.dtype = torch.float32, cu_seqlens: Integer[Tensor, "N+1"] | None = None):
    return x * 2, None


@dispatch("toy_errors", returns=Result("... K", "x"))
def toy_rows_of_errors(x: Float[Tensor, "... K"], y: Float[Tensor, "... K"]):
    return x * y


class Entered(AssertionError):
    """A kernel was reached by a call that should have been refused before."""


class ToyFaulty(Backend):
    operation = "toy_errors"
    priority = 99
    saves = {"x": Saved("B T H", "x")}
    gradients = {}

    def forward(self, call):
        return (call.x * 2, None), (call.x,)

    def backward(self, call, saved, grads):
        return self.gradients


class ToyInvents(ToyFaulty):
    name, gradients = "toy_invents", {"x": None, "y": None}


class ToyForgets(ToyFaulty):
    name = "toy_forgets"


class ToyRight(ToyFaulty):
    name, gradients = "toy_right", {"x": torch.ones(B, T, H)}


class ToyNarrow(ToyFaulty):
    name = "toy_narrow"
    limits = {"dtype": (torch.bfloat16,), "H": range(4, 9), "arch": ("sm80+",)}


class ToyGated(ToyFaulty):
    name, env = "toy_gated", "FLA_TOY_ERRORS"


class Sentry(Backend):
    """Goes before every other backend, takes every call, and runs none."""

    name, priority = "toy_sentry", -1
    handles = frozenset(n for f in (facade.ops.chunk_kda, facade.ops.fused_recurrent_kda, fused_kda_gate,
                                    kda_gate_chunk_cumsum, toy_errors, toy_rows_of_errors)
                        for n in f.operator.declaration.names)

    def __init__(self, operation):
        self.operation = operation

    def forward(self, call):
        raise Entered(f"{call.function} was entered")


# --- how to provoke --------------------------------------------------------------------------------------------------


def zeros(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def offsets(*entries, dtype=torch.int64):
    return torch.tensor(entries, dtype=dtype)


def kda(batch=B, **changes):
    arguments = dict(q=zeros(batch, T, H, K), k=zeros(batch, T, H, K), v=zeros(batch, T, HV, V),
                     g=zeros(batch, T, HV, K), beta=zeros(batch, T, HV)) | changes
    return {name: value for name, value in arguments.items() if value is not ABSENT}


ABSENT = object()


def chunk(**changes):
    return lambda: facade.ops.chunk_kda(**kda(**changes))


def recurrent(**changes):
    return lambda: facade.ops.fused_recurrent_kda(**kda(**changes))


def packed(*entries, **changes):
    """chunk_kda on one row of T tokens with these boundaries."""
    return chunk(batch=1, cu_seqlens=offsets(*entries), **changes)


def gate(**changes):
    return lambda: fused_kda_gate(**dict(g=zeros(B, T, HV, K)) | changes)


def cumsum(**changes):
    return lambda: kda_gate_chunk_cumsum(**dict(g=zeros(B, T, HV, K)) | changes)


def toy(*args, **kwargs):
    return lambda: toy_errors(*args, **kwargs)


def inside(context, provoke):
    def run():
        with context():
            return provoke()

    return run


def forcing(backend, provoke=None):
    return inside(lambda: facade.use_backend(backend), provoke or toy(zeros(B, T, H)))


def with_variable(name, value, provoke):
    return inside(lambda: mock.patch.dict("os.environ", {name: value}), provoke)


def differentiating(backend):
    x = zeros(B, T, H).requires_grad_()
    return forcing(backend, lambda: toy_errors(x)[0].sum().backward())


def differentiating_twice():
    x = zeros(B, T, H).requires_grad_()
    (first,) = torch.autograd.grad(toy_errors(x)[0].sum(), x, create_graph=True)
    first.sum().backward()


def pretending_to_be_cuda(provoke):
    """On a machine with a GPU and on one without."""
    elsewhere = {"_check_devices": lambda *_: torch.device("cuda"), "architecture": lambda device: device.type}
    return inside(lambda: mock.patch.multiple(bind, **elsewhere), provoke)


@contextlib.contextmanager
def only(*names):
    """For a moment no other backend of the toy is there, no kernel tree was looked for, and nothing was told."""
    left = [b for b in registry._backends["toy_errors"] if b.name in names]
    operator = toy_errors.operator
    operator.forget()
    operator._told.clear()
    with mock.patch.dict(registry._backends, toy_errors=left), mock.patch.dict(registry._tree_refusals, toy_errors=[]):
        yield
    operator.forget()


# --- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    written_by: str  # the function of errors.py
    error: type[Exception]
    provoke: Callable[[], object]
    text: str  # whole; <backends>, <operators> stand for the lists of the moment
    warns: bool = False


TABLE = [
    # arguments
    Message("unknown_keyword", TypeError, chunk(inital_state=None),
            "chunk_kda: unknown keyword `inital_state`; did you mean `initial_state`?"),
    Message("unknown_keyword", TypeError, recurrent(chunk_sise=64),
            "fused_recurrent_kda: unknown keyword `chunk_sise`; it takes q, k, v, g, beta, A_log, dt_bias, "
            "scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, "
            "use_beta_sigmoid_in_kernel, allow_neg_eigval, lower_bound, state_v_first, cu_seqlens"),
    Message("unknown_keyword", TypeError, gate(A_logs=None),
            "fused_kda_gate: unknown keyword `A_logs`; did you mean `A_log`?"),
    Message("removed_keyword", DeprecationWarning, chunk(head_first=False),
            "chunk_kda: `head_first` has been removed: inputs are always [B, T, H, ...]; transpose them "
            "before the call"),
    Message("removed_keyword", DeprecationWarning, toy(zeros(B, T, H), head_first=True),
            "toy_errors: `head_first` has been removed: inputs are always [B, T, H, ...]; transpose them "
            "before the call"),
    Message("renamed_keyword", DeprecationWarning, forcing("reference", chunk(transpose_state_layout=True)),
            "chunk_kda: `transpose_state_layout` is the deprecated name of `state_v_first`", warns=True),
    Message("given_under_both_names", ValueError, chunk(transpose_state_layout=True, state_v_first=True),
            "chunk_kda: `transpose_state_layout` is the old name of `state_v_first`; give only "
            "`state_v_first`"),
    Message("given_twice", TypeError, lambda: facade.explain("chunk_kda", zeros(B, T, H, K), **kda()),
            "chunk_kda: `q` is given by position and by keyword"),
    Message("too_many_positional", TypeError, lambda: facade.explain(fused_kda_gate, *[None] * 6),
            "fused_kda_gate: takes 5 positional arguments, 6 were given"),
    Message("missing", TypeError, lambda: facade.explain("chunk_kda", **kda(g=ABSENT, beta=ABSENT)),
            "chunk_kda: missing `g`, `beta`"),
    Message("not_a_tensor", TypeError, chunk(v=None),
            "chunk_kda: `v` must be a tensor [B T HV V], not NoneType"),
    Message("not_a_tensor", TypeError, chunk(A_log=1.0),
            "chunk_kda: `A_log` must be a tensor [HV], not float"),
    Message("wrong_option", TypeError, chunk(scale="1"),
            "chunk_kda: `scale` must be float or None, not str '1'"),
    Message("wrong_option", TypeError, chunk(scale=True),
            "chunk_kda: `scale` must be float or None, not bool True"),
    Message("wrong_option", TypeError, chunk(output_final_state=2),
            "chunk_kda: `output_final_state` must be bool, not int 2"),
    Message("wrong_option", TypeError, chunk(chunk_size=64.0),
            "chunk_kda: `chunk_size` must be int, not float 64.0"),
    Message("wrong_option", TypeError, chunk(chunk_size=True),
            "chunk_kda: `chunk_size` must be int, not bool True"),
    Message("wrong_option", TypeError, chunk(chunk_size=None),
            "chunk_kda: `chunk_size` must be int, not NoneType None"),
    Message("wrong_option", TypeError, gate(output_dtype="float32"),
            "fused_kda_gate: `output_dtype` must be dtype, not str 'float32'"),
    Message("wrong_pair", TypeError, lambda: facade.ops.chunk_linear_attn(*[zeros(B, T, H, K)] * 3, None, (None,) * 3),
            "chunk_linear_attn: `initial_state` must be a tensor or a pair (S, z), not 3 values"),
    # shapes, dtypes, devices
    Message("outer_axes_disagree", ValueError, lambda: toy_rows_of_errors(zeros(2, 3, 4), zeros(3, 4)),
            "toy_rows_of_errors: `y` has shape [3, 4], while `x` has shape [2, 3, 4]; they must have the same axes in "
            "front"),
    Message("wrong_rank", ValueError, chunk(q=zeros(T, H, K)),
            "chunk_kda: `q` is [B, T, H, K], but a tensor of shape [5, 2, 3] was given"),
    Message("wrong_rank", ValueError, recurrent(beta=zeros(B, T)),
            "fused_recurrent_kda: `beta` is [B, T, HV] or [B, T, HV, V], but a tensor of shape [2, 5] was "
            "given"),
    Message("wrong_rank", ValueError, chunk(initial_state=zeros(HV, V, K), state_v_first=True),
            "chunk_kda: `initial_state` is [N, HV, V, K], but a tensor of shape [4, 6, 3] was given"),
    Message("wrong_rank", ValueError, chunk(batch=1, cu_seqlens=offsets(0, 5)[None]),
            "chunk_kda: `cu_seqlens` is [N+1], but a tensor of shape [1, 2] was given"),
    Message("dims_disagree", ValueError, chunk(k=zeros(B, 4, H, K)),
            "chunk_kda: `k` [B T H K] has T=4 (shape [2, 4, 2, 3]), while `q` [B T H K] has T=5 (shape [2, "
            "5, 2, 3])"),
    Message("dims_disagree", ValueError, chunk(g=zeros(B, T, H, K)),
            "chunk_kda: `g` [B T HV K] has HV=2 (shape [2, 5, 2, 3]), while `v` [B T HV V] has HV=4 (shape "
            "[2, 5, 4, 6])"),
    Message("dims_disagree", ValueError, chunk(initial_state=zeros(B, HV, V, K)),
            "chunk_kda: `initial_state` [N HV K V] has K=6 (shape [2, 4, 6, 3]), while `q` [B T H K] has "
            "K=3 (shape [2, 5, 2, 3])"),
    Message("dims_disagree", ValueError, chunk(initial_state=zeros(B, HV, K, V), state_v_first=True),
            "chunk_kda: `initial_state` [N HV V K] has V=3 (shape [2, 4, 3, 6]), while `v` [B T HV V] has "
            "V=6 (shape [2, 5, 4, 6])"),
    Message("dims_disagree", ValueError, recurrent(beta=zeros(B, T, HV, 7)),
            "fused_recurrent_kda: `beta` [B T HV V] has V=7 (shape [2, 5, 4, 7]), while `v` [B T HV V] has "
            "V=6 (shape [2, 5, 4, 6])"),
    Message("dims_disagree", ValueError, chunk(A_log=zeros(H), use_gate_in_kernel=True),
            "chunk_kda: `A_log` [HV] has HV=2 (shape [2]), while `v` [B T HV V] has HV=4 (shape [2, 5, 4, "
            "6])"),
    Message("dims_disagree", ValueError, packed(0, 5, cu_seqlens_cpu=offsets(0, 2, 5)),
            "chunk_kda: `cu_seqlens_cpu` [N+1] has N=2 (shape [3]), while `cu_seqlens` [N+1] has N=1 "
            "(shape [2])"),
    Message("wrong_product", ValueError, chunk(dt_bias=zeros(HV), A_log=zeros(HV), use_gate_in_kernel=True),
            "chunk_kda: `dt_bias` [HV*K] must have HV*K = 12 in axis 0, but a tensor of shape [4] was given"),
    Message("wrong_dtype", TypeError, chunk(g=zeros(B, T, HV, K, dtype=torch.int64)),
            "chunk_kda: `g` must be float16 or bfloat16 or float32 or float64, not int64"),
    Message("wrong_dtype", TypeError, chunk(batch=1, cu_seqlens=zeros(2)),
            "chunk_kda: `cu_seqlens` must be int32 or int64, not float32"),
    Message("dtypes_disagree", TypeError, chunk(v=zeros(B, T, HV, V, dtype=torch.float16)),
            "chunk_kda: `v` is float16 while `q` is float32; they must be the same"),
    Message("devices_disagree", ValueError, chunk(beta=zeros(B, T, HV, device="meta")),
            "chunk_kda: `beta` is on meta while `q` is on cpu; move them to one device"),
    Message("devices_disagree", ValueError, recurrent(q=zeros(B, T, H, K, device="meta")),
            "fused_recurrent_kda: `k` is on cpu while `q` is on meta; move them to one device"),
    Message("must_be_on_host", ValueError, packed(0, 5, cu_seqlens_cpu=offsets(0, 5).to("meta")),
            "chunk_kda: `cu_seqlens_cpu` is the host copy and must be on the CPU, not on meta"),
    # rules
    Message("rule_broken", NotImplementedError, chunk(cp_context="ring"),
            "chunk_kda: context parallelism is not implemented; pass cp_context=None (rule `cp_context is "
            "None`; cp_context='ring')"),
    Message("rule_broken", ValueError, chunk(q=zeros(B, T, 3, K), k=zeros(B, T, 3, K)),
            "chunk_kda: the number of value heads must be a multiple of the number of query/key heads "
            "(rule `HV % H == 0`; HV=4, H=3)"),
    Message("rule_broken", ValueError, recurrent(q=zeros(B, T, 3, K), k=zeros(B, T, 3, K)),
            "fused_recurrent_kda: the number of value heads must be a multiple of the number of query/key "
            "heads (rule `HV % H == 0`; HV=4, H=3)"),
    Message("rule_broken", ValueError, chunk(q=zeros(B, T, H, 257), k=zeros(B, T, H, 257), g=zeros(B, T, HV, 257)),
            "chunk_kda: a head has at most 256 key channels (rule `K <= 256`; K=257)"),
    Message("rule_broken", ValueError, recurrent(q=zeros(B, T, H, 257), k=zeros(B, T, H, 257), g=zeros(B, T, HV, 257)),
            "fused_recurrent_kda: a head has at most 256 key channels (rule `K <= 256`; K=257)"),
    Message("rule_broken", ValueError, chunk(chunk_size=16),
            "chunk_kda: `chunk_size` must be either 32 or 64 (rule `chunk_size in (32, 64)`; chunk_size=16)"),
    Message("rule_broken", ValueError, cumsum(chunk_size=48, lower_bound=-1.0),
            "kda_gate_chunk_cumsum: `chunk_size` must be either 32 or 64 (rule `chunk_size in (32, 64)`; "
            "chunk_size=48)"),
    Message("rule_broken", ValueError, chunk(allow_neg_eigval=True),
            "chunk_kda: `allow_neg_eigval` doubles the sigmoid of beta and needs it in the kernel: set "
            "use_beta_sigmoid_in_kernel=True (rule `use_beta_sigmoid_in_kernel`; "
            "use_beta_sigmoid_in_kernel=False)"),
    Message("rule_broken", ValueError, recurrent(allow_neg_eigval=True),
            "fused_recurrent_kda: `allow_neg_eigval` doubles the sigmoid of beta and needs it in the "
            "kernel: set use_beta_sigmoid_in_kernel=True (rule `use_beta_sigmoid_in_kernel`; "
            "use_beta_sigmoid_in_kernel=False)"),
    Message("rule_broken", ValueError, chunk(use_gate_in_kernel=True),
            "chunk_kda: the gate in the kernel needs `A_log` or `lower_bound` (rule `A_log is not None or "
            "lower_bound is not None`; A_log=None, lower_bound=None)"),
    Message("rule_broken", ValueError, recurrent(use_gate_in_kernel=True),
            "fused_recurrent_kda: the gate in the kernel needs `A_log` or `lower_bound` (rule `A_log is "
            "not None or lower_bound is not None`; A_log=None, lower_bound=None)"),
    Message("rule_broken", ValueError, chunk(A_log=zeros(HV)),
            "chunk_kda: `A_log` and `dt_bias` belong to the gate in the kernel: set "
            "use_gate_in_kernel=True (rule `use_gate_in_kernel or A_log is None and dt_bias is None`; "
            "use_gate_in_kernel=False, A_log='given', dt_bias=None)"),
    Message("rule_broken", ValueError, recurrent(dt_bias=zeros(HV * K)),
            "fused_recurrent_kda: `A_log` and `dt_bias` belong to the gate in the kernel: set "
            "use_gate_in_kernel=True (rule `use_gate_in_kernel or A_log is None and dt_bias is None`; "
            "use_gate_in_kernel=False, A_log=None, dt_bias='given')"),
    Message("rule_broken", ValueError, chunk(safe_gate=True, use_gate_in_kernel=True, A_log=zeros(HV), lower_bound=-6),
            "chunk_kda: `safe_gate` with the gate in the kernel needs `lower_bound` in [-5, 0) (rule `not "
            "use_gate_in_kernel or lower_bound is not None and -5 <= lower_bound < 0`; "
            "use_gate_in_kernel=True, lower_bound=-6.0)"),
    Message("rule_broken", ValueError, chunk(return_intermediate_states=True),
            "chunk_kda: `return_intermediate_states` works under torch.inference_mode() only (rule "
            "`inference`; inference=False)"),
    Message("rule_broken", ValueError,
            inside(torch.inference_mode, chunk(return_intermediate_states=True, disable_recompute=True)),
            "chunk_kda: `return_intermediate_states` and `disable_recompute` exclude each other (rule `not "
            "disable_recompute`; disable_recompute=True)"),
    Message("rule_broken", ValueError, chunk(use_graph=True),
            "chunk_kda: `use_graph` fixes the shape of packed input and needs `cu_seqlens` (rule "
            "`cu_seqlens is not None`; cu_seqlens=None)"),
    Message("rule_broken", ValueError, packed(0, 5, max_num_seqs=1),
            "chunk_kda: `max_num_seqs` belongs to graph mode: set use_graph=True (rule `use_graph`; "
            "use_graph=False)"),
    Message("rule_broken", ValueError, packed(0, 2, 5, use_graph=True, max_num_seqs=3),
            "chunk_kda: in graph mode `cu_seqlens` must be padded with empty sequences to max_num_seqs + 1 "
            "entries (rule `N == max_num_seqs`; N=2, max_num_seqs=3)"),
    Message("rule_broken", ValueError, gate(),
            "fused_kda_gate: the gate needs `A_log` or `lower_bound` (rule `A_log is not None or "
            "lower_bound is not None`; A_log=None, lower_bound=None)"),
    Message("rule_broken", ValueError, cumsum(),
            "kda_gate_chunk_cumsum: the gate needs `A_log` or `lower_bound` (rule `A_log is not None or "
            "lower_bound is not None`; A_log=None, lower_bound=None)"),
    # packed sequences
    Message("packed_batch", ValueError, chunk(cu_seqlens=offsets(0, 5)),
            "chunk_kda: the batch size must be 1 with `cu_seqlens`, not 2; flatten the inputs to one row "
            "of tokens first (x.reshape(1, -1, *x.shape[2:]))"),
    Message("packed_batch", ValueError, recurrent(cu_seqlens=offsets(0, 5)),
            "fused_recurrent_kda: the batch size must be 1 with `cu_seqlens`, not 2; flatten the inputs to "
            "one row of tokens first (x.reshape(1, -1, *x.shape[2:]))"),
    Message("wrong_state_count", ValueError, chunk(initial_state=zeros(3, HV, K, V)),
            "chunk_kda: `initial_state` holds 3 initial states, but the batch holds 2 sequences"),
    Message("wrong_state_count", ValueError, packed(0, 2, 5, initial_state=zeros(1, HV, K, V)),
            "chunk_kda: `initial_state` holds 1 initial states, but `cu_seqlens` describes 2 sequences"),
    Message("wrong_state_count", ValueError, recurrent(initial_state=zeros(1, HV, K, V)),
            "fused_recurrent_kda: `initial_state` holds 1 initial states, but the batch holds 2 sequences"),
    Message("empty_cu_seqlens", ValueError, packed(),
            "chunk_kda: `cu_seqlens` is empty; it needs at least the entry 0"),
    Message("cu_seqlens_start", ValueError, packed(1, 5),
            "chunk_kda: `cu_seqlens` must start at 0, not at 1"),
    Message("cu_seqlens_start", ValueError, toy(zeros(1, T, H), cu_seqlens=offsets(-1, 5, dtype=torch.int32)),
            "toy_errors: `cu_seqlens` must start at 0, not at -1"),
    Message("cu_seqlens_order", ValueError, packed(0, 4, 3, 5),
            "chunk_kda: `cu_seqlens` must not decrease: entry 2 is 3, the one before is 4"),
    Message("cu_seqlens_end", ValueError, packed(0, 2, 6),
            "chunk_kda: `cu_seqlens` ends at 6, past the T=5 tokens given"),
    Message("cu_seqlens_end", ValueError, recurrent(batch=1, cu_seqlens=offsets(0, 6)),
            "fused_recurrent_kda: `cu_seqlens` ends at 6, past the T=5 tokens given"),
    Message("cu_seqlens_end", ValueError,
            lambda: facade.ops.chunk_kda(**{n: x.to("meta") for n, x in kda(batch=1).items()}, cu_seqlens=offsets(0,
                5).to("meta"), cu_seqlens_cpu=offsets(0, 7)),
            "chunk_kda: `cu_seqlens_cpu` ends at 7, past the T=5 tokens given"),
    Message("host_copy_alone", ValueError, chunk(batch=1, cu_seqlens_cpu=offsets(0, 5)),
            "chunk_kda: `cu_seqlens_cpu` is a host copy of `cu_seqlens` and needs it"),
    Message("host_copy_alone", ValueError, chunk(batch=1, cu_seqlens_cpu=offsets(0, 2, 5)),
            "chunk_kda: `cu_seqlens_cpu` is a host copy of `cu_seqlens` and needs it"),
    Message("host_copy_differs", ValueError, packed(0, 2, 5, cu_seqlens_cpu=offsets(0, 3, 5)),
            "chunk_kda: `cu_seqlens_cpu` and `cu_seqlens` hold different values"),
    # choosing
    Message("forced_refusal", BackendRefused, forcing("toy_narrow", toy(zeros(B, T, H), kernel=7)),
            'toy_errors: backend `toy_narrow` was forced by use_backend("toy_narrow") and refuses:\n'
            "  - dtype=torch.float32 (takes torch.bfloat16); H=2 (takes 4 to 8); arch=cpu (takes sm80+); "
            "option kernel=7 is not implemented"),
    Message("forced_refusal", BackendRefused,
            with_variable("FLA_TOY_ERRORS", "0", with_variable("FLA_BACKEND", "toy_gated", toy(zeros(B, T, H)))),
            "toy_errors: backend `toy_gated` was forced by FLA_BACKEND=toy_gated and refuses:\n"
            "  - FLA_TOY_ERRORS=0"),
    Message("forced_refusal", BackendRefused, forcing("toy_right", gate(lower_bound=-1.0)),
            'fused_kda_gate: backend `toy_right` was forced by use_backend("toy_right") and refuses:\n'
            "  - it does not have fused_kda_gate"),
    Message("unknown_backend", ValueError, forcing("fastest", chunk()),
            'chunk_kda: use_backend("fastest") asks for `fastest`, which no one registered; known: '
            "<backends>"),
    Message("unknown_operator", ValueError, lambda: facade.explain("chunk_kad"),
            "no operator is called `chunk_kad`; did you mean `chunk_kda`?"),
    Message("unknown_operator", ValueError, lambda: facade.explain("quicksort"),
            "no operator is called `quicksort`; declared: <operators>"),
    Message("wrong_gate", ValueError,
            with_variable("FLA_TOY_ERRORS", "yes", inside(lambda: only("toy_gated"), toy(zeros(B, T, H)))),
            "FLA_TOY_ERRORS must be 0 or 1, not 'yes'"),
    Message("wrong_gate", ValueError, with_variable("FLA_DISABLE_BACKEND_DISPATCH", "true", chunk()),
            "FLA_DISABLE_BACKEND_DISPATCH must be 0 or 1, not 'true'"),
    Message("fallback_on_accelerator", UserWarning,
            pretending_to_be_cuda(inside(lambda: only("toy_narrow"), toy(zeros(B, T, H)))),
            "toy_errors runs its PyTorch fallback on cuda, which is slow; the backends refused:\n"
            "  - toy_narrow: dtype=torch.float32 (takes torch.bfloat16); H=2 (takes 4 to 8); arch=cuda "
            "(takes sm80+)\n"
            "facade.explain(toy_errors, ...) shows the same for any call", warns=True),
    Message("fallback_on_accelerator", UserWarning, pretending_to_be_cuda(inside(only, toy(zeros(B, T, H)))),
            "toy_errors runs its PyTorch fallback on cuda, which is slow; the backends refused:\n"
            "  - no backend is registered\n"
            "facade.explain(toy_errors, ...) shows the same for any call", warns=True),
    Message("wrong_registration", TypeError, lambda: fla_dispatch.register(3),
            "fla_dispatch.register: 3 is not a Backend"),
    Message("wrong_registration", TypeError, lambda: fla_dispatch.register(Backend),
            "fla_dispatch.register: Backend.name must be a string"),
    # differentiating
    Message("double_backward", RuntimeError, forcing("toy_right", differentiating_twice),
            "toy_errors has no second derivative: its backward pass is a fixed computation that autograd "
            "cannot differentiate. Drop create_graph=True for this operator, or differentiate "
            "facade.reference's recurrent form"),
    Message("unknown_gradients", RuntimeError, differentiating("toy_invents"),
            "toy_errors: backend `toy_invents` returned gradients of ['y'], which are not inputs"),
    Message("missing_gradients", RuntimeError, differentiating("toy_forgets"),
            "toy_errors: backend `toy_forgets` returned no gradient of ['x']"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _backends(register):
    register(ToyInvents, ToyForgets, ToyRight, ToyNarrow, ToyGated, Sentry("toy_errors"), Sentry("kda"))


def _name(message):
    return f"{message.written_by}-{TABLE.index(message)}"


@pytest.mark.parametrize("message", TABLE, ids=_name)
def test_message(message, monkeypatch):
    """The right function writes it, it is raised as the right type, and no backend was entered before."""
    written = []
    author = getattr(errors, message.written_by)
    monkeypatch.setattr(errors, message.written_by, lambda *a, **k: written.append(author(*a, **k)) or written[-1])
    text = message.text.replace("<backends>", ", ".join(registry.known_names()))
    text = text.replace("<operators>", ", ".join(fla_dispatch.operators()))
    whole = f"^{re.escape(text)}$"
    if message.warns:
        with pytest.warns(message.error, match=whole):
            message.provoke()
        assert written == [text]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(message.error, match=whole) as raised:
                message.provoke()
        assert written == [raised.value] and type(raised.value) is message.error


def test_table_holds_every_message():
    """Every public function of errors.py but ``warn``, which only says where."""
    public = {name for name, member in vars(errors).items() if inspect.isfunction(member) and not name.startswith("_")}
    assert public - {"warn"} == {message.written_by for message in TABLE}


def test_what_the_interpreter_says_itself():
    """Missing, repeated and surplus arguments of a public function are refused by Python before dispatch is asked."""
    q = zeros(B, T, H, K)
    for text, provoke in {
        r"chunk_kda\(\) missing 4 required positional arguments: 'k', 'v', 'g', and 'beta'":
            lambda: facade.ops.chunk_kda(q),
        r"chunk_kda\(\) got multiple values for argument 'q'": lambda: facade.ops.chunk_kda(q, **kda()),
        r"chunk_kda\(\) takes from 5 to 22 positional arguments but 23 were given":
            lambda: facade.ops.chunk_kda(*[q] * 23),
    }.items():
        with pytest.raises(TypeError, match=text):
            provoke()


def test_warnings_point_at_the_caller():
    """A warning that names another file than the caller's is not shown by default, or not understood."""
    with pytest.warns(DeprecationWarning, match="deprecated name") as renamed, facade.use_backend("reference"):
        facade.ops.chunk_kda(**kda(), transpose_state_layout=True)
    with pytest.warns(UserWarning, match="PyTorch fallback on cuda") as fallback:
        pretending_to_be_cuda(inside(only, toy(zeros(B, T, H))))()
    assert [w.filename for w in (*renamed, *fallback)] == [__file__] * 2
