"""``import facade.ops``: cheap, silent, without a GPU and without anybody's optional packages (C087)."""

import statistics

WHAT_COMES_ALONG = """
import sys, torch
before = set(sys.modules)
import facade.ops
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(new - set(sys.stdlib_module_names)))
print(*sorted(name for name in set(sys.modules) - before if name.startswith("torch.")))
print(torch.cuda.is_initialized())
"""

ON_CPU = """
import torch, facade, facade.ops
q, k, v = torch.randn(3, 1, 5, 2, 8).unbind()
leaf = q.requires_grad_()
o, state = facade.ops.chunk_kda(leaf, k, v, -torch.rand(1, 5, 2, 8), torch.rand(1, 5, 2), output_final_state=True)
o.sum().backward()
print(o.isfinite().all().item(), leaf.grad.shape, facade.last_route().backend)
"""
RAN = "True torch.Size([1, 5, 2, 8]) reference\n"

SECONDS = """
import time, torch
wall, work = time.perf_counter(), time.process_time()
import facade.ops
print(min(time.perf_counter() - wall, time.process_time() - work))
"""


LOOKED_FOR = """
import concurrent.futures, torch, facade.ops
def ours():
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fla::"))
print(ours())
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    gates = list(pool.map(lambda _: torch.ops.fla.fused_kda_gate.default, range(8)))
print(len(set(gates)), *ours())
g, A_log = torch.zeros(1, 4, 2, 8, device="meta"), torch.zeros(2, device="meta")
print(gates[0](g, A_log, None, None, torch.float32, "reference", True)[0].shape)
print(torch.ops.fla.chunk_gla_backward.default.name(), hasattr(torch.ops.fla, "chunk_kad"))
"""


def without(*packages) -> str:
    """A program's first line where these packages are not installed."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"


def test_imports_torch_and_jaxtyping_only(fresh_python):
    """numpy comes with jaxtyping where it is installed. No warning, no compiler, no CUDA context."""
    warnings = "error::DeprecationWarning:facade,error::DeprecationWarning:fla_dispatch"
    packages, of_torch, initialized = fresh_python(WHAT_COMES_ALONG, PYTHONWARNINGS=warnings).splitlines()
    allowed = {"facade", "fla_dispatch", "jaxtyping", "numpy", "typing_extensions", "wadler_lindig"}
    assert set(packages.split()) <= allowed
    assert not [name for name in of_torch.split() if name.startswith(("torch._dynamo", "torch._inductor"))]
    assert initialized == "False"


def test_costs_150_ms_over_torch(fresh_python):
    """Waiting for a core does not count."""
    assert statistics.median(float(fresh_python(SECONDS)) for _ in range(3)) <= 0.150


def test_defines_library_ops_when_they_are_looked_for(fresh_python):
    """None at import, where they would be most of the cost; then by name, in one thread of many, whole."""
    assert fresh_python(LOOKED_FOR).splitlines() == [
        "[]", "1 fla::fused_kda_gate fla::fused_kda_gate_backward", "torch.Size([1, 4, 2, 8])",
        "fla::chunk_gla_backward False"]


def test_works_without_optional_packages(fresh_python):
    absent = without("triton", "tilelang", "numpy", "matplotlib", "transformers", "einops", "datasets")
    assert fresh_python(absent + ON_CPU) == RAN


def test_works_with_assertions_off(fresh_python):
    """No check is an assert: what is wrong stays wrong under ``python -O``."""
    wrong = "try:\n    facade.ops.chunk_kda(q, k[:, 1:], v, q, q[..., 0])\nexcept ValueError as e:\n    print(e)\n"
    said = fresh_python(ON_CPU + wrong, PYTHONOPTIMIZE="1")
    assert said == RAN + "chunk_kda: `k` [B T H K] has T=4 (shape [1, 4, 2, 8]), while `q` [B T H K] has T=5 (shape " \
        "[1, 5, 2, 8])\n"


def test_dispatch_names_no_operator(fresh_python):
    """The contract imports nothing else of ours and knows no operator."""
    program = "import sys, fla_dispatch; print('facade' in sys.modules, *fla_dispatch.operators())"
    assert fresh_python(program) == "False\n"


def test_the_extension_can_be_left_out(fresh_python):
    program = "from fla_dispatch.extension import registry; print(registry)\n" + ON_CPU
    assert fresh_python(program, FLA_DISPATCH_EXTENSION="0") == "None\n" + RAN
