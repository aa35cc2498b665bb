"""The facade from a repository that vendors it and brings its own torch, jaxtyping and headers."""

import importlib.util

import torch

import facade.ops as fla_ops


def test_chunk_kda_equals_the_recurrence():
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 70, 2, 16, generator=generator) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    inputs = {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": torch.rand(1, 70, 2, generator=generator)}
    o, _ = fla_ops.chunk_kda(**inputs)
    expected, _ = fla_ops.fused_recurrent_kda(**inputs)
    torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-4)


def test_our_own_dependencies_are_used():
    assert importlib.util.find_spec("our_torch") is not None
    assert importlib.util.find_spec("our_jaxtyping") is not None


def test_registry_is_compiled():
    assert importlib.util.find_spec("fla_dispatch._registry") is not None
