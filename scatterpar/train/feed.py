"""Batches of images, read ahead.

    files ─ workers: pieces of 64 images ─ a thread: the next batch ─ engine: this batch

Worker processes read pieces of a batch, which torch's DataLoader yields in order, and a
thread joins them. So memory has the engine's batch, the next one, and a few pieces, for
any number of workers.
"""

from __future__ import annotations

import _thread
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from scatterpar.train.command_line import UsageError, words_of
from scatterpar.train.data import BatchRequest, Images, Source

PIECE = 64  # images that a worker reads at once
_MOST_WORKERS = 16  # by default

_BatchGenerator = Generator[tuple[BatchRequest, Images], None, None]


class FeedError(UsageError):
    """A request cannot be read: an image is broken, or a worker process has ended."""


class Feed(contextlib.AbstractContextManager["Feed"]):
    """Reads the requested batches, in order, with as many workers as the source's
    options say.

    Attributes:
        source: what it reads.
        are_all_readable: whether an image that cannot be read is an error.
        waited: the seconds that the last `take` took.
    """

    def __init__(
        self,
        source: Source,
        requests: Iterable[BatchRequest] = (),
        are_all_readable: bool = True,
    ) -> None:
        self.source = source
        self.are_all_readable = are_all_readable
        self.waited = 0.0
        self._workers = _workers_of(source)
        self._batches = self._read(())
        self.request(requests)

    def request(self, requests: Iterable[BatchRequest]) -> None:
        """Read these requests from now on, and drop batches that were prefetched."""
        self._batches.close()
        self._closed = False
        batches = self._read(requests)
        self._batches = self._ahead(batches) if self._workers else batches

    def take(self) -> tuple[BatchRequest, Images]:
        """Return the next request, and its images, without unreadable ones."""
        start = time.perf_counter()
        try:
            request, images = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:  # a worker process has ended
            raise FeedError(
                f"images cannot be read: {words_of(error):.300} (fewer --workers need "
                "less memory)"
            ) from error
        self.waited = time.perf_counter() - start
        if images.broken and self.are_all_readable:
            name, reason = images.broken[0]
            raise FeedError(f"{name} cannot be read any more: {reason}")
        return request, images

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def _ahead(self, batches: _BatchGenerator) -> _BatchGenerator:
        """Read the next batch in a thread while this one is used."""
        # The thread starts the workers: in the main thread torch would install a signal
        # handler that raises an error anywhere when a worker ends by itself.
        with ThreadPoolExecutor(1, thread_name_prefix="next batch") as thread:
            following = thread.submit(next, batches, None)
            try:
                while (batch := following.result()) is not None:
                    following = thread.submit(next, batches, None)
                    yield batch
            finally:
                self._closed = True  # the thread stops within a batch
                # The workers end with torch's iterator.
                thread.submit(batches.close).result()

    def _read(self, requests: Iterable[BatchRequest]) -> _BatchGenerator:
        """Copy the pieces of each batch out of shared memory, each as it arrives."""
        batches, batches_of_workers = tee(map(_cut, requests))
        loader = DataLoader[Any](
            self.source,  # type: ignore[arg-type]
            batch_size=None,
            sampler=chain.from_iterable(pieces for _, pieces in batches_of_workers),
            # A private one, so that the DataLoader does not draw from the process's.
            generator=torch.Generator(),
            num_workers=self._workers,
            multiprocessing_context=_process_context() if self._workers else None,
            worker_init_fn=_end_with_main_process,
        )
        # `chain` starts the workers with the first piece: a signal may end their server
        # then.
        read_pieces = chain.from_iterable([loader])
        for request, pieces in batches:
            rows = sum(len(piece.rows) for piece in pieces)
            images = torch.empty(
                (rows, *self.source.image_shape),
                dtype=torch.uint8,
                pin_memory=torch.accelerator.is_available(),
            )
            labels = list[Tensor]()
            broken = list[tuple[str, str]]()
            start = 0
            for piece in islice(read_pieces, len(pieces)):
                if self._closed:
                    return
                stop = start + len(piece.images)
                images[start:stop] = piece.images
                labels.append(piece.labels.clone())
                broken += piece.broken
                start = stop
            yield request, Images(images[:start], torch.cat(labels), broken)


def _cut(request: BatchRequest) -> tuple[BatchRequest, list[BatchRequest]]:
    """Return a request, and the pieces of it, for workers."""
    pieces = []
    for rows in request.rows.split(PIECE):
        # As lists: tensors would go to a worker through shared memory, each by a
        # thread.
        pieces.append(request._replace(rows=rows.tolist()))
    return request, pieces


def _workers_of(source: Source) -> int:
    """Return the number of worker processes: by default one per core that this process
    may use, and at most 16.
    """
    workers = source.options.workers
    if source.in_memory:
        return 0
    if workers is not None:
        return workers
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return min(_MOST_WORKERS, cores)


def _process_context() -> Any:
    """Return how workers start: by a fork of a server without threads if possible,
    otherwise spawned.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scatterpar.train.preloaded"])
    return context


def _end_with_main_process(_: int) -> None:
    """Make a worker end with the main process, and not before, by a signal to all
    processes.
    """
    # Torch's workers watch their parent, but that is the fork server, which waits for
    # them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _thread.start_new_thread(_exit_after_main_process, ())  # not joined at exit


def _exit_after_main_process() -> None:
    main: Any = multiprocessing.parent_process()
    main.join()
    os._exit(1)
