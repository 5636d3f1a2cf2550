"""Join the pieces of a result into one, in the order of the batch's rows.

An atom of the pieces is one of these, told by what all pieces have there::

    0-dim tensors                     their weighted mean, or the sum if one is known
    tensors with one entry per row    concatenated
    equal tensors of another size     the first one
    other tensors                     refused
    lists with one entry per row      concatenated, if asked for
    equal plain values                the first one
    anything else                     a list with one entry per piece

A single piece is returned as it is.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.nn.utils.rnn import PackedSequence

from scatterpar.batch import nested
from scatterpar.devices.bits import same_bits
from scatterpar.devices.copies import to_device
from scatterpar.devices.virtual_devices import HOST

# Whether lists may have one entry per row.
Lists = Literal["never", "if clear", "always"]

# Whose ``==`` gives a bool.
_COMPARABLE = (*nested.PLAIN_CLASSES, torch.Size)
# With arrays: whose lists nobody expects.
_UNEXPECTED_IN_LISTS = (*nested.PLAIN_CLASSES, Distribution)


class Entries(enum.Enum):
    """What the entries of a tensor along the rows are, if these are not its rows."""

    FIXED = "as many for any number of rows"
    OTHERS = "several per row, or pairs of rows"
    OF_FIRST = "as those of the first piece, which is taken without a comparison"


@dataclass(frozen=True)
class NumberWeights:
    """How the 0-dim tensors of one place combine.

    Attributes:
        by_piece: the weights of their mean, one per piece.
        is_sum: whether they are added, without weights.
    """

    by_piece: Sequence[float]
    is_sum: bool = False


@dataclass(frozen=True)
class KnownTensors:
    """What is known of the tensors of a piece, by their positions among these.

    Attributes:
        numbers: how 0-dim tensors combine; by default their mean is weighted by rows.
        entries: of tensors that have no rows, though their sizes may be those of rows.
    """

    numbers: Mapping[int, NumberWeights] = field(default_factory=dict)
    entries: Mapping[int, Entries] = field(default_factory=dict)


_NOTHING_KNOWN = KnownTensors()


def join_rows(
    pieces: Sequence[Any],
    dim: int,
    weights: Sequence[float],
    rows: Sequence[int] | None = None,
    *,
    lists: Lists = "never",
    pad: float | None = None,
    names_map: bool = False,
    known: KnownTensors = _NOTHING_KNOWN,
) -> Any:
    """Join pieces of the same nested types, each of consecutive rows, into one value.

    0-dim tensors are averaged with ``weights``, one per piece; pieces with weight zero
    are ignored. ``rows`` has the number of rows of each piece. Tensors with that size
    along ``dim`` are concatenated along ``dim``. A tensor with another size and the
    same bits in all pieces, such as a codebook, is returned once. Other tensors are
    refused by a ``ValueError``. Without ``rows`` all tensors are concatenated. With
    ``pad`` tensors get equal sizes in the other dimensions: they are padded at the end
    with this value. With ``names_map`` errors name ``engine.map``, which computes no
    gradients.

    ``known`` says more of tensors by their positions among those of a piece.

    Any other atom is returned once if all pieces have the same, and otherwise becomes a
    list with one entry per piece. ``lists`` says whether lists that have one entry per
    row are concatenated; ``"if clear"``: unless they may be lists of tensors with rows.

    >>> join_rows([{"y": torch.zeros(2)}, {"y": torch.ones(1)}], 0, [2, 1])
    {'y': tensor([0., 0., 1.])}
    """
    if len(pieces) == 1:
        return pieces[0]

    tensors: list[Tensor] = []
    if known is not _NOTHING_KNOWN:
        tensors = nested.tensors(pieces[0])
    weights_by_id: dict[int, NumberWeights] = {}
    for position, number_weights in known.numbers.items():
        weights_by_id[id(tensors[position])] = number_weights
    entries_by_id: dict[int, Entries] = {}
    for position, kind in known.entries.items():
        entries_by_id[id(tensors[position])] = kind

    def are_entries(values: Sequence[Any], lists: Lists = lists) -> bool:
        return _are_entries(values, rows or (), dim, lists)

    def join_atoms(atoms: list[Any]) -> Any:
        first = atoms[0]
        kind = entries_by_id.get(id(first))
        if kind is Entries.OF_FIRST:
            return first
        if isinstance(first, PackedSequence):
            raise ValueError(
                "outputs that are PackedSequences cannot be joined, because a "
                "PackedSequence interleaves the entries of its rows; return "
                "pad_packed_sequence(output, batch_first=True)"
            )
        if are_entries(atoms):
            return list(chain(*atoms))
        # A text or configuration that all pieces have alike is one value, not several.
        if not all(isinstance(atom, Tensor) for atom in atoms):
            return first if _are_all_same(atoms) else atoms
        if not first.ndim:
            # Numbers have no rows. Micro-batches of unequal sizes count by their rows.
            by_rows = NumberWeights(weights)
            return combined_number(atoms, weights_by_id.get(id(first), by_rows))
        if pad is not None:
            atoms = _padded(atoms, dim, pad)
        if rows is not None and not _have_rows(
            atoms, rows, dim, kind, names_map=names_map
        ):
            return atoms[0]
        return torch.cat(atoms, dim)

    def is_atom(values: Sequence[Any]) -> bool:
        return isinstance(values[0], PackedSequence) or are_entries(values)

    # The output itself may be the list: nothing else can be meant by it.
    if lists != "never" and are_entries(pieces, "always"):
        return list(chain(*pieces))
    return nested.merge(join_atoms, pieces, is_atom)


def _are_entries(
    values: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists
) -> bool:
    """Whether values are lists with one entry per row.

    With ``"if clear"`` they must not look like lists of tensors with rows.
    """
    if lists == "never":
        return False
    have_rows: list[bool] = []  # for each tensor, whether it has them along ``dim``
    for value, num_rows in zip(values, rows, strict=True):
        if not isinstance(value, list) or len(value) != num_rows:
            return False
        if lists == "if clear":
            sizes = [tensor.shape[dim:][:1] for tensor in nested.tensors(value)]
            have_rows += [size == (num_rows,) for size in sizes]
    return not have_rows or not all(have_rows)


def _padded(atoms: list[Tensor], dim: int, value: float) -> list[Tensor]:
    """The tensors, padded at the end to equal sizes in all dimensions but ``dim``."""
    num_dimensions = {atom.ndim for atom in atoms}
    # These cannot be padded: the join refuses them, with their shapes.
    if len(num_dimensions) > 1 or not -atoms[0].ndim <= dim < atoms[0].ndim:
        return atoms
    shapes = zip(*(atom.shape for atom in atoms), strict=True)
    sizes = [max(sizes_of_dimension) for sizes_of_dimension in shapes]
    padded_atoms: list[Tensor] = []
    for atom in atoms:
        sizes[dim] = atom.size(dim)
        # Rows are not padded: their number is right.
        padded = atom.new_full(sizes, value)
        padded[tuple(map(slice, atom.shape))] = atom
        padded_atoms.append(padded)
    return padded_atoms


def tensors_by_place(
    pieces: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists
) -> list[list[Tensor]]:
    """The tensors that ``join_rows`` makes one of: per place, one of each piece.

    Not those in lists with one entry per row, whose entries are of different rows.
    """
    return [
        values
        for values in _values_by_place(pieces, rows, dim, lists)
        if all(isinstance(value, Tensor) for value in values)
    ]


def lists_by_place(
    pieces: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists
) -> list[list[list[Any]]]:
    """The lists that ``join_rows`` does not concatenate: per place, one per piece."""
    return [
        values
        for values in _values_by_place(pieces, rows, dim, lists)
        if all(isinstance(value, list) for value in values)
    ]


def first_listed(
    pieces: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists
) -> Any:
    """The first value that ``join_rows`` makes a list of, though users expect one.

    That is a NumPy array or a distribution, or a number or a string that differs
    between the pieces. Returns ``None`` if there is none. Other objects, such as caches
    of keys and values, are left alone.
    """
    if isinstance(pieces[0], Tensor):  # mostly
        return None
    for values in _values_by_place(pieces, rows, dim, lists):
        first = values[0]
        if isinstance(first, Tensor):
            continue
        is_array = hasattr(type(first), "__array__")
        is_listed = is_array or isinstance(first, _UNEXPECTED_IN_LISTS)
        if is_listed and not _are_all_same(values):
            return first
    return None


def _values_by_place(
    pieces: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists
) -> Iterator[list[Any]]:
    """Per place, the values of all pieces: a container before its children.

    Not those in lists with one entry per row, whose entries are of different rows.
    """
    # The outermost list, as in ``join_rows``.
    if lists != "never" and _are_entries(pieces, rows, dim, "always"):
        return

    def values_of(values: Sequence[Any]) -> Iterator[list[Any]]:
        if _are_entries(values, rows, dim, lists):
            return
        yield list(values)
        for children in zip(*map(nested.children_of, values), strict=False):
            yield from values_of(children)

    yield from values_of(pieces)


def require_same_or_rows(
    pieces: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists = "never"
) -> None:
    """Refuse pieces that cannot be joined, which may be in several memories.

    Raises ``ValueError``. The arguments are those of ``join_rows``.
    """
    for tensors in tensors_by_place(pieces, rows, dim, lists):
        if tensors[0].ndim and not _have_one_per_row(tensors, rows, dim):
            on_host = [to_device(tensor.detach(), HOST) for tensor in tensors]
            _have_rows(on_host, rows, dim)


def _have_rows(
    atoms: Sequence[Tensor],
    rows: Sequence[int],
    dim: int,
    kind: Entries | None = None,
    *,
    names_map: bool = False,
) -> bool:
    """Whether tensors have one entry per row along ``dim``.

    Else they are the same in all pieces. Raises ``ValueError`` if they are neither.
    """
    if kind is None and _have_one_per_row(atoms, rows, dim):
        return True
    first = atoms[0]
    if kind is None:
        num_entries = entries_per_row(first, rows[0], dim)
        # A head that starts at zero gives every row the same entries, so that pieces
        # are equal is no sign that they have no rows.
        are_alike = num_entries > 1 and same_bits(
            first, first.narrow(dim, 0, 1).expand_as(first).contiguous()
        )
        may_be_same = not are_alike
    else:
        may_be_same = kind is Entries.FIXED
    if may_be_same and all(same_bits(first, atom) for atom in atoms[1:]):
        return False
    kinds = zip(atoms, rows, strict=True)
    shapes = dict.fromkeys(
        f"{tuple(atom.shape)} for {num_rows} row{'s' * (num_rows != 1)}"
        for atom, num_rows in kinds
    )
    raise ValueError(
        f"outputs of shape {' and '.join(shapes)} cannot be joined along dim={dim}, "
        f"because they do not have one entry per row along this dimension, and are not "
        f"the same in all micro-batches; "
        f"{_join_remedy(atoms, rows, dim, kind, names_map)}"
    )


def _join_remedy(
    atoms: Sequence[Tensor],
    rows: Sequence[int],
    dim: int,
    kind: Entries | None,
    names_map: bool,
) -> str:
    """The remedy for outputs that cannot be joined, by their entries per row."""
    if kind is Entries.FIXED:
        size = atoms[0].size(dim)
        return (
            f"if the output has {size} entries for any number of rows, such as one "
            "mean per class, return the values of each row from forward, and compute "
            "the output from them after the call"
        )
    entries: set[int] = set()
    for tensor, num_rows in zip(atoms, rows, strict=True):
        entries.add(entries_per_row(tensor, num_rows, dim))
    if 0 in entries and _have_rows_along(1 if dim == 0 else 0, atoms, rows):
        return (
            "if the rows are along another dimension, as in the state of a recurrent "
            "layer, which has the shape (layers, rows, features) also with "
            "batch_first=True, return state.transpose(0, 1)"
        )
    sizes = [tensor.shape[-1:] for tensor in atoms]
    may_be_pairs = kind is Entries.OTHERS or len(set(rows)) > 1
    if may_be_pairs and sizes == [(num_rows,) for num_rows in rows]:
        return (
            "if the output is a matrix of all pairs of rows, return the features of "
            "each row in its place, and compute the matrix after the call (in training "
            "in the criterion, with whole_batch=True)"
        )
    # Texts whose micro-batches are padded each to its longest one.
    if entries == {1}:
        if names_map:
            return (
                "if other dimensions differ in size, pad them to one size with "
                "engine.map(…, pad=value)"
            )
        return (
            "if other dimensions differ in size, pad them to one size in forward, such "
            "as with pad_packed_sequence(…, total_length=…)"
        )
    k = max(entries) if len(entries) == 1 and max(entries) > 1 else "k"
    in_rows = (
        f"if each row has {k} entries, return output.reshape(rows, {k}, …). If forward "
        "returns torch.cat([a, b]), return torch.stack([a, b], 1) in its place. If you "
        "do not need this output, leave it out: pass return_outputs=function, where "
        "function(output) returns the tensors that you need"
    )
    # A fixed number per row is not that of the nodes of graphs.
    if k != "k":
        return in_rows
    lists = (
        "If rows have different numbers of entries, such as the nodes of graphs, pass "
        "Rows(graphs) as inputs, and return list(output.split(sizes)), one tensor per "
        "row, from forward"
    )
    if names_map:
        lists += ", or from a function for engine.map"
    return f"{in_rows}. {lists}"


def _have_rows_along(dim: int, atoms: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Whether each tensor has as many entries along ``dim`` as its piece has rows."""
    return all(
        tensor.shape[dim:][:1] == (num_rows,)
        for tensor, num_rows in zip(atoms, rows, strict=True)
    )


def _have_one_per_row(tensors: Sequence[Tensor], rows: Sequence[int], dim: int) -> bool:
    """Whether all tensors have one entry per row, and are equal in other sizes."""
    other_sizes: set[tuple[int, ...]] = set()
    for tensor, num_rows in zip(tensors, rows, strict=True):
        # A tensor without the dimension has no rows, and may still be equal in all.
        if not -tensor.ndim <= dim < tensor.ndim or tensor.size(dim) != num_rows:
            return False
        other_sizes.add(tensor.shape[:dim] + tensor.shape[dim:][1:])
    return len(other_sizes) == 1


def entries_per_row(tensor: Tensor, num_rows: int, dim: int) -> int:
    """The number of entries along ``dim`` per row; 0 if it is no integer."""
    if not -tensor.ndim <= dim < tensor.ndim:
        return 0
    entries, remainder = divmod(tensor.size(dim), num_rows)
    return 0 if remainder else entries


def _are_all_same(atoms: list[Any]) -> bool:
    """Whether all are one object, or equal values of a class that compares plainly."""
    first = atoms[0]
    if isinstance(first, _COMPARABLE) and {type(first)}.issuperset(map(type, atoms)):
        return atoms == [first] * len(atoms)
    return all(atom is first for atom in atoms)


def combined_number(values: Sequence[Tensor], weights: NumberWeights) -> Tensor:
    """The sum or weighted mean of 0-dim tensors, in their dtype.

    A mean of integers becomes a float. A weight of zero ignores even NaN.
    """
    first = values[0]
    if weights.is_sum:  # torch adds integers up in int64
        return torch.stack(list(values)).sum(dtype=first.dtype)
    # At least float32: a mean of halves would be rounded in each sum.
    dtype = torch.promote_types(first.dtype, torch.float32)
    by_piece = weights.by_piece
    if not any(by_piece):  # all are ignored, as a mean of no terms is NaN
        by_piece = [1.0] * len(values)
    total = sum(by_piece)
    counted: list[Tensor] = []
    weighted: list[Tensor] = []
    for value, weight in zip(values, by_piece, strict=True):
        if weight:
            counted.append(value.to(dtype))
            weighted.append(counted[-1] * (weight / total))
    mean = torch.stack(weighted).sum()
    # Equal numbers keep their bits: ranks compare those of all pieces.
    if not mean.requires_grad:
        are_equal = torch.stack(counted).eq(counted[0]).all()
        mean = torch.where(are_equal, counted[0], mean)
    # A mean of integers, such as of counts, need not be one.
    is_integer = not (first.is_floating_point() or first.is_complex())
    return mean if is_integer else mean.to(first.dtype)
