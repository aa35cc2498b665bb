"""One letter per dimension, for the whole repository, and the little language shapes are written in.

A shape is a string of dimensions separated by spaces: ``"B T HV V"``. A dimension is a letter of ``DIMS``, a letter
plus a number (``"N+1"``) or a product of letters (``"HV*K"``, a flattened pair of axes).
"""

import functools
import math
import re
from dataclasses import dataclass

DIMS = {
    "B": "batch",
    "T": "tokens",
    "H": "query/key heads",
    "HV": "value heads",
    "HQ": "query heads (attention with grouped keys and values)",
    "K": "key channels of a head",
    "V": "value channels of a head",
    "N": "sequences (the batch, or the packed sequences of cu_seqlens)",
    "M": "slots",
    "L": "levels or sources",
    "C": "tokens of a chunk",
    "NT": "chunks",
}

# Sizes that change from call to call. A decision may not depend on them beyond their power-of-two bucket.
VARYING = frozenset({"B", "T", "N", "NT"})


@dataclass(frozen=True, slots=True)
class Dim:
    """The product of ``letters``, plus ``offset``."""

    text: str
    letters: tuple[str, ...]
    offset: int = 0

    @property
    def varies(self) -> bool:
        return not VARYING.isdisjoint(self.letters)

    def size(self, sizes):
        return math.prod(sizes[letter] for letter in self.letters) + self.offset


@functools.cache  # operators share their shapes
def parse_shape(text: str) -> tuple[Dim, ...]:
    """``"N+1"`` → ``(Dim("N+1", ("N",), 1),)``. Raises ``ValueError`` on a letter that is not in ``DIMS``."""
    dims = []
    for word in re.sub(r"\s*\*\s*", "*", text).split():
        product, _, offset = word.partition("+")
        letters = tuple(product.split("*"))
        unknown = [letter for letter in letters if letter not in DIMS]
        if unknown:
            raise ValueError(f"shape {text!r}: {unknown[0]!r} is not a dimension letter; known: {', '.join(DIMS)}")
        dims.append(Dim(word, letters, int(offset or 0)))
    return tuple(dims)
