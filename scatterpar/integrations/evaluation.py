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
from collections.abc import Iterator
from typing import Any

from scatterpar.integrations import loop


class Groups:
    """A loader of batches that reads a group of them ahead. It has the loader's
    attributes.

    Args:
        loader: the stock loader, for example accelerate's.
        size: the number of batches in a group.

    Attributes:
        batches: the group in which the loop is.
        is_last: for each batch of the group, whether the loader has no more.
        results: results of batches, by their numbers in the group; ``None`` if they
            have not been computed.
        options: the arguments with which they were computed.
    """

    def __init__(self, loader: Any, size: int) -> None:
        self._loader = loader
        self._size = size
        self.batches: list[Any] = []
        self.is_last: list[bool] = []
        self.results: dict[int, Any] | None = None
        self.options: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches, one by one."""
        batches = iter(self._loader)
        try:
            while self._read(batches):
                for batch, is_last in zip(self.batches, self.is_last, strict=True):
                    if is_last or self._is_at_end():
                        self._loader.end_of_dataloader = is_last
                    yield batch
        finally:
            self._clear()

    def number_of(self, batch: Any) -> int | None:
        """The number of a batch in the group; ``None`` if it is no batch of the
        group.
        """
        for number, other in enumerate(self.batches):
            if other is batch:
                return number
        return None

    def on_host(self) -> contextlib.AbstractContextManager[None]:
        """In the body, accelerate's loader does not move batches to its device: the
        engine copies each to its replica.
        """
        if not hasattr(self._loader, "end_of_dataloader"):
            return contextlib.nullcontext()
        return loop.overridden(self._loader, device=None)

    def _read(self, batches: Iterator[Any]) -> bool:
        """Read the next group. Returns whether there is one."""
        self._clear()
        for batch in batches:
            self.batches.append(batch)
            # accelerate's loader says so before its last batch. To ask for one more
            # ends its iteration, which the loop must do.
            self.is_last.append(self._is_at_end())
            if self.is_last[-1] or len(self.batches) == self._size:
                break
        return bool(self.batches)

    def _clear(self) -> None:
        self.batches = []
        self.is_last = []
        self.results = None

    def _is_at_end(self) -> bool:
        return bool(getattr(self._loader, "end_of_dataloader", False))
