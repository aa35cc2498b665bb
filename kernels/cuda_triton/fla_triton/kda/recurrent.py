"""``fused_recurrent_kda``: token by token; gradients come from the chunk form, which is the same function."""

from operator import itemgetter

import torch

from fla_triton.backend import TritonBackend
from fla_triton.config import Problem
from fla_triton.engine import TOKEN_STEP, gate_form, width
from fla_triton.kda.chunk import INPUTS, OPTIONS, backward_pass
from fla_triton.launch import address, current_stream, received, remembered


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
        return backward_pass(call.plan, grads.get("final_state") is not None)(call, grads)


@remembered
def steps(plan) -> "Steps":
    return Steps(plan)


class Steps:
    def __init__(self, plan):
        facts, options = plan.facts, plan.facts.options
        self.inputs = itemgetter(*(plan.index[name] for name in INPUTS))
        self.device, self.dtype = facts.device, facts.dtype
        K, V, self.H, self.HV = (facts.dims[letter] for letter in ("K", "V", "H", "HV"))
        self.scale = K**-0.5 if options["scale"] is None else float(options["scale"])
        self.lower_bound = float(options["lower_bound"] or 0)
        self.final, v_first = options["output_final_state"], options["state_v_first"]
        self.state = (self.HV, V, K) if v_first else (self.HV, K, V)
        beta_max = (2 if options["allow_neg_eigval"] else 1) if options["use_beta_sigmoid_in_kernel"] else 0
        *inputs, cu_seqlens = (facts.tensors[name].dtype if name in facts.tensors else None for name in INPUTS)
        self.step = TOKEN_STEP.launch(
            facts.device, Problem(K, V, 32),
            (*inputs, torch.float32 if self.final else None, facts.dtype, cu_seqlens),
            K=K, V=V, NORM=options["use_qk_l2norm_in_kernel"],
            GATE=gate_form(options["use_gate_in_kernel"], options["lower_bound"]), BETA_MAX=beta_max,
            BETA_WIDE=len(facts.tensors["beta"].shape) == 4, V_FIRST=v_first, WIDTH=width(K),
        )  # fmt: skip

    def __call__(self, call):
        given, (*inputs, boundaries) = received(self.inputs(call.values))
        v, S0, cu_seqlens = given[2], given[7], given[8]
        N, T, *_ = v.shape
        programs = N
        if cu_seqlens is not None:
            programs = cu_seqlens.shape[0]
            N = programs - 1
        o, S = torch.empty_like(v, dtype=self.dtype), None
        if self.final and S0 is not None:
            S = torch.empty_like(S0, dtype=torch.float32)
        elif self.final:
            S = torch.empty((N, *self.state), dtype=torch.float32, device=self.device)
        self.step(
            programs * self.HV, current_stream(self.device), *inputs, address(S), address(o), boundaries, T, self.H,
            self.HV, N, self.scale, self.lower_bound,
        )  # fmt: skip
        return o, S
