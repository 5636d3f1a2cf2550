"""Prefetch batches: worker processes read the next one while the engine computes.

Workers read pieces of a batch, which torch's DataLoader yields in order, and one thread joins them.
So memory has the engine's batch, the next one, and a few pieces, for any number of workers. The
requests for training and testing are one stream, so that workers are busy between epochs, too.
"""

from __future__ import annotations

import _thread
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import chain, tee
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scatterpar.train.data import Images, Source
from scatterpar.train.options import UsageError, words_of

PIECE = 64  # images that a worker reads at once; mixup mixes images of one piece
_PIECES_AHEAD, _MOST_WORKERS = 2, 16  # per worker; by default


class FeedError(UsageError):
    """A request cannot be read: an image is broken, or a worker process has ended."""


class Request(NamedTuple):
    """Rows of a part, to be read as one batch, varied as in that epoch."""

    part: str
    rows: Tensor
    epoch: int = 0

    def pieces(self) -> Iterator[tuple[str, list[int], int]]:
        """Yield the part, row numbers and epoch of each piece."""
        for rows in self.rows.split(PIECE) if len(self.rows) else ():
            yield self.part, rows.tolist(), self.epoch


class Feed(AbstractContextManager["Feed"]):
    """Reads the requested batches, in order, with worker processes unless there are 0 `workers`.

    Up to `skip_broken` unreadable images are left out; `warn` gets a line for each. `broken` counts
    how often each was left out, by name. `waited` are the seconds that `take` has taken in all.
    """

    def __init__(
        self,
        source: Source,
        requests: Iterable[Request] = (),
        workers: int | None = 0,
        skip_broken: float = 0,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.source, self.waited, self.broken = source, 0.0, Counter[str]()
        self._skip_broken, self._warn = skip_broken, warn
        if workers is None:
            affinity = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
            workers = min(_MOST_WORKERS, len(affinity(0)))
        self._workers = 0 if source.in_memory else workers
        self._thread: ThreadPoolExecutor | None = None
        self._batches = self._read(iter(()))
        self.request(requests)

    def request(self, requests: Iterable[Request]) -> None:
        """Read these requests from now on, and drop batches that were prefetched."""
        self.close()
        self._closed, self._batches = False, self._read(iter(requests))
        if self._workers and requests:
            # The thread starts the workers: in the main thread torch would install a signal handler
            # that raises an error anywhere when a worker ends by itself.
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="next batch")
            self._next: Future[Any] = self._thread.submit(next, self._batches)

    def take(self) -> tuple[Request, Images]:
        """Return the next request, and its images, without unreadable ones."""
        start = time.perf_counter()
        if self._thread is None:
            request, images = next(self._batches)
        else:
            request, images = self._next.result()
            self._next = self._thread.submit(next, self._batches)
        self.waited += time.perf_counter() - start
        for name, reason in images.broken:
            words = f"{name} cannot be read as an image: {reason}"
            if name not in self.broken:
                if len(self.broken) >= self._skip_broken:
                    more = f"--skip-broken {len(self.broken) + 1} or more leaves it out"
                    raise FeedError(f"{words} ({more})")
                self._warn(f"left out: {words}")
            self.broken[name] += 1
        return request, images

    def close(self) -> None:
        """End the thread and the workers; these end with torch's iterator."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._batches.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, requests: Iterator[Request]) -> Generator[tuple[Request, Images], None, None]:
        """Read one batch after the other."""
        requests, to_cut = tee(requests)
        # A private generator, so that the DataLoader does not draw from the process's.
        options: dict[str, Any] = {"num_workers": self._workers, "generator": torch.Generator()}
        if self._workers:
            options |= {"multiprocessing_context": _context(), "prefetch_factor": _PIECES_AHEAD}
            options["worker_init_fn"] = _end_with_main_process
        sampler: Any = (piece for request in to_cut for piece in request.pieces())
        source: Any = self.source
        # `chain` starts the workers with the first piece: a signal may end their server then.
        pieces = chain.from_iterable(
            [DataLoader(source, batch_size=None, sampler=sampler, **options)]
        )
        for request in requests:
            of_batch = (self._piece(pieces) for _ in request.pieces())
            yield request, _joined(of_batch, len(request.rows), self.source.image_shape)

    def _piece(self, pieces: Iterator[Images]) -> Images:
        if self._closed:
            raise RuntimeError("the feed was closed")
        try:
            return next(pieces)
        except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
            # Either torch says that a worker has ended, or reading the worker's data failed. Torch
            # begins the message with "Caught" if the worker itself raised the error.
            words = words_of(error)
            ended = not isinstance(error, RuntimeError) or "DataLoader worker (pid" in words
            if not ended or words.startswith("Caught "):
                raise
            raise FeedError(
                f"a worker process that reads images has ended by itself ({words}); the system "
                "ends processes where memory runs out: fewer --workers need less"
            ) from error


def _joined(pieces: Iterable[Images], rows: int, shape: tuple[int, int, int]) -> Images:
    """Copy pieces out of shared memory, each as it arrives, into a batch of at most ``rows``."""
    pin = torch.accelerator.is_available()
    images = torch.empty(rows, *shape, dtype=torch.uint8, pin_memory=pin)
    nothing, broken, filled = torch.empty(0, dtype=torch.int64), list[tuple[str, str]](), 0
    labels, numbers = [nothing], [nothing]
    for piece in pieces:
        images[filled : filled + len(piece.rows)] = piece.images
        filled += len(piece.rows)
        labels.append(piece.labels.clone())
        numbers.append(piece.rows.clone())
        broken += piece.broken
    return Images(images[:filled], torch.cat(labels), torch.cat(numbers), broken)


def _context() -> Any:
    """Start workers by a fork of a server without threads if possible, otherwise spawn them."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scatterpar.train.preloaded"])
    return context


def _end_with_main_process(_: int) -> None:
    """Make a worker end with the main process, and not before, by a signal to all processes.

    Torch's workers watch their parent, but that is the fork server, which waits for them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main: Any = multiprocessing.parent_process()
    _thread.start_new_thread(lambda: (main.join(), os._exit(1)), ())  # not joined at exit
