"""Every docstring example runs, and so does the README's."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import facade.ops
from fla_dispatch import operators

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


MODULES = [importlib.import_module(m.name) for m in pkgutil.walk_packages(facade.ops.__path__, "facade.ops.")]


def _public():
    """Every function that a module of operators itself defines."""
    functions = (getattr(module, name) for module in MODULES for name in module.__all__)
    return list(dict.fromkeys(functions))


@pytest.mark.parametrize("function", _public(), ids=lambda f: f.__name__)
def test_docstring_example(function):
    found = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs={})
    assert found and found[0].examples, f"{function.__name__} has no example"
    outcome = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(found[0])
    assert outcome.failed == 0


def test_readme_example():
    (first, *_) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    exec(first, names)
    assert names["o"].shape == names["v"].shape and names["state"].shape == (1, 2, 32, 64)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert "://" in target or (path.parent / target).exists(), f"{document} links to {target}"


def test_every_operator_is_documented_here():
    ours = {name for name, o in operators().items() if o.declaration.body.__module__.startswith("facade.")}
    assert ours <= {f.__name__ for f in _public()}
