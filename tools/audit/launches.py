"""The calls that launch kernels, and where the two disagree. Reads syntax trees; imports no toolchain.

A launch is one of

    kernel[grid](q, k, T=T, BLOCK=64)            Triton, Gluon; also through a name that stands for the kernel
    kernel.run(q, k, grid=grid) / .warmup(...)   the same, spelled out
    launch(kernel, grid, q, k, BLOCK=64)         a wrapper: its own parameters are read from its definition
    device_function(x, BLOCK)                    inside a kernel; also gl.warp_specialize([(function, (x,)), ...])
    factory(M, N)                                TileLang, whose jit functions are called as they are
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tools.audit.kernels import FUNCTIONS, Kernel, called, enclosing, enclosing_kernel, jit_of, kernels_in, last_name
from tools.repository import Source, nearest

# Keywords of a launch that its compiler takes, and those among them that a kernel may have as parameters too.
LAUNCH_OPTIONS = frozenset(
    "grid warmup stream num_warps num_stages num_ctas maxnreg cluster_dims enable_fp_fusion launch_cooperative_grid "
    "launch_pdl debug sanitize_overflow instrumentation_mode waves_per_eu matrix_instr_nonkdim kpack schedule_hint "
    "multibuffer extern_libs".split()
)
HANDED_ON = frozenset({"num_warps", "num_stages", "num_ctas"})


@dataclass(frozen=True)
class Launch:
    source: Source = field(repr=False)
    node: ast.AST = field(repr=False)
    kernels: tuple[Kernel, ...]  # more than one where a name stands for either
    positional: tuple[ast.expr, ...]
    keywords: tuple[ast.keyword, ...]
    without_grid: bool = False

    def arguments(self) -> list[str]:
        """What each parameter is given, in order: `q=call.q`; `?` where a starred argument hides the parameter."""
        names, shown, hidden = iter(self.kernels[0].names), [], False
        for value in self.positional:
            hidden = hidden or isinstance(value, ast.Starred)
            name = "?" if hidden else next(names, "?")
            shown.append(ast.unparse(value) if isinstance(value, ast.Starred) else f"{name}={ast.unparse(value)}")
        return shown + [ast.unparse(keyword) for keyword in self.keywords]

    def disagreements(self) -> list[str]:
        """Every way in which the arguments fit no kernel that is meant."""
        if self.without_grid:
            return [
                f"`{self.kernels[0].name}` is a kernel and is called without a grid: write "
                f"{self.kernels[0].name}[grid](...)"
            ]
        every = [list(_disagreements(self, kernel)) for kernel in self.kernels]
        return [] if any(not found for found in every) else every[0]


def _disagreements(launch: Launch, kernel: Kernel) -> Iterator[str]:
    names, where = kernel.names, f"{kernel.name} ({kernel.source.at(kernel.node)})"
    starred = next((i for i, value in enumerate(launch.positional) if isinstance(value, ast.Starred)), None)
    count = len(launch.positional) if starred is None else starred
    if count > len(names):
        yield f"{count} arguments are given by position, {where} has {len(names)} parameters: {', '.join(names)}"
    by_position, given = set(names[:count]), set()
    for keyword in launch.keywords:
        name = keyword.arg
        if name is None:
            continue
        if name in given:
            yield f"`{name}` is given twice by keyword"
        if name in by_position:
            yield f"`{name}` is given by position (argument {names.index(name) + 1}) and by keyword"
        if name not in names and name not in LAUNCH_OPTIONS:
            yield f"{where} has no parameter `{name}`{nearest(name, names)}"
        given.add(name)
    for name in sorted((by_position | given) & kernel.tuned):
        yield f"`{name}` is given by the launch and by autotune"
    if starred is not None or any(keyword.arg is None for keyword in launch.keywords):
        return
    provided = by_position | given | kernel.tuned | kernel.derived | HANDED_ON
    missing = [
        p.name
        for p in kernel.parameters
        if p.name not in provided and not p.has_default and not (p.constexpr and kernel.tuned_by_unknown)
    ]
    if missing:
        yield f"{', '.join(f'`{name}`' for name in missing)} of {where} is not given"


class Index:
    """All kernels, functions and launches of some sources."""

    def __init__(self, sources: Iterable[Source]):
        self.sources = [source for source in sources if source.path.endswith(".py")]
        self.kernels: dict[str, list[Kernel]] = {}
        self.functions: dict[str, list[tuple[Source, ast.FunctionDef]]] = {}  # those that are no kernels
        self._bindings: dict[str, dict[str, list[ast.AST]]] = {}
        for source in self.sources:
            for kernel in kernels_in(source):
                self.kernels.setdefault(kernel.name, []).append(kernel)
            for node in ast.walk(source.tree):
                if isinstance(node, FUNCTIONS) and not jit_of(node):
                    self.functions.setdefault(node.name, []).append((source, node))
            self._bindings[source.path] = _bindings(source)
        self.launches: list[Launch] = []
        self.unknown: list[tuple[Source, ast.Call]] = []  # name[...](...) of something that is not known here
        for source in self.sources:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Call):
                    self.launches += self._launches(source, node)

    def _launches(self, source: Source, call: ast.Call) -> Iterator[Launch]:
        inside = enclosing_kernel(call)
        function = self._stored_subscript(source, call.func)
        if isinstance(function, ast.Subscript):
            if found := self.resolve(source, function.value):
                yield self._launch(source, call, found, call.args, call.keywords)
            elif function is call.func and inside is None and not _is_parameter(function.value):
                self.unknown.append((source, call))
        elif isinstance(function, ast.Attribute) and function.attr in ("run", "warmup"):
            if found := self.resolve(source, function.value):
                yield self._launch(source, call, found, call.args, call.keywords)
        elif found := self.resolve(source, function, wrapped=False):
            bare = inside is None and found[0].toolchain != "tilelang"
            yield self._launch(source, call, found, call.args, call.keywords, without_grid=bare)
        elif last_name(function) == "warp_specialize":
            for pair in ast.walk(call):
                if isinstance(pair, ast.Tuple) and len(pair.elts) == 2 and isinstance(pair.elts[1], ast.Tuple):
                    if found := self.resolve(source, pair.elts[0]):
                        yield self._launch(source, pair, found, pair.elts[1].elts, [])
        elif call.args and (found := self.resolve(source, call.args[0], wrapped=False)):
            if (handed_on := self._through_wrapper(source, call, last_name(function))) is not None:
                yield self._launch(source, call, found, *handed_on)

    @staticmethod
    def _launch(source, node, kernels, positional, keywords, without_grid=False) -> Launch:
        spelled = []
        for value in positional:
            literal = isinstance(value, ast.Starred) and isinstance(value.value, ast.Tuple | ast.List)
            spelled += value.value.elts if literal else [value]
        named = []
        for keyword in keywords:
            if (
                keyword.arg is None
                and isinstance(keyword.value, ast.Dict)
                and all(isinstance(key, ast.Constant) for key in keyword.value.keys)
            ):
                named += [
                    ast.keyword(key.value, value)
                    for key, value in zip(keyword.value.keys, keyword.value.values, strict=True)
                ]
            elif keyword.arg is None and called(keyword.value) == "dict" and not keyword.value.args:
                named += keyword.value.keywords
            else:
                named.append(keyword)
        return Launch(source, node, tuple(kernels), tuple(spelled), tuple(named), without_grid)

    def _through_wrapper(self, source: Source, call: ast.Call, name: str | None):
        """→ (positional, keywords) that a wrapper called with a kernel hands on to it; None if it is no wrapper."""
        definitions = self.functions.get(name, ())
        launches = name is not None and "launch" in name
        if not definitions:
            return (call.args[2:], call.keywords) if launches else None
        _, definition = max(definitions, key=lambda found: _closeness(found[0], source))
        arguments = definition.args
        own = [a.arg for a in arguments.posonlyargs + arguments.args if a.arg not in ("self", "cls")]
        others = [a.arg for a in arguments.kwonlyargs]
        if arguments.vararg is None or not (launches or "grid" in own + others):
            return None
        return call.args[len(own) :], [k for k in call.keywords if k.arg not in own + others]

    def _stored_subscript(self, source: Source, function: ast.AST) -> ast.AST:
        """``run`` after ``run = kernel[grid]`` is ``kernel[grid]``."""
        if isinstance(function, ast.Name):
            values = self._bindings[source.path].get(function.id, ())
            if len(values) == 1 and isinstance(values[0], ast.Subscript):
                return values[0]
        return function

    def resolve(self, source: Source, node: ast.AST, wrapped: bool = True, depth: int = 0) -> list[Kernel]:
        """The kernels that an expression may stand for; with ``wrapped`` also after ``name = cached(kernel)``."""
        if depth > 4:
            return []
        if isinstance(node, ast.IfExp):
            return self.resolve(source, node.body, wrapped, depth + 1) + self.resolve(
                source, node.orelse, wrapped, depth + 1
            )
        if isinstance(node, ast.Call) and wrapped and node.args:
            return self.resolve(source, node.args[0], wrapped, depth + 1)
        if isinstance(node, ast.Attribute):
            modules = self._bindings[source.path].get(last_name(node.value), ())
            return [
                k
                for alias in modules
                if isinstance(alias, ast.alias)
                for k in self.kernels.get(node.attr, ())
                if _comes_from(k, _module(alias))
            ]
        found = []
        for value in self._bindings[source.path].get(node.id, ()) if isinstance(node, ast.Name) else ():
            if isinstance(value, FUNCTIONS):
                found += [k for k in self.kernels.get(node.id, ()) if k.node is value]
            elif isinstance(value, ast.alias):
                found += self._imported(source, value)
            else:
                found += self.resolve(source, value, wrapped, depth + 1)
        return list(dict.fromkeys(found))

    def _imported(self, source: Source, alias: ast.alias) -> list[Kernel]:
        """The kernel of ``from module import name``; through re-exports the closest one of that name."""
        module, found = _module(alias).rpartition("/")[0], self.kernels.get(alias.name, [])
        if not found or not isinstance(alias.parent, ast.ImportFrom):
            return []
        if exact := [k for k in found if _comes_from(k, module)]:
            return exact
        package = module.partition("/")[0]
        if not alias.parent.level and not any(f"/{package}/" in f"/{s.path}" for s in self.sources):
            return []  # someone else's module
        closest = max(_closeness(k.source, source) for k in found)
        return [k for k in found if _closeness(k.source, source) == closest]


def _module(alias: ast.alias) -> str:
    """What an import names, as the end of a path: ``from fla_triton.kda import kernel`` → "fla_triton/kda/kernel"."""
    if isinstance(alias.parent, ast.ImportFrom):
        return f"{alias.parent.module or ''}.{alias.name}".strip(".").replace(".", "/")
    return alias.name.replace(".", "/")


def _comes_from(kernel: Kernel, module: str) -> bool:
    path = "/" + kernel.source.path.removesuffix(".py")
    return bool(module) and (path.endswith(f"/{module}") or f"/{module}/" in path)


def _closeness(source: Source, other: Source) -> int:
    """How many folders two files share, counted from the root; the most for one and the same file."""
    if source.path == other.path:
        return 1000
    pairs = zip(source.path.split("/")[:-1], other.path.split("/")[:-1], strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), source.path.count("/"))


def _is_parameter(node: ast.AST) -> bool:
    """Whether a name is a parameter of the function around it, as the kernel is in a wrapper."""
    function = enclosing(node, FUNCTIONS)
    return function is not None and last_name(node) in {
        a.arg for a in function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    }


def _bindings(source: Source) -> dict[str, list[ast.AST]]:
    """What each name of a file stands for: a function, an import, or the value assigned to it."""
    bound: dict[str, list[ast.AST]] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS):
            bound.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                bound.setdefault((alias.asname or alias.name).split(".")[0], []).append(alias)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    bound.setdefault(target.id, []).append(node.value)
    return bound
