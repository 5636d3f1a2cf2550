"""A script is given all the time that it needs, and none in which it says nothing.

The grid once had 110 seconds for thousands of combinations: beside a single busy process
it was ended at work, and its 75 tests failed.
"""

from __future__ import annotations

import os

import pytest

from faults.processes import finish, start


def started(script):
    """It has begun: that alone takes longer than these silences on a busy machine."""
    process = start("-c", f"import sys; print('begun', file=sys.stderr)\n{script}")
    assert process.stderr.readline() == "begun\n"
    return process


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_script_that_hangs_says_where():
    script = "import threading\nprint('so far')\ndef stuck(): threading.Event().wait()\nstuck()"
    with pytest.raises(AssertionError, match=r"silent for 2 s\nso far\n(.|\n)* in stuck\n"):
        finish(started(script), silence=2)
