"""Kimi Delta Attention on the chunk engine. Importing this module registers its backends."""

from fla_dispatch import register
from fla_triton.kda.chunk import Chunk
from fla_triton.kda.gate import Gate, GateSums
from fla_triton.kda.recurrent import Recurrent

for backend in (Chunk, Recurrent, Gate, GateSums):
    register(backend)
