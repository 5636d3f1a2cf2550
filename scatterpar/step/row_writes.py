"""Tensors of a batch that user code writes: replicas have copies, so this is told once.

::

    state.copy_(new.detach())      in forward: the caller's tensor keeps its values
    targets["seen"].add_(1)        in a criterion: so does this one
    rows.div_(255)                 nobody reads the rows again: nothing is lost

Nothing tells the first and the last of these apart: all are told, none is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.write_counters import versions
from scatterpar.errors import Told, warn


class RowWrites:
    """The entries of inputs and targets that user code has written in one call.

    Replicas' threads share it.
    """

    def __init__(self) -> None:
        self._entries: set[tuple[str, str]] = set()  # who has written, and what

    @contextlib.contextmanager
    def watched(self, writer: str, part: str, value: Any) -> Iterator[None]:
        """In the body user code, ``writer``, gets ``value``, which is called ``part``.

        Inference tensors do not count how often they are written: of these nothing is
        known.
        """
        tensors = nested.tensors(value)
        before = versions(tensors)
        yield
        if versions(tensors) != before:
            self._entries.update(
                (writer, name) for name in _written(part, value, tensors, before)
            )

    def tell(self, told: Told) -> None:
        """Warn of the entries that no earlier call has written."""
        for writer in sorted({writer for writer, _ in self._entries}):
            names = sorted(name for by, name in self._entries if by == writer)
            new = [name for name in names if told.mark((writer, name))]
            if new:
                warn(
                    f"{writer} writes {', '.join(new)} in place. The replicas get "
                    "copies: your tensors keep their values, and the next step begins "
                    "with these. What is to stay, return from forward, and write it "
                    "after the step (return_outputs=True). If nobody reads it again, "
                    "as behind nn.ReLU(inplace=True), nothing is lost."
                )


def _written(
    part: str, value: Any, tensors: Sequence[Tensor], before: Sequence[int]
) -> list[str]:
    """The names of the entries of ``value`` whose ``tensors`` have other versions."""
    written: set[int] = set()
    for tensor, old, new in zip(tensors, before, versions(tensors), strict=True):
        if old != new:
            written.add(id(tensor))
    names: list[str] = []
    for name, entry in _entries(part, value):
        if not written.isdisjoint(map(id, nested.tensors(entry))):
            names.append(name)
    # User code may have taken the entry out of its container.
    return names or [part]


def _entries(part: str, value: Any) -> list[tuple[str, Any]]:
    """The entries of ``value``, with their names; ``value`` itself if it has none."""
    if isinstance(value, Mapping):
        return [(f"{part}[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, (tuple, list)):
        return [(f"{part}[{number}]", entry) for number, entry in enumerate(value)]
    return [(part, value)]
