"""The chunk engine: device code of the stages that families share. Nothing here launches anything.

Tensors are token-major ([tokens, heads, channels]), states [.., K, V]. C: tokens of a chunk. One program has one chunk
of one value head, or one block of V columns of one state.
"""
