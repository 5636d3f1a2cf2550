"""Lines that a fork of a server reaches for a test, where a run is recorded
(``tests/who.py``).
"""

import contextlib
import sys


@contextlib.contextmanager
def lines_of(test):
    """In the body this process works for ``test``, an id as `PYTEST_CURRENT_TEST` has
    it.
    """
    coverage = sys.modules.get("coverage")
    recording = coverage and coverage.Coverage.current()
    if not recording:
        yield
        return
    recording.switch_context(test)
    yield
    recording.switch_context("")
    recording.save()
