#!/usr/bin/env python3
"""Rules of the kernel trees that can be told from the source, and the directions in which the house imports.

    tools/lint/kernels.py                          everything
    tools/lint/kernels.py kernels/gluon            one tree

What cannot be told without false alarms (that every output is written, that token blocks lie on grid axis 0, that every
exponent is at most 0) is left to the tests.
"""

import ast
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[2]))

from tools.audit.kernels import FUNCTIONS, enclosing_kernel, jit_of, last_name
from tools.lint import finding
from tools.repository import Source, run

BLOCK_POINTERS = ("make_block_ptr", "advance")
DATA_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "dim", "is_contiguous", "stride", "numel", "size")
TREES = ("fla_triton", "fla_gluon", "fla_tilelang", "fla_ascend")
OURS = ("facade", "fla_dispatch", "tests", "tools", "benchmarks", *TREES)
LANGUAGES = ("tl", "gl", "language", "ttgl")


def _is_kernel_code(source: Source) -> bool:
    return source.path.startswith("kernels/") and source.path.endswith(".py")


def _walk(source: Source, kind):
    return (node for node in ast.walk(source.tree) if isinstance(node, kind)) if _is_kernel_code(source) else ()


def _language_call(node: ast.Call, *names: str) -> bool:
    """``tl.<name>(...)`` or ``gl.<name>(...)``."""
    function = node.func
    return isinstance(function, ast.Attribute) and function.attr in names and last_name(function.value) in LANGUAGES


def program_id_is_wide(source):
    """tl.program_id(axis) is cast where it is read, tl.program_id(0).to(tl.int64): offsets overflow 32 bits. A cast to
    tl.int32 is the way to say that a coordinate is meant, as TMA takes them."""
    for node in _walk(source, ast.Call):
        if _language_call(node, "program_id"):
            cast = node.parent
            if not (isinstance(cast, ast.Attribute) and cast.attr == "to" and isinstance(cast.parent, ast.Call)):
                yield node.lineno, f"write {ast.unparse(node)}.to({last_name(node.func.value)}.int64)"


def no_block_pointers(source):
    """tl.make_block_ptr and tl.advance only in kernels/ascend."""
    if not source.path.startswith("kernels/ascend/"):
        for node in _walk(source, ast.Attribute | ast.Name):
            named = last_name(node)
            if named in BLOCK_POINTERS and (isinstance(node, ast.Name) or last_name(node.value) in LANGUAGES):
                yield node.lineno, f"{named}: use offset vectors with full masks; block pointers are for kernels/ascend"


def no_contiguous(source):
    """Kernels get contiguous tensors; the bridge sees to it."""
    for node in _walk(source, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr == "contiguous":
            yield node.lineno, "tensors of a Call are contiguous already; drop .contiguous()"


def no_checks(source):
    """No assert, and no raise that depends on a shape, stride, dtype or device: the declaration and the verifier do."""
    for node in _walk(source, ast.Assert):
        yield node.lineno, "assert: a call was checked when it was bound; state limits in the Backend"
    for node in _walk(source, ast.If):
        reads = any(isinstance(part, ast.Attribute) and part.attr in DATA_ATTRIBUTES for part in ast.walk(node.test))
        raises = any(isinstance(statement, ast.Raise) for statement in node.body)
        if reads and raises and enclosing_kernel(node) is None:
            yield node.lineno, "a check of a tensor: say it in the declaration, or in the Backend's limits"


def no_exp_of_a_sum(source):
    """tl.exp of a bare sum: decay is the exponential of a difference that is at most 0. 1 + tl.exp(...) is no decay."""
    for node in _walk(source, ast.Call):
        if _language_call(node, "exp", "exp2") and node.args and _is_bare_sum(node.args[0]):
            around = node.parent
            if not (isinstance(around, ast.BinOp) and isinstance(around.op, ast.Add)):
                yield node.lineno, f"{ast.unparse(node)}: write the exponent as a difference that is at most 0"


def _is_bare_sum(value: ast.expr) -> bool:
    """a + b, where neither a nor b is, or holds as a term, something subtracted or negated."""
    if not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)):
        return False
    return not any(
        isinstance(part, ast.UnaryOp)
        and isinstance(part.op, ast.USub)
        or isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Sub)
        for part in ast.walk(value)
    )


def dot_names_its_precision(source):
    """tl.dot says input_precision (or allow_tf32), and never single-pass TF32, which fp32 inputs may not take."""
    for node in _walk(source, ast.Call):
        if not _language_call(node, "dot"):
            continue
        precision = {k.arg: k.value for k in node.keywords if k.arg in ("input_precision", "allow_tf32")}
        if not precision and not any(k.arg is None for k in node.keywords):
            yield node.lineno, 'tl.dot: say input_precision= ("ieee", "tf32x3", or a constexpr that holds one)'
        for name, value in precision.items():
            if isinstance(value, ast.Constant) and value.value in ("tf32", True):
                yield node.lineno, f"tl.dot: {name}={value.value!r} is single-pass TF32; fp32 inputs may not take it"


def nothing_is_timed(source):
    """No autotune: tiles come from a heuristic and from committed configurations."""
    for node in _walk(source, FUNCTIONS):
        for decorator in node.decorator_list if jit_of(node) else ():
            if last_name(decorator.func if isinstance(decorator, ast.Call) else decorator) == "autotune":
                yield decorator.lineno, "autotune: tiles come from a heuristic and configs/<device>.json (tools/tune)"


def imports_follow_the_arrows(source):
    """facade → fla_dispatch ← kernels; of kernel trees, fla_gluon alone may import another, fla_triton."""
    allowed = _allowed_imports(source.path)
    if allowed is None:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        else:
            continue
        for module in modules:
            package = module.split(".")[0]
            if package in OURS and package not in allowed:
                yield node.lineno, f"{source.path.split('/')[0]} may not import {package} ({', '.join(allowed)} it may)"


def _allowed_imports(path: str) -> tuple[str, ...] | None:
    if not path.endswith(".py"):
        return None
    if path.startswith("facade/"):
        return "facade", "fla_dispatch"
    if path.startswith("dispatch/"):
        return ("fla_dispatch",)
    if path.startswith("kernels/"):
        own = next((part for part in path.split("/") if part in TREES), "fla_dispatch")
        return ("fla_dispatch", own, "fla_triton") if own == "fla_gluon" else ("fla_dispatch", own)
    return None


RULES = (
    program_id_is_wide,
    no_block_pointers,
    no_contiguous,
    no_checks,
    no_exp_of_a_sum,
    dot_names_its_precision,
    nothing_is_timed,
    imports_follow_the_arrows,
)

if __name__ == "__main__":
    run(lambda: finding.main(__doc__, RULES))
