"""The states in which an interpreter may end, each in a process of its own.

``python -m faults.exits`` imports torch once and forks a child for every state. One line of JSON
each: name, exit code, what was said on stderr, and the seconds from its last line to its end. The
finalisation leaves out the objects that are there before the fork, unless ``whole`` is given.
"""

from __future__ import annotations

import atexit  # noqa: F401  the states use it
import gc
import importlib
import json
import os
import signal
import sys
import tempfile
import threading  # noqa: F401  likewise
import time

import torch  # noqa: F401  likewise
from torch import nn  # noqa: F401  likewise

from scatterpar import ScatterOnceParallel  # noqa: F401  likewise

AT_ONCE = 3
SECONDS = 120  # a child that hangs is killed then

BEGIN = """
model = nn.Linear(4, 2)
inputs, targets = torch.randn(64, 4), torch.randint(2, (64,))
criterion = nn.CrossEntropyLoss()
make = lambda devices=["cpu"] * 3: ScatterOnceParallel(model, 2, devices)
step = lambda engine, criterion=criterion: engine.forward_backward(inputs, targets, criterion)
def slow(output, targets):
    time.sleep(0.05)
    return criterion(output, targets)
inside = threading.Event()
def stuck(output, targets):
    inside.set()
    time.sleep(1000)
heard = threading.Semaphore(0)
def hear(*given):
    heard.release()
    signal.default_int_handler(*given)
def strike_twice():
    inside.wait()
    for _ in range(2):
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        heard.acquire()  # two that wait are one
def daemon(target, *args):
    threading.Thread(target=target, args=args, daemon=True).start()
def later(number):
    threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
"""

STATES = {
    # This one waits for its replica, while the others run.
    "Ctrl-C twice, a replica stuck": (
        "engine = make(); signal.signal(signal.SIGINT, hear); daemon(strike_twice)\n"
        "step(engine, stuck)"
    ),
    "unused": "engine = make()",
    "used": "engine = make(); step(engine)",
    "used, virtual devices": "engine = make(['cpu:0', 'cpu:1']); step(engine)",
    "many": "engines = [make() for _ in range(8)]\nfor engine in engines: step(engine)",
    "closed": "engine = make(); step(engine); engine.close()",
    "in a cycle": "engine = make(); step(engine); engine.me = [engine]; del engine",
    "sys.exit": "engine = make(); step(engine); sys.exit(7)",
    "sys.exit in a criterion": "engine = make()\ndef leave(*_): sys.exit(9)\nstep(engine, leave)",
    "an error in a criterion": "engine = make()\ndef fail(*_): 1 / 0\nstep(engine, fail)",
    "a step in a thread that goes on": (
        "engine = make()\nthreading.Thread(target=step, args=(engine, slow)).start()"
    ),
    "a step at exit": "engine = make(); step(engine); atexit.register(step, engine)",
    "a first step at exit": "engine = make(); atexit.register(step, engine)",
    "closed at exit": "engine = make(); step(engine); atexit.register(engine.close)",
    "Ctrl-C": "engine = make(); later(signal.SIGINT)\nwhile True: step(engine, slow)",
    "SIGTERM": "engine = make(); step(engine); later(signal.SIGTERM)\nwhile 1: step(engine, slow)",
    "a forked child": (
        "engine = make(); step(engine)\n"
        "child = os.fork()\n"
        "if child: assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0"
    ),
    "a traceback keeps it": (
        "try:\n"
        "    engine = make()\n"
        "    def fail(*_): raise ValueError\n"
        "    step(engine, fail)\n"
        "except ValueError as error:\n"
        "    kept = error"
    ),
    "random numbers were drawn": (
        "model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5))\nengine = make(); step(engine)"
    ),
}
# The exit codes of those that do not end with 0.
CODES = {"sys.exit": 7, "sys.exit in a criterion": 9, "an error in a criterion": 1, "SIGTERM": -15}
CODES |= dict.fromkeys(["Ctrl-C", "Ctrl-C twice, a replica stuck"], -2)


class Child:
    """A forked process that ends as the main script."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  both processes use it
        self.deadline = time.monotonic() + SECONDS
        self.pid = os.fork()

    def has_ended(self) -> bool:
        """Whether it has, and if so print what became of it. One that hangs is killed."""
        done, status = os.waitpid(self.pid, os.WNOHANG)
        if not done:
            if time.monotonic() > self.deadline:
                os.kill(self.pid, signal.SIGKILL)
            return False
        ended = time.monotonic()
        self.log.seek(0)
        said, _, at = self.log.read().partition("LAST LINE ")
        line, _, rest = at.partition("\n")
        found = {"name": self.name, "code": os.waitstatus_to_exitcode(status), "said": said + rest}
        found["seconds"] = ended - float(line) if line else 0.0
        print(json.dumps(found), flush=True)
        return True


def wait(children: list[Child], most: int) -> None:
    while len(children) > most:
        children[:] = [child for child in children if not child.has_ended()]
        time.sleep(0.005)


def main() -> str:
    """Fork a child for each state; in a child, the source that it is to run."""
    if "whole" not in sys.argv:
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
        gc.collect()
        gc.freeze()
    children: list[Child] = []
    for name, source in STATES.items():
        wait(children, AT_ONCE - 1)
        children.append(child := Child(name))
        if child.pid == 0:
            os.dup2(child.log.fileno(), 2)
            return f"{BEGIN}{source}\nprint('LAST LINE', time.monotonic(), file=sys.stderr)"
    wait(children, 0)
    return ""


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    exec(main())  # in this module, which is the child's main script
