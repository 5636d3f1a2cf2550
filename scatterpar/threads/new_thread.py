"""Call a function in a thread of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from scatterpar.threads.caller_context import CallerContext


def call_in_new_thread(function: Callable[..., Any], *args: Any) -> Any:
    """Returns ``function(*args)``, called in a new thread with the caller's context.

    For a fork: OpenMP keeps a team of threads for each thread that has used it, and a
    forked child waits forever for the team of the thread that forked. A new thread has
    none, and is the child's main thread.
    """
    call = CallerContext().bound(torch.device("cpu"), function, args)
    with ThreadPoolExecutor(max_workers=1) as executor:
        return executor.submit(call).result()
