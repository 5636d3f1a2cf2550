"""Ranks for tests: processes that start once, run what they are given, and end by
themselves.
"""

import contextlib
import functools
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from faults.processes import fork_context

from harness.recorded import lines_of

SIZE = 3
_IDLE_SECONDS = 1800.0
_REPLY_SECONDS = 300.0


_ranks = []  # the processes, the ends of their pipes, and the folder of their store


def run_on_ranks(size, case, *args):
    """What ``case(group, *args)`` returns on each of the first ``size`` ranks of all
    tests.

    The ranks are started again if they have ended, as idle ones do.
    """
    if not _ranks or not all(process.is_alive() for process in _ranks[0]):
        _ranks[:] = _start()
    pipes = _ranks[1][:size]
    for pipe in pipes:
        pipe.send((os.environ["PYTEST_CURRENT_TEST"], size, case, args))
    answers = [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
    values = []
    for rank, (failure, value) in enumerate(answers):
        assert failure is None, f"on rank {rank}: {failure}"
        values.append(value)
    return values


def _answer(rank, pipe):
    """The failure, or ``None``, and the value that a rank sends."""
    has_answered = pipe.poll(_REPLY_SECONDS)
    assert has_answered, f"rank {rank} said nothing for {_REPLY_SECONDS} s"
    try:
        return pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} has ended") from None


def _start():
    """``SIZE`` ranks over gloo on the loopback, for any number of tests."""
    context = fork_context()
    folder = tempfile.TemporaryDirectory()
    pipes = [context.Pipe() for _ in range(SIZE)]
    processes = []
    for rank, (_, far_end) in enumerate(pipes):
        args = far_end, rank, str(Path(folder.name) / "store")
        process = context.Process(target=_serve, args=args, daemon=True)
        process.start()
        processes.append(process)
        far_end.close()
    return processes, [near_end for near_end, _ in pipes], folder


def _serve(pipe, rank, store):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=_REPLY_SECONDS / 3)
    file = dist.FileStore(store, SIZE)
    dist.init_process_group(
        "gloo", store=file, rank=rank, world_size=SIZE, timeout=limit
    )
    groups = {}
    for size in (1, 2, SIZE):
        groups[size] = dist.new_group(list(range(size)), timeout=limit)
    while pipe.poll(_IDLE_SECONDS):
        try:
            test, size, case, args = pipe.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            with lines_of(test):
                value = case(groups[size], *args)
            pipe.send((None, value))
        except BaseException:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()


def failure(call, *args, **kwargs):
    """The type and the words, notes included, of what ``call`` raises."""
    try:
        call(*args, **kwargs)
    except BaseException as error:
        words = [str(error), *getattr(error, "__notes__", ())]
        return type(error).__name__, "\n".join(words)
    return None


_COLLECTIVES = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]


@contextlib.contextmanager
def Counted():
    """Yields the list of the body's collectives: of each its name, dtype and bytes."""
    calls = []

    def counted(name, original, *args, **kwargs):
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        tensor = tensors[0] if tensors else torch.empty(0)
        calls.append((name, tensor.dtype, tensor.nbytes))
        return original(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            patched = functools.partial(counted, name, getattr(dist, name))
            stack.enter_context(mock.patch.object(dist, name, patched))
        yield calls
