"""``chunk_kda``: prepare the chunks, walk the states through them; and back."""

import functools
from dataclasses import replace

import torch

from fla_triton.backend import TritonBackend
from fla_triton.config import Problem
from fla_triton.engine import (
    CHUNK_TABLE,
    DECAY_GRADIENTS,
    FEW,
    GATE_BACKWARD,
    MERGE_SEGMENTS,
    PREPARE,
    PRODUCT_GRADIENTS,
    STATE_GRADIENT,
    STATE_SCAN,
    STATE_SCAN_BACKWARD,
    Arithmetic,
    Places,
    gate_form,
    parts,
    tensor_float,
    width,
)
from fla_triton.launch import compile_together, interpreted

OPTIONS = frozenset({
    "scale", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "lower_bound", "state_v_first", "cu_seqlens", "A_log", "dt_bias",
})  # fmt: skip


class Chunk(TritonBackend):
    operation = "kda"
    functions = ("chunk_kda",)
    handles = OPTIONS | {
        "safe_gate", "disable_recompute", "return_intermediate_states", "cu_seqlens_cpu", "use_graph", "max_num_seqs",
        "chunk_size",
    }  # fmt: skip

    def forward(self, call):
        return delta_pass(call.plan).forward(call)

    def backward(self, call, saved, grads):
        return delta_pass(call.plan).backward(call, grads)


@functools.lru_cache(maxsize=1024)
def delta_pass(plan) -> "Pass":
    """What all calls of a plan share; a plan fixes every dtype, option and presence of a tensor."""
    return Pass(plan.facts)


class Pass:
    """Forward and backward of a delta rule with per-key gates, in chunks of C tokens.

    Gates that are neither computed here nor vouched for by safe_gate may be above 0: a state that grows amplifies the
    rounding of everything it is made of, so such calls multiply fp32 numbers.
    """

    def __init__(self, facts):
        options, tensors = facts.options, facts.tensors
        self.K, self.V, self.H, self.HV = (facts.dims[letter] for letter in ("K", "V", "H", "HV"))
        self.C = options.get("chunk_size", 64)
        # The gradients of fused_recurrent_kda belong to a forward without rounding, so they have none either.
        decaying = facts.function == "chunk_kda" and (options["use_gate_in_kernel"] or options["safe_gate"])
        self.arithmetic = arithmetic = Arithmetic(
            facts.dtype if decaying else torch.float32, options["use_qk_l2norm_in_kernel"]
        )
        self.scale = self.K**-0.5 if options["scale"] is None else float(options["scale"])
        self.lower_bound = float(options["lower_bound"] or 0)
        self.wanted = options["output_final_state"], options.get("return_intermediate_states", False)
        self.v_first = options["state_v_first"]
        gate = gate_form(options["use_gate_in_kernel"], options["lower_bound"])
        problem = Problem(self.K, self.V, arithmetic.bits, self.C)
        place = dict(C=self.C, PACKED=facts.packed)
        beta_max = (2 if options["allow_neg_eigval"] else 1) if options["use_beta_sigmoid_in_kernel"] else 0
        products = dict(**place, PRECISION=arithmetic.precision)
        decays = dict(
            **products, K=self.K, FRESH="initial_state" not in tensors, NORM=options["use_qk_l2norm_in_kernel"],
            GATE=gate, PARTS=parts(tensors["g"].dtype, bool(gate)),
        )  # fmt: skip
        scan = dict(**products, K=self.K, V=self.V, WIDTH=width(self.K), V_FIRST=self.v_first)
        walk = dict(**scan, IDENTITY=False, EACH=False)
        self.table = CHUNK_TABLE.launch(problem, C=self.C, BLOCK=64)
        self.prepare, self.prepare_any = (
            PREPARE.launch(problem, **decays, BETA_MAX=beta_max, ANY=any_gate, SOLVE=arithmetic.solve)
            for any_gate in (False, True)
        )
        self.scan = STATE_SCAN.launch(problem, **walk, H_V_FIRST=self.v_first)
        self.scan_states = STATE_SCAN.launch(problem, **walk, H_V_FIRST=True)
        # Of a sequence in segments: what each makes of an empty state and of a given one, and from one to the next.
        self.scan_ends = STATE_SCAN.launch(problem, **(walk | dict(EACH=True)), H_V_FIRST=True)
        squares = scan | dict(V=self.K, V_FIRST=False)
        self.scan_maps = STATE_SCAN.launch(
            replace(problem, V=self.K), **squares, IDENTITY=True, EACH=True, H_V_FIRST=True
        )
        self.merge, self.merge_backward = (
            MERGE_SEGMENTS.launch(
                problem, K=self.K, V=self.V, V_FIRST=self.v_first, REVERSE=reverse, PRECISION=tensor_float(21)
            )
            for reverse in (False, True)
        )
        # A call that is not split makes ready for one that is, so that longer sequences compile nothing.
        self.warm = [facts.packed or self.HV > FEW or interpreted()] * 2
        self.begun = [False, False]
        self.scan_backward = STATE_SCAN_BACKWARD.launch(problem, **scan)
        self.product_gradients = PRODUCT_GRADIENTS.launch(
            problem, **products, K=self.K, V=self.V, BETA_MAX=beta_max
        )
        self.decay_gradients = tuple(
            DECAY_GRADIENTS.launch(
                problem, **decays, SECOND=second, ANY=any_gate, SUM_PARTS=2 if arithmetic.bits == 16 else 3
            )
            for any_gate in (False, True) for second in (False, True)
        )  # fmt: skip
        self.state_gradient = STATE_GRADIENT.launch(
            problem, K=self.K, V=self.V, NORM=options["use_qk_l2norm_in_kernel"], GATE=gate, BETA_MAX=beta_max,
            V_FIRST=self.v_first, WIDTH=width(self.K),
        )  # fmt: skip
        self.gate_backward = GATE_BACKWARD.launch(problem, K=self.K, **place, GATE=gate, SUM=False)

    def places(self, call) -> Places:
        B, T, HV = call.v.shape[:3]
        return Places(self.table, B, T, HV, self.C, call.cu_seqlens)

    def preparation(self, call, places):
        """The arguments of ``prepare``, and what it writes: reads, read_keys, write_keys, steps, total, A, P, reach."""
        K, C, HV = self.K, self.C, self.HV
        B, T, H, _ = call.q.shape
        device, dtype = call.q.device, self.arithmetic.dtype
        reads, read_keys, write_keys = (torch.empty((B, T, HV, K), dtype=dtype, device=device) for _ in range(3))
        A, P = (torch.empty((B, T, HV, C), dtype=dtype, device=device) for _ in range(2))
        steps = torch.empty((B, T, HV), dtype=torch.float32, device=device)
        total = torch.empty((places.slots, HV, K), dtype=torch.float32, device=device)
        reach = torch.empty((places.slots, HV, 2), dtype=torch.int32, device=device)
        arguments = (
            call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, reads, read_keys, write_keys, steps, total,
            A, P, reach, places.chunks, T, places.NT, H, HV, self.scale, self.lower_bound,
        )  # fmt: skip
        return arguments, (reads, read_keys, write_keys, steps, total, A, P, reach)

    def segment_states(self, call, places, chunks):
        """(the state before each segment, or the call's own where nothing is split; the segments' maps or None)."""
        if places.span >= call.v.shape[1] and places.segments <= 1:
            return call.initial_state, None
        B, T, HV, V = call.v.shape
        K, walks = self.K, places.walks
        ends, starts = (self.states(call, walks) for _ in range(2))
        maps = torch.empty((walks, HV, K, K), dtype=torch.float32, device=call.v.device)
        where = places.sequences, T, places.NT, places.span, places.segments, HV, walks
        read_keys, write_keys, steps, total, P = chunks
        walked = steps, total, None, P
        self.scan_ends(walks * HV, None, read_keys, write_keys, call.v, *walked, None, ends, None, None, None, *where)
        self.scan_maps(walks * HV, None, read_keys, write_keys, None, *walked, None, maps, None, None, None, *where)
        self.merge(B * HV, maps, ends, call.initial_state, starts, places.segments, HV)
        return starts, maps

    def states(self, call, count):
        """Room for ``count`` states of every value head, laid out as the caller's."""
        shape = (self.V, self.K) if self.v_first else (self.K, self.V)
        return torch.empty((count, self.HV, *shape), dtype=torch.float32, device=call.v.device)

    def forward(self, call):
        places = self.places(call)
        preparation, (reads, read_keys, write_keys, steps, total, A, P, _) = self.preparation(call, places)
        B, T, HV, V = call.v.shape
        o = torch.empty(call.v.shape, dtype=call.q.dtype, device=call.v.device)
        final, starts = self.wanted
        S = self.states(call, places.N) if final else None
        h = None
        if starts:
            shape = (V, self.K) if self.v_first else (self.K, V)
            h = torch.empty((B, call.dims["NT"], HV, *shape), dtype=call.k.dtype, device=call.v.device)

        def walk(places):
            S0, _ = self.segment_states(call, places, (read_keys, write_keys, steps, total, P))
            return (
                places.programs * HV, reads, read_keys, write_keys, call.v, steps, total, A, P, S0, S, o, h, None,
                places.sequences, T, places.NT, places.span, places.segments, HV, places.walks,
            )  # fmt: skip

        prepares = [(self.prepare, preparation), (self.prepare_any, preparation)]
        if not self.begun[0]:
            self.begun[0] = True
            compile_together(*prepares, *([(self.scan, walk(places)[1:])] if places.segments == 1 else ()))
        for launch, arguments in prepares:
            launch(places.slots * HV, *arguments)
        if not self.warm[0] and T > self.C:
            self.warm[0] = True
            self.scan.compile(*walk(self.places(call).split(T, self.C))[1:])
        self.scan(*walk(places))
        return ((o, S, h) if starts else (o, S)), ()

    def backward(self, call, grads):
        places = self.places(call)
        preparation, (reads, read_keys, write_keys, steps, total, A, P, reach) = self.preparation(call, places)
        B, T, HV, V = call.v.shape
        H, K = self.H, self.K
        device, dtype = call.v.device, self.arithmetic.dtype
        do, dS = grads["o"], grads.get("final_state")
        h, dh = (torch.empty((places.slots, HV, V, K), dtype=dtype, device=device) for _ in range(2))
        s, y = (torch.empty((B, T, HV, V), dtype=dtype, device=device) for _ in range(2))

        def walks(places):
            where = places.sequences, T, places.NT, places.span, places.segments, HV, places.walks
            S0, maps = self.segment_states(call, places, (read_keys, write_keys, steps, total, P))
            dends = dS
            if maps is not None:
                from_nothing, dends = (self.states(call, places.walks) for _ in range(2))
                self.scan_backward(
                    places.walks * HV, reads, read_keys, write_keys, do, steps, total, A, P, None, from_nothing, None,
                    None, *where,
                )  # fmt: skip
                self.merge_backward(B * HV, maps, from_nothing, dS, dends, places.segments, HV)
            return (
                (places.programs * HV, reads, read_keys, write_keys, call.v, steps, total, A, P, S0, None, None, h, s,
                 *where),
                (places.walks * HV, reads, read_keys, write_keys, do, steps, total, A, P, dends, None, dh, y, *where),
            )  # fmt: skip

        prepares = [(self.prepare, preparation), (self.prepare_any, preparation)]
        computed = self.gate_backward.constants["GATE"] != 0
        if not self.begun[1]:
            self.begun[1] = True
            wide = torch.empty(1, dtype=torch.float32, device=device)  # stands for what is not allocated yet
            grouped, dg = wide if H != HV else call.q, wide if computed else call.g
            products = (
                steps, do, s, y, h, dh, reads, read_keys, write_keys, total, A, P, call.v, call.beta, places.chunks,
                T, places.NT, HV,
            )  # fmt: skip
            decays = (
                call.q, call.k, call.g, call.A_log, call.dt_bias, reads, read_keys, write_keys, total, A, P, grouped,
                grouped, dg, reach, places.chunks, T, places.NT, H, HV, self.scale, self.lower_bound,
            )  # fmt: skip
            scans = zip((self.scan_states, self.scan_backward), walks(places)) if places.segments == 1 else ()
            compile_together(
                *prepares, *((launch, arguments[1:]) for launch, arguments in scans),
                (self.product_gradients, products), *((launch, decays) for launch in self.decay_gradients),
            )  # fmt: skip
        for launch, arguments in prepares:
            launch(places.slots * HV, *arguments)
        if not self.warm[1] and T > self.C:
            self.warm[1] = True
            forwards, backwards = walks(self.places(call).split(T, self.C))
            self.scan_states.compile(*forwards[1:])
            self.scan_backward.compile(*backwards[1:])
        forwards, backwards = walks(places)
        self.scan_states(*forwards)
        self.scan_backward(*backwards)
        dv, dbeta = torch.empty_like(call.v), torch.empty_like(call.beta)
        # What the scans read makes room for its gradients: nothing reads it again.
        dreads, dread_keys, dwrite_keys, dtotal, dA, dN = reads, read_keys, write_keys, total, A, P
        self.product_gradients(
            places.slots * HV, steps, do, s, y, h, dh, dreads, dread_keys, dwrite_keys, dtotal, dA, dN, dv, dbeta,
            places.chunks, T, places.NT, HV,
        )  # fmt: skip
        del h, dh, s, y, forwards, backwards
        dq, dk = (
            torch.empty((B, T, HV, K), dtype=torch.float32 if H != HV else call.q.dtype, device=device)
            for _ in range(2)
        )
        dg = torch.empty(call.g.shape, dtype=torch.float32 if computed else call.g.dtype, device=device)
        arguments = (
            call.q, call.k, call.g, call.A_log, call.dt_bias, dreads, dread_keys, dwrite_keys, dtotal, dA, dN,
            dq, dk, dg, reach, places.chunks, T, places.NT, H, HV, self.scale, self.lower_bound,
        )  # fmt: skip
        for launch in self.decay_gradients:
            launch(places.slots * HV, *arguments)
        if H != HV:
            dq, dk = (x.view(B, T, H, HV // H, K).sum(3) for x in (dq, dk))
        gradients = {"q": dq, "k": dk, "v": dv, "g": dg, "beta": dbeta}
        if computed:
            gradients |= gate_gradients(self.gate_backward, places, call, dg, self.lower_bound, 1.0)
        if call.initial_state is not None:
            dS0 = torch.empty(call.initial_state.shape, dtype=torch.float32, device=device)
            self.state_gradient(
                places.N * HV, call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias, do, dS, dS0,
                call.cu_seqlens, T, H, HV, places.N, self.scale, self.lower_bound,
            )  # fmt: skip
            gradients["initial_state"] = dS0
        return gradients


def gate_gradients(launch, places, call, d, lower_bound, scale) -> dict:
    """Gradients of g, A_log and dt_bias, given ``d`` of the gate."""
    B, T, HV, K = call.g.shape
    device = d.device
    dg = torch.empty_like(call.g)
    dA, dbias = (
        None if x is None else torch.empty((places.slots, HV, *more), dtype=torch.float32, device=device)
        for x, more in ((call.A_log, ()), (call.dt_bias, (K,)))
    )
    launch(
        places.slots * HV, d, call.g, call.A_log, call.dt_bias, dg, dA, dbias, places.chunks, T, places.NT, HV,
        lower_bound, scale,
    )  # fmt: skip
    gradients = {"g": dg}
    if dA is not None:
        gradients["A_log"] = dA.sum(0)
    if dbias is not None:
        gradients["dt_bias"] = dbias.sum(0).flatten()
    return gradients
