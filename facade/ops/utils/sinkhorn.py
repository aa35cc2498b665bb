"""Doubly stochastic matrices by Sinkhorn's iteration."""

from jaxtyping import Float
from torch import Tensor

from facade import reference
from fla_dispatch import ACCUMULATOR, Result, Rule, dispatch

__all__ = ["sinkhorn"]


@dispatch(
    "sinkhorn", returns=Result("... M M", ACCUMULATOR),
    rules=(Rule("1 <= M <= 8", "a matrix has 1 to 8 rows"), Rule("num_iters >= 1", "`num_iters` must be at least 1")),
    tolerance="linear", shapes={"ci": dict(M=4), "wide": dict(M=8)},
)  # fmt: skip
def sinkhorn(logits: Float[Tensor, "... M M"], num_iters: int = 20):
    r"""Exponentials of matrices, with columns and rows normalised in turn until both sum to 1.

    From P = exp(logits), num_iters times: divide each column by its sum (over axis -2), then each row by its sum (over
    axis -1), in log space. Rows sum to 1, columns in the limit: Sinkhorn and Knopp, "Concerning nonnegative matrices
    and doubly stochastic matrices", 1967.

    Args:
        logits: [..., M, M], 1 <= M <= 8, with at most five axes before.
        num_iters: how often, at least 1.

    Returns:
        P [..., M, M], float32 (float64 for float64 input). Differentiable in logits, once: backward replays every step.

    Raises:
        ValueError, TypeError: arguments that disagree or are of the wrong kind; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import sinkhorn
        >>> P = sinkhorn(torch.eye(3))
        >>> [round(x, 4) for x in P.sum(0).tolist()]
        [1.0, 1.0, 1.0]

    Where this differs from ``fla.ops.utils.sinkhorn``: it runs on any device and takes float64; a num_iters that is no
    integer is a ``TypeError``.
    """
    return reference.rows.sinkhorn(logits, num_iters)
