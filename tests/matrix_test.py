"""The cells that tests/BUILD.bazel declares, those the harness runs and those that are registered are the same."""

import re
from pathlib import Path

import cases
from harness.cells import CELLS

from fla_dispatch import gates, operators, registry

BUILD = Path(__file__).parent / "BUILD.bazel"


def _declared():
    """(subject, backend, hardware) of every kernel_test in the BUILD file."""
    found = set()
    for call in re.findall(r"kernel_test\((.*?)\n    \)(.*?)\n\]", BUILD.read_text(), re.S):
        fields = dict(re.findall(r'(\w+) = "?(\w+)"?', call[0]))
        for op in re.findall(r'"(\w+)"', call[1]):
            found.add((op, fields["backend"], fields["hardware"]))
    return found


def test_build_file_declares_the_cells():
    assert _declared() == set(CELLS)


def test_every_operator_is_a_subject_of_some_cell():
    subjects = {subject for subject, _, _ in CELLS}
    assert subjects == set(cases.SUBJECTS)
    covered = {f.__name__ for subject in cases.SUBJECTS.values() for f in subject.functions}
    ours = {name for name, o in operators().items() if o.declaration.body.__module__.startswith("facade.")}
    assert covered == ours


def test_every_registered_backend_has_its_cells():
    """And no cell names a backend that nobody registered."""
    named = {(subject, backend) for subject, backend, _ in CELLS}
    for subject in cases.SUBJECTS.values():
        backends = {
            b.name
            for o in subject.operators()
            for b in registry.backends(o.declaration.operation, o.declaration.function)
        }
        assert {backend for s, backend in named if s == subject.name} == backends | {gates.FALLBACK}
