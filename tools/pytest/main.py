"""The main program of every test under Bazel: pytest, told what Bazel wants."""

import os
import pathlib
import sys

import pytest

NO_TESTS_COLLECTED = 5


class Shard:
    """One of the parts into which Bazel splits a target with shard_count: every TEST_TOTAL_SHARDS-th test, where tests
    that are marked as together("name") count as one."""

    def __init__(self):
        self.index, self.total = int(os.environ["TEST_SHARD_INDEX"]), int(os.environ["TEST_TOTAL_SHARDS"])
        pathlib.Path(os.environ["TEST_SHARD_STATUS_FILE"]).touch()  # says that we know about shards

    @pytest.hookimpl(trylast=True)  # what --test_filter leaves
    def pytest_collection_modifyitems(self, config, items):
        units: dict[object, list] = {}
        for item in items:
            mark = item.get_closest_marker("together")
            units.setdefault(mark.args if mark else item, []).append(item)
        mine = {item for unit in list(units.values())[self.index :: self.total] for item in unit}
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = [item for item in items if item in mine]


def main() -> int:
    temporary = pathlib.Path(os.environ["TEST_TMPDIR"])
    # Whatever a test or a library writes stays inside the sandbox.
    os.environ["HOME"] = str(temporary)
    os.environ.setdefault("TRITON_CACHE_DIR", str(temporary / "triton"))
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(temporary / "inductor"))
    arguments = ["-p", "no:cacheprovider", "--basetemp", str(temporary / "pytest")]
    if "XML_OUTPUT_FILE" in os.environ:
        arguments += ["--junitxml", os.environ["XML_OUTPUT_FILE"]]
    test_filter = os.environ.get("TESTBRIDGE_TEST_ONLY")  # bazel test --test_filter=
    if test_filter:
        arguments += ["-k", test_filter]
    plugins = [Shard()] if "TEST_TOTAL_SHARDS" in os.environ else []
    code = pytest.main(arguments + sys.argv[1:], plugins)
    return 0 if test_filter and code == NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
