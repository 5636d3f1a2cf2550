"""A script is given all the time that it needs, and none in which it says nothing.

The grid once had 110 seconds for thousands of combinations: beside a single busy process
it was ended at work, and its 75 tests failed.
"""

from __future__ import annotations

import os

import pytest

from faults.processes import finish, finish_all, run, start


def started(script):
    """It has begun: that alone takes longer than these silences on a busy machine."""
    process = start("-c", f"import sys; print('begun', file=sys.stderr)\n{script}")
    assert process.stderr.readline() == "begun\n"
    return process


def test_a_script_that_goes_on_speaking_is_not_ended():
    process = started("import time\nfor i in range(24): print(i); time.sleep(0.1)")
    outcome = finish(process, silence=2)
    assert (outcome.code, outcome.out.split()) == (0, [str(i) for i in range(24)])


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_a_script_that_hangs_says_where():
    script = "import threading\nprint('so far')\ndef stuck(): threading.Event().wait()\nstuck()"
    with pytest.raises(AssertionError, match=r"silent for 2 s\nso far\n(.|\n)* in stuck\n"):
        finish(started(script), silence=2)


def test_several_speak_at_once_more_than_a_pipe_holds():
    script = "import sys\nfor i in range(20000): print(i, file=sys.stderr if i % 2 else sys.stdout)"
    for outcome in finish_all({name: start("-c", script) for name in "abc"}).values():
        assert outcome.code == 0
        assert outcome.out.split() == [str(i) for i in range(0, 20000, 2)]
        assert outcome.err.split() == [str(i) for i in range(1, 20000, 2)]


def test_the_end_is_heard_though_nobody_has_spoken():
    assert run("-c", "import os; os._exit(3)", silence=60).code == 3
