"""KDA's PyTorch forms on the CPU: forward and backward of a training call, and one step of decoding."""

import sys

import torch

from benchmarks.timing import arguments, microseconds, report
from facade.ops import chunk_kda, fused_recurrent_kda


def inputs(B, T, H, K, V, requires_grad):
    normalize = torch.nn.functional.normalize
    values = (
        normalize(torch.randn(B, T, H, K), dim=-1),
        normalize(torch.randn(B, T, H, K), dim=-1),
        torch.randn(B, T, H, V),
        -torch.nn.functional.softplus(torch.randn(B, T, H, K)),
        torch.rand(B, T, H),
    )
    return [x.requires_grad_(requires_grad) for x in values]


def main() -> int:
    options = arguments(__doc__).parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    long, short = inputs(1, 2048, 4, 64, 64, True), inputs(8, 256, 4, 32, 32, True)
    token, state = inputs(1, 1, 4, 64, 64, False), torch.zeros(1, 4, 64, 64)

    def train(values):
        o, S = chunk_kda(*values, output_final_state=True)
        torch.autograd.grad(o.sum() + S.sum(), values)

    rows = {
        "chunk_kda B1 T2048 H4 K64 V64 fp32, forward + backward": microseconds(lambda: train(long), 3) / 1e3,
        "chunk_kda B8 T256 H4 K32 V32 fp32, forward + backward": microseconds(lambda: train(short), 5) / 1e3,
        "fused_recurrent_kda B1 T1 H4 K64 V64 fp32": microseconds(
            lambda: fused_recurrent_kda(*token, initial_state=state, output_final_state=True), 200
        )
        / 1e3,
    }
    bars = {"chunk_kda B1 T2048 H4 K64 V64 fp32, forward + backward": 90}
    return report("kda_cpu", rows, "ms", bars, options)


if __name__ == "__main__":
    sys.exit(main())
