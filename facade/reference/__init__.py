"""The mathematics of every operator in plain PyTorch: one module per family, on any device.

Each family has ``recurrent``, the token recurrence and oracle of all tests, and ``chunk``, the form that runs when no
backend takes a call.
"""

from facade.reference import delta_rule, gla, kda, linear_attn, rwkv6, simple_gla

__all__ = ["delta_rule", "gla", "kda", "linear_attn", "rwkv6", "simple_gla"]
