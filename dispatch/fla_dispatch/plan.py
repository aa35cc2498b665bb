"""A plan is a decision made once for all calls of equal facts: who runs them and how."""

from fla_dispatch import bridge, gates
from fla_dispatch.backend import Backend
from fla_dispatch.bind import PACKED
from fla_dispatch.call import Call, Facts
from fla_dispatch.declaration import Declaration
from fla_dispatch.guard import is_fake
from fla_dispatch.registry import Route
from fla_dispatch.sequences import Sequences


class Plan:
    """What a ``Call`` shares with every other call of the same facts.

    ``tensors`` holds the positions of those that are present, ``differentiable`` the dtypes of those with a gradient,
    ``constants`` the names of floating-point ones without; ``derived`` (position, value) of options that the
    declaration derives; ``run`` carries a call to its results; ``forward`` is set where the backend's forward, less
    what it saves, is all there is to it.
    ``always_check`` is true where a rule or a product reads a size that varies, which the compiled path does not.
    """

    __slots__ = (
        "always_check",
        "backend",
        "constants",
        "counts_chunks",
        "declaration",
        "derived",
        "differentiable",
        "facts",
        "forward",
        "function",
        "index",
        "names",
        "returned",
        "route",
        "run",
        "single",
        "tensors",
        "wanted",
        "witnesses",
    )

    def __init__(self, declaration: Declaration, facts: Facts, backend: Backend | None, route: Route):
        self.declaration, self.facts, self.backend, self.route = declaration, facts, backend, route
        self.function, self.names = declaration.function, declaration.names
        self.index = {name: position for position, name in enumerate(self.names)}
        self.tensors = tuple(self.index[name] for name in facts.tensors)
        self.differentiable = {
            name: tensor.dtype for name, tensor in facts.tensors.items() if declaration.parameter(name).differentiable
        }
        self.constants = tuple(name for name in facts.tensors if declaration.parameter(name).constant)
        self.wanted = declaration.wanted(facts.options)
        self.returned = tuple(n for n, r in declaration.results.items() if n in self.wanted or not r.omitted)
        self.single = tuple(declaration.results) == ("result",)
        self.derived = tuple(
            (self.index[name], derive(facts.dims))
            for name, derive in declaration.derived.items()
            if facts.options[name] is None
        )
        self.counts_chunks = any(declaration.results[name].counts_chunks for name in self.wanted)
        self.witnesses = self._witnesses()
        self.always_check = self._always_check()
        self.run = bridge.run_through(self)
        self.forward = backend.forward if bridge.runs_straight(self) else None

    def _always_check(self) -> bool:
        rules = self.declaration.rules
        products = any(
            dim.varies and len(dim.letters) > 1
            for name in self.facts.tensors
            for shape in self.declaration.parameter(name).shapes
            for dim in shape
        )
        return products or any(r.varies and (r.when is None or self.facts.options[r.when]) for r in rules)

    def _witnesses(self):
        """Where to read each varying size: letter → (position, axis, offset)."""
        found = {}
        for name, tensor in self.facts.tensors.items():
            shapes = self.declaration.shapes_of(self.declaration.parameter(name), self.facts.options)
            dims = next(shape for shape in shapes if len(shape) == len(tensor.shape))
            for axis, dim in enumerate(dims):
                if dim.varies and len(dim.letters) == 1:
                    found.setdefault(dim.letters[0], (self.index[name], axis, dim.offset))
        return found

    def sizes(self, values) -> dict[str, int]:
        """Every letter's size for these values."""
        sizes = dict(self.facts.dims)
        for letter, (position, axis, offset) in self.witnesses.items():
            sizes[letter] = values[position].shape[axis] - offset
        if PACKED not in self.facts.tensors and "B" in sizes:
            sizes["N"] = sizes["B"]
        if self.counts_chunks:
            packed = values[self.index[PACKED]] if PACKED in self.facts.tensors else None
            chunk_size = values[self.index[self.declaration.chunk_size]]
            if not is_fake(packed):  # else no one can know
                sizes["NT"] = Sequences(sizes["B"], sizes["T"], self.facts.device, packed).chunk_count(chunk_size)
        return sizes

    def bind(self, values, tensors) -> Call:
        """A call of these values with ``tensors`` in the place of its own."""
        bound = list(values)
        for position, tensor in zip(self.tensors, tensors, strict=True):
            bound[position] = tensor
        return Call(self, tuple(bound))

    def run_body(self, call):
        """Call the decorated body with the bound values."""
        positional = self.declaration.positional
        keywords = dict(zip(self.names[positional:], call.values[positional:], strict=True))
        return self.declaration.body(*call.values[:positional], **keywords)

    @property
    def backend_name(self) -> str:
        return self.backend.name if self.backend is not None else gates.FALLBACK
