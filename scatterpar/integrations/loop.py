"""Run the step function of another library's training loop on replicas of the loop's modules.

A loop has an *owner*, such as a Trainer, whose step function takes a batch. Each replica calls the
step function for its micro-batches, on a copy of the owner that refers to the replica's modules.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, Rows

Owner = TypeVar("Owner")

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Modules(nn.ModuleList):
    """The modules of a loop, the model first; called, it calls a step function with itself."""

    def forward(self, work: Any, **kwargs: Any) -> Any:
        """Return ``work(self, **kwargs)``."""
        return work(self, **kwargs)


def modules_in(value: Any) -> list[nn.Module]:
    """The modules in ``value``, which is a module, or a list, tuple or dict."""
    return [part for part in _entries(value, [value]) if isinstance(part, nn.Module)]


def copy_of(owner: Owner, replicas: Mapping[int, nn.Module], shared: Container[str]) -> Owner:
    """A shallow copy of ``owner`` with copies of its lists, that refers to ``replicas``.

    They are keyed by the modules' ``id``. Attributes named in ``shared`` are not copied.
    """
    copied = copy.copy(owner)
    for name, value in vars(owner).items():
        if name not in shared and (type(value) is list or modules_in(value)):
            vars(copied)[name] = nested.map_leaves(lambda one: replicas.get(id(one), one), value)
    return copied


@contextlib.contextmanager
def overridden(owner: Any, **values: Any) -> Iterator[None]:
    """In the body, ``owner`` has these attributes, which may be methods."""
    attributes = vars(owner)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            attributes.pop(name, None)
        attributes.update(before)


def replaced(module: nn.Module, **methods: Callable[..., Any]) -> Any:
    """In the body, the module has these methods, such as ``forward``, and no hooks."""
    return overridden(module, **methods, **{name: {} for name in _HOOKS})


def refuse(integration: str, given: Mapping[str, object], reason: str) -> None:
    """Raise ``ValueError`` for the first entry of ``given`` that is true; its key is its name."""
    for name, is_given in given.items():
        if is_given:
            raise ValueError(f"{integration} does not go together with {name}: {reason}")


class Additions:
    """What a call adds to the numbers and lists among the attributes of ``owner``, its copy.

    Not a dataclass, since the engine would join its fields with those of other calls.
    """

    def __init__(self, owner: Any) -> None:
        attributes = vars(owner).items()
        self._lists = {name: (v, len(v)) for name, v in attributes if type(v) is list}
        self._numbers = {name: v for name, v in attributes if type(v) in (int, float)}

    def end(self, owner: Any) -> Self:
        """Keep what the call has added to ``owner``, and drop the rest."""
        now, lists = vars(owner), self._lists.items()
        self.metrics = now.get("_metrics", {})
        self.added: dict[str, Any] = {k: v[n:] for k, (v, n) in lists if now.get(k) is v}
        for name, before in self._numbers.items():
            if type(now.get(name)) in (int, float) and now[name] != before:
                self.added[name] = now[name] - before
        del self._lists
        return self

    def add_to(self, owner: Any) -> None:
        """Add what the call has added to the numbers and lists of ``owner``."""
        for name in self.added.keys() & vars(owner).keys():
            vars(owner)[name] += self.added[name]  # a list stays the same object


def num_rows(batch: Any) -> int:
    """The number of rows: that of the outermost tensor or marker with rows.

    Without one, the length of the longest list at the outermost level that has lists.
    """
    level, longest = [batch], 0
    while level:
        if sizes := [n for n in map(_size, level) if n is not None]:
            return sizes[0]
        longest = longest or max((len(v) for v in level if _is_list(v)), default=0)
        level = list(chain.from_iterable(map(_entries, level)))
    return longest or 1


def as_rows(batch: Any) -> Any:
    """``batch``, with lists that have one entry per row, such as texts, marked as ``Rows``.

    A list of columns is not marked: all tensors and lists in it have as many rows as the batch.
    """
    rows = num_rows(batch)

    def is_rows(value: Any) -> bool:
        sizes = {len(v) if _is_list(v) else _size(v) for v in _leaves(value)} - {None}
        return _is_list(value) and len(value) == rows and sizes != {rows}

    mark = lambda values: Rows(values[0]) if is_rows(values[0]) else values[0]  # noqa: E731
    return nested.merge(mark, [batch], lambda values: is_rows(values[0]))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _size(value: Any) -> int | None:
    """The number of rows of a tensor or marker; ``None`` if there are none."""
    if isinstance(value, Marker):
        return value.num_rows
    return len(value) if isinstance(value, Tensor) and value.ndim else None


def _entries(value: Any, otherwise: Iterable[Any] = ()) -> Iterable[Any]:
    """The entries of a list, tuple or mapping."""
    value = value.values() if isinstance(value, Mapping) else value
    return value if isinstance(value, (list, tuple, ValuesView)) else otherwise


def _leaves(value: Any) -> Iterable[Any]:
    """The entries of ``value``, and those of mappings in it."""
    for entry in _entries(value):
        yield from _leaves(entry) if isinstance(entry, Mapping) else (entry,)
