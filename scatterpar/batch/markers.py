"""Mark values whose rows are not slices of tensors; count the rows of a batch.

What cannot be split into rows is refused where they are counted.
"""

from __future__ import annotations

import copy as copying
import dataclasses
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from itertools import chain
from numbers import Number
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from scatterpar.batch import nested
from scatterpar.batch.classes import attribute_with_rows, copy_of
from scatterpar.batch.objects import remedy_for, unsplit_rows

_SHOWN_SIZES = 3  # in the error for tensors with different numbers of rows
_NAMES_OF_ENTRIES: dict[type | tuple[type, ...], str] = {
    str: "texts",
    Mapping: "dicts",
    (list, tuple): "lists",
}
_OF_A_GRAPH = (
    ", or if a gradient shall reach what computed it, as a generator before a critic, "
    "compute it in forward or in the criterion"
)
_MAX_NUMBERS = 4  # of a size, such as (height, width)
_MAX_VIEWS = 16  # of a row; more are crops or tokens


class Marker:
    """A wrapper around one value of a batch; the base class is for one without rows.

    A new kind of marker is a subclass: other code only calls these methods. It is not a
    dataclass, because ``nested`` would descend into its fields.

    Attributes:
        contents: the marked value, nested at will, without other markers in it.
        collate: returns what the module or criterion gets; ``None`` for the contents.
    """

    contents: Any
    collate: Callable[[Any], Any] | None = None

    def map(self, function: Callable[[Any], Any]) -> Self:
        """A copy of the marker with ``function(contents)``; the rest is shared."""
        # Not the constructor: a subclass may have attributes that it does not know.
        marker = copying.copy(self)
        marker.contents = function(self.contents)
        return marker

    @property
    def num_rows(self) -> int | None:
        """The number of rows; ``None`` for a value that goes to every replica."""
        return None

    def select(self, rows: Sequence[int]) -> Self:
        """A marker with these rows, in this order.

        Shares and micro-batches are selected with a ``range``. Then return views of
        tensors: these may be on a device, where a value that the host reads, or a
        computation, would delay the copies.
        """
        return self

    def join(self, others: Sequence[Self]) -> Self:
        """One marker with the rows of this one, then those of ``others``."""
        return self

    def unwrap(self, *, copy: bool) -> Any:
        """The value as a module or criterion sees it.

        With ``copy``, tensors are copied: user code may write what it gets. As targets
        of cross entropy it must be a tensor with rows along ``dim``.
        """
        value = self.contents
        if copy:  # before ``collate``, which may return the entries themselves
            value = nested.map_tensors(copy_of, value)
        return value if self.collate is None else self.collate(value)

    def atoms(self) -> list[Any]:
        """Every atom of the contents.

        Raises ``TypeError`` for a marker in the marker.
        """
        atoms = nested.atoms(self.contents)
        for atom in atoms:
            if isinstance(atom, (Marker, Batches)):
                raise TypeError(
                    f"{self!r} has {atom!r} in it; give the two side by side"
                )
        return atoms


class Replicated(Marker):
    """Marks a value without rows, whatever its sizes are: every replica gets the same.

    Tensors in ``value`` are copied once to every device without being split, and every
    sub-step gets the whole value. Use it for position ids of shape ``[1, L]``, masks of
    shape ``[L, L]``, anchors, a lookup table, or the adjacency matrix of a graph. It
    may be anywhere in the inputs or targets.

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
        self.contents = value
        self.atoms()  # refuses markers in it

    def __repr__(self) -> str:
        value = self.contents
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        return f"Replicated({type(value).__name__}{shape})"


class Rows(Marker):
    """Marks a sequence with one entry per row: rows that are no slices of one tensor.

    Shares and micro-batches are slices of ``entries``; their tensors are copied to the
    device of the share. Use it for detection targets (a list of dicts), images of
    different sizes, strings, or sequences of different lengths. It may be anywhere in
    the inputs or targets.

    Args:
        entries: a list, tuple or other sequence; tensors in an entry may be of any
            shape.
        collate: ``collate(entries)`` returns the input of the module or criterion for
            the entries of a micro-batch, so each micro-batch is padded separately. It
            runs in the replica's thread, on the replica's device. It also runs when
            terms are counted, losses are checked, or sub-steps are compiled or
            captured. So it must be cheap and have no side effects. Without it, the
            module or criterion gets the list of entries.

    Raises:
        TypeError: ``entries`` is no sequence, or ``collate`` cannot be called.

    Example:
        >>> import torch
        >>> from torch.nn.utils.rnn import pad_sequence
        >>> from scatterpar import ScatterOnceParallel
        >>> model = torch.nn.Embedding(9, 2).eval()
        >>> engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2)
        >>> sentences = [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5])]
        >>> def last_words(few):
        ...     return pad_sequence(few, batch_first=True)[:, -1]
        >>> rows = Rows(sentences, last_words)
        >>> rows
        Rows(3 x Tensor, collate=last_words)
        >>> engine(rows).shape
        torch.Size([3, 2])
    """

    def __init__(
        self, entries: Sequence[Any], collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        if isinstance(entries, (str, bytes, Mapping, Rows)) or not hasattr(
            entries, "__len__"
        ):
            kind = type(entries).__name__
            raise TypeError(f"Rows takes a sequence with one entry per row, got {kind}")
        if collate is not None and not callable(collate):
            raise TypeError(f"collate must be callable, got {collate!r}")
        # A copy, because the user's list may grow before the step ends.
        self.contents: list[Any] = list(entries)
        self.collate = collate

    @property
    def entries(self) -> list[Any]:
        """The entries, one per row."""
        return self.contents

    @property
    def num_rows(self) -> int:
        """The number of entries."""
        return len(self.entries)

    def select(self, rows: Sequence[int]) -> Self:
        """The entries of these rows."""
        return self.map(lambda entries: [entries[row] for row in rows])

    def join(self, others: Sequence[Self]) -> Self:
        """One marker with the entries of this one, then those of ``others``."""
        lists_of_others = [marker.entries for marker in others]
        return self.map(lambda entries: [*chain(entries, *lists_of_others)])

    def __repr__(self) -> str:
        kinds = " or ".join(
            dict.fromkeys(type(entry).__name__ for entry in self.entries)
        )
        name = getattr(self.collate, "__name__", repr(self.collate))
        shown = "" if self.collate is None else f", collate={name}"
        return f"Rows({len(self.entries)} x {kinds or 'nothing'}{shown})"

    @classmethod
    def from_batches(cls, batches: Iterable[Any]) -> Batches:
        """Several batches that make one step, such as a window of a loader's batches.

        Each batch is what ``forward_backward`` takes as inputs, or as targets: tensors,
        tuples or mappings. Batches may differ in their number of rows and in the
        lengths of rows. Each batch is divided over all replicas as it would be alone,
        and no micro-batch has rows of two batches: with ``accum=2`` a replica has two
        sub-steps of each batch. If inputs and targets are both passed in this way, each
        batch must have the same number of rows in both.

        Raises:
            TypeError: one batch instead of several.
            ValueError: no batch at all.

        Example:
            >>> import torch
            >>> from scatterpar import ScatterOnceParallel
            >>> model = torch.nn.Embedding(9, 3)
            >>> engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2)
            >>> batches = [torch.ones(3, 5).long(), torch.ones(2, 7).long()]
            >>> window = Rows.from_batches(batches)
            >>> def mean(output, _):
            ...     return output.mean()
            >>> loss = engine.forward_backward(window, criterion=mean)
            >>> engine.last_step.plan.shares[0].micro_batches
            ((0, 2), (3, 4))
        """
        return Batches(batches)


class Batches:
    """The result of ``Rows.from_batches``: the whole inputs, or the whole targets."""

    def __init__(self, batches: Iterable[Any]) -> None:
        is_one_batch = isinstance(batches, (Tensor, Mapping, str, Rows, Batches))
        if is_one_batch or not isinstance(batches, Iterable):
            raise TypeError(
                f"from_batches takes a list of batches, got {type(batches).__name__}"
            )
        self.entries: list[Any] = list(batches)
        if not self.entries:
            raise ValueError("from_batches got no batch; pass one or more")

    def __repr__(self) -> str:
        return f"Rows.from_batches({len(self.entries)} batches)"


def unwrapped_atom(atom: Any, *, copy: bool = False) -> Any:
    """The atom as a module or criterion sees it; with ``copy``, tensors are copied.

    A module may write its inputs in place, and a step reads them again.
    """
    if isinstance(atom, Marker):
        return atom.unwrap(copy=copy)
    return copy_of(atom) if copy and isinstance(atom, Tensor) else atom


def unwrap_markers(value: Any, *, copy: bool = False) -> Any:
    """``value`` with its atoms as from ``unwrapped_atom``."""
    return nested.map_atoms(partial(unwrapped_atom, copy=copy), value)


def count_rows(
    batch: Mapping[str, Any],
    dim: int,
    *,
    refuse_grad: bool = True,
    known: int | None = None,
) -> int:
    """The number of rows of the batch; the keys of ``batch`` are names for errors.

    This is the size of its tensors along ``dim`` and the ``num_rows`` of its markers,
    which must agree. If nothing has rows, it is ``known``. With ``refuse_grad``, no
    tensor may require grad.
    """
    values: list[tuple[str, Any]] = []
    for name, part in batch.items():
        for value in nested.with_contents(part):
            values.append((name, value))
    # All sizes first: whether a list has one entry per row depends on them.
    # Each with the first value that has it, which stands for all: an error names few.
    sizes: dict[int, tuple[str, Any]] = {}
    for name, value in values:
        size = _size(value, dim)
        if size is not None and size not in sizes:
            sizes[size] = name, value
    for name, value in values:
        problem = _problem(value, dim, sizes, refuse_grad)
        if problem:
            raise ValueError(f"{name}: {problem}")
    # Targets of several batches may have no rows, as a number has none.
    if not sizes and known is not None:
        return known
    if not sizes:
        kinds = [f"{name} is {type(part).__name__}" for name, part in batch.items()]
        raise ValueError(
            f"the batch has no tensor with rows: {', '.join(kinds)}; pass a list "
            f"with one entry per row as Rows(entries), and an object as a dict of its "
            f"tensors"
        )
    if len(sizes) > 1:
        listed = ", ".join([*map(_named_size, sizes.items())][:_SHOWN_SIZES])
        if len(sizes) > _SHOWN_SIZES:
            listed += f" and {len(sizes) - _SHOWN_SIZES} more"
        raise ValueError(
            f"tensors of the batch have different numbers of rows along dim={dim}: "
            f"{listed}; {_views_of(sizes)}if a tensor has its rows along another "
            "dimension, transpose it: state.transpose(0, 1) for the state of a "
            "recurrent layer. If a value has no rows, pass Replicated(value). If a "
            "list has one entry per row, pass Rows(entries)"
        )
    (rows,) = sizes
    if rows == 0:
        (first,) = map(_named_size, sizes.items())
        raise ValueError(f"the batch is empty: {first} along dim={dim}")
    return rows


def _views_of(sizes: Collection[int]) -> str:
    """The remedy if one tensor has several views of each row; else empty.

    Of two views ``torch.cat([first, second])`` has twice as many rows as the labels.
    """
    if len(sizes) != 2:
        return ""
    few, many = sorted(sizes)
    # A size of one is that of states, or of a value for all rows.
    if few < 2 or many % few:
        return ""
    views = many // few
    if views > _MAX_VIEWS:
        return ""
    return (
        f"if a tensor has {views} versions of each row, such as augmented images, pass "
        "each version as an argument of its own, or repeat the targets: "
        f"targets.repeat({views}). Otherwise, "
    )


def _named_size(item: tuple[int, tuple[str, Any]]) -> str:
    """A size, and the value that has it: a tensor by its shape, a marker as it prints
    itself.
    """
    size, (name, value) = item
    is_tensor = isinstance(value, Tensor)
    described = f"shape {tuple(value.shape)}" if is_tensor else repr(value)
    return f"{name} with {size} ({described})"


def _size(value: Any, dim: int) -> int | None:
    """The number of rows of an atom; ``None`` if it has none, or is refused."""
    if isinstance(value, Marker):
        return value.num_rows
    if not isinstance(value, Tensor) or not _is_dense(value):
        return None
    return value.size(dim) if -value.ndim <= dim < value.ndim else None


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _of_missing_dimension(value: Tensor, dim: int) -> str:
    """The remedy for a tensor with rows that has no dimension ``dim``."""
    if value.ndim != 1 or dim != 1:
        return ""
    return "; with one entry per row pass tensor[None], and the module takes [0] of it"


def _problem(value: Any, dim: int, sizes: Collection[int], refuse_grad: bool) -> str:
    """Why an atom or container is refused, and what to pass; empty if it is not.

    Refused is what cannot be split, what would silently be split along something other
    than rows, and what would silently go whole to every replica although it has as many
    entries as rows.
    """
    is_whole = not isinstance(value, Marker) or value.num_rows is None
    for atom in value.atoms() if isinstance(value, Marker) else [value]:
        # A gradient would go to a copy in a replica, and be lost.
        if refuse_grad and isinstance(atom, Tensor) and atom.requires_grad:
            return (
                f"a tensor of shape {tuple(atom.shape)} requires grad, but a batch is "
                f"data; pass tensor.detach(){_OF_A_GRAPH if atom.grad_fn else ''}"
            )
        if is_whole and isinstance(atom, Iterator):
            value = atom
        attribute = attribute_with_rows(atom, sizes) if isinstance(atom, Tensor) else ""
        if attribute:
            return (
                f"a {type(atom).__name__} of shape {tuple(atom.shape)} has an "
                f"attribute {attribute!r} that would go whole to every micro-batch; "
                "pass it beside the tensor, and delete the attribute"
            )
    if isinstance(value, Tensor) and _is_dense(value):
        # A 0-dim tensor goes whole to every replica.
        if not value.ndim or -value.ndim <= dim < value.ndim:
            return ""
        return (
            f"a tensor of shape {tuple(value.shape)} has no dimension {dim} to split; "
            f"every tensor but 0-dim ones is split along dim={dim}, unless it is "
            f"Replicated{_of_missing_dimension(value, dim)}"
        )
    remedy = _remedy(value)
    if remedy:
        kind = str(type(value))
        if isinstance(value, Tensor):
            kind = f"a tensor of layout {value.layout}"
            if value.is_nested:
                kind = "a nested tensor"
        return f"{kind} cannot be split into rows; {remedy}"
    # Tensors in a list are split along their dimension 0: the channels of images.
    if isinstance(value, list) and value and dim == 0 and all(map(_is_image, value)):
        return (
            f"a list of {len(value)} tensors such as {tuple(value[0].shape)} looks "
            "like images, which would be split over their 3 channels; pass "
            "Rows(images) for one image per row, or a tuple if dimension 0 does hold "
            "3 rows"
        )
    # One entry beside one row says nothing: it may be an argument in a list.
    may_be_entries = isinstance(value, (list, tuple)) and 1 < len(value) in sizes
    entries = _kind_of_entries(value, dim) if may_be_entries else ""
    if entries:
        kind = type(value).__name__
        return (
            f"a {kind} of {len(value)} {entries} has as many {entries} as there are "
            f"rows, but the engine does not know whether each belongs to one row; pass "
            f"Rows({entries}) if it does, or Replicated({entries}) if every "
            f"micro-batch gets all"
        )
    # Of a cache the attributes are split, and a marker's contents by its ``select``.
    is_split = isinstance(value, (Marker, Batches)) or nested.is_cache(value)
    name = None if is_split else unsplit_rows(value, dim, sizes)
    if name is not None:
        kind = type(value).__name__
        return (
            f"a {kind} has tensors with as many entries as there are rows, in "
            f"{name!r}, which would go whole to every micro-batch; pass "
            f"{remedy_for(value)}, or pass Rows(list) of one per row, or "
            "Replicated(value) if they are no rows"
        )
    return ""


def _remedy(value: Any) -> str:
    """The remedy for an object with rows that is no dense tensor; else empty."""
    if type(value) in (tuple, list, dict):  # mostly, and the questions take long
        return ""
    modules = [kind.__module__ for kind in type(value).__mro__]
    if isinstance(value, Batches):
        return (
            "several batches must be the whole inputs, or the whole targets, of "
            "forward_backward: put all that belongs to a batch into that batch. For "
            "inference, and with the pair, make one call per batch"
        )
    if isinstance(value, PackedSequence):
        pack = "(pack_sequence(few, enforce_sorted=False),)"
        return f"pass Rows(sequences, pack), where pack(few) returns {pack}"
    if isinstance(value, Tensor) and value.is_nested:
        return (
            "pass Rows(list(tensor.unbind())), whose entries a module or collate= "
            "pads or joins"
        )
    if isinstance(value, Tensor):
        return "pass it as a dense tensor, or its parts"
    if isinstance(value, DataLoader):
        return "iterate the loader, for inputs, targets in loader: …"
    if isinstance(value, Iterator):
        return (
            "it can be read only once, and each micro-batch would read it; pass a list "
            "of its items"
        )
    if any(module.startswith("torch_geometric.data") for module in modules):
        return "pass Rows(graphs, Batch.from_data_list)"
    if modules[0] == "numpy" and getattr(value, "shape", None):
        return "pass torch.from_numpy(array), or Replicated(array) if it has no rows"
    return ""


def _kind_of_entries(value: list[Any] | tuple[Any, ...], dim: int) -> str:
    """The kind of the entries if each may be of one row; else empty.

    Nothing for arguments, or levels of a pyramid: their tensors have rows themselves.
    Nothing for up to four numbers, which are a size, such as (height, width), and for
    a named tuple, whose fields are no rows.
    """
    if hasattr(value, "_fields"):
        return ""
    if all(map(_is_number, value)):
        return "numbers" if len(value) > _MAX_NUMBERS else ""
    names = "entries"
    for kind, name in _NAMES_OF_ENTRIES.items():
        if all(isinstance(entry, kind) for entry in value):
            names = name
    # Of a list of dicts a tensor has as many entries as there are rows by chance.
    are_records = isinstance(value, list) and all(map(_is_record, value))
    has_rows = any(_size(atom, dim) is not None for atom in nested.atoms(value))
    return names if are_records or not has_rows else ""


def _is_record(entry: Any) -> bool:
    return isinstance(entry, Mapping) or dataclasses.is_dataclass(entry)


def _is_number(entry: Any) -> bool:
    return isinstance(entry, (Number, Tensor)) and not getattr(entry, "ndim", 0)


def _is_image(entry: Any) -> bool:
    if not isinstance(entry, Tensor) or entry.ndim != 3 or entry.size(0) != 3:
        return False
    return entry.is_floating_point() or entry.dtype == torch.uint8
