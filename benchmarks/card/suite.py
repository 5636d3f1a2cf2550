"""The tests of the repository that need a GPU; one is enough."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.card.page import FAILED, PASSED
from benchmarks.card.setting import NotRun

TESTS = Path(__file__).parents[2] / "tests"
_MOST_PROCESSES = 6  # each has a context of its own in the GPU's memory


class _Count:
    """Counts the outcomes, and says each failure at once."""

    def __init__(self, say):
        self._say = say
        self.outcomes = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            words = crash.message if crash else str(report.longrepr)
            first_line = words.strip().splitlines()[0]
            _, _, name = report.nodeid.rpartition("/")
            self._say(first_line[:200], name, FAILED)


def cuda_tests(setting, say):
    """The files that mark a test ``cuda``, in several processes if pytest-xdist is here."""
    files = []
    for file in TESTS.rglob("test_*.py"):
        if "mark.cuda" in file.read_text():
            files.append(str(file))
    if not files:
        raise NotRun("the tests are not here")
    count = _Count(say)
    options = ["-q", "-m", "cuda", "-p", "no:cacheprovider", "-W", "ignore"]
    if find_spec("xdist"):
        cores = os.cpu_count() or 1
        options += ["-n", str(min(_MOST_PROCESSES, max(1, cores // 2)))]
    code = pytest.main([*options, *files], plugins=[count])
    outcomes = [f"{number} {outcome}" for outcome, number in count.outcomes.items()]
    say(", ".join(outcomes), "all", PASSED if code == 0 else FAILED)
