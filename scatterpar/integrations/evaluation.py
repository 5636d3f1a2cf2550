"""Evaluation by all replicas: each computes whole batches of the stock loop.

A stock loop computes one batch after the other::

    for batch in loader:
        result = prediction_step(model, batch)

Here the loader reads one batch per replica ahead. When the loop asks for the result of
the first batch, the replicas compute all of them::

    0 1 2 | 3 4 5 | 6        7 batches on 3 replicas: 3 groups
    r r r   r r r   r        r: the result is asked for, by the stock loop

No batch is divided. So the results are those of the stock loop, whatever it computes:
losses that compare rows, outputs without rows, generated texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from scatterpar.batch import nested
from scatterpar.batch.markers import Rows
from scatterpar.devices.transfers import to_device
from scatterpar.engine import ScatterOnceParallel
from scatterpar.integrations.step_batches import FIRST


class Groups:
    """A loader of batches that reads a group of them ahead. It has the loader's
    attributes.

    Args:
        loader: the stock loader, for example accelerate's.
        size: the number of batches in a group.
        prepare: is applied to each batch that is read.

    Attributes:
        size: the number of batches in the next group.
        batches: the group in which the loop is.
        number: the number, in the group, of the batch at which the loop is.
    """

    def __init__(
        self, loader: Any, size: int, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        self.loader = loader
        self._prepare = prepare
        self.size = size
        self.batches: list[Any] = []
        self.number = 0
        self._is_at_end = False  # of the loader, after this group
        # By the numbers of batches in the group; None before they are computed.
        self._results: dict[int, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches, one by one."""
        batches = iter(self.loader)
        try:
            while self._read(batches):
                for number, batch in enumerate(self.batches):
                    # The loader was ahead, and the loop asks it before each batch.
                    if self._is_at_end:
                        is_last = number == len(self.batches) - 1
                        self.loader.end_of_dataloader = is_last
                    self.number = number
                    yield batch
        finally:
            self._clear()

    def has(self, batch: Any) -> bool:
        """Whether the loop is at this batch of a group, and has not had its result."""
        if self._results is not None and self.number not in self._results:
            return False
        return bool(self.batches) and self.batches[self.number] is batch

    def result(self, compute: Callable[[], Sequence[Any]], device: torch.device) -> Any:
        """The result of the batch at which the loop is, on the first device.

        ``compute`` returns the results of the group. It is called for its first batch.
        """
        if self._results is None:
            self._results = dict(enumerate(compute()))
        # Results are large: each is dropped once the loop has it.
        result = self._results.pop(self.number)
        # Also between virtual devices, each of which has a memory of its own.
        move = partial(to_device, device=device, copy=self.number != 0)
        return nested.map_tensors(move, result)

    def _read(self, batches: Iterator[Any]) -> bool:
        """Read the next group. Returns whether there is one."""
        # Before it reads: two groups need twice the memory.
        self._clear()
        for batch in batches:
            if self._prepare is not None:
                batch = self._prepare(batch)
            self.batches.append(batch)
            # accelerate's loader says so before its last batch. To ask for one more
            # ends its iteration, which the loop must do.
            self._is_at_end = bool(getattr(self.loader, "end_of_dataloader", False))
            if self._is_at_end or len(self.batches) == self.size:
                break
        return bool(self.batches)

    def _clear(self) -> None:
        self.batches = []
        self._results = None


def outputs_of_batches(
    engine: ScatterOnceParallel,
    function: Callable[[Any, Any], Any],
    batches: Sequence[Any],
) -> list[Any]:
    """``function(replica, batch)`` of each batch, computed by a replica of its own.

    Nothing is joined. Each output is on its replica's device. Until the loop sets
    ``engine.loop.continues_evaluation`` to ``False``, later calls are of the same
    evaluation.
    """
    # A batch is one row: the engine gives each replica a whole one.
    rows = Rows(batches, FIRST)
    # Outputs may have no rows, or another number of them in each batch.
    boxes = engine.map(partial(_boxed, function=function), batch=rows)
    engine.loop.continues_evaluation = True
    return [box.output for box in nested.atoms(boxes)]


def _boxed(
    replica: Any, function: Callable[[Any, Any], Any], batch: Any
) -> SimpleNamespace:
    """An output in an object, which the engine does not join with others."""
    return SimpleNamespace(output=function(replica, batch))
