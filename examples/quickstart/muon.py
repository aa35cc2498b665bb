"""Muon: momentum whose matrices are made orthogonal before they are applied, so that no direction is learnt last.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. ``torch.optim.Muon`` is the same, but
computes in bfloat16, which many CPUs can only emulate.
"""

import torch
from torch import Tensor

# x → ax + bx³ + cx⁵ takes any singular value in (0, 1] near 1 within a few turns.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
TURNS = 4


def orthogonal(matrix: Tensor) -> Tensor:
    """About U V^T of matrix = U S V^T: all singular values near 1."""
    a, b, c = COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)  # now S <= 1
    if tall := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(TURNS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """For 2D parameters. ``lr`` is the spectral norm of a step, times sqrt(rows / columns) where that is above 1."""

    def __init__(self, params, lr: float = 0.02, momentum: float = 0.8, weight_decay: float = 0.1):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                velocity = self.state[parameter].setdefault("velocity", torch.zeros_like(parameter))
                velocity.lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(velocity, group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                rows, columns = parameter.shape
                parameter.add_(orthogonal(ahead), alpha=-group["lr"] * max(1, rows / columns) ** 0.5)
