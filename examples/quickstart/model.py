"""A byte-level language model whose only mixing over time is Kimi Delta Attention.

No convolution, no attention, no token shift: a byte reaches a later prediction through the state of a KDA layer or not
at all. Without KDA the network sees one byte and can do no better than a table of byte pairs.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import facade.ops as fla_ops

BYTES = 256

# Both operators normalise q and k, compute the gate from its raw input and beta from its logit.
IN_OPERATOR = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
OPTIONS = {
    fla_ops.chunk_kda: IN_OPERATOR | dict(disable_recompute=True),  # batches are small: memory for time
    fla_ops.fused_recurrent_kda: IN_OPERATOR,
}


@dataclass(frozen=True)
class Size:
    """The default is what learns most in a minute on a CPU."""

    layers: int = 3
    width: int = 96  # of the residual stream
    hidden: int = 384  # of an MLP
    heads: int = 2  # H
    key_channels: int = 32  # K
    value_channels: int = 48  # V


class KDA(nn.Module):
    """The operator and the projections around it."""

    def __init__(self, size: Size):
        super().__init__()
        self.heads = size.heads
        keys, values = size.heads * size.key_channels, size.heads * size.value_channels
        self.parts = [keys, keys, values, keys, size.heads, values]  # q, k, v, g, beta and the gate of the output
        self.project = nn.Linear(size.width, sum(self.parts), bias=False)
        self.norm = nn.RMSNorm(size.value_channels)
        self.out = nn.Linear(values, size.width, bias=False)
        # exp(A_log) * softplus(dt_bias) is what a channel forgets per byte: from nearly all down to a fiftieth.
        forgets = torch.empty(keys).uniform_(math.log(0.02), math.log(2)).exp()
        self.A_log = nn.Parameter(torch.zeros(size.heads))
        self.dt_bias = nn.Parameter(forgets.expm1().log())

    def operands(self, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """x [B, T, width] → (the operator's tensors by name, the gate of its output [B, T, H, V])."""
        q, k, v, g, beta, gate = self.project(x).split(self.parts, dim=-1)
        q, k, v, g, gate = (y.unflatten(-1, (self.heads, -1)) for y in (q, k, v, g, gate))
        return dict(q=q, k=k, v=v, g=g, beta=beta, A_log=self.A_log, dt_bias=self.dt_bias), gate

    def forward(self, x: Tensor, state: Tensor | None, operator) -> tuple[Tensor, Tensor]:
        """x [B, T, width], state [B, H, K, V] → the same, T bytes later."""
        tensors, gate = self.operands(x)
        o, state = operator(**tensors, **OPTIONS[operator], initial_state=state, output_final_state=True)
        return self.out((self.norm(o) * gate.sigmoid()).flatten(-2)), state


class MLP(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.before_kda, self.kda = nn.RMSNorm(size.width), KDA(size)
        self.before_mlp, self.mlp = nn.RMSNorm(size.width), MLP(size)

    def forward(self, x: Tensor, state: Tensor | None, operator) -> tuple[Tensor, Tensor]:
        mixed, state = self.kda(self.before_kda(x), state, operator)
        x = x + mixed
        return x + self.mlp(self.before_mlp(x)), state


class LanguageModel(nn.Module):
    def __init__(self, size: Size = Size()):
        super().__init__()
        self.embed = nn.Embedding(BYTES, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)

    def forward(self, tokens: Tensor, states=None, operator=fla_ops.chunk_kda) -> tuple[Tensor, list[Tensor]]:
        """tokens [B, T], one state per block or None → (logits [B, T, 256] of the next bytes, the states behind them).

        ``operator`` is ``chunk_kda`` or, to walk byte by byte, ``fused_recurrent_kda``.
        """
        x, behind = self.embed(tokens), []
        for block, state in zip(self.blocks, states or [None] * len(self.blocks), strict=True):
            x, state = block(x, state, operator)
            behind.append(state)
        return self.head(self.norm(x)), behind

    def loss(self, tokens: Tensor) -> Tensor:
        """Nats per byte of tokens[:, 1:], each predicted from those before it."""
        logits, _ = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
