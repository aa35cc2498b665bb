"""How the tests of the tools run them: in this process, as a program would be."""

import sys
from typing import NamedTuple

import pytest

from tools import repository


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def program(monkeypatch, capsys):
    """``program(main, "--flag", ...)`` → status, standard output and standard error."""

    def run(main, *arguments) -> Ended:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            repository.run(main)
        captured = capsys.readouterr()
        return Ended(end.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def tree(tmp_path):
    """``tree({"kernels/a.py": "..."})`` writes files below a folder of its own → the folder."""

    def write(files: dict[str, str]):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


@pytest.fixture
def import_fresh(monkeypatch):
    """Forget what a test imports of a package."""

    def forget(package: str):
        for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)

    return forget
