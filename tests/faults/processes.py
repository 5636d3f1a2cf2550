"""Scripts in processes of their own; one that falls silent says where its threads are,
and ends.

How long a script takes depends on what else the machine does, so no total is limited.

To import torch, with what an optimizer imports, takes three seconds of a core, and a
fork next to nothing. So most are forked from a server that imports and does nothing
else: no thread, no engine, no random number of one process is there in the next.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from harness.recorded import lines_of

TESTS = Path(__file__).parent.parent

SILENCE = 180.0  # seconds without a sign of life; an idle machine needs two or three
_ABORT_SECONDS = 10.0  # to say where the threads are


def environment() -> dict[str, str]:
    """The environment of a script: the tests' modules and the package
    are importable.
    """
    path = [os.environ.get("PYTHONPATH", ""), str(TESTS), str(TESTS.parent)]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def has_forks() -> bool:
    """Whether the system has forks from a server."""
    return "forkserver" in multiprocessing.get_all_start_methods()


def fork_context() -> Any:
    """Of `multiprocessing`: its processes are forked from the server, or start from
    nothing.

    Other users of the server, such as a loader's workers, come from the same one. Where
    one of them was first, it has imported less.
    """
    if not has_forks():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["harness.imported"])
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return context


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-X", "faulthandler", *arguments]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment() | variables, **pipes)


def finish(
    process: subprocess.Popen[str] | Forked, silence: float = SILENCE
) -> Outcome:
    """Wait for a process; one that is silent for too long is ended, and
    fails the test.
    """
    said: dict[str, list[str]] = {"stdout": [], "stderr": []}
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name, pieces in said.items():
        args = getattr(process, name), pieces, heard
        threading.Thread(target=_listen, args=args, daemon=True).start()
    if not _both_end(heard, silence):
        process.send_signal(signal.SIGABRT)
        _both_end(heard, _ABORT_SECONDS)
        process.kill()
        process.wait()
        out, err = map("".join, said.values())
        raise AssertionError(f"silent for {silence:g} s\n{out[-2000:]}\n{err}")
    return Outcome(process.wait(), *map("".join, said.values()))


def _listen(pipe: Any, pieces: list[str], heard: queue.SimpleQueue[str]) -> None:
    """Collect what is said, in whatever pieces it comes; the last one is empty."""
    with pipe:
        while not pieces or pieces[-1]:
            pieces.append(pipe.buffer.read1().decode(errors="replace"))
            heard.put(pieces[-1])


def _both_end(heard: queue.SimpleQueue[str], silence: float) -> bool:
    """Whether both streams end, without so long a silence before."""
    try:
        ended = 0
        while ended < 2:
            ended += heard.get(timeout=silence) == ""
    except queue.Empty:
        return False
    return True


def run(*arguments: str, silence: float = SILENCE, **variables: str) -> Outcome:
    return finish(start(*arguments, **variables), silence)


class Forked:
    """Python with ``arguments``; has of a `subprocess.Popen` what it takes to wait for
    one.
    """

    def __init__(self, *arguments: str) -> None:
        context = fork_context()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        ends = [there for _, there in pipes]
        self._process = context.Process(target=_become, args=(*ends, test, arguments))
        self._process.start()
        self.pid = self._process.pid
        for _, there in pipes:
            there.close()
        self.stdout, self.stderr = (
            os.fdopen(os.dup(here.fileno())) for here, _ in pipes
        )

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode


def start_forked(*arguments: str) -> subprocess.Popen[str] | Forked:
    """``start`` in a fork, where the system has them."""
    return Forked(*arguments) if has_forks() else start(*arguments)


def run_forked(*arguments: str) -> Outcome:
    """``run`` in a fork, where the system has them."""
    return finish(start_forked(*arguments))


def _become(
    out: Connection, err: Connection, test: str, arguments: tuple[str, ...]
) -> None:
    """Be the script: its streams, its arguments, its end."""
    for pipe, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(pipe.fileno(), stream.fileno())
        pipe.close()
        stream.reconfigure(write_through=True)
    faulthandler.enable()
    option, script, *sys.argv[1:] = arguments
    with lines_of(test):
        if option == "-m":
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            exec(script, {"__name__": "__main__"})
