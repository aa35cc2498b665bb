"""``fused_recurrent_kda``: token by token; gradients come from the chunk form, which is the same function."""

import functools

import torch

from fla_triton.backend import TritonBackend
from fla_triton.config import Problem
from fla_triton.engine import TOKEN_STEP, gate_form, width
from fla_triton.kda.chunk import OPTIONS, delta_pass


class Recurrent(TritonBackend):
    operation = "kda"
    functions = ("fused_recurrent_kda",)
    handles = OPTIONS

    def also_refuses(self, facts):
        if facts.needs_grad and len(facts.tensors["beta"].shape) == 4:
            yield "gradients with a beta per value channel are not implemented"

    def forward(self, call):
        return steps(call.plan)(call), ()

    def backward(self, call, saved, grads):
        return delta_pass(call.plan).backward(call, grads)


@functools.lru_cache(maxsize=1024)
def steps(plan) -> "Steps":
    return Steps(plan.facts)


class Steps:
    def __init__(self, facts):
        options = facts.options
        self.K, self.V = facts.dims["K"], facts.dims["V"]
        self.scale = self.K**-0.5 if options["scale"] is None else float(options["scale"])
        self.lower_bound = float(options["lower_bound"] or 0)
        self.final, self.v_first = options["output_final_state"], options["state_v_first"]
        beta_max = (2 if options["allow_neg_eigval"] else 1) if options["use_beta_sigmoid_in_kernel"] else 0
        self.step = TOKEN_STEP.launch(
            Problem(self.K, self.V, 32), K=self.K, V=self.V, NORM=options["use_qk_l2norm_in_kernel"],
            GATE=gate_form(options["use_gate_in_kernel"], options["lower_bound"]), BETA_MAX=beta_max,
            BETA_WIDE=len(facts.tensors["beta"].shape) == 4, V_FIRST=self.v_first, WIDTH=width(self.K),
        )  # fmt: skip

    def __call__(self, call):
        q, v, cu_seqlens = call.q, call.v, call.cu_seqlens
        B, T, H, K = q.shape
        HV, V = v.shape[2:]
        N = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        o = torch.empty(v.shape, dtype=q.dtype, device=q.device)
        S = None
        if self.final:
            S = torch.empty((N, HV, V, K) if self.v_first else (N, HV, K, V), dtype=torch.float32, device=q.device)
        self.step(
            (N if cu_seqlens is None else N + 1) * HV, q, call.k, v, call.g, call.beta, call.A_log, call.dt_bias,
            call.initial_state, S, o, cu_seqlens, T, H, HV, N, self.scale, self.lower_bound,
        )  # fmt: skip
        return o, S
