"""Batches that are ready when they are wanted: read by worker processes while the engine computes.

A batch of thousands of images is read in pieces. Each piece is one item of torch's DataLoader,
which keeps a few of them in flight per worker and hands them over in order; one thread puts
the next batch together from them. So there are in memory, whatever the number of workers: the
batch that the engine has, the next one, and some pieces.

What is wanted is one stream of requests, over the ends of epochs too, for training and testing:
the workers never run dry in between, and whoever trains or tests takes what comes. The number
of images that were used is all there is to a resume, with any number of workers and machines.
(torchdata's StatefulDataLoader refuses another number of workers when it goes on.)
"""

from __future__ import annotations

import _thread
import contextlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import tee
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scatterpar.train.data import Broken, Images, Piece, Source, UsageError, words_of

PIECE = 64  # images that a worker reads at once; with mixup, what is mixed with each other
PIECES_AHEAD = 2  # of each worker
_MOST_WORKERS = 16  # by default


class FeedError(UsageError):
    """What is wanted cannot be read: a broken image, or a worker process that is gone."""


class Request(NamedTuple):
    """Rows of a part that are wanted together, as they are in an epoch; of all ranks' so many."""

    part: str
    rows: Tensor
    epoch: int = 0
    of: int = 0


Batch = tuple[Request, Images]


class Feed:
    """Hands out what was requested, in order, and times how long that takes.

    `workers` processes read (None: one for each core, at most 16); with 0 this one does, when it is
    asked. `skip_broken` images may be left out that cannot be read; `warn` is called with a line
    for each. `waited` are the seconds that whoever asked has waited, and `broken` tells how often
    images were left out, by name.
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
        """Let these come from here on; what was read ahead is dropped.

        Workers are started by the thread that reads ahead. In the main one torch would install a
        signal handler that raises in the middle of anything when a worker ends by itself.
        """
        self.close()
        self._closed = False
        self._batches = self._read(iter(requests))
        if self._workers:
            self._assembler = ThreadPoolExecutor(1, thread_name_prefix="next batch")
            self._next: Future[Batch] = self._assembler.submit(next, self._batches)

    def take(self) -> Batch:
        """Return the next request, and its images without those that are broken."""
        start = time.perf_counter()
        if self._assembler is None:
            request, found = next(self._batches)
        else:
            request, found = self._next.result()
            self._next = self._assembler.submit(next, self._batches)
        self.waited += time.perf_counter() - start
        for problem in found.broken:
            self._leave_out(problem)
        return request, found

    def close(self) -> None:
        """End the thread and, by dropping torch's iterator, the workers."""
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
        requests, cut = tee(requests)
        # A generator of its own, so that the process's own is left alone.
        how: dict[str, Any] = {"num_workers": self._workers, "generator": torch.Generator()}
        if self._workers:
            context = _context()
            theirs, _alive = context.Pipe(duplex=False)  # as long as this generator
            how["worker_init_fn"] = partial(_end_with, theirs)
            how |= {"multiprocessing_context": context, "prefetch_factor": PIECES_AHEAD}
        wanted: Any = (piece for request in cut for piece in _pieces(request))
        source: Any = self.source
        pieces = iter(DataLoader(source, batch_size=None, sampler=wanted, **how))
        for request in requests:
            mine = (self._piece(pieces) for _ in _pieces(request))
            yield request, _joined(mine, len(request.rows), self.source.image_shape)

    def _piece(self, pieces: Iterator[Images]) -> Images:
        if self._closed:
            raise RuntimeError("the feed was closed")
        try:
            return next(pieces)
        except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
            # Torch says so, or the worker ended after it had announced a piece. "Caught" is how
            # torch passes on a worker's own error.
            words = words_of(error)
            ended = not isinstance(error, RuntimeError) or "DataLoader worker (pid" in words
            if not ended or words.startswith("Caught "):
                raise
            raise FeedError(
                f"a worker process that reads images has ended by itself ({words}); the system "
                "ends processes where memory runs out: fewer --workers need less"
            ) from error

    def _leave_out(self, problem: Broken) -> None:
        said = f"{problem.name} cannot be read as an image: {problem.reason}"
        if problem.name not in self.broken:
            if len(self.broken) >= self._skip_broken:
                raise FeedError(
                    f"{said} (--skip-broken {len(self.broken) + 1} or more leaves it out; "
                    "--check-data lists all such files first)"
                )
            self._warn(f"left out: {said}")
        self.broken[problem.name] += 1


def _default_workers() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(_MOST_WORKERS, cores)


def _pieces(request: Request) -> Iterator[Piece]:
    for rows in request.rows.split(PIECE) if len(request.rows) else ():
        yield request.part, rows.tolist(), request.epoch


def _joined(pieces: Iterable[Images], rows: int, shape: tuple[int, int, int]) -> Images:
    """Copy pieces into one batch of at most so many rows, each as soon as it is there.

    It lies in page-locked memory where accelerators copy from it.
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
    """Workers are forked from a clean process where there is one: this one has threads.

    As Python 3.14 does by itself on Linux.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scatterpar.train.preloaded"])
    return context


def _end_with(pipe: Connection, _: int) -> None:
    """Let a worker end when the main process does, however that happens, and not before.

    Nobody writes into the pipe: it ends when the system closes the other side. Torch's workers
    watch their parent, which is the fork server, and that one waits for them. Signals that a
    terminal or a service manager sends to all processes are for the main one.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def watch() -> None:
        with contextlib.suppress(OSError):
            pipe.poll(None)
        os._exit(1)

    _thread.start_new_thread(watch, ())  # nobody waits for it at the worker's own end
