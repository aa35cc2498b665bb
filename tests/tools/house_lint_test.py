"""tools/lint/house.py: each rule fires on what it is against, and is silent on what the house writes."""

import pytest

from tools.lint import finding, house
from tools.repository import ROOT, Source, sources

# Spelled in two parts, so that this file keeps the rules.
HOME, TEMPORARY = "/ho" + "me/", "/t" + "mp/"
INDEX = "https://example.net/si" + "mple/"

OPERATOR = '''
@dispatch("kda", returns=Result("B T HV V", "q"))
def chunk_kda(q):
    r"""One sentence.

    Args:
        q: queries.

    Returns:
        o.

    Raises:
        ValueError: always.

    Example:
        >>> 1 + 1
        2
    """
'''

FIRES = [
    (house.no_vague_names, "facade/utils.py", ""),
    (house.no_vague_names, "facade/ops/utils/helpers.py", ""),
    (house.no_vague_names, "kernels/gluon/fla_gluon/helpers/tile.py", ""),
    (house.no_vague_names, "tests/test_utils.py", ""),
    (house.no_vague_names, "docs/misc.md", ""),
    (house.no_vague_names, "kernels/gluon/fla_gluon/kda/forward_v2.py", ""),
    (house.no_machine_paths, "docs/a.md", f"cd {HOME}ada/fla"),
    (house.no_machine_paths, "tools/a.sh", f"PYTHON={TEMPORARY}venv/bin/python"),
    (house.no_machine_paths, "tests/a_test.py", "open('/ro" + "ot/x')"),
    (house.no_machine_paths, "setup.py", "'/wo" + "rk/main'"),
    (house.no_registry_hosts, "tools/pip/a.in", "torch @ https://files.pythonhos" + "ted.org/torch.whl"),
    (house.no_registry_hosts, "a.lock", "--index-url ht" + "tps://example.net/x"),
    (house.no_registry_hosts, "docs/a.md", f"see {INDEX}"),
    (house.operators_are_documented, "facade/ops/kda.py", "@dispatch('kda')\ndef chunk_kda(q):\n    return q\n"),
    (house.operators_are_documented, "facade/ops/kda.py", OPERATOR.replace("Raises:", "Throws:")),
    (house.operators_are_documented, "facade/ops/kda.py", OPERATOR.replace("One sentence.", "One")),
    (house.operators_are_documented, "facade/ops/kda.py", OPERATOR.replace(">>> ", "")),
    (house.no_long_lines, "facade/ops/kda.py", "x" * 121),
    (house.no_assert_for_validation, "facade/ops/kda.py", "def f(x):\n    assert x\n"),
    (house.no_assert_for_validation, "dispatch/fla_dispatch/bind.py", "assert 1\n"),
    (house.no_assert_for_validation, "kernels/gluon/fla_gluon/kda.py", "assert 1\n"),
]

SILENT = [
    (house.no_vague_names, "facade/reference/kda.py", ""),
    (house.no_vague_names, "facade/ops/utils/cumsum.py", ""),
    (house.no_vague_names, "facade/ops/rwkv7.py", ""),
    (house.no_vague_names, "docs/miscellany_of_nothing.md", ""),
    (house.no_machine_paths, "tests/a_test.py", f"open('{TEMPORARY}x')"),
    (
        house.no_machine_paths,
        "tools/a.sh",
        "#!/usr/bin/env bash\ncd $ROOT" + f"{TEMPORARY}x; hidden by /tmp, > /dev/null",
    ),
    (house.no_machine_paths, "docs/a.md", "facade/ho" + "me/x and https://example.net/ro" + "ot/x"),
    (
        house.no_registry_hosts,
        "README.md",
        "pip finds torch on PyPI; --no-emit-index-url; https://arxiv.org/abs/2510.26692",
    ),
    (house.no_registry_hosts, "dispatch/BUILD.bazel", ":registry"),
    (house.operators_are_documented, "facade/ops/kda.py", OPERATOR + "\ndef _inner(q):\n    return q\n"),
    (house.operators_are_documented, "facade/reference/kda.py", "def chunk(q):\n    return q\n"),
    (house.no_long_lines, "facade/ops/kda.py", "x" * 120),
    (house.no_long_lines, "tools/pip/cpu.lock", "x" * 400),
    (house.no_assert_for_validation, "tests/op_test.py", "assert 1\n"),
    (house.no_assert_for_validation, "facade/ops/kda.py", "def f(x):\n    '''Never assert x.'''\n"),
]


@pytest.mark.parametrize(("rule", "path", "text"), FIRES)
def test_fires(rule, path, text):
    assert len(list(rule(Source(path, text)))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), SILENT)
def test_is_silent(rule, path, text):
    assert list(rule(Source(path, text))) == []


def test_every_rule_was_seen_to_fire_and_to_be_silent():
    assert {rule for rule, *_ in FIRES} == {rule for rule, *_ in SILENT} == set(house.RULES)


def test_messages_say_what_is_missing():
    (found,) = finding.check(
        [house.operators_are_documented],
        [Source("facade/ops/kda.py", OPERATOR.replace("Args:", "").replace("Example:", ""))],
    )
    assert str(found) == (
        "facade/ops/kda.py:3: operators_are_documented: chunk_kda: the docstring has no Args:, no Example:"
    )


@pytest.mark.parametrize("rule", house.RULES, ids=lambda rule: rule.__name__)
def test_this_repository(rule):
    every = sources(ROOT)
    assert len(every) > 50, "the repository was not found"
    assert "\n".join(map(str, finding.check([rule], every))) == ""
