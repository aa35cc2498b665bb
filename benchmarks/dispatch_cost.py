"""What a call costs before a backend sees it: bind, choose and hand-over of chunk_kda with seven tensors.

Measured at the public symbol, less an empty function of the same signature; beside the Python path, and beside what the
plainest possible wrapper (functools.wraps around a body) costs.
"""

import functools
import sys

import torch

import facade
import fla_dispatch
from benchmarks.timing import arguments, microseconds, report
from facade.ops import chunk_kda


class Empty(fla_dispatch.Backend):
    """Takes the call and does nothing."""

    name, operation, functions, priority = "empty", "kda", ("chunk_kda",), 0
    handles = frozenset({"output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "A_log", "dt_bias"})

    def forward(self, call):
        return (None, None), ()


def main() -> int:
    options = arguments(__doc__).parse_args()
    B, T, H, K = 1, 128, 4, 64
    q, k, v, g = torch.randn(4, B, T, H, K).unbind()
    beta, A_log, dt_bias = torch.rand(B, T, H), torch.zeros(H), torch.zeros(H * K)
    body = chunk_kda.operator.declaration.body
    source = f"lambda {', '.join(_with_defaults(body))}: None"
    empty = eval(source, {"defaults": chunk_kda.operator.defaults})

    @functools.wraps(body)
    def wrapped(*args, **kwargs):
        return empty(*args, **kwargs)

    def call(function):
        return lambda: function(
            q,
            k,
            v,
            g,
            beta,
            A_log=A_log,
            dt_bias=dt_bias,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            output_final_state=True,
        )

    fla_dispatch.register(Empty)
    call(chunk_kda)()
    assert facade.last_route().backend == "empty", facade.last_route()
    floor = microseconds(call(empty), 200_000)
    rows = {
        "empty function": floor,
        "functools.wraps wrapper, less the empty function": microseconds(call(wrapped), 200_000) - floor,
        "public symbol, less the empty function": microseconds(call(chunk_kda), 200_000) - floor,
        "Python path, less the empty function": microseconds(call(chunk_kda.operator.call_in_python), 2_000) - floor,
    }
    with torch.no_grad():
        rows["public symbol under no_grad, less the empty function"] = microseconds(call(chunk_kda), 200_000) - floor
    bars = {"public symbol, less the empty function": 1.2} if chunk_kda.operator.compiled else {}
    return report("dispatch_cost", rows, "µs", bars, options)


def _with_defaults(body):
    """The parameters of ``body`` as source."""
    operator = chunk_kda.operator
    words = [
        name + (f"=defaults[{name!r}]" if name in operator.defaults else "") for name in operator.declaration.names
    ]
    words.insert(operator.declaration.positional, "*")
    return words


if __name__ == "__main__":
    sys.exit(main())
