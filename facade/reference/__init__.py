"""The mathematics of every operator in plain PyTorch: one module per family, on any device.

Each family has ``recurrent``, the token recurrence and oracle of all tests, and ``chunk``, the form that runs when no
backend takes a call. ``chunks`` and ``rows`` hold what is no recurrence.
"""

from facade.reference import chunks, delta_rule, gla, kda, linear_attn, rows, rwkv6, simple_gla

__all__ = ["chunks", "delta_rule", "gla", "kda", "linear_attn", "rows", "rwkv6", "simple_gla"]
