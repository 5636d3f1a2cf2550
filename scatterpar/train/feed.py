"""Prefetch batches: worker processes read the next one while the engine computes.

A batch of thousands of images is read in pieces. Each piece is one item of torch's DataLoader,
which prefetches a few pieces per worker and yields them in order. One thread joins them to the next
batch. So memory has the engine's batch, the next one, and some pieces, for any number of workers.

The requests for training and testing are one stream, which does not end with an epoch: the workers
are always busy, and the training loop takes batches in the order of the requests. A resumed run
needs only the number of images that were used, with any number of workers and machines.
(torchdata's StatefulDataLoader refuses to resume with another number of workers.)
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
from itertools import tee
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scatterpar.train.data import Broken, Images, Piece, Source, UsageError, words_of

PIECE = 64  # images that a worker reads at once; mixup mixes images of one piece
PIECES_AHEAD = 2  # per worker
_MOST_WORKERS = 16  # by default


class FeedError(UsageError):
    """A request cannot be read: an image is broken, or a worker process has ended."""


class Request(NamedTuple):
    """Rows of a part, to be read as one batch: those of one rank, varied as in that epoch."""

    part: str
    rows: Tensor
    epoch: int = 0
    rows_of_all_ranks: int = 0


Batch = tuple[Request, Images]


class Feed:
    """Reads the requested batches, in order.

    Args:
        source: the data.
        requests: what to read.
        workers: processes that read; None: one per core, at most 16. 0: `take` reads.
        skip_broken: the number of unreadable images that may be left out.
        warn: called with a line for each image that is left out.

    Attributes:
        waited: the seconds that `take` has taken in all.
        broken: how often each image was left out, by name.
    """

    def __init__(
        self,
        source: Source,
        requests: Iterable[Request] = (),
        workers: int | None = 0,
        skip_broken: float = 0,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.source = source
        self.waited = 0.0
        self.broken: Counter[str] = Counter()
        self._skip_broken = skip_broken
        self._warn = warn
        self._workers = _default_workers() if workers is None else workers
        self._workers *= not source.in_memory
        self._assembler: ThreadPoolExecutor | None = None
        self._batches = self._read(iter(()))
        if requests:
            self.request(requests)

    def request(self, requests: Iterable[Request]) -> None:
        """Read these requests from now on, and drop batches that were prefetched.

        The prefetching thread starts the workers. In the main thread torch would install a signal
        handler that raises an error anywhere when a worker ends by itself.
        """
        self.close()
        self._closed = False
        self._batches = self._read(iter(requests))
        if self._workers:
            self._assembler = ThreadPoolExecutor(1, thread_name_prefix="next batch")
            self._next: Future[Batch] = self._assembler.submit(next, self._batches)

    def take(self) -> Batch:
        """Return the next request, and its images, without unreadable ones."""
        start = time.perf_counter()
        if self._assembler is None:
            request, images = next(self._batches)
        else:
            request, images = self._next.result()
            self._next = self._assembler.submit(next, self._batches)
        self.waited += time.perf_counter() - start
        for problem in images.broken:
            self._leave_out(problem)
        return request, images

    def close(self) -> None:
        """End the thread and the workers; these end with torch's iterator."""
        self._closed = True
        if self._assembler is not None:
            self._assembler.shutdown(wait=True)
            self._assembler = None
        self._batches.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Read one batch after the other."""
        requests, to_cut = tee(requests)
        # A private generator, so that the DataLoader does not draw from the process's.
        options: dict[str, Any] = {"num_workers": self._workers, "generator": torch.Generator()}
        if self._workers:
            options |= {"multiprocessing_context": _context(), "prefetch_factor": PIECES_AHEAD}
            options["worker_init_fn"] = _end_with_main_process
        sampler: Any = (piece for request in to_cut for piece in _pieces(request))
        source: Any = self.source
        pieces = iter(DataLoader(source, batch_size=None, sampler=sampler, **options))
        for request in requests:
            of_batch = (self._piece(pieces) for _ in _pieces(request))
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

    def _leave_out(self, problem: Broken) -> None:
        message = f"{problem.name} cannot be read as an image: {problem.reason}"
        if problem.name not in self.broken:
            if len(self.broken) >= self._skip_broken:
                raise FeedError(
                    f"{message} (--skip-broken {len(self.broken) + 1} or more leaves it out; "
                    "--check-data lists all such files first)"
                )
            self._warn(f"left out: {message}")
        self.broken[problem.name] += 1


def _default_workers() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(_MOST_WORKERS, cores)


def _pieces(request: Request) -> Iterator[Piece]:
    for rows in request.rows.split(PIECE) if len(request.rows) else ():
        yield request.part, rows.tolist(), request.epoch


def _joined(pieces: Iterable[Images], rows: int, shape: tuple[int, int, int]) -> Images:
    """Copy pieces into one batch of at most ``rows`` rows, each as soon as it arrives.

    The batch is in pinned memory if there is an accelerator.
    """
    pin = torch.accelerator.is_available()
    images = torch.empty(rows, *shape, dtype=torch.uint8, pin_memory=pin)
    labels, numbers, broken, filled = list[Tensor](), list[Tensor](), list[Broken](), 0
    for piece in pieces:
        broken += piece.broken
        if len(piece.labels):
            images[filled : filled + len(piece.labels)] = piece.images
            filled += len(piece.labels)
            labels.append(piece.labels.clone())
            numbers.append(piece.rows.clone())
    nothing = [torch.empty(0)]
    return Images(
        images[:filled], torch.cat(labels or nothing), torch.cat(numbers or nothing), broken
    )


def _context() -> Any:
    """How workers start: forked from a server without threads if possible, otherwise spawned.

    Python 3.14 has the same default on Linux.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scatterpar.train.preloaded"])
    return context


def _end_with_main_process(_: int) -> None:
    """Make a worker end when the main process has ended, for any reason, and not before.

    Torch's workers watch the process that forked them, but that is the fork server, which waits for
    them. Workers ignore signals that a terminal or a service manager sends to all processes.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        main = multiprocessing.parent_process()
        assert main is not None
        main.join()
        os._exit(1)

    _thread.start_new_thread(watch, ())  # not joined at the worker's exit
