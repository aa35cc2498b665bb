"""A byte-level language model whose only mixing over time is Kimi Delta Attention.

No convolution, no attention, no token shift: a byte reaches a later prediction through the state of a KDA layer or not
at all. Without KDA the network sees one byte and can do no better than a table of byte pairs.
"""

import math
from dataclasses import dataclass

import facade.ops as fla_ops
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256

# How both operators are called: q and k normalised, the gate and the sigmoid of beta computed in the operator.
IN_OPERATOR = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)


@dataclass(frozen=True)
class Size:
    """Layers and dimensions. The default is what learns most in a minute on two cores."""

    layers: int = 2
    width: int = 128  # of the residual stream
    hidden: int = 512  # of an MLP
    heads: int = 2  # H
    key_channels: int = 64  # K
    value_channels: int = 64  # V


class KDA(nn.Module):
    """Projections around the operator: x [B, T, width] to [B, T, width]."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads, self.K, self.V = size.heads, size.key_channels, size.value_channels
        keys, values = self.heads * self.K, self.heads * self.V
        self.split = (keys, keys, values, keys, values, self.heads)
        self.project = nn.Linear(size.width, sum(self.split), bias=False)  # to q, k, v, decay, output gate and beta
        self.norm = nn.RMSNorm(self.V)
        self.out = nn.Linear(values, size.width, bias=False)
        # Heads and channels start with half-lives spread from a few bytes to a few hundred.
        rate = torch.empty(keys).uniform_(math.log(1e-3), math.log(0.3)).exp_()
        self.A_log = nn.Parameter(torch.zeros(self.heads))
        self.dt_bias = nn.Parameter(rate.expm1().log())  # softplus(dt_bias) = rate

    def operands(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The operator's tensors by name, and the output gate [B, T, H, V]."""
        q, k, v, g, gate, beta = self.project(x).split(self.split, dim=-1)
        q, k, g = (y.unflatten(-1, (self.heads, self.K)) for y in (q, k, g))
        v, gate = (y.unflatten(-1, (self.heads, self.V)) for y in (v, gate))
        return dict(q=q, k=k, v=v, g=g, beta=beta, A_log=self.A_log, dt_bias=self.dt_bias), gate

    def forward(self, x: Tensor, operator=fla_ops.chunk_kda, **state) -> tuple[Tensor, Tensor | None]:
        """→ (y, the operator's final state); ``state`` holds initial_state and output_final_state."""
        tensors, gate = self.operands(x)
        o, final_state = operator(**tensors, **IN_OPERATOR, **state)
        return self.out((self.norm(o) * gate.sigmoid()).flatten(-2)), final_state


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.norm, self.kda = nn.RMSNorm(size.width), KDA(size)
        self.mlp = nn.Sequential(nn.RMSNorm(size.width), nn.Linear(size.width, size.hidden, bias=False), nn.GELU(),
                                 nn.Linear(size.hidden, size.width, bias=False))

    def forward(self, x, **how):
        mixed, state = self.kda(self.norm(x), **how)
        x = x + mixed
        return x + self.mlp(x), state


class LanguageModel(nn.Module):
    def __init__(self, size: Size = Size()):
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens):
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
