"""Softmax and its gradient, log-sum-exp, softplus."""

import torch
from jaxtyping import Float
from torch import Tensor

from facade import reference
from fla_dispatch import ACCUMULATOR, Result, dispatch

__all__ = ["logsumexp_fwd", "softmax_bwd", "softmax_fwd", "softplus"]

SHAPES = {"ci": dict(K=24), "wide": dict(K=4096)}


@dispatch("softmax", returns=Result("... K", ("dtype", "x")), tolerance="linear", shapes=SHAPES)
def softmax_fwd(x: Float[Tensor, "... K"], dtype: torch.dtype | None = torch.float):
    r"""Softmax over the last axis.

    p = exp(x) / sum exp(x), shifted by the largest x, so that it never overflows.

    Args:
        x: [..., K], with at most five axes before the last.
        dtype: of the result; None: that of x. The arithmetic is float32 (float64 for float64 input).

    Returns:
        p [..., K]. Differentiable in x, once.

    Raises:
        ValueError, TypeError: arguments of the wrong kind; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import softmax_fwd
        >>> softmax_fwd(torch.zeros(2, 4)).tolist()
        [[0.25, 0.25, 0.25, 0.25], [0.25, 0.25, 0.25, 0.25]]
    """
    return reference.rows.softmax(x, dtype)


@dispatch("softmax", returns=Result("... K", ("dtype", "p")), tolerance="linear", shapes=SHAPES)
def softmax_bwd(p: Float[Tensor, "... K"], dp: Float[Tensor, "... K"], dtype: torch.dtype | None = torch.float):
    r"""The gradient that softmax passes on.

    dx = p (dp - sum p dp) over the last axis, where p = softmax(x).

    Args:
        p: what ``softmax_fwd`` returned, [..., K].
        dp: its gradient [..., K].
        dtype: of the result; None: that of p. The arithmetic is float32 (float64 for float64 input).

    Returns:
        dx [..., K]. Differentiable in p and dp, once.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import softmax_bwd
        >>> softmax_bwd(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).tolist()
        [0.25, -0.25]
    """
    return reference.rows.softmax_backward(p, dp, dtype)


@dispatch("softmax", returns=Result("...", ("dtype", ACCUMULATOR)), tolerance="linear", shapes=SHAPES)
def logsumexp_fwd(x: Float[Tensor, "... K"], scale: float | None = None, dtype: torch.dtype | None = None):
    r"""The logarithm of the sum of exponentials over the last axis.

    z = log sum exp(scale x), shifted by the largest, so that it never overflows.

    Args:
        x: [..., K], with at most five axes before the last.
        scale: factor on x; 1 if None.
        dtype: of the result; float32 (float64 for float64 input) if None, as is the arithmetic.

    Returns:
        z [...]. Differentiable in x, once.

    Raises:
        ValueError, TypeError: arguments of the wrong kind; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import logsumexp_fwd
        >>> round(logsumexp_fwd(torch.zeros(8)).item(), 4)  # log(8)
        2.0794
    """
    return reference.rows.logsumexp(x, scale, dtype)


def softplus(x: Tensor) -> Tensor:
    r"""ln(1 + e^x), and x itself from 20 on.

    Args:
        x: a tensor of any shape.

    Returns:
        The same shape and dtype. Differentiable, any number of times.

    Raises:
        TypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from facade.ops.utils import softplus
        >>> [round(y, 4) for y in softplus(torch.tensor([0.0, 30.0])).tolist()]
        [0.6931, 30.0]

    Where this differs from ``fla.ops.utils.softplus``: that is a function for use inside Triton kernels; this one takes
    tensors.
    """
    return torch.nn.functional.softplus(x)
