#!/usr/bin/env python3
"""Rules that every file of the house keeps: names, what may not be committed, docstrings of operators, line length.

tools/lint/house.py                 everything
tools/lint/house.py facade docs     some folders or files
"""

import ast
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).absolute().parents[2]))

from tools.audit.kernels import FUNCTIONS, last_name
from tools.lint import finding
from tools.repository import run

VAGUE = frozenset({"util", "utils", "helper", "helpers", "misc", "v2"})
NAMED_BY_THE_API = "facade/ops/utils/"  # fla.ops.utils
LINE_LENGTH = 120
SECTIONS = ("Args", "Returns", "Raises", "Example")
VALIDATED_OTHERWISE = ("facade/", "dispatch/", "kernels/")
# Folders that only one machine has; below /tmp a name is one too, but tests may make their own there.
MACHINE_PATHS = re.compile(r"(?<![\w.$}/-])/(?:root/|home/\w|Users/\w|work/\w|tmp/\w)")
# Hosts that serve packages, and options that point at one.
REGISTRIES = re.compile(
    r"\b(?:[\w-]+\.)*(?:pypi|pythonhosted|anaconda)\.org\b|\bjfrog\.io\b|\bbcr\.bazel\b|"
    r"https?://\S*/(?:simple|artifactory|nexus)\b|(?:index-url|find-links)[= ]+https?://\S*",
    re.I,
)


def no_vague_names(source):
    """No file or folder is called utils, helpers, misc or v2, alone or as a part of its name."""
    for part in source.path.removeprefix(NAMED_BY_THE_API).split("/"):
        words = part.split(".")[0].lower().strip("_").split("_")
        if vague := VAGUE.intersection(words):
            yield 1, f"`{part}` is called `{min(vague)}`: name it after what it does"


def no_machine_paths(source):
    """No path of one machine: home folders, and names below /tmp outside tests."""
    for number, line in enumerate(source.lines, 1):
        for found in MACHINE_PATHS.findall(line):
            if not (found.startswith("/tmp/") and source.path.startswith("tests/")):
                yield number, f"a path of one machine: {found}..."


def no_registry_hosts(source):
    """No host name of a package registry: which one serves is the machine's business."""
    for number, line in enumerate(source.lines, 1):
        if found := REGISTRIES.search(line):
            yield number, f"a package registry: {found.group()}"


def operators_are_documented(source):
    """The docstring of an operator says what it is in one line, and has Args, Returns, Raises and Example."""
    if not (source.path.startswith("facade/ops/") and source.path.endswith(".py")):
        return
    for node in source.tree.body:
        if not isinstance(node, FUNCTIONS) or not any(
            isinstance(d, ast.Call) and last_name(d.func) == "dispatch" for d in node.decorator_list
        ):
            continue
        text = ast.get_docstring(node)
        if not text:
            yield node.lineno, f"{node.name} has no docstring"
            continue
        if not text.partition("\n")[0].rstrip().endswith("."):
            yield node.lineno, f"{node.name}: the first line of the docstring is not a sentence"
        if missing := [name for name in SECTIONS if not re.search(rf"^{name}:$", text, re.M)]:
            yield node.lineno, f"{node.name}: the docstring has no {', no '.join(f'{name}:' for name in missing)}"
        elif ">>> " not in text.partition("\nExample:\n")[2]:
            yield node.lineno, f"{node.name}: the example cannot be run; write it with >>>"


def no_long_lines(source):
    """Lines of Python have at most 120 characters."""
    if source.path.endswith(".py"):
        for number, line in enumerate(source.lines, 1):
            if len(line) > LINE_LENGTH:
                yield number, f"{len(line)} characters; at most {LINE_LENGTH}"


def no_assert_for_validation(source):
    """facade, dispatch and kernels raise errors that say what to do; python -O drops an assert."""
    if source.path.startswith(VALIDATED_OTHERWISE) and source.path.endswith(".py"):
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Assert):
                yield node.lineno, "assert: raise a ValueError or TypeError that says what to do"


RULES = (
    no_vague_names,
    no_machine_paths,
    no_registry_hosts,
    operators_are_documented,
    no_long_lines,
    no_assert_for_validation,
)

if __name__ == "__main__":
    run(lambda: finding.main(__doc__, RULES))
