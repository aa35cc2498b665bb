"""What every reference computes with: its dtype, unit vectors, activations that round alike everywhere."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F

NORM_EPS = 1e-6
ALIGN = 16  # elements; a cache line of fp32


def no_autocast(x):
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext()


def working_dtype(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def unit(x):
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def unit_backward(x, dunit):
    inverse = torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
    y = x * inverse
    return (dunit - y * (y * dunit).sum(-1, keepdim=True)) * inverse


def running_sum(x, dim, reverse=False):
    """Sums from the first element along ``dim`` through each, or from each through the last."""
    return x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)


def aligned(x):
    """The last dimension padded with zeros to whole cache lines: then a product rounds alike in any batch."""
    return F.pad(x, (0, -x.shape[-1] % ALIGN)) if x.shape[-1] % ALIGN else x


# torch.sigmoid and log1p round differently in the last elements of a tensor than elsewhere; exp and log do not, and a
# packed sequence has to give the bits of the same sequence alone.


def sigmoid(x):
    y = _exp_of_minus_abs(x)
    return torch.where(x > 0, 1, y) / (1 + y)


def softplus(x):
    y = _exp_of_minus_abs(x)
    sum_ = 1 + y
    log1p = torch.log(sum_) + (y - (sum_ - 1)) / sum_  # the second term is what rounding took from the sum
    return torch.where(x > 0, x + log1p, log1p)


def _exp_of_minus_abs(x):
    return torch.exp(torch.where(x > 0, -x, x))  # written so that autograd is right at 0
