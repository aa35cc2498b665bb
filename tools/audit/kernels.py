"""Kernels as their source declares them: parameters, and which of them autotune and heuristics give."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.repository import Source

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Parameter:
    name: str
    constexpr: bool
    has_default: bool
    node: ast.arg = field(compare=False)


@dataclass(frozen=True)
class Kernel:
    name: str
    source: Source = field(repr=False)
    node: ast.FunctionDef = field(repr=False)
    toolchain: str  # the last name before `.jit`: "triton", "gluon", "tilelang"
    parameters: tuple[Parameter, ...]
    tuned: frozenset[str]  # given by autotune's configurations
    derived: frozenset[str]  # given by heuristics
    tuned_by_unknown: bool  # there are configurations that cannot be read here

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)


def kernels_in(source: Source) -> Iterator[Kernel]:
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS) and (toolchain := jit_of(node)):
            tuned, derived, unknown = set(), set(), False
            for decorator in node.decorator_list:
                if called(decorator) == "autotune":
                    keys = _configured(source, decorator)
                    tuned, unknown = tuned | keys, unknown or not keys
                elif called(decorator) == "heuristics":
                    derived |= {key.value for value in decorator.args for key in _dict_keys(source, value)}
            yield Kernel(
                node.name, source, node, toolchain, _parameters(node), frozenset(tuned), frozenset(derived), unknown
            )


def jit_of(node: ast.FunctionDef) -> str | None:
    """The toolchain whose ``jit`` decorates a function."""
    for decorator in node.decorator_list:
        target = decorator.func if isinstance(decorator, ast.Call) else decorator
        if last_name(target) == "jit":
            return last_name(target.value) if isinstance(target, ast.Attribute) else "triton"
    return None


def last_name(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


def called(node: ast.AST) -> str | None:
    return last_name(node.func) if isinstance(node, ast.Call) else None


def _parameters(node: ast.FunctionDef) -> tuple[Parameter, ...]:
    arguments = node.args.posonlyargs + node.args.args
    without = len(arguments) - len(node.args.defaults)
    listed = [(argument, i >= without) for i, argument in enumerate(arguments)]
    listed += [(a, d is not None) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    return tuple(
        Parameter(a.arg, a.annotation is not None and "constexpr" in ast.unparse(a.annotation), default, a)
        for a, default in listed
    )


def _configured(source: Source, decorator: ast.Call) -> set[str]:
    """Meta-parameters in the configurations of ``autotune``; they may stand in a variable or a function beside it."""
    values = [*decorator.args[:1], *(k.value for k in decorator.keywords if k.arg == "configs")]
    names = {last_name(node) for value in values for node in ast.walk(value)}
    values += [node for node in source.tree.body if isinstance(node, FUNCTIONS) and node.name in names]
    values += [
        node.value
        for node in source.tree.body
        if isinstance(node, ast.Assign) and any(last_name(target) in names for target in node.targets)
    ]
    found = set()
    for node in (node for value in values for node in ast.walk(value)):
        if called(node) == "Config":
            meta = node.args[:1] + [k.value for k in node.keywords if k.arg == "kwargs"]
            found |= {key.value for value in meta for key in _dict_keys(source, value)}
    return found


def _dict_keys(source: Source, value: ast.expr) -> Iterator[ast.Constant]:
    """Keys of ``{"A": 1}``, of ``dict(A=1)``, or of a variable beside it that holds one."""
    if isinstance(value, ast.Dict):
        yield from (key for key in value.keys if isinstance(key, ast.Constant))
    elif called(value) == "dict":
        yield from (ast.Constant(keyword.arg) for keyword in value.keywords if keyword.arg)
    elif isinstance(value, ast.Name):
        for node in source.tree.body:
            if isinstance(node, ast.Assign) and any(last_name(target) == value.id for target in node.targets):
                yield from _dict_keys(source, node.value) if not isinstance(node.value, ast.Name) else ()


def enclosing(node: ast.AST, kinds) -> ast.AST | None:
    node = getattr(node, "parent", None)
    while node is not None and not isinstance(node, kinds):
        node = getattr(node, "parent", None)
    return node


def enclosing_kernel(node: ast.AST) -> ast.FunctionDef | None:
    """The jit function around a node."""
    function = enclosing(node, FUNCTIONS)
    while function is not None and jit_of(function) in (None, "tilelang"):
        function = enclosing(function, FUNCTIONS)
    return function
