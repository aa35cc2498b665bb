"""One letter per dimension, for the whole repository, and the little language shapes are written in.

A shape is a string of dimensions separated by spaces: ``"B T HV V"``. A dimension is a letter of ``DIMS``, a letter
plus a number (``"N+1"``) or a product of letters (``"HV*K"``, a flattened pair of axes). ``"B T H | B T H K"`` are
alternatives, told apart by their rank; ``"... K"`` has any axes before the last, up to ``len(OUTER)``.
"""

import functools
import math
import re
from collections.abc import Collection
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

OUTER = {f"A{i}": f"axis {i} of those that `...` stands for" for i in range(1, 6)}

# Sizes that change from call to call. A decision may not depend on them beyond their power-of-two bucket.
VARYING = frozenset({"B", "T", "N", "NT", *OUTER})


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
        unknown = [letter for letter in letters if letter not in DIMS and letter not in OUTER]
        if unknown:
            raise ValueError(f"shape {text!r}: {unknown[0]!r} is not a dimension letter; known: {', '.join(DIMS)}")
        dims.append(Dim(word, letters, int(offset or 0)))
    return tuple(dims)


@functools.cache
def alternatives(text: str) -> tuple[tuple[Dim, ...], ...]:
    """Every shape that ``text`` stands for, ``|`` and ``...`` written out."""
    shapes = []
    for shape in text.split("|"):
        outer = [" ".join(list(OUTER)[:count]) for count in range(len(OUTER) + 1)] if "..." in shape else [""]
        shapes += [parse_shape(shape.replace("...", axes)) for axes in outer]
    return tuple(shapes)


def fitting(shapes: tuple[tuple[Dim, ...], ...], known: Collection[str]) -> tuple[Dim, ...]:
    """The longest of some alternatives whose letters are all ``known``."""
    return max((shape for shape in shapes if all(set(dim.letters) <= set(known) for dim in shape)), key=len)
