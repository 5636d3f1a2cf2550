"""Run a user's step in several processes that form a gloo group.

Processes are forked, which needs no pickling, so that functions of a notebook's cell
work. Where a fork is not possible they are spawned, and import the user's code.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scatterpar.libraries import is_library_file
from scatterpar.splitting.process_state import ProcessState, reset_accelerate
from scatterpar.splitting.step_run import Settings, StepFunction, StepResult, run_step
from scatterpar.threads.interrupts import Interrupts
from scatterpar.threads.new_thread import call_in_new_thread
from scatterpar.torch_private.compiler import import_compiler

# After the time limit, for a rank to say where it is. A rank that a kernel holds, as
# one that waits for threads which did not survive the fork, says nothing.
_GRACE_SECONDS = 10.0
_MOST_LINES = 5  # of the user's code, of a step that failed


@dataclass(frozen=True)
class RankJob:
    """Run the step on a rank. ``shares`` has the batches of each rank."""

    step: StepFunction
    model: nn.Module
    shares: list[list[Any]]
    settings: Settings


@dataclass(frozen=True)
class _Failure:
    """Why a rank failed, and when: a rank that waits for it fails later.

    Attributes:
        text: the exception, and the lines of the user's code that led to it.
        time: by the clock that all processes of a machine share.
        place: the last of these lines.
    """

    text: str
    time: float = 0.0
    place: str = "no line of its step"


def run_on_ranks(job: RankJob, seconds: float) -> list[StepResult]:
    """Run a job in a process per rank. Returns the results of all ranks, in order.

    Raises:
        RuntimeError: a rank failed, or its process ended. All others are killed.
        TimeoutError: a rank has not ended after ``seconds``.
        ValueError: ``step`` cannot be sent to a spawned process.
    """
    is_forked = can_fork()
    context: Any = multiprocessing.get_context("fork" if is_forked else "spawn")
    sent: RankJob | bytes = job if is_forked else _pickled(job)
    # Once here, and not in each forked process: it takes seconds.
    import_compiler()
    size = len(job.shares)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        port = _free_port()
        ranks = []
        for rank in range(size):
            arguments = (rank, size, folder, port, seconds, sent)
            # Daemons: an interpreter that exits ends them, and does not wait.
            ranks.append(context.Process(target=_rank, args=arguments, daemon=True))
        # Before the start, so that a rank that reaches its own limit is late here, too.
        deadline = time.monotonic() + seconds
        try:
            with Interrupts():
                call_in_new_thread(_start, ranks)
            return _results(ranks, folder, seconds, deadline)
        finally:
            with Interrupts():
                _kill(ranks)


def can_fork() -> bool:
    """Whether processes can be forked: an accelerator's driver does not survive it."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


def _pickled(job: RankJob) -> bytes:
    """The job in bytes. torch's own way to processes would move the user's tensors."""
    buffer = io.BytesIO()
    with _sending():
        torch.save(job, buffer)
    return buffer.getvalue()


@contextlib.contextmanager
def _sending() -> Iterator[None]:
    """In the body a job becomes bytes, or is made of them."""
    try:
        yield
    except (AttributeError, ImportError, TypeError, pickle.PicklingError) as error:
        raise ValueError(
            f"step cannot be sent to new processes, which ranks= needs on this machine "
            f"({error}); define step, and the model's class, in a file that can be "
            f"imported"
        ) from error


def _start(processes: list[Any]) -> None:
    for process in processes:
        process.start()


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()  # trainers handle SIGTERM
            process.join()
            process.close()


def _free_port() -> int:
    # For steps that form a group of their own by MASTER_PORT: ours has a file store.
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# --- in the process of a rank ---


def _rank(
    rank: int, size: int, folder: Path, port: int, seconds: float, sent: RankJob | bytes
) -> None:
    """Run the job of one rank, and write its result or failure to a file."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent kills its ranks
    _limit_time(seconds)
    _set_launcher_variables(rank, size, port)
    torch.get_num_threads()  # or the first operator would set the number again
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    answer: StepResult | _Failure
    try:
        job = _received(sent)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds),
        )
        # Kept until the end: gloo's destructor may wait for a thread that waits for the
        # GIL, if the step calls ``destroy_process_group()``.
        group = dist.group.WORLD
        tensors = ProcessState(job.model, job.step).tensors
        batches = job.shares[rank]
        answer = run_step(job.step, job.model, batches, job.settings, tensors)
        _limit_time(0)  # only the step has a limit
    except BaseException as error:  # also SystemExit: the parent shall know
        _limit_time(0)  # first: its next signal would end what tells the error
        answer = _failure(error)
    # Renamed when it is whole, because the parent may look at any time.
    unfinished = folder / f"{rank}.part"
    torch.save(answer, unfinished)
    unfinished.rename(_answer_file(folder, rank))
    if isinstance(answer, StepResult) and dist.group.WORLD is group:
        with contextlib.suppress(RuntimeError):
            dist.barrier()  # other ranks may still need this one's connections
    # ``os._exit`` does not flush.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without waiting for threads that the step has started


def _limit_time(seconds: float) -> None:
    """Raise ``TimeoutError`` in the user's code after some seconds; never, if 0.

    A collective that waits does not notice it: its group has a time limit of its own.
    """
    if not hasattr(signal, "setitimer"):  # on Windows
        return

    def end(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, end)
    # Again, for a loop that catches it and goes on. So a rank ends without its parent.
    signal.setitimer(signal.ITIMER_REAL, seconds, _GRACE_SECONDS)


def _failure(error: BaseException) -> _Failure:
    """The exception, and the lines of the user's code that led to it.

    Lines of this package and of libraries are left out: the user's last line says which
    call failed, and thirty lines above it would hide the exception.
    """
    (*_, last) = traceback.format_exception_only(error)
    notes = getattr(error, "__notes__", ())
    lines = []
    for file, number, name, line in traceback.extract_tb(error.__traceback__):
        if not is_library_file(file):
            lines.append(f"{file}:{number} in {name}: {line}")
    text = "\n  ".join([last.strip(), *notes, *lines[-_MOST_LINES:]])
    return _Failure(text, time.monotonic(), *lines[-1:])


def _received(sent: RankJob | bytes) -> RankJob:
    if isinstance(sent, RankJob):
        return sent
    with _sending():
        job: RankJob = torch.load(io.BytesIO(sent), weights_only=False)
    return job


def _set_launcher_variables(rank: int, size: int, port: int) -> None:
    """Set what a launcher sets."""
    os.environ |= {
        "RANK": f"{rank}",
        "LOCAL_RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        "LOCAL_WORLD_SIZE": f"{size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "ACCELERATE_USE_CPU": "true",
    }
    if sys.platform == "linux":
        # A machine's name may lead to an address that is not its own.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    reset_accelerate()


def _answer_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.answer"


# --- in the user's process ---


def _results(
    processes: list[Any], folder: Path, seconds: float, deadline: float
) -> list[StepResult]:
    """Wait for the result of each rank. The first failure ends the wait.

    A rank that is late fails, too, and says where it was.
    """
    size = len(processes)
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    # A rank that says nothing is late.
    answers: list[StepResult | _Failure] = [_Failure("", deadline)] * size
    while running:
        left = deadline + _GRACE_SECONDS - time.monotonic()
        ended = wait(list(running), max(0.0, left))
        if not ended:
            break
        failures = []
        for sentinel in ended:
            rank = running.pop(sentinel)
            answer = _answer(processes[rank], _answer_file(folder, rank))
            answers[rank] = answer
            if isinstance(answer, _Failure) and answer.time < deadline:
                failures.append((answer.time, rank, answer.text))
        if failures:
            _, rank, text = min(failures)
            raise RuntimeError(f"step failed on rank {rank} of {size}: {text}")
    results = [answer for answer in answers if isinstance(answer, StepResult)]
    if len(results) < size:
        places = []
        for rank, answer in enumerate(answers):
            if isinstance(answer, _Failure):
                places.append(f"rank {rank} is at {answer.place}")
        lines_of_ranks = "\n".join(places)
        raise TimeoutError(
            f"the ranks of splitcheck have not ended after {seconds:g} s; call the "
            f"same collectives on all {size} ranks, or pass a longer timeout=. "
            f"{lines_of_ranks}"
        )
    return results


def _answer(process: Any, file: Path) -> StepResult | _Failure:
    """Read what the process of a rank has written before it ended."""
    if file.exists():
        # A process of ours has written it, so it may be unpickled.
        answer: StepResult | _Failure = torch.load(file, weights_only=False)
        return answer
    process.join()  # or its exit code is not known yet
    return _Failure(
        f"its process ended with exit code {process.exitcode}; if it gathers, give all "
        f"ranks tensors of one shape"
    )
