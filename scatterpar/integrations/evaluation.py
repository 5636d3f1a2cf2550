"""Evaluation by all replicas: each computes whole batches of the stock loop.

A stock loop computes one batch after the other::

    for batch in loader:
        result = prediction_step(model, batch)

Here the loader reads one batch per replica ahead, which replicas compute at the same
time. The loop gets each result when it asks for it.

No batch is divided. So the results are those of the stock loop, whatever it computes:
losses that compare rows, outputs without rows, generated texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from scatterpar.integrations import loop
from scatterpar.options.batch_calls import BatchCalls


class BatchesAhead:
    """A loader that reads some batches ahead. It has the loader's attributes.

    Args:
        loader: the stock loader, for example accelerate's.
        size: the number of batches that are read at the same time.
        prepare: is applied to each batch that is read.

    Attributes:
        size: as above; the loop may lower it.
        batches: those that were read. The loop is at the first one.
        inputs: what replicas get for the first of these batches, if it is not these;
            the loop adds them.
        calls: compute them; ``None`` before the loop asks for its first result.
    """

    def __init__(
        self, loader: Any, size: int, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        self.loader = loader
        self._prepare = prepare
        self.size = size
        self.batches: deque[Any] = deque()
        self.inputs: deque[Any] = deque()
        self.calls: BatchCalls | None = None
        self._has_result = False  # of the batch at which the loop is
        self._is_at_end = False  # of the loader, after these batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches, one by one."""
        self._is_at_end = False
        batches = iter(self.loader)
        try:
            self._read(batches)
            while self.batches:
                # The loader was ahead, and the loop asks it before each batch.
                if self._is_at_end:
                    self.loader.end_of_dataloader = len(self.batches) == 1
                self._has_result = False
                yield self.batches[0]
                if self.calls is not None and not self._has_result:
                    self.calls.skip()
                # Before it reads: each batch is in memory until the loop has left it.
                self.batches.popleft()
                if self.inputs:
                    self.inputs.popleft()
                self._read(batches)
        finally:
            self.batches.clear()
            self.inputs.clear()
            # A loop may end before its loader, or fail.
            self.close()

    def has(self, batch: Any) -> bool:
        """Whether the loop is at this batch, and has not had its result."""
        return bool(self.batches) and self.batches[0] is batch and not self._has_result

    def result(self) -> Any:
        """The result of the batch at which the loop is, on its replica's device."""
        assert self.calls is not None
        self._has_result = True
        return self.calls.result(list(self.inputs or self.batches))

    def moved(self, value: Any, device: torch.device) -> Any:
        """What the result has, on the first device. Then its replica goes on."""
        assert self.calls is not None
        on_device = loop.moved(value, device, copy=True)
        self.calls.go_on()
        return on_device

    def close(self) -> None:
        """End the calls whose results the loop did not ask for."""
        if self.calls is not None:
            self.calls.close()

    def _read(self, batches: Iterator[Any]) -> None:
        """Read batches until there are ``size``, or the loader has no more."""
        while len(self.batches) < self.size:
            # accelerate's loader says so before its last batch. To ask for one more
            # ends its iteration, which must not be before the loop has had the batch.
            if self._is_at_end and self.batches:
                return
            try:
                batch = next(batches)
            except StopIteration:
                return
            if self._prepare is not None:
                batch = self._prepare(batch)
            self.batches.append(batch)
            self._is_at_end = bool(getattr(self.loader, "end_of_dataloader", False))
