"""The calls whose kernels are compiled: operators at the sizes they are used at, so that every switch is thrown.

A row is few words, which name it in the budget. That no switch is missing is a test: whatever the cases of the op tests
make of a kernel, apart from sizes, some row makes of it too.
"""

from dataclasses import dataclass, field

import cases
import torch
from harness.subject import build

from fla_dispatch import operator_of

PACKED = [0, 40, 40, 100]  # boundaries


@dataclass(frozen=True)
class Row:
    """A call of ``operator``; ``given`` holds options, and True for every optional tensor that is present."""

    operator: str
    dtype: str
    K: int
    V: int
    given: dict = field(default_factory=dict)
    heads: tuple[int, int] = (32, 32)  # fewer would make ready for split sequences too, with more kernels
    packed: bool = False
    backward: bool = True
    wide: tuple[str, ...] = ()  # tensors that are fp32 whatever the dtype
    sample: bool = False  # what a newer compiler is tried on, as time is short: every kernel is in some such row

    def __str__(self):
        words = [self.operator, self.dtype, f"K{self.K}", f"V{self.V}"]
        words += [f"{name}={value}" if value is not True else name for name, value in self.given.items()]
        words += [f"H{self.heads[0]}of{self.heads[1]}"] if self.heads != (32, 32) else []
        words += [f"{name}:fp32" for name in self.wide]
        return " ".join([*words, *["packed"] * self.packed])

    def arguments(self) -> dict[str, object]:
        subject = next(s for s in cases.SUBJECTS.values() if operator_of(self.operator) in s.operators())
        H, HV = self.heads
        sizes = {"B": 1 if self.packed else 2, "T": 100, "H": H, "HV": HV, "K": self.K, "V": self.V}
        given, offsets = {"dtype": self.dtype, **self.given}, PACKED if self.packed else None
        built = build(subject, operator_of(self.operator), sizes, given, offsets)
        return built | {name: built[name].float() for name in self.wide}


    def call(self):
        return prepared(operator_of(self.operator), self.arguments(), self.backward)


def prepared(operator, given: dict, backward: bool):
    """The call as the Triton backend gets it. Its verifier is not asked, for it would look for a device."""
    for x in given.values():
        if backward and isinstance(x, torch.Tensor) and x.is_floating_point():
            x.requires_grad_()
    values = [given.get(p.name, getattr(p, "default", None)) for p in operator.declaration.parameters]
    with torch.set_grad_enabled(backward):
        return operator.prepare(values, backend="triton")


STATES = {"initial_state": True, "output_final_state": True}
NORMED = {"use_qk_l2norm_in_kernel": True}
RAW = {"use_gate_in_kernel": True, "A_log": True, "dt_bias": True}
LAYER = {**NORMED, **RAW, "use_beta_sigmoid_in_kernel": True}
BOUNDED = {"use_gate_in_kernel": True, "A_log": True, "lower_bound": -5.0}
REFLECTING = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}

ROWS = (
    Row("chunk_kda", "bf16", 128, 128, LAYER, wide=("A_log",), sample=True),
    Row("chunk_kda", "bf16", 128, 128, {**NORMED, **STATES}, packed=True, wide=("g",)),
    Row("chunk_kda", "bf16", 256, 256, {**BOUNDED, **STATES, "state_v_first": True}, heads=(16, 32)),
    Row("chunk_kda", "bf16", 100, 60, {"chunk_size": 32, **REFLECTING}),
    Row("chunk_kda", "bf16", 64, 64, {"return_intermediate_states": True, **STATES}, backward=False),
    Row("chunk_kda", "fp16", 128, 64, {**NORMED, **REFLECTING, "chunk_size": 32, **STATES}, heads=(16, 32),
        packed=True),
    Row("chunk_kda", "bf16", 64, 64, {"safe_gate": True, **STATES}, heads=(2, 2), sample=True),
    Row("chunk_kda", "fp16", 64, 64, {**RAW, **STATES, "state_v_first": True}, heads=(2, 2)),
    Row("chunk_kda", "bf16", 64, 64, {**LAYER, "initial_state": True, "chunk_size": 32}, heads=(2, 2)),
    Row("chunk_kda", "fp32", 64, 128, heads=(16, 32), packed=True),
    Row("chunk_kda", "fp32", 256, 256, {**RAW, "lower_bound": -5.0, **STATES}),
    Row("fused_recurrent_kda", "bf16", 128, 128, {**LAYER, **STATES}, backward=False, sample=True),
    Row("fused_recurrent_kda", "bf16", 64, 64, {}, heads=(1, 2), wide=("g", "beta"), backward=False),
    Row("fused_recurrent_kda", "fp16", 64, 64, {**RAW, "lower_bound": -5.0, **REFLECTING, **STATES}, packed=True,
        backward=False),
    Row("fused_recurrent_kda", "fp32", 256, 100, {**RAW, "beta rank": 1, "state_v_first": True}, backward=False),
    Row("fused_recurrent_kda", "fp32", 100, 64, {**NORMED, **STATES}, backward=False),
    Row("fused_kda_gate", "bf16", 128, 128, {"A_log": True, "dt_bias": True}),
    Row("fused_kda_gate", "fp16", 64, 64, {"A_log": True, "dt_bias": True}),
    Row("kda_gate_chunk_cumsum", "bf16", 128, 128, {"lower_bound": -5.0}),
    Row("kda_gate_chunk_cumsum", "fp32", 100, 100, {"A_log": True, "dt_bias": True, "lower_bound": -5.0,
                                                    "chunk_size": 32}, packed=True, sample=True),
)

# What is compiled at a time: the kernels of a row's forward, then those that its backward adds.
PASSES = tuple((index, backward) for index, row in enumerate(ROWS) for backward in (False, True)[: 1 + row.backward])


def title(index: int, backward: bool) -> str:
    """What a pass is called in the budget."""
    return f"{ROWS[index]} {'backward' if backward else 'forward'}"
