"""Whatever the state: the interpreter ends within seconds, with its own code, without an abort."""

from __future__ import annotations

import os
import time

import pytest

from faults.processes import finish, start

SECONDS = 5.0
LOADED = 60.0  # a generous bound for the whole process, imports on a busy machine included

BEGIN = """
import atexit, gc, os, signal, sys, threading, time, weakref
import torch
from torch import nn
from scatterpar import ScatterOnceParallel
model = nn.Linear(4, 2)
inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
criterion = nn.CrossEntropyLoss()
make = lambda devices=["cpu"] * 3: ScatterOnceParallel(model, 2, devices)
step = lambda engine, criterion=criterion: engine.forward_backward(inputs, targets, criterion)
def at_exit():
    print("ending", flush=True)
def slow(output, targets):
    time.sleep(0.05)
    return criterion(output, targets)
def stuck(output, targets):
    time.sleep(100)
def last():
    global ended
    ended = time.monotonic()
"""

STATES = {
    "unused": ("engine = make()", 0),
    "used": ("engine = make(); step(engine)", 0),
    "used, virtual devices": ("engine = make(['cpu:0', 'cpu:1']); step(engine)", 0),
    "many": ("engines = [make() for _ in range(8)]\nfor engine in engines: step(engine)", 0),
    "closed": ("engine = make(); step(engine); engine.close()", 0),
    "in a cycle": ("engine = make(); step(engine); engine.me = [engine]; del engine", 0),
    "sys.exit": ("engine = make(); step(engine); sys.exit(7)", 7),
    "sys.exit in a criterion": (
        "engine = make()\ndef leave(output, targets): sys.exit(9)\nstep(engine, leave)",
        9,
    ),
    "an error in a criterion": (
        "engine = make()\ndef fail(output, targets): raise ValueError('boom')\nstep(engine, fail)",
        1,
    ),
    "a step in a daemon thread": (
        "engine = make()\n"
        "def forever():\n"
        "    while True: step(engine, slow)\n"
        "threading.Thread(target=forever, daemon=True).start(); time.sleep(0.2)",
        0,
    ),
    "a step in a thread that goes on": (
        "engine = make()\nthreading.Thread(target=step, args=(engine, slow)).start()",
        0,
    ),
    "a step at exit": ("engine = make(); step(engine); atexit.register(step, engine)", 0),
    "a first step at exit": ("engine = make(); atexit.register(step, engine)", 0),
    "closed at exit": ("engine = make(); step(engine); atexit.register(engine.close)", 0),
    "Ctrl-C": (
        "engine = make()\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "while True: step(engine, slow)",
        -2,
    ),
    "Ctrl-C twice, a replica stuck": (
        "engine = make()\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "step(engine, stuck)",
        -2,
    ),
    "SIGTERM": (
        "engine = make(); step(engine)\n"
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "while True: step(engine, slow)",
        -15,
    ),
    "a stuck replica in a daemon thread": (
        "engine = make()\n"
        "threading.Thread(target=step, args=(engine, stuck), daemon=True).start(); time.sleep(0.2)",
        0,
    ),
    "a forked child": (
        "engine = make(); step(engine)\n"
        "child = os.fork()\n"
        "if child: assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0",
        0,
    ),
    "a traceback keeps it": (
        "try:\n"
        "    engine = make()\n"
        "    def fail(output, targets): raise ValueError('boom')\n"
        "    step(engine, fail)\n"
        "except ValueError as error:\n"
        "    kept = error",
        0,
    ),
    "random numbers were drawn": (
        "model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))\nengine = make(); step(engine)",
        0,
    ),
}

END = """
started = time.monotonic()
"""


@pytest.fixture(scope="module")
def outcomes():
    """Two processes at a time."""
    names = list(STATES)
    found = {}
    for first in range(0, len(names), 3):
        begun = {
            name: (start("-c", BEGIN + STATES[name][0]), time.monotonic())
            for name in names[first : first + 3]
        }
        for name, (process, _) in begun.items():
            try:
                found[name] = finish(process, LOADED)
            except AssertionError as error:
                found[name] = error
    return found


@pytest.mark.skipif(os.name != "posix", reason="signals and fork")
@pytest.mark.parametrize("state", STATES)
def test_ends_promptly_with_its_own_code(outcomes, state):
    outcome = outcomes[state]
    if isinstance(outcome, AssertionError):
        raise outcome
    assert "terminate called" not in outcome.err
    assert "Fatal Python error" not in outcome.err
    assert "Exception ignored" not in outcome.err
    assert outcome.code == STATES[state][1], outcome.err
