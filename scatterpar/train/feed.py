"""Prefetch batches: worker processes read the next one while the engine computes.

Workers read pieces of a batch, which torch's DataLoader yields in order, and one thread joins them.
So memory has the engine's batch, the next one, and a few pieces, for any number of workers.
"""

from __future__ import annotations

import _thread
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, tee
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from scatterpar.train.data import Images, Request, Source
from scatterpar.train.options import UsageError, words_of

PIECE = 64  # images that a worker reads at once; mixup mixes images of one piece
_PIECES_AHEAD, _MOST_WORKERS = 2, 16  # per worker; by default


class FeedError(UsageError):
    """A request cannot be read: an image is broken, or a worker process has ended."""


_Batches = Generator[tuple[Request, Images], None, None]


class Feed:
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
        self._batches = self._read(iter(()))
        self.request(requests)

    def request(self, requests: Iterable[Request]) -> None:
        """Read these requests from now on, and drop batches that were prefetched."""
        self._batches.close()
        self._closed, batches = False, self._read(iter(requests))
        self._batches = self._ahead(batches) if self._workers else batches

    def take(self) -> tuple[Request, Images]:
        """Return the next request, and its images, without unreadable ones."""
        start = time.perf_counter()
        request, images = next(self._batches)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def _ahead(self, batches: _Batches) -> _Batches:
        """Read the next batch in a thread while this one is used."""
        # The thread starts the workers: in the main thread torch would install a signal handler
        # that raises an error anywhere when a worker ends by itself.
        with ThreadPoolExecutor(1, thread_name_prefix="next batch") as thread:
            following = thread.submit(next, batches, None)
            try:
                while (batch := following.result()) is not None:
                    following = thread.submit(next, batches, None)
                    yield batch
            finally:
                self._closed = True  # the thread stops within a batch
                thread.submit(batches.close).result()  # the workers end with torch's iterator

    def _read(self, requests: Iterator[Request]) -> _Batches:
        """Read one batch after the other."""
        requests, to_cut = tee(requests)
        # A private generator, so that the DataLoader does not draw from the process's.
        options: dict[str, Any] = {"num_workers": self._workers, "generator": torch.Generator()}
        if self._workers:
            options |= {"multiprocessing_context": _context(), "prefetch_factor": _PIECES_AHEAD}
            options["worker_init_fn"] = _end_with_main_process
        sampler: Any = (piece for request in to_cut for piece in _pieces(request))
        source: Any = self.source
        # `chain` starts the workers with the first piece: a signal may end their server then.
        pieces = chain.from_iterable(
            [DataLoader(source, batch_size=None, sampler=sampler, **options)]
        )
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


def _pieces(request: Request) -> Iterator[Request]:
    # As lists: tensors would go to a worker through shared memory, each by a thread.
    rows_of_pieces = request.rows.split(PIECE) if len(request.rows) else ()
    return (request._replace(rows=rows.tolist()) for rows in rows_of_pieces)


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
    """Make a worker end with the main process, and not before, by a signal to all processes."""
    # Torch's workers watch their parent, but that is the fork server, which waits for them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    main: Any = multiprocessing.parent_process()
    _thread.start_new_thread(lambda: (main.join(), os._exit(1)), ())  # not joined at exit
