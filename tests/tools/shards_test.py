"""tools/pytest/main.py: the shards of a target have every test between them, and what belongs together in one."""

import importlib.util

import pytest

from tools import repository

TESTS = ["a", "b sm_80", "c sm_90", "d", "e sm_80", "f sm_90", "g"]  # name, and what it belongs together with


class Item:
    def __init__(self, words):
        self.name, *self.together = words.split()

    def get_closest_marker(self, name):
        assert name == "together"
        return pytest.mark.together(*self.together).mark if self.together else None


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """``shards(total)`` → the names of the tests of each; "-name" of those that it reports as deselected."""
    spec = importlib.util.spec_from_file_location("main", repository.ROOT / "tools/pytest/main.py")
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    monkeypatch.setenv("TEST_SHARD_STATUS_FILE", str(tmp_path / "status"))

    def shard(index, total):
        monkeypatch.setenv("TEST_SHARD_INDEX", str(index))
        monkeypatch.setenv("TEST_TOTAL_SHARDS", str(total))
        items, left = [Item(words) for words in TESTS], []
        config = type("Config", (), {"hook": type("Hook", (), {"pytest_deselected": lambda items: left.extend(items)})})
        main.Shard().pytest_collection_modifyitems(config, items)
        assert (tmp_path / "status").exists()
        return [x.name for x in items] + [f"-{x.name}" for x in left]

    return lambda total: [shard(index, total) for index in range(total)]


def test_every_test_is_in_one_shard_and_in_order(shards):
    first, second = shards(2)
    assert first == ["a", "c", "f", "g", "-b", "-d", "-e"]
    assert second == ["b", "d", "e", "-a", "-c", "-f", "-g"]


def test_what_belongs_together_stays_together(shards):
    kept = [{name for name in names if name[0] != "-"} for names in shards(4)]
    assert [sum(pair <= names for names in kept) for pair in ({"b", "e"}, {"c", "f"})] == [1, 1]
    assert sorted(name for names in kept for name in names) == [words[0] for words in TESTS]


def test_more_shards_than_tests(shards):
    assert sum(name[0] != "-" for names in shards(9) for name in names) == len(TESTS)
