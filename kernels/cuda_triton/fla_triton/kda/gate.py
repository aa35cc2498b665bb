"""The gate of KDA by itself, and its sums inside chunks."""

import functools

import torch

from fla_triton.backend import TritonBackend
from fla_triton.config import Problem
from fla_triton.engine import CHUNK_TABLE, GATE, GATE_BACKWARD, Places, gate_form
from fla_triton.kda.chunk import gate_gradients

OPTIONS = frozenset({"A_log", "dt_bias", "lower_bound", "output_dtype"})


class Gate(TritonBackend):
    operation = "kda"
    functions = ("fused_kda_gate",)
    handles = OPTIONS

    def forward(self, call):
        launches = gate_launches(call.plan)
        return (launches.forward(call, None, 1.0),), ()

    def backward(self, call, saved, grads):
        return gate_launches(call.plan).backward(call, grads["result"], None, 1.0)


class GateSums(TritonBackend):
    operation = "kda"
    functions = ("kda_gate_chunk_cumsum",)
    handles = OPTIONS | {"chunk_size", "scale", "cu_seqlens"}

    def forward(self, call):
        launches = gate_launches(call.plan)
        return (launches.forward(call, call.cu_seqlens, factor(call)),), ()

    def backward(self, call, saved, grads):
        return gate_launches(call.plan).backward(call, grads["result"], call.cu_seqlens, factor(call))


def factor(call) -> float:
    return 1.0 if call.scale is None else float(call.scale)


@functools.lru_cache(maxsize=1024)
def gate_launches(plan) -> "GateLaunches":
    return GateLaunches(plan.facts)


class GateLaunches:
    def __init__(self, facts):
        options, K = facts.options, facts.dims["K"]
        self.C = options.get("chunk_size", 64)
        self.lower_bound = float(options["lower_bound"] or 0)
        self.dtype = options["output_dtype"]
        constants = dict(
            K=K, C=self.C, PACKED=facts.packed, GATE=gate_form(True, options["lower_bound"]),
            SUM=facts.function == "kda_gate_chunk_cumsum",
        )  # fmt: skip
        problem = Problem(K, K, 32, self.C)
        self.table = CHUNK_TABLE.launch(problem, C=self.C, BLOCK=64)
        self.gate = GATE.launch(problem, **constants)
        self.gate_backward = GATE_BACKWARD.launch(problem, **constants)

    def forward(self, call, cu_seqlens, scale):
        B, T, HV, _ = call.g.shape
        places = Places(self.table, B, T, HV, self.C, cu_seqlens)
        out = torch.empty(call.g.shape, dtype=self.dtype, device=call.g.device)
        self.gate(
            places.slots * HV, call.g, call.A_log, call.dt_bias, out, places.chunks, T, places.NT, HV,
            self.lower_bound, scale,
        )  # fmt: skip
        return out

    def backward(self, call, d, cu_seqlens, scale):
        B, T, HV, _ = call.g.shape
        places = Places(self.table, B, T, HV, self.C, cu_seqlens)
        return gate_gradients(self.gate_backward, places, call, d, self.lower_bound, scale)
