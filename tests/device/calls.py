"""Operators on the Triton backend of a GPU."""

import cases
import torch
from harness.trial import Trial

from fla_dispatch import operator_of


def trial(function: str, device="cuda") -> Trial:
    operator = operator_of(function)
    subject = next(s for s in cases.SUBJECTS.values() if operator in s.operators())
    return Trial(subject, operator, "triton", torch.device(device))


def layer(found: Trial) -> str:
    """The variant of a layer that leaves everything to the operator."""
    return "activated" if "activated" in found.subject.variants else "softplus"
