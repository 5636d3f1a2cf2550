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
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from scatterpar.train.command_line import UsageError, printable, words_of
from scatterpar.train.data import BatchRequest, Images, Source
from scatterpar.train.processes import ALONE, Processes

PIECE = 64  # images that a worker reads at once; mixup mixes images of one piece
_PIECES_AHEAD = 2  # per worker
_MOST_WORKERS = 16  # by default

_Batches = Generator[tuple[BatchRequest, Images], None, None]


class FeedError(UsageError):
    """A request cannot be read: an image is broken, or a worker process has ended."""


class BrokenError(FeedError):
    """More images are broken than may be left out."""


class Feed(contextlib.AbstractContextManager["Feed"]):
    """Reads the requested batches, in order, with as many workers as the source's
    options say.

    Attributes:
        source: what it reads.
        limit: how many broken images may be left out; all, if it is None.
        processes: those that divide the rows of each request.
        broken: how often each broken image was left out.
        waited: the seconds that the last `take` took.
    """

    def __init__(
        self,
        source: Source,
        requests: Iterable[BatchRequest] = (),
        limit: int | None = None,
        processes: Processes = ALONE,
    ) -> None:
        self.source = source
        self.limit = limit
        self.processes = processes
        self.broken = Counter[str]()
        self.waited = 0.0
        self._workers = 0
        if not source.in_memory:
            workers = source.options.workers
            if workers is None:
                workers = max(1, _default_workers() // processes.size)
            self._workers = workers
        self._batches = self._read(iter(()))
        self.request(requests)

    def request(self, requests: Iterable[BatchRequest]) -> None:
        """Read these requests from now on, and drop batches that were prefetched."""
        self._batches.close()
        self._closed = False
        batches = self._read(iter(requests))
        self._batches = self._ahead(batches) if self._workers else batches

    def take(self) -> tuple[BatchRequest, Images]:
        """Return the next request, and this process's images of it, without unreadable
        ones.
        """
        start = time.perf_counter()
        try:
            request, images = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:  # a worker process has ended
            raise FeedError(
                f"images cannot be read: {words_of(error):.300} (fewer --workers need "
                "less memory)"
            ) from error
        self.waited = time.perf_counter() - start
        for name, reason in images.broken:
            if self.limit is not None and name not in self.broken:
                line = f"{name} cannot be read as an image: {reason}"
                if len(self.broken) >= self.limit:
                    raise BrokenError(line)
                tqdm.write(printable(f"left out: {line}"))
            self.broken[name] += 1
        return request, images

    def __exit__(self, *_: object) -> None:
        self._batches.close()

    def _ahead(self, batches: _Batches) -> _Batches:
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

    def _read(self, requests: Iterator[BatchRequest]) -> _Batches:
        """Copy the pieces of each batch out of shared memory, each as it arrives."""
        requests, requests_to_cut = tee(requests)
        loader = DataLoader[Any](
            self.source,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._pieces(requests_to_cut),
            **self._loader_options(),
        )
        # `chain` starts the workers with the first piece: a signal may end their server
        # then.
        pieces = chain.from_iterable([loader])
        has_accelerator = torch.accelerator.is_available()
        for request in requests:
            rows = self.processes.part_of(request.rows)
            images = torch.empty(
                (len(rows), *self.source.image_shape),
                dtype=torch.uint8,
                pin_memory=has_accelerator,
            )
            labels = list[Tensor]()
            broken = list[tuple[str, str]]()
            start = 0
            for piece in islice(pieces, -(-len(rows) // PIECE)):
                if self._closed:
                    return
                stop = start + len(piece.images)
                images[start:stop] = piece.images
                labels.append(piece.labels.clone())
                broken += piece.broken
                start = stop
            if not labels:  # there are fewer images than processes
                labels.append(torch.empty(0, dtype=torch.int64))
            yield request, Images(images[:start], torch.cat(labels), broken)

    def _pieces(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Cut this process's part of requests into pieces for workers."""
        for request in requests:
            rows = self.processes.part_of(request.rows).tolist()
            for start in range(0, len(rows), PIECE):
                # As lists: tensors would go to a worker through shared memory, each by
                # a thread.
                yield request._replace(rows=rows[start : start + PIECE])

    def _loader_options(self) -> dict[str, Any]:
        """Return the DataLoader's options for this number of workers."""
        # A private generator, so that the DataLoader does not draw from the process's.
        options: dict[str, Any] = {
            "num_workers": self._workers,
            "generator": torch.Generator(),
        }
        if self._workers:
            options["multiprocessing_context"] = _process_context()
            options["prefetch_factor"] = _PIECES_AHEAD
            options["worker_init_fn"] = _end_with_main_process
        return options


def _default_workers() -> int:
    """Return one worker per core that this process may use, and at most 16."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
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
