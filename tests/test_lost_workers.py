"""A worker thread that dies ends its step with an error, and the next step has a new crew.

A debugger, a watchdog or a test harness may end one. The step then waited for ever.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
from pathlib import Path

import pytest
from faults.state import capture, differences
from helpers.models import CLASSES, FEATURES, mlp
from helpers.oracle import assert_step, randint, randn
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.threads import workers as threads

BATCH = randn(12, FEATURES), randint(CLASSES, 12)
LOSS = nn.CrossEntropyLoss()
SECONDS = 60


@pytest.fixture(autouse=True)
def _quietly(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    yield
    monkeypatch.undo()


@pytest.fixture(autouse=True)
def _workers_sleep_until_there_is_work(monkeypatch):
    """In a free-threaded interpreter too, where an idle one would wake, die, and be replaced."""
    monkeypatch.setattr(threads, "_FREE_THREADED", False)


def kill(thread):
    identifier = ctypes.c_ulong(thread.ident)
    set_in_it = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert set_in_it(identifier, ctypes.py_object(KeyboardInterrupt)) == 1


def wait_until_idle(thread):
    """Until it has waited for its next task for a while: before, it would raise at once."""
    seen, deadline = 0, time.monotonic() + SECONDS
    while seen < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.disable()  # CPython 3.11 may crash where it collects while it makes a frame's object
        try:
            frame = sys._current_frames()[thread.ident]
        finally:
            gc.enable()
        sleeps = Path(f"/proc/self/task/{thread.native_id}/stat")
        at_rest = not sleeps.exists() or sleeps.read_text().rpartition(")")[2].split()[0] == "S"
        seen = seen + 1 if frame.f_code.co_name == "_serve" and at_rest else 0
    assert seen == 5, f"{thread.name} never waited for its next task"


def workers():
    return [
        thread for thread in threading.enumerate() if thread.name.startswith("scatterpar replica ")
    ]


@pytest.mark.parametrize("which", [[0], [2], [0, 1, 2]])
def test_an_exception_while_it_waits(devices, which):
    with ScatterOnceParallel(mlp(), 2, devices(3)) as engine:
        engine.forward_backward(*BATCH, LOSS)
        before = capture(engine.module)
        crew = workers()
        for number in which:
            wait_until_idle(crew[number])
            kill(crew[number])
        name = crew[which[0]].name
        match = rf"this engine lost a worker \({name}\): .*outside"
        with pytest.raises(RuntimeError, match=match) as caught:
            engine.forward_backward(*BATCH, LOSS)
        others = "".join(getattr(caught.value, "__notes__", []))
        assert all(crew[number].name in others for number in which[1:])
        assert differences(before, capture(engine.module)) == []
        assert_step(engine, *BATCH, LOSS)
        for thread in crew:  # those that were given up are on their way out
            thread.join(SECONDS)
        assert all(thread not in workers() for thread in crew)


def test_one_that_is_dead_already_is_replaced(devices, monkeypatch):
    monkeypatch.setattr(threads, "_FREE_THREADED", True)  # it wakes, and dies
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        engine.forward_backward(*BATCH, LOSS)
        victim = workers()[1]
        kill(victim)
        victim.join(SECONDS)
        assert not victim.is_alive()
        assert_step(engine, *BATCH, LOSS)


def test_the_others_are_waited_for(devices):
    """They work on what the step lets go of: it ends only after they did."""
    ended = []

    def criterion(output, targets):
        time.sleep(0.2)
        ended.append(len(output))
        return LOSS(output, targets)

    with ScatterOnceParallel(mlp(), 1, devices(2), verify=False) as engine:
        engine.forward_backward(*BATCH, LOSS)
        wait_until_idle(workers()[1])
        kill(workers()[1])
        with pytest.raises(RuntimeError, match="lost a worker"):
            engine.forward_backward(*BATCH, criterion)
        assert ended == [6]
