"""What the tensors of a batch cannot say: that they have no rows, that rows are in a list.

Markers are plain data. What they mean for slices and devices is in ``slices.py``, ``scatter.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from scatterpar.step import nested

__all__ = [
    "Batches",
    "Replicated",
    "Rows",
    "all_tensors",
    "has_entries",
    "row_tensors",
    "transform",
]


class Replicated:
    """The same for every replica: a value without rows, whatever its sizes are.

    Tensors in ``value`` go whole to every device, once each, and every sub-step gets the whole
    value. For position ids of shape ``[1, L]``, masks of shape ``[L, L]``, anchors, a lookup
    table, the adjacency matrix of a graph. It may stand anywhere in the inputs or targets.

    Args:
        value: tensors, nested at will.

    Raises:
        TypeError: ``value`` has ``Rows`` or another ``Replicated`` in it.

    Example:
        >>> import torch
        >>> from scatterpar import ScatterOnceParallel
        >>> class Attend(torch.nn.Module):
        ...     def forward(self, x, mask):
        ...         return x @ mask
        >>> engine = ScatterOnceParallel(Attend().eval(), device_ids=["cpu"] * 2)
        >>> engine(torch.ones(4, 4), Replicated(torch.eye(4))).shape
        torch.Size([4, 4])
    """

    def __init__(self, value: Any) -> None:
        inner = _first_marker(value)
        if inner is not None:
            raise TypeError(
                f"Replicated holds what has no rows, got {inner!r} in it; give the two side by side"
            )
        self.value = value

    def __repr__(self) -> str:
        shape = f" of shape {tuple(self.value.shape)}" if isinstance(self.value, Tensor) else ""
        return f"Replicated({type(self.value).__name__}{shape})"


class Rows:
    """A sequence with one entry per row, where rows are no slices of one tensor.

    Shares and micro-batches are slices of ``entries``; the tensors in them go to the device of
    their share. For detection targets (a list of dicts), images of different sizes, strings,
    sequences of different lengths. It may stand anywhere in the inputs or targets.

    Args:
        entries: a list, tuple or other sequence; tensors in an entry may be of any shape.
        collate: ``collate(entries)`` makes of a micro-batch's entries what the module or
            criterion takes, on the replica's device and in its thread: padding is that of the
            micro-batch. By default it takes the list of them.

    Raises:
        TypeError: entries that are no sequence, a collate that cannot be called.

    Example:
        >>> import torch
        >>> from torch.nn.utils.rnn import pad_sequence
        >>> from scatterpar import ScatterOnceParallel
        >>> engine = ScatterOnceParallel(torch.nn.Embedding(9, 2).eval(), device_ids=["cpu"] * 2)
        >>> sentences = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])]
        >>> rows = Rows(sentences, lambda few: pad_sequence(few, batch_first=True)[:, -1])
        >>> rows
        Rows(3 x Tensor, collate=<lambda>)
        >>> engine(rows).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, entries: Sequence[Any], collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        if isinstance(entries, (str, bytes, Mapping, Rows)) or not hasattr(entries, "__len__"):
            raise TypeError(
                f"Rows takes a sequence with one entry per row, such as a list, got "
                f"{type(entries).__name__}"
            )
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be callable, got {collate!r}")
        self.entries = list(entries)
        self.collate = collate

    def __repr__(self) -> str:
        kinds = " or ".join(dict.fromkeys(type(entry).__name__ for entry in self.entries))
        name = getattr(self.collate, "__name__", repr(self.collate))
        shown = "" if self.collate is None else f", collate={name}"
        return f"Rows({len(self.entries)} x {kinds or 'nothing'}{shown})"

    @classmethod
    def from_batches(cls, batches: Iterable[Any]) -> Rows:
        """Several batches that make one step, such as a window of a loader's batches.

        The batches are what ``forward_backward`` takes as inputs, or as targets: tensors,
        tuples, mappings, each with rows of its own and of other lengths, say, than the others.
        Micro-batches end where a batch ends, and each batch is divided over all replicas, as
        it would be alone: with ``accum=2`` a replica has two sub-steps of each batch. Inputs
        and targets that are both given so must agree in the rows of each batch.

        Raises:
            TypeError: one batch instead of several.
            ValueError: none.

        Example:
            >>> import torch
            >>> from scatterpar import ScatterOnceParallel
            >>> model = torch.nn.Embedding(9, 3)
            >>> engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2)
            >>> window = Rows.from_batches([torch.ones(3, 5).long(), torch.ones(2, 7).long()])
            >>> loss = engine.forward_backward(window, criterion=lambda output, _: output.mean())
            >>> engine.last_step.plan.shares[0].micro_batches
            ((0, 2), (3, 4))
        """
        return Batches(batches)


class Batches(Rows):
    """What ``Rows.from_batches`` makes.

    Args:
        batches: one nested value per batch.
        sizes: how many rows each has, where that is known already.
    """

    def __init__(self, batches: Iterable[Any], sizes: Sequence[int] | None = None) -> None:
        if isinstance(batches, (Tensor, Mapping, str, Rows)) or not isinstance(batches, Iterable):
            raise TypeError(f"from_batches takes a list of batches, got {type(batches).__name__}")
        batches = list(batches)
        if not batches:
            raise ValueError("from_batches got no batch: a step needs one at least")
        inner = next((b for b in map(_first_marker, batches) if isinstance(b, Batches)), None)
        if inner is not None:
            raise TypeError(f"from_batches takes batches, got {inner!r} in one of them")
        super().__init__(batches)
        self.sizes = sizes

    def __repr__(self) -> str:
        return f"Rows.from_batches({len(self.entries)} batches)"


def transform(function: Callable[[Any], Any], value: Any) -> Any:
    """``nested.transform`` that goes into markers too, and keeps them."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Batches):
            return Batches([transform(function, batch) for batch in leaf.entries], leaf.sizes)
        if isinstance(leaf, Rows):
            return Rows([nested.transform(function, e) for e in leaf.entries], leaf.collate)
        if isinstance(leaf, Replicated):
            return Replicated(nested.transform(function, leaf.value))
        return function(leaf)

    return nested.transform(one, value)


def row_tensors(value: Any) -> list[Tensor]:
    """Every tensor of ``value`` whose slices are rows, those of several batches too."""
    return [leaf for leaf in _open(value) if isinstance(leaf, Tensor)]


def has_entries(value: Any) -> bool:
    """Whether rows of ``value`` are entries of a list: its ``Rows`` that are no several batches."""
    return any(isinstance(leaf, Rows) for leaf in _open(value))


def all_tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor of ``value``, those in markers too."""
    return (leaf for leaf in _open(value, entries=True) if isinstance(leaf, Tensor))


def _open(value: Any, *, entries: bool = False) -> Iterator[Any]:
    """The leaves of ``value`` and of its several batches; with ``entries`` of all markers."""
    for leaf in nested.leaves(value):
        if isinstance(leaf, Batches) or (entries and isinstance(leaf, Rows)):
            yield from _open(leaf.entries, entries=entries)
        elif entries and isinstance(leaf, Replicated):
            yield from nested.leaves(leaf.value)
        else:
            yield leaf


def _first_marker(value: Any) -> Replicated | Rows | None:
    return next(
        (leaf for leaf in nested.leaves(value) if isinstance(leaf, (Replicated, Rows))), None
    )
