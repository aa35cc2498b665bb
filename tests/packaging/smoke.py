"""What tools/wheel_check runs in an environment that holds the wheel and what it asks for: nothing of the checkout."""

import importlib.metadata
import importlib.util
import pathlib
import sys

import torch

import facade
import facade.ops as fla_ops
from fla_dispatch import extension

assert pathlib.Path(facade.__file__).is_relative_to(sys.prefix), facade.__file__
assert "triton" not in sys.modules, "importing the facade loaded Triton"
assert not torch.cuda.is_initialized(), "importing the facade created a CUDA context"

# The registry is compiled into the wheel; torch offers what it reads tensors by from 2.10 on.
assert importlib.util.find_spec("fla_dispatch._registry") is not None, "the wheel has no compiled registry"
reads_tensors = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
assert (extension.registry is not None) == reads_tensors, "the compiled registry is not used"

distribution = importlib.metadata.distribution("fla-facade")
assert distribution.version == facade.__version__
assert {"triton", "tilelang", "ascend"} <= set(distribution.metadata.get_all("Provides-Extra"))
installed = {file.parts[0] for file in distribution.files if file.suffix == ".py"}
assert all(name == "facade" or name.startswith("fla_") for name in installed), installed

generator = torch.Generator().manual_seed(0)
q, k, v, g = (torch.randn(2, 70, 3, 16, generator=generator) for _ in range(4))
k = torch.nn.functional.normalize(k, dim=-1).requires_grad_()
inputs = {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": torch.rand(2, 70, 3, generator=generator)}
o, state = fla_ops.chunk_kda(**inputs, output_final_state=True)
expected, expected_state = fla_ops.fused_recurrent_kda(**inputs, output_final_state=True)
torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)
torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-4)
o.square().mean().backward()
assert k.grad.isfinite().all() and k.grad.any()

with_registry = "compiled registry" if extension.registry is not None else "Python registry"
print(f"Python {sys.version.split()[0]}, torch {torch.__version__}, {with_registry}: ok")
