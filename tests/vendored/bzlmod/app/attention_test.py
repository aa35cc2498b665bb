"""The facade from a repository that vendors it."""

import importlib.util

import torch

import facade.ops as fla_ops


def test_chunk_kda_equals_the_recurrence():
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


def test_registry_is_compiled():
    assert importlib.util.find_spec("fla_dispatch._registry") is not None
