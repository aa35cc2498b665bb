"""tools/operator_table.py: the table of the README comes from the registry, and each cell says how it was proven."""

import ast
import json
import re

import pytest

from fla_dispatch import Backend, register, unregister
from tools import operator_table
from tools.repository import ROOT, UserError

README = "# Title\n\n<!-- operators -->\nold\n<!-- /operators -->\n\nText | with | bars\n"


@pytest.fixture
def second_backend():
    class Second(Backend):
        name, operation, functions = "second", "kda", ("chunk_kda",)

    register(Second)
    yield
    unregister("second", "kda")


def committed_proofs():
    return json.loads((ROOT / "docs/proofs.json").read_text())


def test_table_has_every_public_operator(program):
    ended = program(operator_table.main)
    assert ended.status == 0, ended.err
    head, rule, *rows = ended.out.splitlines()
    first = next(row for row in rows if row.startswith("| `chunk_kda` "))
    assert head.startswith("| operator | ") and head.endswith(" | reference |")
    assert rule == "|-" * (head.count("|") - 1) + "|"
    assert first.startswith("| `chunk_kda` | ") and first.endswith(" | CPU: `//tests:chunk_kda_reference` |")
    assert [line.split("`")[1] for line in ended.out.splitlines()[2:]] == sorted(committed_proofs())


def test_write_then_check(program, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(README)
    stale = program(operator_table.main, "--check", "--readme", readme)
    assert stale == (1, "", "the table in README.md is stale: run tools/operator_table.py --write\n")
    assert readme.read_text() == README
    assert program(operator_table.main, "--write", "--readme", readme).status == 0
    assert program(operator_table.main, "--check", "--readme", readme) == (0, "", "")
    table = program(operator_table.main).out
    assert readme.read_text() == README.replace("old\n", table)


def test_mistakes_are_one_line(program, tmp_path):
    (tmp_path / "README.md").write_text("nothing here\n")
    (tmp_path / "proofs.json").write_text("{")
    for arguments, message in [
        (["--check", "--readme", tmp_path / "README.md"], "has no lines <!-- operators --> and <!-- /operators -->"),
        (["--check", "--readme", tmp_path / "none.md"], "none.md does not exist"),
        (["--proofs", tmp_path / "none.json"], "none.json does not exist"),
        (["--proofs", tmp_path / "proofs.json"], "is not valid JSON"),
    ]:
        ended = program(operator_table.main, *arguments)
        assert ended.status == 2 and message in ended.err and len(ended.err.splitlines()) == 1


def test_a_cell_needs_its_proof(program, second_backend, tmp_path):
    ended = program(operator_table.main)
    assert ended.status == 2 and "chunk_kda × second is registered and has no proof" in ended.err
    proofs = committed_proofs()
    proofs["chunk_kda"]["second"] = "H200: //tests:chunk_kda_second_h200"
    (tmp_path / "proofs.json").write_text(json.dumps(proofs))
    lines = program(operator_table.main, "--proofs", tmp_path / "proofs.json").out.splitlines()
    column = lines[0].split(" | ").index("second")
    cells = {line.split("`")[1]: line.split(" | ")[column] for line in lines[2:]}
    assert cells.pop("chunk_kda") == "H200: `//tests:chunk_kda_second_h200`"
    assert set(cells.values()) == {"–"}


def test_a_proof_needs_its_cell():
    proofs = {"op": {"reference": "CPU", "triton": "H200"}, "gone": {"reference": "CPU"}}
    with pytest.raises(UserError) as error:
        operator_table.table({"op": ["reference"]}, proofs, set())
    assert "op × triton has a proof and is not registered" in str(error.value)
    assert "gone × reference has a proof and is not registered" in str(error.value)


def test_the_table_does_not_depend_on_what_this_machine_can_import():
    proofs = {"op": {"reference": "CPU", "triton": "H200"}}
    there = operator_table.table({"op": ["triton", "reference"]}, proofs, set())
    assert operator_table.table({"op": ["reference"]}, proofs, {"triton", "ascend"}) == there


def test_proofs_name_tests_that_exist():
    """A label in docs/proofs.json is a cell of tests/harness/cells.py."""
    tree = ast.parse((ROOT / "tests/harness/cells.py").read_text())
    cells = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "CELLS"
    )
    labels = {
        f"{subject}_{backend}" + ("" if hardware == "cpu" else f"_{hardware}") for subject, backend, hardware in cells
    }
    named = re.findall(r"//tests:(\w+)", (ROOT / "docs/proofs.json").read_text())
    assert named and set(named) <= labels
