#!/usr/bin/env python3
"""Says who would run a described call of an operator, and why every other backend refuses. Allocates and runs nothing.

    tools/explain.py chunk_kda                                        a bfloat16 call on the CPU
    tools/explain.py chunk_kda --shape train_8k --arch sm90 --grad    training on a Hopper GPU, from any machine
    tools/explain.py chunk_kda --B 1 --T 8192 --H 32 --K 256 --arch sm90 --dtype bf16 \\
        --with initial_state,cu_seqlens --set use_gate_in_kernel=True --set lower_bound=-5.0

Sizes that are not given are those of a shape that the operator's declaration names (train_8k if it has one, else its
first); HV follows a given H where they are equal there. The gates of the environment (FLA_BACKEND, FLA_TRITON ...)
count as for a real call. Status: 0, or 1 if a forced backend refuses, or 2 if the call itself is wrong.
"""

import argparse
import ast
import contextlib
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[1]))

from tools.repository import UserError, add_import_roots, nearest, parser, run

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
DEFAULT_SHAPE = "train_8k"


def arguments() -> argparse.Namespace:
    from fla_dispatch.dims import DIMS

    command = parser(__doc__)
    command.add_argument("operator", help="a public operator: chunk_kda")
    command.add_argument("--shape", metavar="NAME", help="named shape of the declaration that gives the other sizes")
    command.add_argument("--dtype", default="bf16", choices=[*DTYPES, *DTYPES.values()], help="of the float tensors")
    command.add_argument("--device", help="cpu, cuda, npu ...; by default cuda with --arch, otherwise cpu")
    command.add_argument("--arch", help="sm80, sm90, sm100, gfx942 ...; by default that of this machine's device")
    command.add_argument(
        "--with",
        dest="tensors",
        metavar="TENSOR,...",
        action="append",
        default=[],
        help="optional tensors that are present",
    )
    command.add_argument(
        "--set",
        dest="options",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="an option of the operator; may be given several times",
    )
    command.add_argument("--grad", action="store_true", help="gradients are wanted")
    command.add_argument("--inference", action="store_true", help="under torch.inference_mode()")
    command.add_argument("--backend", metavar="NAME", help="as inside `with facade.use_backend(NAME)`")
    command.add_argument("--json", action="store_true", help="print JSON")
    sizes = command.add_argument_group("sizes")
    for letter, meaning in DIMS.items():
        sizes.add_argument(f"--{letter}", type=int, metavar="SIZE", help=meaning)
    return command.parse_args()


def sizes(declaration, wanted: argparse.Namespace) -> tuple[dict[str, int], str | None]:
    """→ (every letter's size, the named shape that they were filled up from)."""
    from fla_dispatch.dims import DIMS

    given = {letter: size for letter in DIMS if (size := getattr(wanted, letter)) is not None}
    shapes = declaration.named_shapes
    name = wanted.shape or (DEFAULT_SHAPE if DEFAULT_SHAPE in shapes else next(iter(shapes), None))
    if name is not None and name not in shapes:
        known = f"; it has {', '.join(shapes)}" if shapes else ""
        raise UserError(f"{declaration.function} has no shape `{name}`{nearest(name, shapes) or known}")
    named = dict(shapes.get(name, {}))
    if "H" in given and "HV" not in given and "HV" in named and named["HV"] == named.get("H"):
        named["HV"] = given["H"]
    filled = named | given
    filled.setdefault("N", filled.get("B", 1))
    letters = {letter for p in declaration.tensors for shape in p.shapes for dim in shape for letter in dim.letters}
    if unused := [letter for letter in given if letter not in letters]:
        raise UserError(
            f"no tensor of {declaration.function} has the dimension {unused[0]}; "
            f"they have {', '.join(letter for letter in DIMS if letter in letters)}"
        )
    if missing := [letter for letter in DIMS if letter in letters and letter not in filled]:
        raise UserError(f"give --{' and --'.join(missing)}: {declaration.function} names no shape to take it from")
    return {letter: size for letter, size in filled.items() if letter in letters}, name


def options(declaration, words: list[str]) -> dict[str, object]:
    import torch

    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise UserError(f"--set {word}: write OPTION=VALUE")
        if name in (p.name for p in declaration.tensors):
            raise UserError(f"--set {word}: `{name}` is a tensor; say --with {name} if it is present")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            dtype = getattr(torch, DTYPES.get(text, text.removeprefix("torch.")), None)
            values[name] = dtype if isinstance(dtype, torch.dtype) else text
    return values


def present(declaration, words: list[str]) -> list[str]:
    optional = [p.name for p in declaration.tensors if p.optional]
    names = [name.strip() for word in words for name in word.split(",") if name.strip()]
    for name in names:
        if name not in optional:
            known = nearest(name, optional) or f"; it has {', '.join(optional) or 'none'}"
            raise UserError(f"--with {name}: {declaration.function} has no such optional tensor{known}")
    return names


def place(wanted: argparse.Namespace) -> tuple[str, str | None]:
    """→ (device, architecture)."""
    import torch

    device = wanted.device or ("cuda" if wanted.arch and wanted.arch != "cpu" else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise UserError(f"--device {device}: torch knows no such device") from None
    if kind == "cuda" and wanted.arch is None and not torch.cuda.is_available():
        raise UserError("this machine has no CUDA device to ask for its architecture; add --arch, such as --arch sm90")
    return device, wanted.arch


def main() -> int:
    add_import_roots()
    try:
        import torch

        import facade.ops  # noqa: F401  declares the operators
        from fla_dispatch import bind, operator_of, use_backend
    except ModuleNotFoundError as error:
        raise UserError(f"facade.ops needs {error.name}, which is not installed here") from None

    wanted = arguments()
    try:
        operator = operator_of(wanted.operator)
    except ValueError as error:
        raise UserError(error) from None
    declaration = operator.declaration
    dims, shape = sizes(declaration, wanted)
    tensors, given = present(declaration, wanted.tensors), options(declaration, wanted.options)
    device, arch = place(wanted)
    described = operator.describe(
        dims,
        dtype=getattr(torch, DTYPES.get(wanted.dtype, wanted.dtype)),
        device=device,
        arch=arch,
        tensors=tensors,
        requires_grad=wanted.grad,
        **given,
    )
    with torch.inference_mode() if wanted.inference else contextlib.nullcontext():
        try:
            _, facts = bind.check(declaration, bind.arrange(declaration, (), described))
        except (TypeError, ValueError, NotImplementedError, DeprecationWarning) as error:
            raise UserError(error) from None
        with use_backend(wanted.backend) if wanted.backend else contextlib.nullcontext():
            try:
                route = operator.explain(**described)
            except ValueError as error:  # a backend or a gate that does not exist
                raise UserError(error) from None
    call = {
        "dims": dims,
        "shape": shape,
        "dtype": str(facts.dtype).removeprefix("torch."),
        "device": device,
        "arch": facts.arch,
        "tensors": tensors,
        "options": {name: str(value) for name, value in given.items()},
        "grad": facts.needs_grad,
        "inference": facts.inference,
    }
    print(as_json(route, call) if wanted.json else as_table(route, call))
    return 1 if route.backend == "none" else 0


def as_json(route, call: dict) -> str:
    runs = None if route.backend == "none" else route.backend
    refusals = [{"backend": name, "reason": reason} for name, reason in route.refusals]
    return json.dumps(
        {"operator": route.function, "call": call, "backend": runs, "forced_by": route.forced_by, "refusals": refusals},
        indent=2,
    )


def as_table(route, call: dict) -> str:
    from fla_dispatch.gates import FALLBACK

    words = [
        f"{call['dtype']} on {call['arch']}",
        *(f"with {name}" for name in call["tensors"]),
        *(f"{name}={value}" for name, value in call["options"].items()),
        *(["gradients"] if call["grad"] else []),
        *(["inference mode"] if call["inference"] else []),
    ]
    shape = f" ({call['shape']} for what is not given)" if call["shape"] else ""
    lines = [
        f"{route.function}: {' '.join(f'{letter}={size}' for letter, size in call['dims'].items())}{shape}",
        "  " + ", ".join(words),
        "",
    ]
    if route.backend == "none":
        return "\n".join(lines + [f"  {line}" for line in route.refusals[0][1].splitlines()])
    runs = "the PyTorch reference" if route.backend == FALLBACK else ""
    if route.forced_by:
        runs += f"{', ' if runs else ''}forced by {route.forced_by}"
    rows = [(route.backend, "runs", runs)]
    rows += [
        (name, "refuses" if i == 0 else "", reason)
        for name, text in route.refusals
        for i, reason in enumerate(text.split("; "))
    ]
    width = max(len(name) for name, _, _ in rows)
    for name, verdict, text in rows:
        lines.append(f"  {name if verdict else '':{width}}  {verdict:7}  {text}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
