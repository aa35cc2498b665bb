"""Every place that a change of an operator, a kernel or a parameter would touch, by kind. Reads syntax trees only."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.audit.kernels import FUNCTIONS, Kernel, enclosing, last_name
from tools.audit.launches import Index, Launch
from tools.repository import Source

KINDS = (
    "declaration",
    "reference",
    "kernel",
    "backend",
    "forward return",
    "backward return",
    "saved",
    "launch",
    "test",
    "benchmark",
    "doc",
    "other",
)
SPOKEN_ABOUT = 4  # a parameter's name of fewer letters counts in prose only where it is set as code


@dataclass(frozen=True)
class Place:
    kind: str
    path: str
    line: int
    text: str
    arguments: tuple[str, ...] = ()  # of a launch, in order
    disagreements: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operator:
    """A function under ``@dispatch("family", ...)``."""

    name: str
    operation: str
    source: Source = field(repr=False)
    node: ast.FunctionDef = field(repr=False)

    @property
    def parameters(self) -> list[ast.arg]:
        return [*self.node.args.posonlyargs, *self.node.args.args, *self.node.args.kwonlyargs]


@dataclass(frozen=True)
class Backend:
    """A subclass of some ``...Backend`` that sets ``operation``."""

    operation: str
    functions: tuple[str, ...]  # those of the operation that it serves; none named: all
    source: Source = field(repr=False)
    node: ast.ClassDef = field(repr=False)
    fields: dict[str, ast.stmt] = field(repr=False)

    @property
    def saves(self) -> tuple[str, ...]:
        value = getattr(self.fields.get("saves"), "value", None)
        keys = value.keys if isinstance(value, ast.Dict) else []
        return tuple(key.value for key in keys if isinstance(key, ast.Constant))

    def serves(self, operator: Operator) -> bool:
        return self.operation == operator.operation and (not self.functions or operator.name in self.functions)


class Audit:
    """A repository's operators, backends, kernels and launches, and the questions about them."""

    def __init__(self, sources: list[Source]):
        self.sources = sources
        self.index = Index(sources)
        declaring = [source for source in self.index.sources if not source.path.startswith("tests/")]
        self.operators = [operator for source in declaring for operator in _operators(source)]
        self.backends = [backend for source in declaring for backend in _backends(source)]
        self.kernels = [kernel for same in self.index.kernels.values() for kernel in same]

    def names(self) -> dict[str, set[str]]:
        """Everything that can be asked about → what it is."""
        known: dict[str, set[str]] = {}
        for operator in self.operators:
            known.setdefault(operator.name, set()).add("operator")
            for argument in operator.parameters:
                known.setdefault(argument.arg, set()).add("parameter")
        for kernel in self.kernels:
            known.setdefault(kernel.name, set()).add("kernel")
            for name in kernel.names:
                known.setdefault(name, set()).add("parameter")
        for backend in self.backends:
            for name in backend.saves:
                known.setdefault(name, set()).add("residual")
        return known

    def launches(self, folder: str = "") -> list[Place]:
        return [launch_place(launch) for launch in self.index.launches if launch.source.path.startswith(folder)]

    def places(self, name: str) -> list[Place]:
        what, found = self.names()[name], []
        if "operator" in what:
            found += self._of_operators([operator for operator in self.operators if operator.name == name])
        if "kernel" in what:
            found += self._of_kernels([kernel for kernel in self.kernels if kernel.name == name])
        if what & {"parameter", "residual"}:
            found += self._of_parameter(name)
        found += self._mentions(name, by_word=bool(what & {"operator", "kernel"}))
        return sorted(set(found), key=lambda p: (KINDS.index(p.kind), p.path, p.line))

    # --- an operator ---

    def _of_operators(self, operators: list[Operator]) -> Iterator[Place]:
        for operator in operators:
            yield place("declaration", operator.source, operator.node)
            for call in (node for node in ast.walk(operator.node) if isinstance(node, ast.Call)):
                for source, function in self.index.functions.get(last_name(call.func), ()):
                    if "/reference/" in source.path and isinstance(call.func, ast.Attribute):
                        yield place("reference", operator.source, call)
                        yield place("reference", source, function)
        for backend in self.backends:
            if any(backend.serves(operator) for operator in operators):
                yield from self._of_backend(backend)

    def _of_backend(self, backend: Backend) -> Iterator[Place]:
        source = backend.source
        yield place("backend", source, backend.node)
        for name in ("functions", "limits", "handles", "saves"):
            if name in backend.fields:
                yield place("backend", source, backend.fields[name])
        for method in (node for node in backend.node.body if isinstance(node, FUNCTIONS)):
            if method.name in ("forward", "backward", "also_refuses", "rank"):
                yield place("backend", source, method)
            if method.name in ("forward", "backward"):
                for returned in (node for node in ast.walk(method) if isinstance(node, ast.Return)):
                    yield place(f"{method.name} return", source, returned)
                    yield from (
                        place("backward return", source, key)
                        for key in _keys(returned.value)
                        if method.name == "backward"
                    )
        saves = getattr(backend.fields.get("saves"), "value", None)
        yield from (place("saved", source, key) for key in _keys(saves))
        for near, function in self._reached(backend):
            for node in ast.walk(function):
                if _reads(node, "saved", backend.saves):
                    yield place("saved", near, node)
        inside = [(near.path, function) for near, function in self._reached(backend)]
        for launch in self.index.launches:
            if any(launch.source.path == path and _contains(function, launch.node) for path, function in inside):
                yield launch_place(launch)

    def _reached(self, backend: Backend) -> list[tuple[Source, ast.AST]]:
        """The class, and every function that its methods may come to call, by name, within its own tree."""
        tree = "/".join(backend.source.path.split("/")[:2])
        reached, waiting = [], [(backend.source, backend.node)]
        while waiting:
            source, function = waiting.pop()
            reached.append((source, function))
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                for near, called in self.index.functions.get(last_name(call.func), ()):
                    known = any(called is other for _, other in reached + waiting)
                    if near.path.startswith(tree) and not known and enclosing(called, ast.ClassDef) is None:
                        waiting.append((near, called))
        return reached

    # --- a kernel ---

    def _of_kernels(self, kernels: list[Kernel]) -> Iterator[Place]:
        yield from (place("kernel", kernel.source, kernel.node) for kernel in kernels)
        around = []
        for launch in self.index.launches:
            if any(kernel in kernels for kernel in launch.kernels):
                yield launch_place(launch)
                around.append(launch)
        for backend in self.backends:
            functions = self._reached(backend)
            if any(
                launch.source is source and _contains(function, launch.node)
                for launch in around
                for source, function in functions
            ):
                yield place("backend", backend.source, backend.node)

    # --- a parameter, a saved tensor ---

    def _of_parameter(self, name: str) -> Iterator[Place]:
        word = re.compile(rf"\b{re.escape(name)}\b")
        declared = {
            operator.source for operator in self.operators if name in (argument.arg for argument in operator.parameters)
        }
        for source in declared:  # the parameter, the rules and layouts that name it, and what is said about it
            yield from (
                Place("declaration", source.path, number, line.strip())
                for number, line in enumerate(source.lines, 1)
                if word.search(line)
            )
        for kernel in self.kernels:
            yield from (place("kernel", kernel.source, p.node) for p in kernel.parameters if p.name == name)
        for launch in self.index.launches:
            if any(name in kernel.names for kernel in launch.kernels) or _mentions_name(launch, name):
                yield launch_place(launch)
        for backend in self.backends:
            for stated, statement in backend.fields.items():
                for node in ast.walk(statement):
                    if isinstance(node, ast.Constant) and node.value == name:
                        yield place("saved" if stated == "saves" else "backend", backend.source, node)
        for source in self.index.sources:
            if source.path.startswith("kernels/"):
                yield from self._in_kernel_tree(source, name)
            elif "/reference/" in source.path:
                for function in (node for node in ast.walk(source.tree) if isinstance(node, FUNCTIONS)):
                    yield from (
                        place("reference", source, argument)
                        for argument in function.args.args + function.args.kwonlyargs
                        if argument.arg == name
                    )

    @staticmethod
    def _in_kernel_tree(source: Source, name: str) -> Iterator[Place]:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute) and node.attr == name and last_name(node.value) == "call":
                yield place("backend", source, node)
            elif _reads(node, "saved", (name,)):
                yield place("saved", source, node)
            elif isinstance(node, ast.Return | ast.Assign) and (method := enclosing(node, FUNCTIONS)):
                if "backward" in method.name:
                    yield from (place("backward return", source, key) for key in _keys(node.value) if key.value == name)

    # --- where it is spoken of ---

    def _mentions(self, name: str, by_word: bool) -> Iterator[Place]:
        word = re.compile(rf"\b{re.escape(name)}\b")
        quoted = re.compile(rf"`[^`\n]*\b{re.escape(name)}\b[^`\n]*`")
        for source in self.sources:
            kind = _kind_of_file(source.path)
            if kind is None:
                continue
            if source.path.endswith(".py") and not by_word:
                yield from (place(kind, source, node) for node in ast.walk(source.tree) if _names(node, name))
                continue
            pattern = word if by_word or len(name) >= SPOKEN_ABOUT else quoted
            yield from (
                Place(kind, source.path, number, line.strip())
                for number, line in enumerate(source.lines, 1)
                if pattern.search(line)
            )


def _kind_of_file(path: str) -> str | None:
    """What a file that mentions something is; None for those that are read as code."""
    first = path.split("/")[0]
    if path.endswith(".md") or first == "docs":
        return "doc"
    return {
        "tests": "test",
        "benchmarks": "benchmark",
        "facade": None,
        "kernels": None,
        "dispatch": None,
        "tools": None,
    }.get(first, "other")


def place(kind: str, source: Source, node: ast.AST) -> Place:
    return Place(kind, source.path, node.lineno, source.line(node.lineno))


def launch_place(launch: Launch) -> Place:
    return Place(
        "launch",
        launch.source.path,
        launch.node.lineno,
        launch.source.line(launch.node.lineno),
        tuple(launch.arguments()),
        tuple(launch.disagreements()),
    )


def _operators(source: Source) -> Iterator[Operator]:
    for node in source.tree.body:
        for decorator in node.decorator_list if isinstance(node, FUNCTIONS) else ():
            if isinstance(decorator, ast.Call) and last_name(decorator.func) == "dispatch" and decorator.args:
                yield Operator(node.name, getattr(decorator.args[0], "value", ""), source, node)


def _backends(source: Source) -> Iterator[Backend]:
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = {}
        for statement in node.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            fields |= {target.id: statement for target in targets if isinstance(target, ast.Name)}
        operation = getattr(getattr(fields.get("operation"), "value", None), "value", None)
        inherits = any("Backend" in (last_name(base) or "") for base in node.bases)
        if isinstance(operation, str) and inherits:
            functions = getattr(fields.get("functions"), "value", None)
            named = [item.value for item in getattr(functions, "elts", ()) if isinstance(item, ast.Constant)]
            yield Backend(operation, tuple(named), source, node, fields)


def _keys(value: ast.AST | None) -> list[ast.Constant]:
    """The constant keys of every dict written in an expression."""
    dicts = [node for node in ast.walk(value) if isinstance(node, ast.Dict)] if value is not None else []
    return [key for each in dicts for key in each.keys if isinstance(key, ast.Constant)]


def _reads(node: ast.AST, variable: str, keys) -> bool:
    """``variable["key"]``, or ``variable.get("key")``."""
    if isinstance(node, ast.Subscript):
        key, owner = node.slice, node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get" and node.args:
        key, owner = node.args[0], node.func.value
    else:
        return False
    return last_name(owner) == variable and isinstance(key, ast.Constant) and key.value in keys


def _contains(function: ast.AST, node: ast.AST) -> bool:
    while node is not None and node is not function:
        node = getattr(node, "parent", None)
    return node is function


def _mentions_name(launch: Launch, name: str) -> bool:
    values = [*launch.positional, *(keyword.value for keyword in launch.keywords)]
    return any(last_name(node) == name for value in values for node in ast.walk(value))


def _names(node: ast.AST, name: str) -> bool:
    """A keyword, a string or an attribute of that name: what a rename would have to follow."""
    if isinstance(node, ast.keyword):
        return node.arg == name
    return (isinstance(node, ast.Constant) and node.value == name) or (
        isinstance(node, ast.Attribute) and node.attr == name
    )
