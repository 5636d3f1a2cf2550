"""Scripts in processes of their own that are forked, and so spared the imports: see ``forks``."""

from __future__ import annotations

import faulthandler
import os
import runpy
import sys
from multiprocessing.connection import Connection
from subprocess import Popen

from harness import forks

from faults.processes import Outcome, finish, start


class Forked:
    """Python with ``arguments``; has of a `subprocess.Popen` what it takes to wait for one."""

    def __init__(self, *arguments: str) -> None:
        context = forks.context()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        self._process = context.Process(
            target=_become, args=(*(there for _, there in pipes), arguments)
        )
        self._process.start()
        self.pid = self._process.pid
        for _, there in pipes:
            there.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(here.fileno())) for here, _ in pipes)

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode


def start_forked(*arguments: str) -> Popen[str] | Forked:
    """``start`` in a fork, where the system has them."""
    return Forked(*arguments) if forks.are_possible() else start(*arguments)


def run_forked(*arguments: str) -> Outcome:
    """``run`` in a fork, where the system has them."""
    return finish(start_forked(*arguments))


def _become(out: Connection, err: Connection, arguments: tuple[str, ...]) -> None:
    """Be the script: its streams, its arguments, its end."""
    for pipe, stream in ((out, sys.stdout), (err, sys.stderr)):
        os.dup2(pipe.fileno(), stream.fileno())
        pipe.close()
        stream.reconfigure(write_through=True)
    faulthandler.enable()
    option, script, *sys.argv[1:] = arguments
    if option == "-m":
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        exec(script, {"__name__": "__main__"})
