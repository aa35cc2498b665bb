"""tools/new_op.py: what it writes is a declaration, and a test that fails until the recurrence is written."""

import os
import subprocess
import sys

import pytest

from tools import new_op
from tools.lint import finding, house, kernels
from tools.repository import ROOT, sources

RECURRENCE = """    import torch

    from facade.reference.sequences import sequences  # noqa: F401  the reference can use what is there

    S = torch.zeros(*k.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1])
    o = torch.empty_like(v)
    for t in range(q.shape[1]):
        S = S + k[:, t, :, :, None] * v[:, t, :, None, :]
        o[:, t] = scale * torch.einsum("bhk,bhkv->bhv", q[:, t], S)
    return o, S if output_final_state else None
"""


@pytest.fixture
def checkout(tree):
    """The facade alone, where an operator can be added."""
    return tree({source.path: source.text for source in sources(ROOT, "facade") if source.path.endswith(".py")})


def run_new_test(checkout):
    path = os.pathsep.join([str(checkout), str(ROOT / "dispatch"), *sys.path])
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(checkout),
            "-c",
            os.devnull,
            "tests/reference/toy_test.py",
        ],
        cwd=checkout,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )


def test_its_test_fails_until_the_recurrence_is_written(checkout, program):
    ended = program(new_op.main, "toy", "chunk_toy", "--root", checkout)
    written = ended.out.split("\n\n")[0].splitlines()
    assert ended.status == 0
    assert written == [
        "facade/ops/toy.py",
        "facade/reference/toy.py",
        "tests/cases/toy.py",
        "tests/reference/toy_test.py",
    ]
    before = run_new_test(checkout)
    assert before.returncode == 1 and "1 failed" in before.stdout
    assert "NotImplementedError: facade/reference/toy.py: write the recurrence" in before.stdout
    reference = checkout / "facade/reference/toy.py"
    lines = reference.read_text().splitlines(keepends=True)
    reference.write_text("".join(line if "NotImplementedError" not in line else RECURRENCE for line in lines))
    after = run_new_test(checkout)
    assert after.returncode == 0 and "1 passed" in after.stdout, after.stdout


def test_what_it_writes_keeps_the_rules(tree, program):
    root = tree({})
    program(new_op.main, "toy", "chunk_toy", "--root", root)
    assert finding.check(house.RULES + kernels.RULES, sources(root)) == []


def test_nothing_is_overwritten(checkout, program):
    ended = program(new_op.main, "kda", "chunk_kda_wide", "--root", checkout)
    assert ended.status == 2 and "facade/ops/kda.py" in ended.err and "nothing was written" in ended.err
    assert len(ended.err.splitlines()) == 1
    assert "chunk_kda_wide" not in (checkout / "facade/ops/kda.py").read_text()
    assert not (checkout / "tests").exists()


@pytest.mark.parametrize("name", ["chunk-toy", "Chunk", "class", "1"])
def test_names(tree, program, name):
    root = tree({})
    assert program(new_op.main, "toy", name, "--root", root).status == 2
    assert list(root.iterdir()) == []
