"""Several processes of one run, as torchrun would start them, on one machine.

::

    python -m scatterpar train --processes 2
        process 0    GPUs 0 to 3    the first half of each batch    prints and saves
        process 1    GPUs 4 to 7    the second half

Every process makes the same run: it draws the same order, and steps on its part of the
rows. The engine adds the gradients of all processes, so that all have the same weights.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessExitedException,
    start_processes,
)

from scatterpar.distributed.collectives import RankError
from scatterpar.train.command_line import UsageError
from scatterpar.train.records import SIGNALS, received_by

# After one process has failed, the first needs time to save; a process that waits in
# NCCL for the failed one does not end by itself.
_GRACE_SECONDS = 60.0
_LOST = 3  # the exit code of a process that another one has left
# The first process that fails creates it, with the error of a user or a file.
_ERROR_FILE = "error"


@dataclass(eq=False)
class Processes:
    """The processes of a run, as one of them sees them.

    Attributes:
        rank: the number of this process.
        size: the number of processes.
        folder: where they find each other.
        group: the process group of the engine; None for a single process.
    """

    rank: int = 0
    size: int = 1
    folder: str = ""
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process prints and saves."""
        return self.rank == 0

    def part_of(self, items: Any) -> Any:
        """Return this process's part of a sequence or tensor, in order."""
        start = len(items) * self.rank // self.size
        stop = len(items) * (self.rank + 1) // self.size
        return items[start:stop]

    def connect(self, device: torch.device) -> None:
        """Form the process group. `device` is the first one of this process."""
        if self.size == 1:
            return
        backend = "gloo"
        if device.type != "cpu":
            torch.accelerator.set_device_index(device)
            name = dist.get_default_backend_for_device(device)
            backend = f"cpu:gloo,{device.type}:{name}"
        if sys.platform == "linux":
            # No other machine takes part, so none shall reach gloo's ports.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            # A port could be taken, or be reached from other machines.
            f"file://{self.folder}/store",
            rank=self.rank,
            world_size=self.size,
        )
        self.group = dist.group.WORLD

    def gathered(self, value: Any) -> list[Any]:
        """Return the values of all processes, in order.

        Raises `RankError` if a process has ended.
        """
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, value, self.group)
        except RuntimeError as error:
            raise RankError(f"the results of all processes: {error}") from error
        return values

    def largest(self, number: int) -> int:
        """Return the largest of the numbers that the processes pass."""
        return int(max(self.gathered(number)))

    def finish(self) -> None:
        """Wait for the other processes, which may still read from this one."""
        if self.group is not None:
            with contextlib.suppress(RuntimeError):
                dist.barrier()


ALONE = Processes()


def launch(
    run: Callable[[Sequence[str], Processes], int], arguments: Sequence[str], size: int
) -> int:
    """Call `run(arguments, processes)` in new processes. Returns the exit code of the
    first.

    Ctrl-C and SIGTERM are passed on to all. If a process ends early, the others save
    and end, too.

    Raises a `UsageError` if a process has raised one, or was killed.
    """
    processes = list[Any]()

    def pass_on(number: int, _: FrameType | None) -> None:
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, number)

    with tempfile.TemporaryDirectory() as folder, received_by(pass_on):
        _block_signals()
        context: Any = start_processes(
            _run_process,
            (size, folder, run, tuple(arguments)),
            nprocs=size,
            join=False,
            # A fork of a process with threads, which torch has, may hang.
            start_method="spawn",
        )
        if sys.platform != "win32":  # the console sends Ctrl-C to all
            processes += context.processes
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            while not context.join(grace_period=_GRACE_SECONDS):
                pass
        except ProcessExitedException as error:  # of the first that ended early
            file = Path(folder, _ERROR_FILE)
            if file.exists():
                text = file.read_text(encoding="utf-8")
                if text:
                    raise UsageError(text) from error
                return 1  # the process has printed a traceback
            if error.signal_name:
                raise UsageError(
                    f"process {error.error_index} of {size} was ended by "
                    f"{error.signal_name}, and the others have ended with it"
                ) from error
    code: int = context.processes[0].exitcode
    return code


def _block_signals() -> None:
    """Let new processes begin with both signals blocked, so that none is lost, or ends
    an import with a traceback. They unblock them in `_receive_signals`.
    """
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # its start would unblock the signals
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _receive_signals() -> None:
    """Get signals from the first process alone, and not from the terminal, too."""
    if sys.platform != "win32":
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _end(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)


def _run_process(
    rank: int,
    size: int,
    folder: str,
    run: Callable[[Sequence[str], Processes], int],
    arguments: Sequence[str],
) -> None:
    """Be one of the processes: run, and end with the exit code."""
    if rank:
        warnings.simplefilter("ignore")  # those of the first process are the same
    # As torchrun does: the processes share the cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    processes = Processes(rank, size, folder)
    with received_by(_end):
        _receive_signals()
        try:
            code = run(arguments, processes)
            processes.finish()
        except RankError:  # the process that failed says why
            code = _LOST
        except Exception as error:
            code = 1
            # All may have the same error, which is told once.
            with (
                contextlib.suppress(FileExistsError),
                Path(folder, _ERROR_FILE).open("x", encoding="utf-8") as file,
            ):
                if isinstance(error, UsageError):
                    file.write(str(error))
                else:
                    traceback.print_exc()
    # Before gloo's threads can abort a process that ends in the usual way.
    atexit.register(os._exit, code)
    sys.exit(code)
