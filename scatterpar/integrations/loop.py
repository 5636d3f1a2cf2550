"""Run the step function of another library's training loop on replicas of the loop's
modules.

A loop has an *owner*, such as a Trainer, whose step function takes a batch. Each
replica calls the step function for its micro-batches, on a copy of the owner that
refers to the replica's modules.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker, Rows

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class Modules(nn.ModuleList):
    """The modules of a loop, the model first; called, it calls a step function with
    itself.
    """

    def forward(self, work: Any, **kwargs: Any) -> Any:
        """Return ``work(self, **kwargs)``."""
        return work(self, **kwargs)


def modules_in(value: Any) -> list[nn.Module]:
    """The modules in ``value``, which is a module, or a list, tuple or dict."""
    return [part for part in (value, *_entries(value)) if isinstance(part, nn.Module)]


def copy_of(
    owner: Any, replicas: Mapping[int, nn.Module], shared: Container[str]
) -> Any:
    """A shallow copy of ``owner`` with copies of its lists, that refers to
    ``replicas``.

    They are keyed by the modules' ``id``. Attributes named in ``shared`` are not
    copied.
    """
    copied = copy.copy(owner)
    for name, value in vars(owner).items():
        if name not in shared and (type(value) is list or modules_in(value)):
            vars(copied)[name] = nested.map_leaves(
                lambda one: replicas.get(id(one), one), value
            )
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
    """Raise ``ValueError`` for the first entry of ``given`` that is true; its key is
    its name.
    """
    for name, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{integration} does not go together with {name}: {reason}"
            )


@contextlib.contextmanager
def additions(owner: Any) -> Iterator[dict[str, Any]]:
    """At the end of the body, what it has added to the numbers and lists of ``owner``,
    by name.
    """
    attributes, added = vars(owner), dict[str, Any]()
    lists = {name: (v, len(v)) for name, v in attributes.items() if type(v) is list}
    numbers = {name: v for name, v in attributes.items() if type(v) in (int, float)}
    yield added
    added |= {
        name: v[n:] for name, (v, n) in lists.items() if attributes.get(name) is v
    }
    for name, before in numbers.items():
        if type(attributes.get(name)) in (int, float) and attributes[name] != before:
            added[name] = attributes[name] - before


def add(owner: Any, added: Mapping[str, Any]) -> None:
    """Add to the numbers and lists of ``owner`` what a call has added to those of its
    copy.
    """
    for name in added.keys() & vars(owner).keys():
        vars(owner)[name] += added[name]  # a list stays the same object


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
    """``batch``, with lists that have one entry per row, such as texts, marked as
    ``Rows``.

    A list of columns is not marked: all tensors and lists in it have as many rows as
    the batch.
    """
    rows = num_rows(batch)

    def is_rows(values: Sequence[Any]) -> bool:
        (value,) = values
        if not _is_list(value) or len(value) != rows:
            return False
        each = [
            nested.leaves(v, containers=True) if isinstance(v, Mapping) else [v]
            for v in value
        ]
        return {len(v) if _is_list(v) else _size(v) for v in chain(*each)} - {None} != {
            rows
        }

    return nested.merge(lambda v: Rows(v[0]) if is_rows(v) else v[0], [batch], is_rows)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields")


def _size(value: Any) -> int | None:
    """The number of rows of a tensor or marker; ``None`` if there are none."""
    if isinstance(value, Marker):
        return value.num_rows
    return len(value) if isinstance(value, Tensor) and value.ndim else None


def _entries(value: Any) -> Iterable[Any]:
    """The entries of a list, tuple or mapping; nothing for any other value."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
