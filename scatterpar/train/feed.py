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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import tee
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from scatterpar.train.data import TEST, TRAIN, Broken, Images, Source, UsageError, words_of

PIECE = 64  # images that a worker reads at once; with mixup, what is mixed with each other
PIECES_AHEAD = 2  # of each worker
_MOST_WORKERS = 16  # by default

NOTHING = Images(torch.empty(0), torch.empty(0), torch.empty(0))
_Piece = tuple[str, list[int], int]  # part, rows, epoch


class FeedError(UsageError):
    """What is wanted cannot be read: a broken image, or a worker process that is gone."""


@dataclass(frozen=True)
class Request:
    """Rows of a part that are wanted together, as they are in an epoch; of all ranks' so many."""

    part: str
    rows: Tensor
    epoch: int = 0
    of: int = 0

    def pieces(self) -> Iterator[_Piece]:
        """Cut it."""
        for start in range(0, len(self.rows), PIECE):
            yield self.part, self.rows[start : start + PIECE].tolist(), self.epoch


class Feed:
    """Hands out what was requested, in order, and times how long that takes.

    Args:
        source: what is read.
        requests: the first ones; workers start when there are some.
        workers: processes that read; 0: this one reads, when it is asked.
        skip_broken: how many images may be left out that cannot be read.
        warn: called with a line for each image that is left out for the first time.

    Attributes:
        waited: seconds that whoever asked has waited.
        started: seconds of it for the first batch, when the workers start.
        broken: how often images were left out, by name.
    """

    def __init__(
        self,
        source: Source,
        requests: Iterable[Request] = (),
        workers: int = 0,
        skip_broken: int = 0,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.source = source
        self.waited = self.started = 0.0
        self.broken: Counter[str] = Counter()
        self._skip_broken = skip_broken
        self._warn = warn
        self._workers = workers
        self._ahead: _Ahead | None = None
        self.request(requests)

    def request(self, requests: Iterable[Request]) -> None:
        """Let these come from here on; what was read ahead is dropped."""
        self.close()
        self._ahead = None
        if self._workers and requests:
            self._ahead = _Ahead(self.source, requests, self._workers)
        self._coming = self._ahead or ((request, self._read(request)) for request in requests)

    def take(self) -> tuple[Request, Images]:
        """Return the next request, and its images without those that are broken.

        Raises:
            FeedError: an image cannot be read, or a worker has ended by itself.
        """
        start = time.perf_counter()
        request, found = next(self._coming)
        seconds = time.perf_counter() - start
        self.started = self.started if self.waited else seconds
        self.waited += seconds
        for problem in found.broken:
            self._leave_out(problem)
        return request, found

    def close(self) -> None:
        """End the workers."""
        if self._ahead is not None:
            self._ahead.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, request: Request) -> Images:
        if self.source.in_memory:
            return self.source.read(request.part, request.rows, request.epoch)
        return _joined(map(_Pieces(self.source).__getitem__, request.pieces()), len(request.rows))

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


class _Ahead(Iterator[tuple[Request, Images]]):
    """The stream of what was requested: workers read pieces, a thread joins the next batch."""

    def __init__(self, source: Source, wanted: Iterable[Request], workers: int) -> None:
        requests, cut = tee(wanted)
        pieces = (piece for request in cut for piece in request.pieces())
        self._loader, self._alive = _loader(_Pieces(source), pieces, workers)
        self._batches = self._assembled(requests)
        self._closed = False
        self._assembler = ThreadPoolExecutor(1, thread_name_prefix="next batch")
        self._next = self._assembler.submit(next, self._batches)

    def __next__(self) -> tuple[Request, Images]:
        """Return the next batch, and begin with the one after."""
        found = self._next.result()
        self._next = self._assembler.submit(next, self._batches)
        return found

    def close(self) -> None:
        """End the thread and, by dropping torch's iterator, the workers."""
        self._closed = True
        self._assembler.shutdown(wait=True)
        self._batches.close()

    def _assembled(
        self, requests: Iterator[Request]
    ) -> Generator[tuple[Request, Images], None, None]:
        """Read one batch after the other, into page-locked memory where accelerators copy from it.

        The workers are started here rather than in the main thread. There torch would install a
        signal handler that raises in the middle of anything when a worker ends by itself. Here
        it is noticed when the worker's piece does not come.
        """
        pieces, pin = iter(self._loader), torch.accelerator.is_available()
        for request in requests:
            mine = (self._piece(pieces) for _ in range(-(-len(request.rows) // PIECE)))
            yield request, _joined(mine, len(request.rows), pin)

    def _piece(self, pieces: Iterator[Images]) -> Images:
        if self._closed:
            raise RuntimeError("the feed was closed")
        try:
            return next(pieces)
        except (RuntimeError, EOFError, ConnectionError, FileNotFoundError) as error:
            if not _is_of_an_ended_worker(error):
                raise
            raise FeedError(
                "a worker process that reads images has ended by itself "
                f"({words_of(error)}); the system "
                "ends processes where memory runs out: fewer --workers need less"
            ) from error


@dataclass(frozen=True)
class _Pieces(Dataset[Images]):
    """What a worker does; where it only looks, names and faults come back, and no images."""

    source: Source
    looks: bool = False

    def __getitem__(self, piece: _Piece) -> Images:
        part, rows, epoch = piece
        found = self.source.read(part, torch.tensor(rows), epoch)
        if self.looks:
            return NOTHING._replace(rows=torch.tensor(rows), broken=found.broken)
        return found


def check_data(source: Source, workers: int, told: Callable[[int], object]) -> list[Broken]:
    """Look at all pictures, in parallel; return those that cannot be read.

    Args:
        source: of pictures.
        workers: processes that read; 0: this one does.
        told: called with the number of pictures of each piece.
    """
    parts = ((TRAIN, len(source.train)), (TEST, len(source.test)))
    pieces = (piece for part, n in parts for piece in Request(part, torch.arange(n)).pieces())
    loader, _alive = _loader(_Pieces(source, looks=True), pieces, workers)
    broken: list[Broken] = []
    for found in loader:
        broken += found.broken
        told(len(found.rows))
    return broken


def default_workers() -> int:
    """A process for each core that this one may use, at most 16."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    return min(_MOST_WORKERS, cores)


def _loader(
    pieces: _Pieces, sampler: Iterator[_Piece], workers: int
) -> tuple[DataLoader[Images], Connection | None]:
    """Make a loader, and what its workers live as long as."""
    # A generator of its own, so that the process's own is left alone.
    how: dict[str, Any] = {"collate_fn": _as_it_is, "generator": torch.Generator()}
    alive = None
    if workers:
        context = _context()
        theirs, alive = context.Pipe(duplex=False)
        how["worker_init_fn"] = partial(_end_with, theirs)
        how |= {"multiprocessing_context": context, "prefetch_factor": PIECES_AHEAD}
    made: Any = DataLoader
    return made(pieces, batch_size=None, sampler=sampler, num_workers=workers, **how), alive


def _joined(pieces: Iterable[Images], rows: int, pin: bool = False) -> Images:
    """Copy pieces into one batch of at most so many rows, each as soon as it is there."""
    images: Tensor | None = None
    columns: tuple[list[Tensor], list[Tensor]] = [], []
    broken: list[Broken] = []
    filled = 0
    for piece in pieces:
        broken += piece.broken
        if not len(piece.labels):
            continue
        if images is None:
            shape = (rows, *piece.images.shape[1:])
            images = torch.empty(shape, dtype=piece.images.dtype, pin_memory=pin)
        images[filled : filled + len(piece.labels)] = piece.images
        filled += len(piece.labels)
        for column, values in zip(columns, (piece.labels, piece.rows), strict=True):
            column.append(values.clone())
    if images is None:
        return NOTHING._replace(broken=broken)
    labels, numbers = map(torch.cat, columns)
    return Images(images[:filled], labels, numbers, broken)


def _context() -> Any:
    """Workers are forked from a clean process where there is one: this one has threads.

    As Python 3.14 does by itself on Linux.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scatterpar.train.preloaded"])
    return context


def _is_of_an_ended_worker(error: Exception) -> bool:
    """Whether torch says so, or the worker ended after it had announced a piece."""
    if isinstance(error, RuntimeError):
        return "DataLoader worker (pid" in str(error)
    return not str(error).startswith("Caught ")  # that is how torch passes on a worker's own


def _as_it_is(piece: Any) -> Any:
    return piece


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
