"""The main program of every test under Bazel: pytest, told what Bazel wants."""

import os
import pathlib
import sys

import pytest

NO_TESTS_COLLECTED = 5


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
    code = pytest.main(arguments + sys.argv[1:])
    return 0 if test_filter and code == NO_TESTS_COLLECTED else int(code)


if __name__ == "__main__":
    sys.exit(main())
