"""The files of this repository, as its tools read them."""

import argparse
import ast
import difflib
import os
import pathlib
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property

# Beside `tools`: the checkout, or a test's runfiles. `bazel run` says where the checkout is, so that tools can write.
ROOT = pathlib.Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY") or pathlib.Path(__file__).absolute().parents[2])

NOT_OURS = ("build", "dist", "__pycache__")
HIDDEN_BUT_OURS = (".ci", ".github", ".bazelrc", ".bazelversion", ".bazelignore", ".gitignore", ".ruff.toml")


@dataclass(frozen=True)
class Source:
    """One text file; ``path`` is relative to the root, with slashes."""

    path: str
    text: str

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, in which every node knows its ``parent``."""
        try:
            tree = ast.parse(self.text)
        except SyntaxError as error:
            raise UserError(f"{self.path}:{error.lineno}: not valid Python: {error.msg}") from None
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                child.parent = node
        return tree

    def line(self, number: int) -> str:
        return self.lines[number - 1].strip()

    def at(self, node: ast.AST) -> str:
        return f"{self.path}:{node.lineno}"


def parser(document: str) -> argparse.ArgumentParser:
    """A command line described by a tool's docstring: its first line, and what follows it as an epilogue."""
    return argparse.ArgumentParser(
        description=document.partition("\n")[0],
        allow_abbrev=False,
        epilog=document.partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


class UserError(Exception):
    """Something the user can mend; ends a tool with one line and status 2."""


def files(root: pathlib.Path = ROOT) -> list[str]:
    """Paths of all files that are or may be committed, relative to ``root``; sorted."""
    if (root / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            capture_output=True,
            text=True,
        )
        if listed.returncode == 0:
            return sorted({path for path in listed.stdout.split("\0") if path and (root / path).is_file()})
    return sorted(_walk(root))


def _walk(root: pathlib.Path):
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in NOT_OURS and _is_shown(name)]
        for name in names:
            path = pathlib.Path(folder, name)
            # Programs that Bazel lays between the sources of a test lead into its output tree.
            if _is_shown(name) and not name.endswith((".so", ".pyc")) and "/bazel-out/" not in os.path.realpath(path):
                yield path.relative_to(root).as_posix()


def _is_shown(name: str) -> bool:
    return name in HIDDEN_BUT_OURS or not name.startswith((".", "bazel-"))


def sources(root: pathlib.Path = ROOT, *folders: str, suffix: str = "") -> list[Source]:
    """The text files below ``folders`` (all without any) whose names end with ``suffix``. Binary files are left out."""
    found = []
    for path in files(root):
        if path.endswith(suffix) and (not folders or path.startswith(tuple(f"{folder}/" for folder in folders))):
            try:
                found.append(Source(path, (root / path).read_text()))
            except UnicodeDecodeError:
                continue
    return found


def add_import_roots(root: pathlib.Path = ROOT) -> None:
    """Let a checkout be imported where nothing is installed: the facade, dispatch and every kernel tree."""
    for folder in (root, root / "dispatch", *sorted(root.glob("kernels/*"))):
        if folder.is_dir() and str(folder) not in sys.path:
            sys.path.append(str(folder))


def run(main) -> None:
    """Run a tool's ``main()`` as a program: its result is the status; a ``UserError`` is one line and status 2."""
    try:
        status = main()
        sys.stdout.flush()
    except UserError as error:
        print(f"{pathlib.Path(sys.argv[0]).stem}: {error}", file=sys.stderr)
        status = 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)


def nearest(word: str, known) -> str:
    """ "; did you mean `x`?", or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean `{near[0]}`?" if near else ""
