"""Every public operator, under the names of ``fla.ops``."""

from facade.ops.kda import chunk_kda, fused_recurrent_kda

__all__ = ["chunk_kda", "fused_recurrent_kda"]
