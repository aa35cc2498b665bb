"""The calls that launch kernels, and where the two disagree. Reads syntax trees; imports no toolchain.

A launch is one of

    kernel[grid](q, k, T=T, BLOCK=64)            Triton, Gluon; also through a name that stands for the kernel
    kernel.run(q, k, grid=grid) / .warmup(...)   the same, spelled out
    launch(kernel, grid, q, k, BLOCK=64)         a wrapper: its own parameters are read from its definition
    device_function(x, BLOCK)                    inside a kernel; also gl.warp_specialize([(function, (x,)), ...])
    factory(M, N)                                TileLang, whose jit functions are called as they are
    step = KERNEL.launch(problem, BLOCK=64)      in two halves, where KERNEL = Kernel(kernel, ...): first the constants,
    step(grid, q, k, T)                          then the arguments; ``step`` may be an attribute or be handed on
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
CONSTANTS, ARGUMENTS = "constants", "arguments"
DEPTH = 4  # how often a name is followed to what it stands for


@dataclass(frozen=True)
class Launch:
    source: Source = field(repr=False)
    node: ast.AST = field(repr=False)
    kernels: tuple[Kernel, ...]  # more than one where a name stands for either
    positional: tuple[ast.expr, ...]
    keywords: tuple[ast.keyword, ...]
    without_grid: bool = False
    half: str | None = None  # CONSTANTS or ARGUMENTS of a launch in two halves

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
    if launch.half is not None:
        yield from _disagreements_of_half(launch, kernel, where)
        return
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


def _disagreements_of_half(launch: Launch, kernel: Kernel, where: str) -> Iterator[str]:
    constants = [p.name for p in kernel.parameters if p.constexpr]
    others = [p.name for p in kernel.parameters if not p.constexpr]
    for keyword in launch.keywords:
        if launch.half == ARGUMENTS:
            yield f"arguments of {where} are given by position; `{keyword.arg or '**'}` is given by keyword"
        elif keyword.arg is not None and keyword.arg not in constants:
            yield f"{where} has no constant `{keyword.arg}`{nearest(keyword.arg, constants)}"
    if launch.half == ARGUMENTS and not any(isinstance(value, ast.Starred) for value in launch.positional):
        if len(launch.positional) != len(others):
            yield f"{len(launch.positional)} arguments are given, {where} takes {len(others)}: {', '.join(others)}"


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
        self.calls: dict[str, list[tuple[Source, ast.Call]]] = {}  # by the name of what is called
        for source in self.sources:
            for node in ast.walk(source.tree):
                if isinstance(node, ast.Call) and (name := called(node)):
                    self.calls.setdefault(name, []).append((source, node))
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
            elif function is call.func and inside is None and not _is_handed_in(function.value):
                self.unknown.append((source, call))
        elif isinstance(function, ast.Attribute) and function.attr in ("run", "warmup"):
            if found := self.resolve(source, function.value):
                yield self._launch(source, call, found, call.args, call.keywords)
        elif found := self._planned(source, call):
            yield self._launch(source, call, found, [], [k for k in call.keywords if k.arg != "config"], half=CONSTANTS)
        elif inside is None and (found := self._plan(source, function)):
            grid, *arguments = _spelled(call.args) or [None]
            arguments = [grid, *arguments] if isinstance(grid, ast.Starred) else arguments
            yield self._launch(source, call, found, arguments, call.keywords, half=ARGUMENTS)
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
    def _launch(source, node, kernels, positional, keywords, without_grid=False, half=None) -> Launch:
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
        return Launch(source, node, tuple(kernels), tuple(spelled), tuple(named), without_grid, half)

    def _planned(self, source: Source, node: ast.AST) -> list[Kernel]:
        """The kernels of ``KERNEL.launch(...)``."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "launch":
            return self.resolve(source, node.func.value)
        return []

    def _plan(self, source: Source, node: ast.AST, depth: int = 0) -> list[Kernel]:
        """The kernels of an expression that stands for what ``KERNEL.launch(...)`` returned."""
        values = []
        if depth > DEPTH:
            return []
        if isinstance(node, ast.Attribute) and last_name(node.value) == "self":
            values = [(source, value) for value in _assigned_to_attribute(node)]
        elif isinstance(node, ast.Name) and (function := _has_parameter(node)):
            return self._handed_to(source, function, node.id, depth)
        elif isinstance(node, ast.Name):
            values = [(source, v) for v in self._bindings[source.path].get(node.id, ()) if isinstance(v, ast.expr)]
            values += [(source, v) for v in _looped_over(node)]
        found = []
        for near, value in values:
            inner = [k for call in ast.walk(value) for k in self._planned(near, call)]
            found += inner or self._plan(near, value, depth + 1)
        return list(dict.fromkeys(found))

    def _handed_to(self, source: Source, function: ast.FunctionDef, name: str, depth: int) -> list[Kernel]:
        """The kernels of the plans that callers hand to a parameter of a function, or of a class's ``__init__``."""
        names = [a.arg for a in function.args.posonlyargs + function.args.args]
        owner = enclosing(function, ast.ClassDef)
        position = names.index(name) - (owner is not None) if name in names else -1
        title = owner.name if owner is not None and function.name == "__init__" else function.name
        tree, found = source.path.split("/")[:2], []
        for near, call in self.calls.get(title, ()) if position >= 0 else ():
            if near.path.split("/")[:2] == tree:
                given = [keyword.value for keyword in call.keywords if keyword.arg == name]
                for value in given or call.args[position : position + 1]:
                    found += self._planned(near, value) or self._plan(near, value, depth + 1)
        return list(dict.fromkeys(found))

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
        if depth > DEPTH:
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
                found += self._imported(source, value) or self._imported_stand_in(value, depth)
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


    def _imported_stand_in(self, alias: ast.alias, depth: int) -> list[Kernel]:
        """What ``from module import NAME`` stands for, where the module says ``NAME = Kernel(kernel, ...)``."""
        module = _module(alias).rpartition("/")[0]
        if not isinstance(alias.parent, ast.ImportFrom) or not module:
            return []
        return [
            kernel
            for source in self.sources
            if f"/{source.path}".endswith(f"/{module}.py")
            for kernel in self.resolve(source, ast.Name(alias.name), True, depth + 1)
        ]


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


def _has_parameter(node: ast.AST) -> ast.FunctionDef | None:
    """The function around a name, if the name is a parameter of it."""
    function = enclosing(node, FUNCTIONS)
    if function is None:
        return None
    arguments = function.args
    named = {a.arg for a in arguments.posonlyargs + arguments.args + arguments.kwonlyargs}
    return function if last_name(node) in named else None


def _is_handed_in(node: ast.AST) -> bool:
    """Whether the kernel comes from outside: a parameter of a wrapper, or an attribute of a callable object."""
    owner = node
    while isinstance(owner, ast.Attribute):
        owner = owner.value
    if owner is not node and isinstance(owner, ast.Name) and owner.id == "self":
        around = enclosing(node, ast.ClassDef)
        return around is not None and any(isinstance(x, FUNCTIONS) and x.name == "__call__" for x in around.body)
    return _has_parameter(node) is not None


def _assigned_to_attribute(node: ast.Attribute) -> Iterator[ast.expr]:
    """The values of every ``self.name = ...`` of the class around ``self.name``, also among several targets."""
    around = enclosing(node, ast.ClassDef)
    for statement in ast.walk(around) if around is not None else ():
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                targets = target.elts if isinstance(target, ast.Tuple) else [target]
                if any(isinstance(t, ast.Attribute) and t.attr == node.attr for t in targets):
                    yield statement.value


def _looped_over(node: ast.Name) -> Iterator[ast.expr]:
    """What ``for name in ...`` goes through, in the function around ``name``."""
    for statement in ast.walk(enclosing(node, FUNCTIONS) or ast.Module([], [])):
        if isinstance(statement, ast.For) and isinstance(statement.target, ast.Name) and statement.target.id == node.id:
            yield statement.iter


def _spelled(values: list[ast.expr]) -> list[ast.expr]:
    """``*arguments`` as what the function around it assigned to ``arguments``, where that is one tuple."""
    found = []
    for value in values:
        if isinstance(value, ast.Starred) and isinstance(value.value, ast.Name):
            assigned = [
                statement.value
                for statement in ast.walk(enclosing(value, FUNCTIONS) or ast.Module([], []))
                if isinstance(statement, ast.Assign)
                and any(isinstance(t, ast.Name) and t.id == value.value.id for t in statement.targets)
            ]
            if len(assigned) == 1 and isinstance(assigned[0], ast.Tuple):
                found += assigned[0].elts
                continue
        found.append(value)
    return found


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
