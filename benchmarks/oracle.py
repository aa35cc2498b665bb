"""What is right: the bounds and cases of the tests, for benchmarks that print no figure of a wrong result."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).absolute().parents[1] / "tests"))

from cases import SUBJECTS  # noqa: E402
from harness import bounds  # noqa: E402
from harness.trial import Trial, short_calls  # noqa: E402

__all__ = ["SUBJECTS", "Trial", "bounds", "short_calls"]
