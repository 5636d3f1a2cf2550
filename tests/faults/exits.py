"""The states in which an interpreter may end, each in a process of its own.

``python -m faults.exits`` imports torch once and forks a child for every state. One
line of JSON each: name, exit code, and what was said on stderr. The finalisation leaves
out the objects that are there before the fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import tempfile

import scatterpar  # noqa: F401  for the states, which are forked

# A child that hangs is ended. An engine gives its workers four seconds.
BEGIN = """
import os, signal, sys, threading, time
import torch
from torch import nn
from scatterpar import ScatterOnceParallel

signal.alarm(100)
model = nn.Linear(4, 2)
inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
criterion = nn.CrossEntropyLoss()
make = lambda: ScatterOnceParallel(model, 2, ["cpu"] * 3)
step = lambda engine, criterion=criterion: engine.forward_backward(inputs, targets, criterion)
def slow(output, targets):
    time.sleep(0.05)
    return criterion(output, targets)
inside, heard = threading.Event(), threading.Semaphore(0)
def stuck(output, targets):
    inside.set()
    time.sleep(1000)
def hear(*given):
    heard.release()
    signal.default_int_handler(*given)
def strike_twice():
    inside.wait()
    for _ in range(2):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        heard.acquire()  # two that wait are one
def later(number):
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
"""

STATES = {  # the exit code, and how it is come to
    "Ctrl-C twice, a replica stuck": (
        -signal.SIGINT,
        "engine = make(); signal.signal(signal.SIGINT, hear)\n"
        "threading.Thread(target=strike_twice, daemon=True).start(); step(engine, "
        "stuck)",
    ),
    "sys.exit in a criterion": (9, "step(make(), lambda *_: sys.exit(9))"),
    "a step in a thread that goes on": (
        0,
        "threading.Thread(target=step, args=(make(), slow)).start()",
    ),
    **{
        number.name: (
            -number,
            f"engine = make(); later({number})\nwhile True: step(engine, slow)",
        )
        for number in (signal.SIGINT, signal.SIGTERM)
    },
    "a forked child": (
        0,
        "engine = make(); step(engine)\n"
        "child = os.fork()\n"
        "if child: assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0",
    ),
}


def main() -> str:
    """Fork a child for each state; in a child, the source that it is to run."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
    gc.collect()
    gc.freeze()
    children = {}
    for name, (_, source) in STATES.items():
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115  both processes use it
        if not (pid := os.fork()):
            os.dup2(log.fileno(), 2)
            return BEGIN + source
        children[pid] = name, log
    while children:
        pid, status = os.wait()
        name, log = children.pop(pid)
        log.seek(0)
        found = {
            "name": name,
            "code": os.waitstatus_to_exitcode(status),
            "said": log.read(),
        }
        print(json.dumps(found), flush=True)
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(main())  # in this module, which is the child's main script
