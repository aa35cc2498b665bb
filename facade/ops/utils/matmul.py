"""Matrix products with an activation behind them."""

import torch
from torch import Tensor

from facade.reference.arithmetic import no_autocast, working_dtype

__all__ = ["addmm", "matmul"]

ACTIVATIONS = {
    "": lambda x: x,
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.01),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


def matmul(a: Tensor, b: Tensor, activation: str = "") -> Tensor:
    """The product a b, with an activation behind it.

    Args:
        a: [M, K] or [B, M, K].
        b: [K, N].
        activation: "leaky_relu" (0.01 below 0), "relu", "sigmoid", "tanh", or "" for none.

    Returns:
        [M, N] or [B, M, N] in a's dtype, rounded once: arithmetic is float32 (float64 where a or b is), and on NVIDIA
        GPUs in as many bits as torch.set_float32_matmul_precision asks for. Differentiable, any number of times.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import matmul
        >>> matmul(torch.tensor([[1.0, -2.0]]), torch.eye(2), "relu").tolist()
        [[1.0, 0.0]]

    Where this differs from ``fla.ops.utils.matmul``: it has a gradient; whether float32 products may use TF32 is what
    torch's own setting says ("highest", which is the default, says no), where ``fla.ops`` never does.
    """
    return _product("matmul", a, b, activation)


def addmm(x: Tensor, a: Tensor, b: Tensor, alpha: float | None = None, beta: float | None = None) -> Tensor:
    """beta x + alpha a b.

    Args:
        x: what is added, broadcast to the product.
        a: [M, K] or [B, M, K].
        b: [K, N].
        alpha, beta: factors; 1 if None.

    Returns:
        [M, N] or [B, M, N] in a's dtype, rounded once. Differentiable, any number of times.

    Raises:
        ValueError, TypeError: arguments that disagree; the message names them.

    Example:
        >>> import torch
        >>> from facade.ops.utils import addmm
        >>> addmm(torch.ones(2, 2), torch.eye(2), torch.eye(2), alpha=3.0, beta=0.5).tolist()
        [[3.5, 0.5], [0.5, 3.5]]

    Where this differs from ``fla.ops.utils.addmm``: as ``matmul`` does.
    """
    return _product("addmm", a, b, "", x, 1 if alpha is None else alpha, 1 if beta is None else beta)


def _product(function, a, b, activation, x=None, alpha=1, beta=0):
    if activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{function}: `activation` must be one of {known}, not {activation!r}")
    if a.dim() not in (2, 3) or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"{function}: `a` is [M, K] or [B, M, K] and `b` [K, N], but tensors of shapes {list(a.shape)} and "
            f"{list(b.shape)} were given"
        )
    shape = *a.shape[:-1], b.shape[1]
    if x is not None and (x.dim() > len(shape) or any(m not in (1, n) for m, n in zip(x.shape[::-1], shape[::-1]))):
        raise ValueError(f"{function}: `x` of shape {list(x.shape)} does not broadcast to the product's {list(shape)}")
    for name, tensor in {"a": a, "b": b, "x": x}.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{function}: `{name}` must be a floating-point tensor, not {tensor.dtype}")
    with no_autocast(a):
        if x is None and not activation and a.dtype == b.dtype:
            return a @ b  # accumulates in float32 as it is
        wide = torch.promote_types(working_dtype(a), working_dtype(b))
        product = ACTIVATIONS[activation](a.to(wide) @ b.to(wide))
        if x is not None:
            product = alpha * product + beta * x.to(wide)
        return product.to(a.dtype)
