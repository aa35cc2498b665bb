"""The chunk engine's kernels with their configurations, and the numbers an operator's host code shares."""

import torch
import triton

from fla_triton.config import Config, Problem
from fla_triton.launch import INTERPRETED, Kernel, Launch, tensor_float
from fla_triton.primitives import gates, heads, intra, intra_backward, places, scan, step

SMALLEST = 16  # rows or columns of a matrix product


def width(size: int) -> int:
    """The tile that holds ``size`` channels."""
    return max(SMALLEST, triton.next_power_of_2(size))


# Candidates, best first on the H200 (K = V = 128, bf16); the later ones need less shared memory. In the interpreter a
# wide tile costs as much as a narrow one.


def _channels(problem: Problem) -> tuple[Config, ...]:
    """Blocks of channels of one chunk, loaded some blocks ahead: few warps, so that they seldom wait for each other."""
    BK = 32 if INTERPRETED else SMALLEST
    return tuple(Config(BK=min(width(problem.K), BK), num_warps=2, num_stages=stages) for stages in (3, 2, 1))


def _state(problem: Problem) -> tuple[Config, ...]:
    """A block of columns of the state, all of its rows; the next chunk is loaded ahead where that fits."""
    tiles = ((32, 2), (32, 1), (16, 1)) if problem.bits == 16 else ((16, 2), (16, 1))
    return tuple(Config(BV=min(width(problem.V), BV), num_warps=4, num_stages=stages) for BV, stages in tiles)


def _merge(problem: Problem) -> tuple[Config, ...]:
    return tuple(Config(BK=min(width(problem.K), BK), BV=SMALLEST, num_warps=4, num_stages=1) for BK in (64, 32))


def _products(problem: Problem) -> tuple[Config, ...]:
    tiles = ((64, 64, 3), (64, 64, 1)) if problem.bits == 16 else ((32, 32, 2),)
    return tuple(
        Config(BK=min(width(problem.K), BK), BV=min(width(problem.V), BV), num_warps=4, num_stages=stages)
        for BK, BV, stages in (*tiles, (32, 32, 1), (16, 32, 1))
    )


def _gate(problem: Problem) -> tuple[Config, ...]:
    return tuple(Config(BK=min(width(problem.K), BK), num_warps=4, num_stages=1) for BK in (64, 32))


def _token(problem: Problem) -> tuple[Config, ...]:
    return (Config(BV=width(problem.V) if INTERPRETED else SMALLEST, num_warps=1, num_stages=1),)


PREPARE = Kernel(intra.prepare, _channels)
STATE_SCAN = Kernel(scan.state_scan, _state, splits_values=True)
STATE_SCAN_BACKWARD = Kernel(scan.state_scan_backward, _state, splits_values=True)
MERGE_SEGMENTS = Kernel(scan.merge_segments, _merge, splits_values=True)
PRODUCT_GRADIENTS = Kernel(intra_backward.product_gradients, _products)
DECAY_GRADIENTS = Kernel(intra_backward.decay_gradients, _channels)
SUM_HEADS = Kernel(heads.sum_heads, _gate)
GATE = Kernel(gates.gate, _gate)
GATE_BACKWARD = Kernel(gates.gate_backward, _gate)
TOKEN_STEP = Kernel(step.token_step, _token, splits_values=True)
STATE_GRADIENT = Kernel(step.state_gradient, _token, splits_values=True)
CHUNK_TABLE = Kernel(places.chunk_table, lambda problem: (Config(num_warps=4, num_stages=1),))


class Arithmetic:
    """How a call computes: the dtype of what is multiplied, and the precision of products.

    bf16 inputs are multiplied as bf16. fp16 ones are not: states reach beyond 65504, so they count as fp32. The
    triangular solve among keys of length 1 stays within fp16, which is as fine as TF32 and twice as fast.
    """

    def __init__(self, dtype: torch.dtype, unit_keys: bool):
        narrow = dtype == torch.bfloat16
        self.dtype = torch.bfloat16 if narrow else torch.float32
        self.bits = 16 if narrow else 32
        self.precision = "bf16" if narrow else tensor_float(21)
        self.solve = "fp16" if narrow and unit_keys else tensor_float(10 if narrow else 21)


def parts(dtype: torch.dtype, computed: bool) -> int:
    """How many bf16 numbers hold a gate: given in ``dtype``, or computed in fp32."""
    if computed or dtype.itemsize > 2:
        return 3
    return 1 if dtype == torch.bfloat16 else 2


def gate_form(use_gate: bool, lower_bound: float | None) -> int:
    """GATE of the kernels."""
    return 0 if not use_gate else 1 if lower_bound is None else 2


SEGMENT = 8192  # tokens; a fixed length, so that cuts depend on nothing but the position in the sequence
FEW = 16  # states at once (sequences times value heads) that leave most of a GPU idle


def may_split(HV: int) -> bool:
    """Whether dense sequences are walked in segments if they are long: where there are few states to walk at once."""
    return HV <= FEW


def splits(B: int, T: int, HV: int) -> bool:
    """Whether they are."""
    return T > SEGMENT and may_split(B * HV) and not torch.are_deterministic_algorithms_enabled()


class Places:
    """Where the chunks of a call lie, in numbers: of ``B`` rows of ``T`` tokens, or (``N``) of N packed sequences.

    ``slots`` of chunks, ``programs`` that walk states and ``walks`` among them that hold one: sequences, or segments of
    ``span`` tokens where dense sequences are ``split``.
    """

    __slots__ = ("N", "NT", "packed", "programs", "segments", "slots", "span", "walks")

    def __init__(self, B: int, T: int, C: int, N: int | None = None, split: bool = False):
        self.packed = N is not None
        if self.packed:
            self.N, self.NT, self.slots, self.programs = N, 0, -(-T // C) + N + 1, N + 1
            self.segments, self.span, self.walks = 1, T, N
            return
        self.NT = -(-T // C)
        self.span = SEGMENT if split else T
        self.N, self.slots, self.segments = B, B * self.NT, -(-T // SEGMENT) if split else 1
        self.programs = self.walks = B * self.segments

    def tables(self) -> tuple:
        """Pieces of a workspace: the tables of ``primitives/places.py`` for packed input."""
        if not self.packed:
            return None, None
        return ((self.slots, 4), torch.int32), ((self.programs, 3), torch.int32)

    def tabulate(self, launch, queue, cu_seqlens, chunks, sequences, T: int) -> None:
        """Fill the tables, if there are any."""
        if self.packed:
            launch(self.programs, queue, cu_seqlens, chunks, sequences, T, self.N, self.slots)


def table_launch(device, problem: Problem, cu_seqlens) -> Launch:
    """What fills the tables, for boundaries of this dtype."""
    dtypes = cu_seqlens, torch.int32, torch.int32
    return CHUNK_TABLE.launch(device, problem, dtypes, C=problem.C, BLOCK=64)
