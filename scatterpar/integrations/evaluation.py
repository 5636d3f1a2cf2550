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

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, Rows
from scatterpar.devices.fingerprints import same_bits
from scatterpar.engine import ScatterOnceParallel
from scatterpar.errors import warn
from scatterpar.integrations import loop
from scatterpar.integrations.steps import FIRST


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
        is_last: for each batch of the group, whether the loader has no more.
        results: results of batches, by their numbers in the group; ``None`` if they
            have not been computed.
        options: the arguments with which they were computed.
    """

    def __init__(
        self, loader: Any, size: int, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        self.loader = loader
        self._prepare = prepare
        self.size = size
        self.batches: list[Any] = []
        self.number = 0
        self.is_last: list[bool] = []
        self.results: dict[int, Any] | None = None
        self.options: Any = None

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
                    is_last = self.is_last[number]
                    if is_last or self._is_at_end():
                        self.loader.end_of_dataloader = is_last
                    self.number = number
                    yield batch
        finally:
            self._clear()

    def number_of(self, batch: Any) -> int | None:
        """The number of a batch in the group; ``None`` if it is no batch of the
        group.
        """
        for number, batch_of_group in enumerate(self.batches):
            if batch_of_group is batch:
                return number
        return None

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """In the body, accelerate's loader does not move batches to its device: the
        engine copies each to its replica.
        """
        if not hasattr(self.loader, "end_of_dataloader"):
            return contextlib.nullcontext()
        return loop.overridden(self.loader, device=None)

    def _read(self, batches: Iterator[Any]) -> bool:
        """Read the next group. Returns whether there is one."""
        self._clear()
        for batch in batches:
            if self._prepare is not None:
                batch = self._prepare(batch)
            self.batches.append(batch)
            # accelerate's loader says so before its last batch. To ask for one more
            # ends its iteration, which the loop must do.
            self.is_last.append(self._is_at_end())
            if self.is_last[-1] or len(self.batches) == self.size:
                break
        return bool(self.batches)

    def _clear(self) -> None:
        self.batches = []
        self.is_last = []
        self.results = None

    def _is_at_end(self) -> bool:
        return bool(getattr(self.loader, "end_of_dataloader", False))


def outputs_of_batches(
    engine: ScatterOnceParallel,
    function: Callable[[Any, Any], Any],
    batches: Sequence[Any],
) -> list[Any]:
    """``function(replica, batch)`` of each batch, computed by a replica of its own.

    Nothing is joined. Each output is on its replica's device.
    """
    # A batch is one row: the engine gives each replica a whole one.
    rows = Rows(batches, FIRST)
    boxes = engine.map(partial(_boxed, function=function), batch=rows)
    return [box.output for box in nested.atoms(boxes)]


def _boxed(
    replica: Any, function: Callable[[Any, Any], Any], batch: Any
) -> SimpleNamespace:
    """An output in an object, which the engine does not join with others."""
    return SimpleNamespace(output=function(replica, batch))


def rows_of(batch: Any, rows: Sequence[int], num_rows: int) -> Any:
    """These rows of a batch whose lists of rows are marked, as a step function gets
    them.
    """

    def select(value: Any) -> Any:
        if isinstance(value, Marker):
            return value.select(rows).unwrap(copy=False)
        if isinstance(value, Tensor) and value.ndim and len(value) == num_rows:
            return value[list(rows)]
        return value

    return nested.map_atoms(select, batch)


class RowLooks:
    """Whether the results of a step function are those of its parts.

    A look compares the results of a few rows in one call with those of two calls, and
    with those of one call with other random numbers. If these differ, it tells
    nothing.

    Attributes:
        undivided: the names of step functions that compare rows.
    """

    def __init__(self) -> None:
        self.undivided: set[str] = set()
        self._calls: dict[str, int] = {}

    def is_due(self, step: str, num_rows: int) -> bool:
        """Whether to look at this call: number 1, 2, 4, 8, … with several rows."""
        if step in self.undivided or num_rows < 2:
            return False
        number = self._calls.get(step, 0) + 1
        self._calls[step] = number
        return not number & (number - 1)

    def look(self, step: str, num_rows: int, results_of: ResultsOf) -> None:
        """Look at a call of ``step``, and warn if its results depend on all rows.

        Args:
            step: the step function's name.
            num_rows: the number of rows of the batch.
            results_of: returns the results of parts with these rows.
        """
        # Five rows, as far apart as possible, or all.
        rows = sorted({number * (num_rows - 1) // 4 for number in range(5)})
        middle = len(rows) // 2  # two of five: some layers need two rows
        parts = [rows[:middle], rows[middle:]]
        with _process_generators_restored():
            try:
                whole = _seeded(0, results_of, [rows])
                divided = _seeded(0, results_of, parts)
                reseeded = _seeded(1, results_of, [rows])
            except Exception:  # the call itself raises, or tells nothing
                return
        draws_numbers = not all(map(same_bits, whole, reseeded))
        if draws_numbers or _are_close(whole, divided):
            return
        self.undivided.add(step)
        warn(
            f"{step} gives other results for a few rows at once than for parts of "
            "them, so it gets each batch as a whole, on the first device. It may "
            "compare rows, or log a ratio of sums. To use all devices, update metrics "
            "of torchmetrics, or return what is needed and compute the value of all "
            "rows at the end of the epoch"
        )


ResultsOf = Callable[[Sequence[Sequence[int]]], Any]


def _seeded(
    seed: int, results_of: ResultsOf, parts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """The tensors of the results of ``parts``, with random numbers of this seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nested.tensors(results_of(parts))


@contextlib.contextmanager
def _process_generators_restored() -> Iterator[None]:
    """In the body, Python's and NumPy's random numbers may be drawn."""
    state = random.getstate()
    state_of_numpy = numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        numpy.random.set_state(state_of_numpy)


def _are_close(whole: Sequence[Tensor], divided: Sequence[Tensor]) -> bool:
    """Whether all numbers agree, up to rounding of the least precise dtype."""
    shapes = [tensor.shape for tensor in whole]
    if shapes != [tensor.shape for tensor in divided]:
        return False
    tolerances = [_TOLERANCES.get(tensor.dtype, 0.0) for tensor in whole]
    tolerance = max(tolerances, default=0.0)
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled():
        tolerance = _TOLERANCE_OF_HALF
    for expected, result in zip(whole, divided, strict=True):
        near = torch.isclose(
            expected.double(), result.double(), tolerance, tolerance, equal_nan=True
        )
        if not bool(near.all()):
            return False
    return True


# Beside an effect of rows on each other, which is larger than all of these.
_TOLERANCE_OF_HALF = 5e-2
_TOLERANCES = {
    torch.float64: 1e-7,
    torch.float32: 5e-3,  # of TF32, too
    torch.float16: _TOLERANCE_OF_HALF,
    torch.bfloat16: _TOLERANCE_OF_HALF,
}
