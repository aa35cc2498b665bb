"""Every tool runs from a checkout as a file and as a module, with nothing on the import path, and has its help."""

import os
import pathlib
import subprocess
import sys

import pytest

from tools.repository import ROOT, files

TOOLS = [
    "inspect_fla_ops",
    "explain",
    "audit_callsites",
    "new_op",
    "operator_table",
    "tune",
    "lint/house",
    "lint/kernels",
]


@pytest.mark.parametrize("tool", TOOLS)
@pytest.mark.parametrize("as_module", [False, True], ids=["file", "module"])
def test_help(tool, as_module):
    command = ["-m", f"tools.{tool.replace('/', '.')}"] if as_module else [f"tools/{tool}.py"]
    elsewhere = [path for path in sys.path if path and not pathlib.Path(path).absolute().is_relative_to(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(elsewhere)}
    environment.pop("PYTHONSAFEPATH", None)  # set by Bazel; with it, -m does not look into the current folder
    ended = subprocess.run(
        [sys.executable, *command, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("usage:") and f"tools/{tool}.py" in ended.stdout, "no example"


def test_the_repository_is_read_without_its_outputs(tmp_path):
    for path in (
        "a.py",
        ".bazelrc",
        ".hidden/b.py",
        "bazel-out/c.py",
        "build/d.py",
        "builder/e.py",
        "f.so",
        "__pycache__/g.pyc",
        ".ci/run",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
    assert files(tmp_path) == [".bazelrc", ".ci/run", "a.py", "builder/e.py"]
