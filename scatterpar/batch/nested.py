"""Traverse, merge and join nested values: tuples, lists, mappings, dataclasses, caches
of tensors.

Methods of a user's tensor subclass are not called inside a generator, except to compare
bits: a ``StopIteration`` from such a method would become another error.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import getitem, setitem
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import to_device, to_numbers

# whether lists may have one entry per row
Lists = Literal["never", "if clear", "always"]

# leaves, which need no look at their class
_PLAIN = {bool, int, float, str, bytes, type(None)}


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with every leaf replaced by ``function(leaf)``; containers keep their
    types.
    """
    children, make = _parts(value, value)
    if make is None:
        return function(value)
    return make(  # most children are tensors, which need no further call
        [
            function(v) if isinstance(v, Tensor) else map_leaves(function, v)
            for v in children
        ]
    )


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
    """``value`` with every tensor replaced by ``function(tensor)``;
    other leaves stay.
    """
    return map_leaves(
        lambda leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, value
    )


def merge(
    function: Callable[[list[Any]], Any],
    values: Sequence[Any],
    is_leaf: Callable[[Sequence[Any]], bool] = lambda _: False,
) -> Any:
    """One value from several of the same structure: ``function`` gets the leaves of
    each position.

    If ``is_leaf(values)``, the values of a position count as leaves.

    >>> merge(sum, [{"a": 1, "b": (2, 3)}, {"a": 10, "b": (20, 30)}])
    {'a': 11, 'b': (22, 33)}
    """
    first = values[0]
    _, make = (
        _parts(first, first) if not is_leaf(values) and _alike(values) else ((), None)
    )
    if make is None:
        return function(list(values))
    each = [_parts(value, first)[0] for value in values]
    return make(
        [merge(function, children, is_leaf) for children in zip(*each, strict=True)]
    )


def leaves(value: Any, *, containers: bool = False) -> list[Any]:
    """Every leaf of ``value``, in order; with ``containers`` each of these before its
    leaves.
    """
    children, make = _parts(value, value)
    if make is None:
        return [value]
    inner = [leaves(child, containers=containers) for child in children]
    return [*([value] if containers else ()), *chain(*inner)]


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of ``value``, in order."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def _parts(
    value: Any, like: Any
) -> tuple[Iterable[Any], Callable[[list[Any]], Any] | None]:
    """The children of ``value``, in the order of ``like``'s keys, and a function.

    The function makes such a container from new children. For a leaf: no children, and
    ``None``.
    """
    if type(value) in (tuple, list):
        return value, type(value)
    if type(value) in _PLAIN or isinstance(value, (Tensor, torch.Size)):
        return (), None
    if isinstance(value, tuple):
        return value, functools.partial(_tuple_like, value)
    if isinstance(value, list):
        return value, functools.partial(_list_like, value)
    get: Callable[..., Any] = getattr
    put: Callable[..., None] = object.__setattr__  # of frozen dataclasses too
    if isinstance(value, Mapping):
        if type(value) is not dict:
            _refuse_iteration_over_rows(value)
        names, get, put = [*like], getitem, setitem
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        names = [field.name for field in fields if hasattr(value, field.name)]
    elif is_cache(value):
        names = [
            n
            for n, v in vars(like).items()
            if isinstance(v, (Tensor, list)) or is_cache(v)
        ]
    else:
        return (), None

    def make(children: list[Any]) -> Any:
        if type(value) is dict or (
            put is setitem and not hasattr(value, "__setitem__")
        ):
            return dict(zip(names, children, strict=True))
        result = copy.copy(value)  # keeps its other attributes
        _forget_computed(result)
        for name, child in zip(names, children, strict=True):
            put(result, name, child)
        return result

    return [get(value, name) for name in names], make


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


def refuse_generators(output: Any) -> None:
    """Refuse generators in an output: they would run later, outside of any replica's
    context.
    """
    for leaf in leaves(output):
        if isinstance(leaf, Iterator):
            raise TypeError(
                f"the module's output contains a {type(leaf).__name__} that has not "
                "been consumed; "
                f"return a list or tuple of its items"
            )


def _alike(values: Sequence[Any]) -> bool:
    """Whether the outermost containers have the same structure, so that they can be
    merged.
    """
    first = values[0]
    if any(type(value) is not type(first) for value in values):
        return False
    if isinstance(first, (tuple, list)):
        return all(len(value) == len(first) for value in values)
    if isinstance(first, Mapping) and any(
        value.keys() != first.keys() for value in values
    ):
        raise ValueError(
            f"mappings with different keys cannot be joined: "
            f"{' and '.join(str(sorted(map(str, value))) for value in values)}; "
            "return the same "
            f"keys for all rows"
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
        """Whether values are lists with one entry per row, and not lists of tensors
        with rows.
        """
        if rows is None or lists == "never":
            return False
        pairs = list(zip(values, rows, strict=True))
        if not all(isinstance(value, list) and len(value) == n for value, n in pairs):
            return False
        inside = [(tensor, n) for value, n in pairs for tensor in tensors(value)]
        return (
            lists == "always"
            or not inside
            or any(t.shape[dim:][:1] != (n,) for t, n in inside)
        )

    def join_leaves(leaves: list[Any]) -> Any:
        if isinstance(leaves[0], PackedSequence):
            raise ValueError(
                "outputs that are PackedSequences cannot be joined, because a "
                "PackedSequence "
                "interleaves the entries of its rows; return what "
                "pad_packed_sequence(output, batch_first=True) gives"
            )
        if are_entries(leaves):
            return _in_order([*chain(*leaves)], order, dim)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return leaves[0] if _all_same(leaves) else leaves
        if not leaves[0].ndim:
            return _average(leaves, weights)
        if pad is not None:
            leaves = _padded(leaves, dim, pad)
        if rows is not None and not _entries_per_row(leaves, rows, dim):
            return leaves[0]
        return _in_order(torch.cat(leaves, dim), order, dim)

    if lists != "never" and are_entries(pieces, "always"):
        return _in_order([*chain(*pieces)], order, dim)
    return merge(
        join_leaves,
        pieces,
        lambda v: isinstance(v[0], PackedSequence) or are_entries(v),
    )


def _padded(leaves: list[Tensor], dim: int, value: float) -> list[Tensor]:
    """The tensors, padded at the end to equal sizes in all dimensions
    except ``dim``.
    """
    if (
        len({leaf.ndim for leaf in leaves}) > 1
        or not -leaves[0].ndim <= dim < leaves[0].ndim
    ):
        return leaves
    sizes = [max(each) for each in zip(*(leaf.shape for leaf in leaves), strict=True)]
    padded = []
    for leaf in leaves:
        sizes[dim] = leaf.size(dim)
        padded.append(leaf.new_full(sizes, value))
        padded[-1][tuple(map(slice, leaf.shape))] = leaf
    return padded


def _in_order(joined: Any, order: Sequence[int], dim: int) -> Any:
    """A list or tensor with its rows in ascending ``order`` of their numbers."""
    if not order:
        return joined
    # entries per row
    each = 1 if isinstance(joined, list) else joined.size(dim) // len(order)
    places = (
        torch.tensor(order).argsort()[:, None] * each + torch.arange(each)
    ).flatten()
    if isinstance(joined, list):
        return [joined[place] for place in to_numbers(places)]
    return joined.index_select(dim, to_device(places, joined.device))


def _entries_per_row(leaves: Sequence[Tensor], rows: Sequence[int], dim: int) -> int:
    """The number of entries per row along ``dim``; 0 if the tensors are the same in all
    pieces.

    Raises ``ValueError`` if the tensors cannot be joined.
    """
    sizes = [leaf.size(dim) if -leaf.ndim <= dim < leaf.ndim else 0 for leaf in leaves]
    ratios = {size / n for size, n in zip(sizes, rows, strict=True)}
    others = {leaf.shape[:dim] + leaf.shape[dim:][1:] for leaf in leaves}
    entries = (
        min(ratios) if len(ratios) == len(others) == 1 and min(ratios) % 1 == 0 else 0
    )
    if entries == 1:
        return 1
    first = leaves[0]
    # Entries of rows that are all equal, as those of a head of zeros, are no codebook.
    are_rows = entries and same_bits(
        first, first.narrow(dim, 0, 1).expand_as(first).contiguous()
    )
    if not are_rows and all(same_bits(first, other) for other in leaves[1:]):
        return 0
    if not entries:
        shapes = " and ".join([str(tuple(leaf.shape)) for leaf in leaves])
        raise ValueError(
            f"outputs of shapes {shapes}, which are those of "
            f"{' and '.join(map(str, rows))} "
            f"rows, cannot be joined along dim={dim}; return the rows along that "
            "dimension, such "
            "as torch.stack([a, b], 1) in the place of torch.cat([a, b]), or select "
            "with "
            "return_outputs=function, or pad them to one size with engine.map(…, "
            "pad=value)"
        )
    return int(entries)


def _all_same(leaves: list[Any]) -> bool:
    first, plain = leaves[0], (bool, int, float, complex, str, bytes, torch.Size)
    return all(
        leaf is first
        or (isinstance(first, plain) and type(leaf) is type(first) and leaf == first)
        for leaf in leaves
    )


def _average(values: list[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of 0-dim tensors, in their dtype; integers become floats."""
    first, total = values[0], sum(weights)
    counted = [
        (value, weight) for value, weight in zip(values, weights, strict=True) if weight
    ]
    if not counted:
        return first
    dtype = torch.promote_types(first.dtype, torch.float32)
    mean = torch.stack(
        [value.to(dtype) * (weight / total) for value, weight in counted]
    ).sum()
    # equal numbers keep their bits: ranks compare those of all pieces
    if not mean.requires_grad:
        one = counted[0][0].to(dtype)
        are_equal = torch.stack([value for value, _ in counted]).eq(one).all()
        mean = torch.where(are_equal, one, mean)
    is_integer = not (first.is_floating_point() or first.is_complex())
    return mean if is_integer else mean.to(first.dtype)
