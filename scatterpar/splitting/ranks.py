"""Run a user's step in several processes that form a gloo group.

Processes are forked, which needs no pickling, so that functions of a notebook's cell
work. Where a fork is not possible they are spawned, and import the user's code.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scatterpar.splitting.process_state import reset_accelerate
from scatterpar.splitting.step_run import Settings, StepFunction, StepResult, run_step
from scatterpar.state.walk import Walk
from scatterpar.threads.interrupts import Interrupts
from scatterpar.threads.workers import call_in_new_thread
from scatterpar.torch_private import import_compiler

# Asks a rank for its stack. Not a timer of faulthandler: if the parent has one, as
# under pytest, its forked child would wait for it forever.
_STACK_SIGNAL = getattr(signal, "SIGUSR1", None)
_STACK_SECONDS = 2.0  # how long a rank may take to write its stack
_GRACE_SECONDS = 10  # after the time limit a rank ends itself, if its parent cannot
_MOST_LINES = 5  # of the user's code, of a step that failed
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@dataclass(frozen=True)
class RankJob:
    """What a rank runs. ``shares`` has the batches of each rank."""

    step: StepFunction
    model: nn.Module
    shares: list[list[Any]]
    settings: Settings


@dataclass(frozen=True)
class _Failure:
    """Why a rank failed, and when: a rank that waits for it fails later."""

    text: str
    time: float


def run_on_ranks(job: RankJob, seconds: float) -> list[StepResult]:
    """The results of all ranks, in order.

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
            ranks.append(context.Process(target=_rank, args=arguments, daemon=True))
        try:
            with Interrupts():
                call_in_new_thread(_start, ranks)
            return _results(ranks, folder, seconds)
        finally:
            with Interrupts():
                _kill(ranks)


def can_fork() -> bool:
    """Whether processes can be forked: an accelerator's driver does not survive it."""
    return sys.platform == "linux" and not torch.accelerator.is_available()


def _pickled(job: RankJob) -> bytes:
    """The job in bytes. torch's own way to processes would move the user's tensors."""
    buffer = io.BytesIO()
    try:
        torch.save(job, buffer)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise _not_sent(error) from error
    return buffer.getvalue()


def _not_sent(error: Exception) -> ValueError:
    return ValueError(
        f"step cannot be sent to new processes, which ranks= needs on this machine "
        f"({error}); define it, and the model's class, in a file that can be imported"
    )


def _start(processes: list[Any]) -> None:
    for process in processes:
        process.start()


def _kill(processes: list[Any]) -> None:
    for process in processes:
        if process.pid is not None:
            process.kill()  # trainers handle SIGTERM
    for process in processes:
        if process.pid is not None:
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
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(seconds) + _GRACE_SECONDS)
    if _STACK_SIGNAL:
        stack = open(_stack_file(folder, rank), "w")  # noqa: SIM115  used until the end
        faulthandler.register(_STACK_SIGNAL, file=stack)
    _set_environment(rank, size, port)
    torch.get_num_threads()  # or the first operator would set the number again
    torch.set_num_threads(1)
    answer: StepResult | _Failure
    try:
        job = _received(sent)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=seconds + _GRACE_SECONDS),
        )
        # Kept until the end: gloo's destructor may wait for a thread that waits for the
        # GIL, if the step calls ``destroy_process_group()``.
        group = dist.group.WORLD
        tensors = Walk([job.model, job.step]).tensors.values()
        answer = run_step(
            job.step, job.model, job.shares[rank], job.settings, list(tensors)
        )
    except BaseException as error:  # also SystemExit: the parent shall know
        answer = _Failure(_described(error), time.monotonic())
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


def _described(error: BaseException) -> str:
    """The exception, and the lines of the user's code that led to it.

    Lines of this package and of libraries are left out: the user's last line says which
    call failed, and thirty lines above it would hide the exception.
    """
    (*_, last) = traceback.format_exception_only(error)
    notes = [f"  {note}" for note in getattr(error, "__notes__", ())]
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames[:-1] if not _is_library(frame.filename)]
    lines = []
    for frame in (*users[-_MOST_LINES:], *frames[-1:]):  # also where it was raised
        place = f"{frame.filename}:{frame.lineno} in {frame.name}"
        lines.append(f"  {place}: {frame.line}")
    return "\n".join([last.strip(), *notes, *lines])


def _received(sent: RankJob | bytes) -> RankJob:
    if isinstance(sent, RankJob):
        return sent
    try:
        job: RankJob = torch.load(io.BytesIO(sent), weights_only=False)
    except (AttributeError, ImportError) as error:
        raise _not_sent(error) from error
    return job


def _set_environment(rank: int, size: int, port: int) -> None:
    """Set what a launcher sets."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "ACCELERATE_USE_CPU": "true",
    }
    for name, value in values.items():
        os.environ[name] = str(value)
    if sys.platform == "linux":
        # A machine's name may lead to an address that is not its own.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    reset_accelerate()


def _answer_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.answer"


def _stack_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.stack"


# --- in the user's process ---


def _results(processes: list[Any], folder: Path, seconds: float) -> list[StepResult]:
    """Wait for the result of each rank. The first failure ends the wait."""
    deadline = time.monotonic() + seconds
    running = {process.sentinel: rank for rank, process in enumerate(processes)}
    results: dict[int, StepResult] = {}
    while running:
        ended = wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ended:
            raise TimeoutError(
                _where_ranks_wait(processes, list(running.values()), folder, seconds)
            )
        for sentinel in ended:
            rank = running.pop(sentinel)
            answer = _answer(folder, rank)
            if not isinstance(answer, StepResult):
                raise RuntimeError(_first_failure(processes, folder, rank))
            results[rank] = answer
    return [results[rank] for rank in sorted(results)]


def _answer(folder: Path, rank: int) -> StepResult | _Failure | None:
    """What a rank has written; ``None`` if its process ended before."""
    path = _answer_file(folder, rank)
    if not path.exists():
        return None
    answer: StepResult | _Failure = torch.load(path, weights_only=False)
    return answer


def _first_failure(processes: list[Any], folder: Path, ended: int) -> str:
    """The failure that came first. ``ended`` is a rank whose process ended by one."""
    failures = {}
    for rank in range(len(processes)):
        answer = _answer(folder, rank)
        if isinstance(answer, _Failure):
            failures[rank] = answer
    if ended in failures:
        rank = min(failures, key=lambda rank: failures[rank].time)
        text = failures[rank].text
    else:
        rank = ended
        processes[rank].join()
        text = (
            f"its process ended with exit code {processes[rank].exitcode}; if it "
            f"gathers, give all ranks tensors of one shape"
        )
    return f"step failed on rank {rank} of {len(processes)}: {text}"


def _where_ranks_wait(
    processes: list[Any], running: list[int], folder: Path, seconds: float
) -> str:
    lines = [_current_line(processes[rank], folder, rank) for rank in running]
    return (
        f"{len(running)} of {len(processes)} ranks have not ended after {seconds:g} s; "
        f"call the same collectives on all ranks, or pass a longer timeout=. "
        + "; ".join(lines)
    )


def _current_line(process: Any, folder: Path, rank: int) -> str:
    """The line of the user's code where a rank is."""
    if _STACK_SIGNAL is None:
        return f"rank {rank} is in process {process.pid}"
    os.kill(process.pid, _STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_SECONDS
    while time.monotonic() < deadline:
        time.sleep(0.05)
        line = _users_line(_stack_file(folder, rank).read_text())
        if line:
            return f"rank {rank} is at {line}"
    return f"rank {rank} is at no line of its step"


def _users_line(stack: str) -> str:
    """The innermost line of the user's step in a stack, innermost line first."""
    for line in stack.splitlines():
        frame = line.strip()
        if str(Path(__file__).parent) in frame:
            return ""  # what follows has called the step
        if frame.startswith("File ") and not _is_library(frame):
            return frame
    return ""


def _is_library(frame: str) -> bool:
    """Whether a line of a stack is of an installed package, or of this one."""
    own = str(Path(__file__).parents[1])
    return any(part in frame for part in ("-packages", _STANDARD_LIBRARY, own))
