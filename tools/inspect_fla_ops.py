#!/usr/bin/env python3
"""Lists the public operators of facade.ops, or of an installed fla.ops: names, signatures, backends. Runs no kernel.

tools/inspect_fla_ops.py                                  every operator, its module, what it is
tools/inspect_fla_ops.py --filter kda --backends          who can run the operators of KDA
tools/inspect_fla_ops.py --signature chunk_kda            its parameters, one a line
tools/inspect_fla_ops.py --package fla.ops --json         the same of an installed fla, for programs
"""

import argparse
import importlib
import inspect
import json
import pathlib
import pkgutil
import sys
import types

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[1]))

from tools.repository import UserError, add_import_roots, nearest, parser, run

OURS = "facade.ops"


def load(package: str) -> types.ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and package.split(".")[: error.name.count(".") + 1] == error.name.split("."):
            hint = "install it, or leave --package out to see facade.ops" if package != OURS else "install it"
            raise UserError(f"package {package} is not installed here (no module named {error.name}); {hint}") from None
        raise UserError(f"package {package} needs {error.name}, which is not installed here") from None
    except Exception as error:  # whatever an installed package does when it is imported
        reason = str(error).strip().splitlines() or [""]
        raise UserError(f"package {package} cannot be imported: {type(error).__name__}: {reason[0]}") from None


def public_operators(package: types.ModuleType) -> tuple[dict[str, object], list[str]]:
    """→ (the functions in ``__all__`` of the package and of its modules, by name; what could not be imported)."""
    modules, problems = [package], []
    for found in pkgutil.iter_modules(getattr(package, "__path__", ())):
        try:
            modules.append(load(f"{package.__name__}.{found.name}"))
        except UserError as error:
            problems.append(str(error))
    operators = {}
    for module in modules:
        for name in getattr(module, "__all__", ()):
            member = getattr(module, name, None)
            if callable(member) and not inspect.isclass(member):
                operators.setdefault(name, member)
    return dict(sorted(operators.items())), problems


def summary(function) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0].strip()


# --- signatures ------------------------------------------------------------------------------------------------------


def parameters(function) -> list[dict]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return []
    described = []
    for p in signature.parameters.values():
        entry = {"name": p.name, "kind": p.kind.name.lower()}
        if p.annotation is not p.empty:
            entry["annotation"] = annotation(p.annotation)
        if p.default is not p.empty:
            entry["default"] = repr(p.default)
        described.append(entry)
    return described


def annotation(hint) -> str:
    """As it is written in the source: `Float[Tensor, "B T H K"] | None`."""
    text = inspect.formatannotation(hint) if not isinstance(hint, str) else hint
    return text.replace("jaxtyping.", "").replace("'", '"')


def signature_text(name: str, described: list[dict]) -> str:
    """One parameter a line, with annotation and default."""
    lines, before = [], None
    for entry in described:
        if entry["kind"] == "keyword_only" and before not in ("keyword_only", "var_positional"):
            lines.append("    *,")
        stars = {"var_positional": "*", "var_keyword": "**"}.get(entry["kind"], "")
        text = stars + entry["name"]
        text += f": {entry['annotation']}" if "annotation" in entry else ""
        if "default" in entry:
            text += f" = {entry['default']}" if "annotation" in entry else f"={entry['default']}"
        lines.append(f"    {text},")
        before = entry["kind"]
    return "\n".join([f"{name}(", *lines, ")"])


# --- backends --------------------------------------------------------------------------------------------------------


def backends(function) -> list[dict]:
    """Who serves an operator: what each backend takes, and whether it could run on this machine."""
    from fla_dispatch import operator_of, registry
    from fla_dispatch.gates import FALLBACK

    if not hasattr(function, "operator"):
        return [{"name": "plain PyTorch", "available": True, "reason": None}]
    declaration = operator_of(function).declaration
    registered = registry.backends(declaration.operation, declaration.function)
    described = [_backend(backend) for backend in sorted(registered, key=lambda b: b.priority)]
    for name, reason in registry.absent(declaration.operation):
        described.append({"name": name, "available": False, "reason": reason})
    described.append({"name": FALLBACK, "available": True, "reason": None})
    return described


def _backend(backend) -> dict:
    reason = _why_unavailable(backend)
    return {
        "name": backend.name,
        "available": reason is None,
        "reason": reason,
        "priority": backend.priority,
        "limits": {what: _listed(taken) for what, taken in backend.limits.items()},
        "handles": sorted(backend.handles),
        "saves": list(backend.saves),
        "differentiable": backend.differentiable,
        "package": backend.package,
        "env": backend.env,
    }


def _why_unavailable(backend) -> str | None:
    """What can be said before a call is known: its gate, its package, the device and architecture it wants.

    ``Backend.probe`` itself is not asked: a backend may try a kernel there.
    """
    import torch

    from fla_dispatch import Backend
    from fla_dispatch.backend import within
    from fla_dispatch.gates import Gates
    from fla_dispatch.registry import architecture, gate_refusal

    if (closed := gate_refusal(backend, Gates.read())) is not None:
        return closed
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    installed, problem = Backend.probe(backend, device)
    if not installed:
        return problem
    for what, here in (("device", device.type), ("arch", architecture(device))):
        if what in backend.limits and not within(what, here, backend.limits[what]):
            return f"needs {what} {_listed(backend.limits[what])}; this machine has {here}"
    return None


def _listed(taken) -> str:
    from fla_dispatch.backend import listed

    return listed(taken).replace("torch.", "")


# --- output ----------------------------------------------------------------------------------------------------------


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{word:{width}}" for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def backend_lines(described: list[dict]) -> str:
    lines = []
    for entry in described:
        lines.append(f"  {entry['name']}: " + ("available" if entry["available"] else f"no: {entry['reason']}"))
        if "limits" in entry:
            limits = "; ".join(f"{what} {taken}" for what, taken in entry["limits"].items())
            lines.append(f"      priority {entry['priority']}; takes {limits or 'any device, dtype and size'}")
            lines.append(f"      handles {', '.join(entry['handles']) or 'no options'}")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    command = parser(__doc__)
    command.add_argument("--package", default=OURS, help="facade.ops (default) or any other, such as fla.ops")
    command.add_argument("--filter", metavar="TEXT", help="only operators with TEXT in their name or module")
    command.add_argument(
        "--signature",
        metavar="OPERATOR",
        action="append",
        default=[],
        help="print its whole signature; may be given several times",
    )
    command.add_argument(
        "--backends",
        action="store_true",
        help="print who can run each operator, and why a backend is not available here",
    )
    command.add_argument("--json", action="store_true", help="print everything in JSON: signatures too")
    return command.parse_args()


def select(operators: dict, wanted: argparse.Namespace) -> dict:
    for name in wanted.signature:
        if name not in operators:
            raise UserError(f"{wanted.package} has no operator `{name}`{nearest(name, operators)}")
    if wanted.filter:
        text = wanted.filter.lower()
        operators = {name: f for name, f in operators.items() if text in name.lower() or text in f.__module__.lower()}
        if not operators:
            raise UserError(f"no operator of {wanted.package} has `{wanted.filter}` in its name or module")
    return {name: operators[name] for name in wanted.signature} if wanted.signature and not wanted.filter else operators


def main() -> int:
    wanted = arguments()
    add_import_roots()
    if wanted.backends and wanted.package != OURS:
        raise UserError(f"--backends asks the registry of {OURS}; {wanted.package} has none that it knows")
    every, problems = public_operators(load(wanted.package))
    chosen = select(every, wanted)
    described = {
        name: {"module": function.__module__, "summary": summary(function), "parameters": parameters(function)}
        | ({"backends": backends(function)} if wanted.package == OURS and (wanted.backends or wanted.json) else {})
        for name, function in (chosen | {name: every[name] for name in wanted.signature}).items()
    }
    if wanted.json:
        print(json.dumps({"package": wanted.package, "operators": described, "not_imported": problems}, indent=2))
        return 0
    blocks = []
    if not wanted.signature and not wanted.backends:
        rows = [("operator", "module", "")] + [(name, d["module"], d["summary"]) for name, d in described.items()]
        blocks.append(table(rows))
    for name, entry in described.items():
        text = [signature_text(name, entry["parameters"])] if name in wanted.signature else []
        if wanted.backends:
            text += [backend_lines(entry["backends"])] if text else [name + "\n" + backend_lines(entry["backends"])]
        blocks += ["\n".join(text)] if text else []
    print("\n\n".join(blocks))
    for problem in problems:
        print(f"left out: {problem}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    run(main)
