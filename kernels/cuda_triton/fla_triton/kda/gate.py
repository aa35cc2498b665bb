"""The gate of KDA by itself, and its sums inside chunks."""

from operator import itemgetter

import torch

from fla_triton.backend import TritonBackend
from fla_triton.config import Problem
from fla_triton.engine import GATE, GATE_BACKWARD, Places, gate_form, table_launch
from fla_triton.launch import Workspace, address, addresses, compile_together, current_stream, received, remembered

OPTIONS = frozenset({"A_log", "dt_bias", "lower_bound", "output_dtype"})
INPUTS = ("g", "A_log", "dt_bias")


class Gate(TritonBackend):
    operation = "kda"
    functions = ("fused_kda_gate",)
    handles = OPTIONS

    def forward(self, call):
        return (gate_pass(call.plan).forward(call, None, 1.0),), ()

    def backward(self, call, saved, grads):
        return gate_pass(call.plan).backward(call, grads["result"], None, 1.0)


class GateSums(TritonBackend):
    operation = "kda"
    functions = ("kda_gate_chunk_cumsum",)
    handles = OPTIONS | {"chunk_size", "scale", "cu_seqlens"}

    def forward(self, call):
        return (gate_pass(call.plan).forward(call, call.cu_seqlens, factor(call)),), ()

    def backward(self, call, saved, grads):
        return gate_pass(call.plan).backward(call, grads["result"], call.cu_seqlens, factor(call))


def factor(call) -> float:
    return 1.0 if call.scale is None else float(call.scale)


@remembered
def gate_pass(plan) -> "GatePass":
    return GatePass(plan)


class GatePass:
    def __init__(self, plan):
        facts, options = plan.facts, plan.facts.options
        self.inputs = itemgetter(*(plan.index[name] for name in INPUTS))
        self.dtypes = {name: x.dtype for name, x in facts.tensors.items()}
        self.device, self.K, self.C = facts.device, facts.dims["K"], options.get("chunk_size", 64)
        self.lower_bound = float(options["lower_bound"] or 0)
        self.dtype, self.gate = options["output_dtype"], gate_form(True, options["lower_bound"])
        self.packed = facts.packed
        problem = Problem(self.K, self.K, 32, self.C)
        self.table = table_launch(self.device, problem, self.dtypes["cu_seqlens"]) if self.packed else None
        tables, inputs = torch.int32 if self.packed else None, tuple(map(self.dtypes.get, INPUTS))
        sums = facts.function == "kda_gate_chunk_cumsum"
        self.forward_gate = GATE.launch(
            self.device, problem, (*inputs, self.dtype, tables), K=self.K, C=self.C, PACKED=self.packed, GATE=self.gate,
            SUM=sums,
        )  # fmt: skip
        self.gradients = GateGradients(self, problem, self.dtype, self.lower_bound, sums)

    def tabulated(self, shape, cu_seqlens, T: int, launches):
        """Where the chunks lie, where kernels go, what holds the tables, and the table of chunks."""
        places = Places(shape[0], T, self.C, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        kept, (boundaries,) = received((cu_seqlens,))
        to = current_stream(self.device)
        compile_together((self.table, *launches))
        memory, (chunks, sequences) = Workspace(self.device, places.tables()).allocate()
        places.tabulate(self.table, to, boundaries, chunks, sequences, T)
        return places, to, (memory, kept), chunks

    def forward(self, call, cu_seqlens, scale):
        given, inputs = received(self.inputs(call.values))
        shape = given[0].shape
        _, T, HV, _ = shape
        places, to, _kept, chunks = self.tabulated(shape, cu_seqlens, T, (self.forward_gate,))
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.forward_gate(
            places.slots * HV, to, *inputs, address(out), chunks, T, places.NT, HV, self.lower_bound, scale
        )
        return out

    def backward(self, call, d, cu_seqlens, scale):
        (*given, d), _ = received((*self.inputs(call.values), d))
        shape = given[0].shape
        places, to, _kept, chunks = self.tabulated(shape, cu_seqlens, shape[1], self.gradients.launches)
        return self.gradients(places, to, *given, chunks, d, shape[1], scale)


class GateGradients:
    """Gradients of g, A_log and dt_bias, given that of the gate or its sums."""

    def __init__(self, of, problem, dtype, lower_bound: float, sums: bool = False):
        """``of``: the pass whose device, dtypes, K, C, packed and gate these are; ``dtype``: of what is given."""
        g, A_log, dt_bias = (of.dtypes.get(name) for name in INPUTS)
        self.device, self.lower_bound = of.device, lower_bound
        sizes = A_log and torch.float32, dt_bias and torch.float32
        self.launch = GATE_BACKWARD.launch(
            of.device, problem, (dtype, g, A_log, dt_bias, g, *sizes, torch.int32 if of.packed else None),
            K=of.K, C=of.C, PACKED=of.packed, GATE=of.gate, SUM=sums,
        )  # fmt: skip
        self.launches = (self.launch,)

    def __call__(self, places, to, g, A_log, dt_bias, chunks, d, T: int, scale: float = 1.0) -> dict:
        HV, K = g.shape[2:]
        dg = torch.empty_like(g)
        dA_log, ddt_bias = (
            None if x is None else torch.empty((places.slots, HV, *more), dtype=torch.float32, device=self.device)
            for x, more in ((A_log, ()), (dt_bias, (K,)))
        )
        self.launch(
            places.slots * HV, to, *addresses((d, g, A_log, dt_bias, dg, dA_log, ddt_bias)), chunks, T, places.NT, HV,
            self.lower_bound, scale,
        )  # fmt: skip
        gradients = {"g": dg}
        if dA_log is not None:
            gradients["A_log"] = dA_log.sum(0)
        if ddt_bias is not None:
            gradients["dt_bias"] = ddt_bias.sum(0).flatten()
        return gradients
