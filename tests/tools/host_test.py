"""tools/bazel and tools/lane: what a host lacks is said in one line; the Bazel of a launcher is used as it is."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

TOOLS = pathlib.Path(__file__).parents[2] / "tools"
NEEDED = ["bash", "dirname", "readlink", "sed", "timeout"]


@pytest.fixture
def host(tmp_path):
    """A host of our making: `host.program(name, script)` puts a program on its PATH, `host(tool, …)` calls a tool."""

    class Host:
        path = tmp_path / "bin"
        environment = {"PATH": str(path), "HOME": str(tmp_path / "home")}

        def program(self, name, script):
            (self.path / name).unlink(missing_ok=True)
            (self.path / name).write_text("#!/bin/bash\n" + script)
            (self.path / name).chmod(0o755)

        def __call__(self, tool, *arguments):
            command = [str(TOOLS / tool), *arguments]
            return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60)

    host = Host()
    host.path.mkdir()
    for name in NEEDED:
        (host.path / name).symlink_to(shutil.which(name))
    host.program("uname", '[ "$1" = -m ] && echo x86_64 || echo Linux')
    host.program("c++", "")
    host.environment["FLA_PYTHON"] = sys.executable
    return host


def says(ended, text):
    assert ended.returncode == 1, ended
    assert ended.stdout == "" and ended.stderr.count("\n") == 1, ended
    assert text in ended.stderr


def test_other_machines_are_refused(host):
    host.program("uname", '[ "$1" = -m ] && echo aarch64 || echo Linux')
    says(host("bazel", "version"), "needs x86-64 Linux; this is Linux aarch64.")


def test_no_compiler(host):
    (host.path / "c++").unlink()
    says(host("bazel", "version"), "no C++ compiler: install one (Debian, Ubuntu: apt-get install g++).")


def test_no_python(host):
    del host.environment["FLA_PYTHON"]
    says(host("bazel", "version"), "no working Python 3.11, 3.12, 3.13: install one")


def test_a_python_shim_that_does_not_run_is_no_python(host):
    del host.environment["FLA_PYTHON"]
    host.program("python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    says(host("bazel", "version"), "no working Python 3.11, 3.12, 3.13: install one")


def test_wrong_choice_of_python(host):
    host.program("python2", 'echo "2.7"')
    host.environment["FLA_PYTHON"] = "python2"
    says(host("bazel", "version"), "no working Python 3.11, 3.12, 3.13 at FLA_PYTHON=python2:")


def test_no_venv_module(host):
    python = host.path / "python3.11"
    answers = {"version_info": "echo 3.11", "executable": f"echo {python}", "ensurepip": "exit 1"}
    host.program("python3.11", "".join(f'[[ "$*" != *{asked}* ]] || {answer}\n' for asked, answer in answers.items()))
    host.environment["FLA_PYTHON"] = str(python)
    says(host("bazel", "version"), "has no venv module: install it (Debian, Ubuntu: apt-get install python3.11-venv).")


def test_the_bazel_of_a_launcher_is_used(host):
    host.program("real", 'echo "real $*"')
    host.environment["BAZEL_REAL"] = str(host.path / "real")
    assert host("bazel", "test", "//...").stdout == "real test //...\n"


def test_bazel_on_path_is_used_if_new_enough(host):
    host.program("bazel", '[ "$1" = --version ] && echo "bazel 6.5.0" || echo "old $*"')
    host.program("bazelisk", '[ "$1" = --version ] && echo "bazel 8.0.1" || echo "new $*"')
    assert host("bazel", "test", "//...").stdout == "new test //...\n"


def test_this_file_on_path_is_not_taken_for_bazel(host):
    (host.path / "bazel").symlink_to((TOOLS / "bazel").resolve())
    host.program("bazelisk", '[ "$1" = --version ] && echo "bazel 7.7.1" || echo "other $*"')
    assert host("bazel", "test").stdout == "other test\n"


def test_lanes(host):
    assert host("lane").returncode == host("lane", "tpu").returncode == 2
    says(host("lane", "ascend"), "has never run")
    host.environment["FLA_PYTHON"] = str(host.path / "python3")
    host.program("python3", "echo 'No module named torch' >&2; exit 1")
    ended = host("lane", "h200")
    assert ended.returncode == 1 and "has no torch" in ended.stderr, ended


def test_every_script_is_executable():
    for script in ("bazel", "bootstrap_bazel.sh", "lane", "wheel_check", "pip/lock.sh"):
        assert os.access(TOOLS / script, os.X_OK), script
