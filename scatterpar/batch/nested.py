"""Traverse, merge and join nested values.

Containers are tuples, lists, mappings, dataclasses, and caches of tensors.

Methods of a user's tensor subclass are not called inside a generator, except to compare
bits: a ``StopIteration`` from such a method would become another error.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import to_device, to_numbers

# Whether lists may have one entry per row.
Lists = Literal["never", "if clear", "always"]

# Leaves, which need no look at their class.
_PLAIN = {bool, int, float, str, bytes, type(None)}
# Whose ``==`` gives a bool.
_COMPARABLE = (bool, int, float, complex, str, bytes, torch.Size)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function(leaf)`` in the place of each leaf.

    Containers keep their types.
    """
    children, make = _parts(value, value)
    if make is None:
        return function(value)
    mapped: list[Any] = []
    for child in children:
        if isinstance(child, Tensor):  # most children are, and need no further call
            mapped.append(function(child))
        else:
            mapped.append(map_leaves(function, child))
    return make(mapped)


# Takes leaves in order from an iterator, and puts them together.
Build = Callable[[Iterator[Any]], Any]


def flatten(value: Any) -> tuple[list[Any], Build]:
    """Every leaf of ``value``, and a function that puts other leaves in their places.

    >>> leaves, build = flatten({"a": 1, "b": (2, 3)})
    >>> leaves, build(iter([10, 20, 30]))
    ([1, 2, 3], {'a': 10, 'b': (20, 30)})
    """
    children, make = _parts(value, value)
    if make is None:
        return [value], next
    flat: list[Any] = []
    builds: list[Build] = []
    for child in children:
        if isinstance(child, Tensor):  # most children are tensors
            flat.append(child)
            builds.append(next)
        else:
            leaves_of_child, build_child = flatten(child)
            flat += leaves_of_child
            builds.append(build_child)

    def build(remaining: Iterator[Any]) -> Any:
        return make([build_child(remaining) for build_child in builds])

    return flat, build


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """``value`` with ``function(tensor)`` for each tensor; other leaves stay."""
    return map_leaves(
        lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value
    )


def merge(
    function: Callable[[list[Any]], Any],
    values: Sequence[Any],
    is_leaf: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> Any:
    """One value from several of the same structure.

    ``function`` gets the leaves of each position. If ``is_leaf(values)``, the values of
    a position count as leaves.

    >>> merge(sum, [{"a": 1, "b": (2, 3)}, {"a": 10, "b": (20, 30)}])
    {'a': 11, 'b': (22, 33)}
    """
    if is_leaf(values) or not _are_alike(values):
        return function(list(values))
    first = values[0]
    _, make = _parts(first, first)
    if make is None:
        return function(list(values))
    children = [_parts(value, first)[0] for value in values]  # of each value
    merged: list[Any] = []
    for values_of_position in zip(*children, strict=True):
        merged.append(merge(function, values_of_position, is_leaf))
    return make(merged)


def leaves(value: Any, *, containers: bool = False) -> list[Any]:
    """Every leaf of ``value``, in order.

    With ``containers`` each container is there, too, before its leaves.
    """
    children, make = _parts(value, value)
    if make is None:
        return [value]
    flat = [value] if containers else []
    for child in children:
        flat += leaves(child, containers=containers)
    return flat


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of ``value``, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


Make = Callable[[list[Any]], Any]  # makes a container from new children


def _parts(value: Any, like: Any) -> tuple[Iterable[Any], Make | None]:
    """The children of ``value``, and how to make such a container from others.

    Children are in the order of ``like``'s keys. A leaf has no children, and ``None``.
    """
    if type(value) in (tuple, list):
        return value, type(value)
    if type(value) in _PLAIN or isinstance(value, (Tensor, torch.Size)):
        return (), None
    if isinstance(value, tuple):
        return value, functools.partial(_tuple_like, value)
    if isinstance(value, list):
        return value, functools.partial(_list_like, value)
    if isinstance(value, Mapping):
        if type(value) is not dict:
            _refuse_iteration_over_rows(value)
        keys = list(like)
        children = [value[key] for key in keys]
        return children, functools.partial(_mapping_like, value, keys)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        names = [field.name for field in fields if hasattr(value, field.name)]
    elif is_cache(value):
        names = [name for name, item in vars(like).items() if _is_of_cache(item)]
    else:
        return (), None
    children = [getattr(value, name) for name in names]
    return children, functools.partial(_object_like, value, names)


def _mapping_like(original: Any, keys: list[Any], children: Iterable[Any]) -> Any:
    """A mapping of the original's class and attributes, with other values."""
    pairs = zip(keys, children, strict=True)
    if type(original) is dict or not hasattr(original, "__setitem__"):
        return dict(pairs)
    mapping = copy.copy(original)
    _forget_computed(mapping)
    for key, child in pairs:
        mapping[key] = child
    return mapping


def _object_like(original: Any, names: list[str], children: Iterable[Any]) -> Any:
    """An object of the original's class, with other values of these attributes."""
    result = copy.copy(original)
    _forget_computed(result)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(result, name, child)  # of frozen dataclasses, too
    return result


def _tuple_like(original: tuple[Any, ...], children: Iterable[Any]) -> Any:
    """A tuple of the original's class and attributes, with other items."""
    kind: Any = type(original)
    if hasattr(kind, "n_sequence_fields"):  # such as ``torch.return_types.max``
        return kind(children)
    # Not the constructor, which may take other arguments than the items.
    make = getattr(kind, "_make", functools.partial(tuple.__new__, kind))
    return _with_attributes(make(children), original)


def _list_like(original: list[Any], children: Iterable[Any]) -> Any:
    """A list of the original's class and attributes, with other items."""
    made = list.__new__(type(original))
    list.extend(made, children)
    return _with_attributes(made, original)


def _with_attributes(made: Any, original: Any) -> Any:
    """``made`` with the attributes of ``original``, of the same class."""
    if hasattr(original, "__dict__"):
        vars(made).update(vars(original))
        _forget_computed(made)
    return made


def _forget_computed(value: Any) -> None:
    """Drop the values of cached properties: they were computed from other contents."""
    attributes = getattr(value, "__dict__", {})
    for name in [*attributes]:
        if isinstance(getattr(type(value), name, None), functools.cached_property):
            del attributes[name]


def _refuse_iteration_over_rows(value: Mapping[Any, Any]) -> None:
    """Refuse a mapping that iterates over something other than its keys."""
    keys = [*value.keys()]
    items = [*islice(value, len(keys) + 1)]
    pairs = zip(items, keys, strict=False)
    are_keys = all(type(item) is type(key) and item == key for item, key in pairs)
    if len(items) != len(keys) or not are_keys:
        remedy = "its .to_dict()" if hasattr(value, "to_dict") else "{key: value[key]}"
        raise TypeError(
            f"a {type(value).__name__} iterates over its rows, not over its keys, so its "
            f"parts cannot be told from its rows; use a dict in its place, such as "
            f"{remedy}"
        )


def is_cache(value: Any) -> bool:
    """Whether ``value`` is a cache of ``transformers``, or a layer of one."""
    return any(
        base.__module__ == "transformers.cache_utils" for base in type(value).__mro__
    )


def _is_of_cache(item: Any) -> bool:
    """Whether an attribute of a cache has tensors."""
    return isinstance(item, (Tensor, list)) or is_cache(item)


def refuse_generators(output: Any) -> None:
    """Refuse generators in an output.

    They would run later, outside of any replica's context.
    """
    for leaf in leaves(output):
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"the module's output contains a {type(leaf).__name__} that has not "
                f"been consumed; return a list or tuple of its items"
            )


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether the outermost containers have the same structure.

    Raises ``ValueError`` for mappings with different keys.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return False
    if isinstance(first, (tuple, list)):
        return all(len(value) == len(first) for value in values)
    if not isinstance(first, Mapping):
        return True
    if any(value.keys() != first.keys() for value in values):
        keys = [str(sorted(map(str, value))) for value in values]
        raise ValueError(
            f"mappings with different keys cannot be joined: {' and '.join(keys)}; "
            f"return the same keys for all rows"
        )
    return True


def join_rows(
    pieces: Sequence[Any],
    dim: int,
    weights: Sequence[float],
    rows: Sequence[int] | None = None,
    *,
    lists: Lists = "never",
    order: Sequence[int] = (),
    pad: float | None = None,
) -> Any:
    """Join pieces of the same nested types, each of consecutive rows, into one value.

    0-dim tensors are averaged with ``weights``, one per piece; pieces with weight zero
    are ignored. ``rows`` has the number of rows of each piece. Tensors with that size
    along ``dim``, or with one and the same multiple of it, are concatenated along
    ``dim``. A tensor with another size and the same bits in all pieces, such as a
    codebook, is returned once. Other tensors are refused by a ``ValueError``. Without
    ``rows`` all tensors are concatenated. With ``pad`` tensors get equal sizes in the
    other dimensions: they are padded at the end with this value.

    Any other leaf is returned once if all pieces have the same, and otherwise becomes a
    list with one entry per piece. ``lists`` says whether lists that have one entry per
    row are concatenated; ``"if clear"``: unless they may be lists of tensors with rows.

    If the rows of the pieces are not consecutive, ``order`` has their numbers, piece by
    piece, and the result has the rows in ascending order. A single piece is already in
    that order.

    >>> join_rows([{"y": torch.zeros(2)}, {"y": torch.ones(1)}], 0, [2, 1])
    {'y': tensor([0., 0., 1.])}
    """
    if len(pieces) == 1:
        return pieces[0]

    def are_entries(values: Sequence[Any], lists: Lists = lists) -> bool:
        return rows is not None and _are_entries(values, rows, dim, lists)

    def join_leaves(leaves: list[Any]) -> Any:
        first = leaves[0]
        if isinstance(first, PackedSequence):
            raise ValueError(
                "outputs that are PackedSequences cannot be joined, because a "
                "PackedSequence interleaves the entries of its rows; return what "
                "pad_packed_sequence(output, batch_first=True) gives"
            )
        if are_entries(leaves):
            return _in_order(list(chain(*leaves)), order, dim)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return first if _are_all_same(leaves) else leaves
        if not first.ndim:
            return _average(leaves, weights)
        if pad is not None:
            leaves = _padded(leaves, dim, pad)
        if rows is not None and not _entries_per_row(leaves, rows, dim):
            return leaves[0]
        return _in_order(torch.cat(leaves, dim), order, dim)

    def is_leaf(values: Sequence[Any]) -> bool:
        return isinstance(values[0], PackedSequence) or are_entries(values)

    if lists != "never" and are_entries(pieces, "always"):
        return _in_order(list(chain(*pieces)), order, dim)
    return merge(join_leaves, pieces, is_leaf)


def _are_entries(
    values: Sequence[Any], rows: Sequence[int], dim: int, lists: Lists
) -> bool:
    """Whether values are lists with one entry per row.

    With ``"if clear"`` they must not look like lists of tensors with rows.
    """
    if lists == "never":
        return False
    for value, num_rows in zip(values, rows, strict=True):
        if not isinstance(value, list) or len(value) != num_rows:
            return False
    if lists == "always":
        return True
    have_tensors = False
    for value, num_rows in zip(values, rows, strict=True):
        for tensor in tensors(value):
            have_tensors = True
            if tensor.shape[dim:][:1] != (num_rows,):
                return True
    return not have_tensors


def _padded(leaves: list[Tensor], dim: int, value: float) -> list[Tensor]:
    """The tensors, padded at the end to equal sizes in all dimensions but ``dim``."""
    num_dimensions = {leaf.ndim for leaf in leaves}
    if len(num_dimensions) > 1 or not -leaves[0].ndim <= dim < leaves[0].ndim:
        return leaves
    shapes = zip(*(leaf.shape for leaf in leaves), strict=True)
    sizes = [max(sizes_of_dimension) for sizes_of_dimension in shapes]
    padded_leaves: list[Tensor] = []
    for leaf in leaves:
        sizes[dim] = leaf.size(dim)
        padded = leaf.new_full(sizes, value)
        padded[tuple(map(slice, leaf.shape))] = leaf
        padded_leaves.append(padded)
    return padded_leaves


def _in_order(joined: Any, order: Sequence[int], dim: int) -> Any:
    """A list or tensor with its rows in ascending ``order`` of their numbers."""
    if not order:
        return joined
    entries_per_row = 1
    if isinstance(joined, Tensor):
        entries_per_row = joined.size(dim) // len(order)
    first_entries = torch.tensor(order).argsort()[:, None] * entries_per_row
    places = (first_entries + torch.arange(entries_per_row)).flatten()
    if isinstance(joined, list):
        return [joined[place] for place in to_numbers(places)]
    return joined.index_select(dim, to_device(places, joined.device))


def _entries_per_row(leaves: Sequence[Tensor], rows: Sequence[int], dim: int) -> int:
    """The number of entries per row along ``dim``.

    It is 0 if the tensors have no rows, and are the same in all pieces. Raises
    ``ValueError`` if the tensors cannot be joined.
    """
    ratios: set[float] = set()  # of entries to rows
    other_sizes: set[tuple[int, ...]] = set()  # in the other dimensions
    for leaf, num_rows in zip(leaves, rows, strict=True):
        size = leaf.size(dim) if -leaf.ndim <= dim < leaf.ndim else 0
        ratios.add(size / num_rows)
        other_sizes.add(leaf.shape[:dim] + leaf.shape[dim:][1:])
    entries = 0.0
    if len(ratios) == len(other_sizes) == 1 and min(ratios) % 1 == 0:
        (entries,) = ratios
    if entries == 1:
        return 1
    first = leaves[0]
    # A head that starts at zero gives every row the same entries: that pieces are equal
    # is no sign that they have no rows.
    are_rows = entries and same_bits(
        first, first.narrow(dim, 0, 1).expand_as(first).contiguous()
    )
    if not are_rows and all(same_bits(first, leaf) for leaf in leaves[1:]):
        return 0
    if not entries:
        shapes = " and ".join([str(tuple(leaf.shape)) for leaf in leaves])
        raise ValueError(
            f"outputs of shapes {shapes}, which are those of "
            f"{' and '.join(map(str, rows))} rows, cannot be joined along dim={dim}; "
            f"return the rows along that dimension, such as torch.stack([a, b], 1) in "
            f"the place of torch.cat([a, b]), or select with return_outputs=function, "
            f"or pad them to one size with engine.map(…, pad=value)"
        )
    return int(entries)


def _are_all_same(leaves: list[Any]) -> bool:
    """Whether all are one object, or equal values of a class that compares plainly."""
    first = leaves[0]
    is_comparable = isinstance(first, _COMPARABLE)
    for leaf in leaves:
        is_equal = is_comparable and type(leaf) is type(first) and leaf == first
        if leaf is not first and not is_equal:
            return False
    return True


def _average(values: list[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of 0-dim tensors, in their dtype; integers become floats."""
    first = values[0]
    dtype = torch.promote_types(first.dtype, torch.float32)
    total = sum(weights)
    counted: list[Tensor] = []
    weighted: list[Tensor] = []
    for value, weight in zip(values, weights, strict=True):
        if weight:  # a weight of zero ignores even NaN
            counted.append(value)
            weighted.append(value.to(dtype) * (weight / total))
    if not counted:
        return first
    mean = torch.stack(weighted).sum()
    # Equal numbers keep their bits: ranks compare those of all pieces.
    if not mean.requires_grad:
        number = counted[0].to(dtype)
        are_equal = torch.stack(counted).eq(number).all()
        mean = torch.where(are_equal, number, mean)
    is_integer = not (first.is_floating_point() or first.is_complex())
    return mean if is_integer else mean.to(first.dtype)
