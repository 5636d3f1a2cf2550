"""What the thread of a worker does: the tasks of its queue, until there is ``None``.

In a free-threaded interpreter (PEP 703) the thread that made an object frees it, when it next runs
Python; also where another thread dropped it last. So idle threads wake now and then, and whoever
needs the memory wakes them.
"""

from __future__ import annotations

import os
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import torch

__all__ = ["Queue", "serve", "shut_down", "wake"]

_Task = Callable[[], object]
Queue = SimpleQueue[_Task | None]

_FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
_IDLE_SECONDS = 0.1 if _FREE_THREADED else None
_EXIT_SECONDS = 4.0  # how long a worker may take to come to its next sub-step when all stop


def serve(queue: Queue, budget: int, ready: threading.Barrier) -> None:
    """Run the tasks of ``queue``, each with ``budget`` intra-op threads."""
    torch.get_num_threads()  # initialises the thread; its first parallel operator would undo ours
    torch.set_num_threads(budget)
    ready.wait()
    del ready
    while (task := _next(queue)) is not None:
        task()
        del task


def _next(queue: Queue) -> _Task | None:
    while True:
        try:
            return queue.get(timeout=_IDLE_SECONDS)
        except Empty:
            pass


def wake(queues: Sequence[Queue]) -> Callable[[float], None]:
    """Let the threads of ``queues``, which are idle, free what others have dropped.

    Returns:
        Waits until they have, or for so many seconds: one may have died.
    """
    if not (queues and _FREE_THREADED):
        return lambda _: None
    awake = threading.Semaphore(0)
    for queue in queues:
        queue.put(awake.release)

    def wait(seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for _ in queues:
            awake.acquire(timeout=max(0.0, deadline - time.monotonic()))

    return wait


def shut_down(queues: Sequence[Queue], threads: Sequence[threading.Thread], pid: int) -> None:
    """End the threads of ``queues`` and wait for them, if they are this process's."""
    if os.getpid() != pid:  # a forked child has none of these threads
        return
    for queue in queues:
        queue.put(None)
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
