"""``chunk_kda``: prepare the chunks, walk the states through them; and back."""

from dataclasses import replace
from operator import itemgetter

import torch

from fla_triton.backend import TritonBackend
from fla_triton.config import Problem
from fla_triton.engine import (
    DECAY_GRADIENTS,
    MERGE_SEGMENTS,
    PREPARE,
    PRODUCT_GRADIENTS,
    STATE_GRADIENT,
    STATE_SCAN,
    STATE_SCAN_BACKWARD,
    SUM_HEADS,
    Arithmetic,
    Places,
    gate_form,
    may_split,
    parts,
    splits,
    table_launch,
    tensor_float,
    width,
)
from fla_triton.kda.gate import GateGradients
from fla_triton.launch import Workspace, addresses, compile_together, current_stream, received, remembered

OPTIONS = frozenset({
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "state_v_first", "cu_seqlens", "A_log", "dt_bias",
})  # fmt: skip
INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens")
SIZES = 64  # of calls whose layout is remembered per plan
ROWS = 64  # tokens of a program that adds up heads
FP32, INT32 = torch.float32, torch.int32


class Chunk(TritonBackend):
    operation = "kda"
    functions = ("chunk_kda",)
    handles = OPTIONS | {
        "safe_gate", "disable_recompute", "return_intermediate_states", "cu_seqlens_cpu", "use_graph", "max_num_seqs",
        "chunk_size",
    }  # fmt: skip

    def forward(self, call):
        return forward_pass(call.plan)(call), ()

    def backward(self, call, saved, grads):
        return backward_pass(call.plan, grads.get("final_state") is not None)(call, grads)


@remembered
def forward_pass(plan) -> "Forward":
    """What all forward calls of a plan share; a plan fixes every dtype, option and presence of a tensor."""
    return Forward(plan)


@remembered
def backward_pass(plan, closing: bool) -> "Backward":
    """Likewise backward; ``closing``: there is a gradient of the final state."""
    return Backward(plan, closing)


class Size:
    """What depends on a call's numbers of tokens and sequences: where chunks lie, and the workspace."""

    __slots__ = ("later", "places", "workspace")


class Pass:
    """What forward and backward of a delta rule with per-key gates, in chunks of C tokens, have in common.

    Gates that are neither computed here nor vouched for by safe_gate may be above 0: a state that grows amplifies the
    rounding of everything it is made of, so such calls multiply fp32 numbers.
    """

    def __init__(self, plan):
        facts, options = plan.facts, plan.facts.options
        self.device, self.packed = facts.device, facts.packed
        self.inputs = itemgetter(*(plan.index[name] for name in INPUTS))
        self.dtypes = {name: facts.tensors[name].dtype if name in facts.tensors else None for name in INPUTS}
        self.K, self.V, self.H, self.HV = (facts.dims[letter] for letter in ("K", "V", "H", "HV"))
        self.C = options.get("chunk_size", 64)
        # The gradients of fused_recurrent_kda belong to a forward without rounding, so they have none either.
        decaying = facts.function == "chunk_kda" and (options["use_gate_in_kernel"] or options["safe_gate"])
        norm = options["use_qk_l2norm_in_kernel"]
        self.arithmetic = Arithmetic(facts.dtype if decaying else FP32, norm)
        self.scale = self.K**-0.5 if options["scale"] is None else float(options["scale"])
        self.lower_bound = float(options["lower_bound"] or 0)
        self.v_first = options["state_v_first"]
        self.state = (self.V, self.K) if self.v_first else (self.K, self.V)
        self.gate = gate_form(options["use_gate_in_kernel"], options["lower_bound"])
        self.beta_max = (2 if options["allow_neg_eigval"] else 1) if options["use_beta_sigmoid_in_kernel"] else 0
        self.problem = Problem(self.K, self.V, self.arithmetic.bits, self.C)
        products = dict(C=self.C, PACKED=self.packed, PRECISION=self.arithmetic.precision)
        decays = dict(
            **products, K=self.K, FRESH=self.dtypes["initial_state"] is None, NORM=norm, GATE=self.gate,
            PARTS=parts(self.dtypes["g"], bool(self.gate)),
        )  # fmt: skip
        scan = dict(**products, K=self.K, V=self.V, WIDTH=width(self.K), V_FIRST=self.v_first)
        self.products, self.decays, self.scanning = products, decays, scan
        self.tables = INT32 if self.packed else None
        self.few = not self.packed and may_split(self.HV)
        self.sizes: dict[tuple, Size] = {}
        self.begun = False
        self.table = table_launch(self.device, self.problem, self.dtypes["cu_seqlens"]) if self.packed else None
        inputs = tuple(self.dtypes[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias"))
        dtype = self.arithmetic.dtype
        self.prepare, self.prepare_any = (
            self.launch(
                PREPARE, (*inputs, dtype, dtype, dtype, FP32, FP32, dtype, dtype, INT32, self.tables),
                **decays, BETA_MAX=self.beta_max, ANY=any_gate, SOLVE=self.arithmetic.solve,
            )
            for any_gate in (False, True)
        )  # fmt: skip
        # Of a sequence in segments: what each makes of an empty state and of a given one, and from one to the next.
        self.scan_ends = self.scan(EACH=True, S=FP32, S0=None)
        self.scan_maps = self.scan(
            replace(self.problem, V=self.K), V=self.K, V_FIRST=False, IDENTITY=True, EACH=True, v=None, S=FP32, S0=None
        )
        self.merge = self.merging(False, self.dtypes["initial_state"])

    def launch(self, kernel, dtypes, problem=None, **constants):
        return kernel.launch(self.device, problem or self.problem, dtypes, **constants)

    def scan(self, problem=None, *, S0, S=None, o=None, h=None, s=None, H_V_FIRST=True, **constants):
        """``state_scan`` with these results."""
        dtype = self.arithmetic.dtype
        v = constants.pop("v", self.dtypes["v"])
        reads = dtype if o is not None else None
        constants = {**self.scanning, "IDENTITY": False, "EACH": False, "H_V_FIRST": H_V_FIRST, **constants}
        walked = reads, dtype, dtype, v, FP32, FP32, dtype if o is not None else None, dtype
        return self.launch(STATE_SCAN, (*walked, S0, S, o, h, s, self.tables), problem, **constants)

    def merging(self, reverse: bool, given):
        return self.launch(
            MERGE_SEGMENTS, (FP32, FP32, given, FP32), K=self.K, V=self.V, V_FIRST=self.v_first, REVERSE=reverse,
            PRECISION=tensor_float(21),
        )  # fmt: skip

    # --- sizes ---

    def size(self, B: int, T: int, cu_seqlens) -> Size:
        N = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        key = B, T, N, N is None and splits(B, T, self.HV)
        found = self.sizes.get(key)
        if found is None:
            if len(self.sizes) >= SIZES:
                self.sizes.clear()
            found = self.sizes[key] = self.measure(*key)
        return found

    def measure(self, B, T, N, split) -> Size:
        size, HV, K, C, dtype = Size(), self.HV, self.K, self.C, self.arithmetic.dtype
        size.places = places = Places(B, T, C, N, split)
        rows, pairs = ((B, T, HV, K), dtype), ((B, T, HV, C), dtype)
        states = ((places.walks, HV, *self.state), FP32) if split else None
        size.workspace = Workspace(self.device, (
            rows, rows, rows, ((B, T, HV), FP32), ((places.slots, HV, K), FP32), pairs, pairs,
            ((places.slots, HV, 2), INT32), *places.tables(), states, states,
            ((places.walks, HV, K, K), FP32) if split else None, *self.more(states),
        ))  # fmt: skip
        size.later = self.measure_later(B, T, places)
        return size

    def more(self, states) -> tuple:
        """Further pieces of the workspace."""
        return ()

    def measure_later(self, B, T, places) -> Workspace | None:
        """A workspace that is given back before the call ends."""
        return None

    # --- stages ---

    def begin(self, launches) -> None:
        """Compile side by side what the first call needs, and what longer ones will."""
        self.begun = True
        segments = (self.scan_ends, self.scan_maps, self.merge) if self.few else ()
        compile_together((self.table, self.prepare, self.prepare_any, *segments, *launches))

    def prepare_chunks(self, places, to, inputs, room, T) -> None:
        """Everything that a chunk is by itself."""
        q, k, _, g, beta, A_log, dt_bias, _, cu_seqlens = inputs
        reads, read_keys, write_keys, steps, total, A, P, reach, chunks, sequences, *_ = room
        places.tabulate(self.table, to, cu_seqlens, chunks, sequences, T)
        for prepare in (self.prepare, self.prepare_any):
            prepare(
                places.slots * self.HV, to, q, k, g, beta, A_log, dt_bias, reads, read_keys, write_keys, steps, total,
                A, P, reach, chunks, T, places.NT, self.H, self.HV, self.scale, self.lower_bound,
            )  # fmt: skip

    def segment_states(self, places, to, inputs, room, T):
        """The state before each segment, or the call's own where nothing is split."""
        _, _, v, *_, S0, _ = inputs
        if places.segments == 1:
            return S0
        _, read_keys, write_keys, steps, total, _, P, _, _, sequences, ends, starts, maps, *_ = room
        HV, walks = self.HV, places.walks
        where = sequences, T, places.NT, places.span, places.segments, HV, walks
        walked = steps, total, None, P
        self.scan_ends(walks * HV, to, None, read_keys, write_keys, v, *walked, None, ends, None, None, None, *where)
        self.scan_maps(walks * HV, to, None, read_keys, write_keys, None, *walked, None, maps, None, None, None, *where)
        self.merge(places.N * HV, to, maps, ends, S0, starts, places.segments, HV)
        return starts


class Forward(Pass):
    def __init__(self, plan):
        super().__init__(plan)
        options = plan.facts.options
        self.final, self.starts = options["output_final_state"], options.get("return_intermediate_states", False)
        results = dict(
            S=FP32 if self.final else None, o=self.dtypes["q"], h=self.dtypes["k"] if self.starts else None,
            H_V_FIRST=self.v_first,
        )  # fmt: skip
        self.scans = tuple(self.scan(S0=S0, **results) for S0 in (self.dtypes["initial_state"], FP32))

    def __call__(self, call) -> tuple:
        given, inputs = received(self.inputs(call.values))
        v, HV = given[2], self.HV
        B, T, *_ = v.shape
        size = self.size(B, T, given[-1])
        places = size.places
        to = current_stream(self.device)
        if not self.begun:
            self.begin(self.scans[: 1 + self.few])
        o = torch.empty_like(v, dtype=self.dtypes["q"])
        S = h = None
        if self.final:
            S = torch.empty((places.N, HV, *self.state), dtype=FP32, device=self.device)
        if self.starts:
            h = torch.empty((B, call.dims["NT"], HV, *self.state), dtype=self.dtypes["k"], device=self.device)
        _memory, room = size.workspace.allocate()
        self.prepare_chunks(places, to, inputs, room, T)
        S0 = self.segment_states(places, to, inputs, room, T)
        reads, read_keys, write_keys, steps, total, A, P, _, _, sequences, *_ = room
        self.scans[places.segments > 1](
            places.programs * HV, to, reads, read_keys, write_keys, inputs[2], steps, total, A, P, S0,
            *addresses((S, o, h)), None, sequences, T, places.NT, places.span, places.segments, HV, places.walks,
        )  # fmt: skip
        return (o, S, h) if self.starts else (o, S)


class Backward(Pass):
    def __init__(self, plan, closing: bool):
        super().__init__(plan)
        dtype, dtypes = self.arithmetic.dtype, self.dtypes
        rows = dtype, dtype, dtype
        last = FP32 if closing else None
        self.grouped, self.computed = self.H != self.HV, bool(self.gate)
        self.gradient = FP32 if self.grouped else dtypes["q"]
        self.dg = FP32 if self.computed else dtypes["g"]
        results = dict(o=None, h=dtype, s=dtype)
        self.scans = tuple(self.scan(S0=S0, **results) for S0 in (dtypes["initial_state"], FP32))
        walked = *rows, dtypes["q"], FP32, FP32, dtype, dtype

        def scan_backward(dS, dS0, dh, y):
            return self.launch(STATE_SCAN_BACKWARD, (*walked, dS, dS0, dh, y, self.tables), **self.scanning)

        self.scans_backward = tuple(scan_backward(dS, None, dtype, dtype) for dS in (last, FP32))
        self.scan_backward_ends = scan_backward(None, FP32, None, None)
        self.merge_backward = self.merging(True, last)
        self.product_gradients = self.launch(
            PRODUCT_GRADIENTS,
            (FP32, dtypes["q"], dtype, dtype, dtype, dtype, *rows, FP32, dtype, dtype, dtypes["v"], dtypes["beta"],
             self.tables),
            **self.products, K=self.K, V=self.V, BETA_MAX=self.beta_max,
        )  # fmt: skip
        inputs = tuple(dtypes[name] for name in ("q", "k", "g", "A_log", "dt_bias"))
        self.decay_gradients = tuple(
            self.launch(
                DECAY_GRADIENTS,
                (*inputs, *rows, FP32, dtype, dtype, self.gradient, self.gradient, self.dg, INT32, self.tables),
                **self.decays, SECOND=second, ANY=any_gate, SUM_PARTS=2 if self.arithmetic.bits == 16 else 3,
            )
            for any_gate in (False, True) for second in (False, True)
        )  # fmt: skip
        self.sum_heads = None
        if self.grouped:
            self.sum_heads = self.launch(SUM_HEADS, (FP32, FP32, dtypes["q"], dtypes["k"]), K=self.K, ROWS=ROWS)
        self.gate_gradients = GateGradients(self, self.problem, FP32, self.lower_bound) if self.computed else None
        self.state_gradient = None
        if dtypes["initial_state"] is not None:
            self.state_gradient = self.launch(
                STATE_GRADIENT,
                (*(dtypes[name] for name in ("q", "k", "g", "beta", "A_log", "dt_bias")), dtypes["q"], last, FP32,
                 dtypes["cu_seqlens"]),
                K=self.K, V=self.V, NORM=plan.facts.options["use_qk_l2norm_in_kernel"], GATE=self.gate,
                BETA_MAX=self.beta_max, V_FIRST=self.v_first, WIDTH=width(self.K),
            )  # fmt: skip

    def more(self, states) -> tuple:
        """Of the segments' gradients: what each makes of nothing, and what each ends in."""
        return states, states

    def measure_later(self, B, T, places) -> Workspace:
        dtype, HV, K, V = self.arithmetic.dtype, self.HV, self.K, self.V
        states, values = ((places.slots, HV, V, K), dtype), ((B, T, HV, V), dtype)
        return Workspace(self.device, (states, states, values, values))

    def launches(self) -> tuple:
        """What a call launches beside its preparation."""
        segments = (self.scan_backward_ends, self.merge_backward) if self.few else ()
        return (
            *self.scans[: 1 + self.few], *self.scans_backward[: 1 + self.few], *segments, self.product_gradients,
            *self.decay_gradients, self.sum_heads, *(self.gate_gradients.launches if self.computed else ()),
            self.state_gradient,
        )  # fmt: skip

    def __call__(self, call, grads) -> dict:
        given, inputs = received(self.inputs(call.values))
        _upstream, ends = received((grads["o"], grads.get("final_state")))
        q, k, v, g, beta, A_log, dt_bias, S, cu_seqlens = given
        B, T, *_ = v.shape
        size = self.size(B, T, cu_seqlens)
        to = current_stream(self.device)
        if not self.begun:
            self.begin(self.launches())
        _memory, room = size.workspace.allocate()
        self.prepare_chunks(size.places, to, inputs, room, T)
        dv, dbeta = torch.empty_like(v), torch.empty_like(beta)
        self.product_stage(size, to, inputs, ends, addresses((dv, dbeta)), room, T)
        dq, dk, dg = torch.empty_like(q), torch.empty_like(k), torch.empty_like(g, dtype=self.dg)
        each = (dq, dk)
        if self.grouped:
            each = tuple(torch.empty((B, T, self.HV, self.K), dtype=FP32, device=self.device) for _ in range(2))
        self.decay_stage(size.places, to, inputs, addresses((*each, dg)), room, T)
        if self.grouped:
            grid = -(-B * T // ROWS) * self.H
            self.sum_heads(grid, to, *addresses((*each, dq, dk)), B * T, self.H, self.HV)
        gradients = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
        if self.computed:
            gradients |= self.gate_gradients(size.places, to, g, A_log, dt_bias, room[8], dg, T)
        if S is not None:
            dS0 = torch.empty_like(S, dtype=FP32)
            q, k, _, g, beta, A_log, dt_bias, _, cu_seqlens = inputs
            self.state_gradient(
                size.places.N * self.HV, to, q, k, g, beta, A_log, dt_bias, *ends, *addresses((dS0,)), cu_seqlens, T,
                self.H, self.HV, size.places.N, self.scale, self.lower_bound,
            )  # fmt: skip
            gradients["initial_state"] = dS0
        return gradients

    def product_stage(self, size, to, inputs, ends, results, room, T) -> None:
        """Gradients of all that the scans read, in its place, and of v and beta: ``results``."""
        places, HV = size.places, self.HV
        v, (do, dS) = inputs[2], ends
        reads, read_keys, write_keys, steps, total, A, P, _, chunks, sequences, *_, maps, from_nothing, dends = room
        _memory, (h, dh, s, y) = size.later.allocate()
        where = sequences, T, places.NT, places.span, places.segments, HV, places.walks
        walked = steps, total, A, P
        split = places.segments > 1
        S0 = self.segment_states(places, to, inputs, room, T)
        if split:
            self.scan_backward_ends(
                places.walks * HV, to, reads, read_keys, write_keys, do, *walked, None, from_nothing, None, None, *where
            )
            self.merge_backward(places.N * HV, to, maps, from_nothing, dS, dends, places.segments, HV)
            dS = dends
        self.scans[split](
            places.programs * HV, to, None, read_keys, write_keys, v, steps, total, None, P, S0, None, None, h, s,
            *where,
        )  # fmt: skip
        self.scans_backward[split](
            places.walks * HV, to, reads, read_keys, write_keys, do, *walked, dS, None, dh, y, *where
        )
        self.product_gradients(
            places.slots * HV, to, steps, do, s, y, h, dh, reads, read_keys, write_keys, total, A, P, *results, chunks,
            T, places.NT, HV,
        )  # fmt: skip

    def decay_stage(self, places, to, inputs, results, room, T) -> None:
        """Gradients of q, k and the gates, ``results``, from those of what was prepared."""
        q, k, _, g, _, A_log, dt_bias, *_ = inputs
        dreads, dread_keys, dwrite_keys, _, dtotal, dA, dN, reach, chunks, *_ = room
        for launch in self.decay_gradients:
            launch(
                places.slots * self.HV, to, q, k, g, A_log, dt_bias, dreads, dread_keys, dwrite_keys, dtotal, dA, dN,
                *results, reach, chunks, T, places.NT, self.H, self.HV, self.scale, self.lower_bound,
            )  # fmt: skip
