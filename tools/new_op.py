#!/usr/bin/env python3
"""Writes the skeleton of an operator of a new family: declaration, reference, test cases, and a test that fails.

    tools/new_op.py mamba2 chunk_mamba2

Nothing is overwritten. An operator of a family that exists belongs into that family's files.
"""

import keyword
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[1]))

from tools.repository import ROOT, UserError, parser, run

DECLARATION = '''"""FAMILY: what sets its state update apart, in one line.

Author et al., "Title", arXiv:...
"""

from fla_dispatch import ACCUMULATOR, Result, Rule, dispatch
from jaxtyping import Float, Integer
from torch import Tensor

from facade.reference import FAMILY

__all__ = ["NAME"]

SHAPES = {
    "ci": dict(B=1, T=63, H=2, HV=4, K=24, V=40),
    "train_8k": dict(B=1, T=8192, H=32, HV=32, K=128, V=128),
}


@dispatch(
    "FAMILY",
    returns={
        "o": Result("B T HV V", "q"),
        "final_state": Result("N HV K V", ACCUMULATOR, when="output_final_state"),
    },
    rules=(Rule("HV % H == 0", "the number of value heads must be a multiple of the number of query/key heads"),),
    derive={"scale": "K ** -0.5"},
    layouts={"state_v_first": ("HV K V", "HV V K")},
    same_dtype=[("q", "k", "v")],
    shapes=SHAPES,
)
def NAME(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Integer[Tensor, "N+1"] | None = None,
):
    r"""What it computes, in one sentence.

    Per sequence and value head, with a state S [K, V]::

        S_t = S_{t-1} + k_t v_t^T
        o_t = scale * S_t^T q_t

    Value head j uses query/key head j // (HV / H).

    Args:
        q, k: queries and keys [B, T, H, K].
        v: values [B, T, HV, V]; o has their shape and q's dtype.
        scale: factor on the output; K ** -0.5 if None.
        initial_state: [N, HV, K, V] in any float dtype ([N, HV, V, K] with state_v_first); zeros if None.
        output_final_state: return the state after the last token of each sequence, float32.
        state_v_first: states are [.., V, K] instead of [.., K, V].
        cu_seqlens: boundaries [N+1] of packed sequences, int32 or int64, first 0; B must be 1.

    Returns:
        (o [B, T, HV, V], final_state or None). Differentiable in q, k, v and initial_state.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.FAMILY import NAME
        >>> o, _ = NAME(torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 16))
        >>> o.shape
        torch.Size([1, 4, 2, 16])
    """
    return FAMILY.recurrent(q, k, v, scale, initial_state, output_final_state, state_v_first, cu_seqlens)
'''

REFERENCE = '''"""FAMILY in plain PyTorch: the token recurrence, the oracle of every test.

    S_t = S_{t-1} + k_t v_t^T
    o_t = scale * S_t^T q_t
"""


def recurrent(q, k, v, scale=None, initial_state=None, output_final_state=False, state_v_first=False, cu_seqlens=None,
              compute_dtype=None):
    """→ (o, final_state or None), token by token, in ``compute_dtype`` (float32 if None)."""
    raise NotImplementedError("facade/reference/FAMILY.py: write the recurrence")
'''

CASES = '''"""FAMILY: how to make inputs, and what is right."""

import torch
from harness.subject import Subject

from facade.ops.FAMILY import NAME
from facade.reference import FAMILY


def make(name: str, shape, options, generator) -> torch.Tensor:
    """Values a trained layer could have."""
    return torch.randn(shape, generator=generator)


def recurrence(function: str, arguments: dict, dtype: torch.dtype):
    return FAMILY.recurrent(**arguments, compute_dtype=dtype)


SUBJECTS = (Subject("NAME", (NAME,), make, recurrence, {"scale": [None, 0.3]}),)
'''

TEST = '''"""FAMILY: the first steps of the recurrence, computed by hand."""

import torch

from facade.ops.FAMILY import NAME


def test_first_token():
    """An empty state returns what one token writes: o = scale (q . k) v."""
    q, k, v = torch.randn(3, 2, 1, 4)
    o, state = NAME(q[:, None], k[:, None], v[:, None], scale=0.5, output_final_state=True)
    torch.testing.assert_close(o[:, 0], 0.5 * (q * k).sum(-1, keepdim=True) * v)
    torch.testing.assert_close(state, k[..., :, None] * v[..., None, :])
'''

FILES = {
    "facade/ops/FAMILY.py": DECLARATION,
    "facade/reference/FAMILY.py": REFERENCE,
    "tests/cases/FAMILY.py": CASES,
    "tests/reference/FAMILY_test.py": TEST,
}

NEXT = """
1. python -m pytest tests/reference/FAMILY_test.py fails: say what NAME is in facade/ops/FAMILY.py, write the recurrence
   in facade/reference/FAMILY.py, and its first step in the test.
2. Make it public: facade/ops/__init__.py, facade/reference/__init__.py.
3. Make it a cell of the one test body: tests/cases/__init__.py, tests/harness/cells.py, tests/BUILD.bazel.
4. Say how the cell was proven in docs/proofs.json, and run tools/operator_table.py --write."""


def write(root: pathlib.Path, family: str, name: str) -> list[str]:
    """→ the paths written."""
    filled = {
        path.replace("FAMILY", family): text.replace("FAMILY", family).replace("NAME", name)
        for path, text in FILES.items()
    }
    if present := [path for path in filled if (root / path).exists()]:
        raise UserError(
            f"{', '.join(present)} exist{'s' if len(present) == 1 else ''} already, nothing was written; add "
            f"{name} there by hand, beside the operators of {family}"
        )
    for path, text in filled.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return list(filled)


def main() -> int:
    command = parser(__doc__)
    command.add_argument("family", help="of the operator, as a module name: mamba2")
    command.add_argument("name", help="of the operator, <algorithm>_<family>: chunk_mamba2")
    command.add_argument("--root", type=pathlib.Path, default=ROOT, help="the repository; by default this one")
    wanted = command.parse_args()
    for word in (wanted.family, wanted.name):
        if not word.isidentifier() or keyword.iskeyword(word) or word != word.lower():
            raise UserError(f"`{word}` must be a Python name in lower case")
    for path in write(wanted.root, wanted.family, wanted.name):
        print(path)
    print(NEXT.replace("FAMILY", wanted.family).replace("NAME", wanted.name))
    return 0


if __name__ == "__main__":
    run(main)
