"""Outputs beside a loss, which are joined when they are read.

::

    output = engine(ids, labels=labels)    a loss, and logits on each device
    output["loss"].backward()              if nobody reads the logits, they stay there
    output["logits"]                       now they are joined, on the master

The mapping or dataclass is one of a subclass of its class. What cannot be joined, such
as a cache of keys and values, raises when it is read.
"""

from __future__ import annotations

import contextlib
import copy
import copyreg
import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from scatterpar.batch import nested

_UNREAD = "_scatterpar_unread"
# These methods read all entries.
_OF_ALL = frozenset(
    {"items", "values", "to_tuple", "copy", "popitem", "update", "clear"}
)
Join = Callable[[], Any]


def has_loss(output: Any) -> bool:
    """Whether an output has a number with a graph, and other entries."""
    if not is_readable_later(output):
        return False
    entries = entries_by_name(output).values()
    return any(map(_is_loss, entries)) and not all(map(_is_loss, entries))


def is_readable_later(output: Any) -> bool:
    """Whether entries of an output may be joined when they are read."""
    if isinstance(output, dict):
        return all(isinstance(key, str) for key in output)
    if not dataclasses.is_dataclass(output) or not hasattr(output, "__dict__"):
        return False
    # A field with a slot, of a class whose base has none, would hide what is set.
    return all(field.name in vars(output) for field in dataclasses.fields(output))


def entries_by_name(output: Any) -> dict[str, Any]:
    """The entries of a mapping, or the fields of a dataclass."""
    if isinstance(output, dict):
        return {name: output[name] for name in output}
    fields = dataclasses.fields(output)
    return {field.name: getattr(output, field.name) for field in fields}


def _is_loss(value: Any) -> bool:
    is_number = isinstance(value, Tensor) and not value.ndim
    return is_number and value.is_floating_point() and value.requires_grad


def needs_join(value: Any) -> bool:
    """Whether an entry has tensors other than a number."""
    if isinstance(value, Tensor):
        return value.ndim > 0
    return any(isinstance(atom, Tensor) for atom in nested.atoms(value))


def read_later(
    output: Any, entries: Mapping[str, Any], joins: Mapping[str, Join]
) -> Any:
    """Make an object like ``output`` with these entries, and with ``joins`` for others.

    Returns ``None`` if its class cannot have a subclass of this kind.
    """
    class_of_output: Any = type(output)
    kind = _class_for(class_of_output)
    try:
        if type(output) in (dict, OrderedDict):  # whose objects keep their class
            result = kind(output)
        else:
            # Not by its constructor, which may ask for more, or compute.
            result = copy.copy(output)
            # Past a user's method, which may make an entry of it.
            object.__setattr__(result, "__class__", kind)
            nested.forget_computed(result)
    except TypeError:  # another layout, such as slots
        return None
    for name, value in entries.items():
        _set(result, name, value)
    # So that keys, their order and ``len`` are those of the whole output.
    for name in joins:
        _set(result, name, None)
    vars(result)[_UNREAD] = dict(joins)
    return result


def _set(output: Any, name: str, value: Any) -> None:
    """Set an entry, without methods of the user's class."""
    if isinstance(output, dict):
        base: Any = OrderedDict if isinstance(output, OrderedDict) else dict
        base.__setitem__(output, name, value)
        if name not in vars(output):  # it is no attribute, too
            return
    vars(output)[name] = value


# Two outputs of one class have one class again.
@functools.cache
def _class_for(kind: type) -> Any:
    mixin = _UnreadItems if issubclass(kind, dict) else _UnreadFields
    names = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_scatterpar_class": kind,
    }
    return type(kind.__name__, (mixin, kind), names)


class _UnreadFields:
    """Joins a field at its first access."""

    # Not ``__getattr__``: the field is there, and is None until it is joined.
    def __getattribute__(self, name: str) -> Any:
        attributes = object.__getattribute__(self, "__dict__")
        unread = attributes.get(_UNREAD)
        if unread:
            # An entry that is no attribute may have the name of a method.
            if name in _OF_ALL and name not in attributes:
                _join_unread(self)
            elif name in unread:
                _join_entry(self, name)
        return super().__getattribute__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        unread = vars(self).get(_UNREAD, ())
        if name in unread and name not in vars(self):  # the entry is another value
            _join_entry(self, name)
        with _not_to_join(self, name):
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        with _not_to_join(self, name):
            super().__delattr__(name)

    # Two whole outputs of one object would be compared entry by entry, and a
    # dataclass compares tensors then (since Python 3.13): an object equals itself.
    def __eq__(self, other: object) -> bool:
        whole = _whole_output(self)
        return bool(whole == (whole if other is self else other))

    # A dict has one of its own.
    def __ne__(self, other: object) -> bool:
        whole = _whole_output(self)
        return bool(whole != (whole if other is self else other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(_whole_output(self))

    # As the user's class: pickle could not import this one.
    def __reduce_ex__(self, protocol: Any) -> Any:
        whole = _whole_output(self)
        reduced = whole.__reduce_ex__(protocol)
        # These make objects of the class that is pickled only.
        if reduced[0] in (copyreg.__newobj__, copyreg.__newobj_ex__):  # type: ignore[attr-defined]
            return copy.copy, (whole,)
        return reduced


class _UnreadItems(_UnreadFields):
    """Joins an entry at its first access."""

    # With a method of its own, Python copies no entries past it.
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()  # type: ignore[misc, no-any-return]

    def __getitem__(self, key: Any) -> Any:
        # Outputs of transformers have entries by position, too.
        if isinstance(key, (int, slice)) and hasattr(type(self), "to_tuple"):
            names = list(self)[key]
            if isinstance(key, int):
                return self[names]
            return tuple(self[name] for name in names)
        if key in vars(self).get(_UNREAD, ()):
            _join_entry(self, key)
        return dict.__getitem__(self, key)  # type: ignore[index]

    def get(self, key: Any, default: Any = None) -> Any:
        """The entry, or the default."""
        if key not in self:
            return default
        return self[key]

    def pop(self, key: Any, *default: Any) -> Any:
        """Take the entry out."""
        if key in vars(self).get(_UNREAD, ()):
            _join_entry(self, key)
        return super().pop(key, *default)  # type: ignore[misc]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The entry, which is set to the default if it is missing."""
        if key in vars(self).get(_UNREAD, ()):
            _join_entry(self, key)
        return super().setdefault(key, default)  # type: ignore[misc]

    def __setitem__(self, key: Any, value: Any) -> None:
        with _not_to_join(self, key):
            super().__setitem__(key, value)  # type: ignore[misc]

    def __delitem__(self, key: Any) -> None:
        with _not_to_join(self, key):
            super().__delitem__(key)  # type: ignore[misc]

    # The item stays if the attribute goes.
    def __delattr__(self, name: str) -> None:
        if name in vars(self).get(_UNREAD, ()):
            _join_entry(self, name)
        super().__delattr__(name)

    # Python looks operators up in the class, past ``__getattribute__``.
    def __or__(self, other: Any) -> Any:
        _join_unread(self)
        return super().__or__(other)  # type: ignore[misc]

    def __ror__(self, other: Any) -> Any:
        _join_unread(self)
        return super().__ror__(other)  # type: ignore[misc]

    def __ior__(self, other: Any) -> Any:
        _join_unread(self)
        return super().__ior__(other)  # type: ignore[misc]


@contextlib.contextmanager
def _not_to_join(output: Any, name: Any) -> Iterator[None]:
    """In the body an entry is written or deleted. If that is refused, it stays."""
    unread = vars(output).get(_UNREAD, {})
    join = unread.pop(name, None)
    try:
        yield
    except BaseException:
        if join is not None:
            unread[name] = join
        raise


def _join_entry(output: Any, name: str) -> None:
    unread = vars(output)[_UNREAD]
    value = unread[name]()  # if it raises, it does so again
    del unread[name]
    _set(output, name, value)


def _join_unread(output: Any) -> None:
    for name in list(vars(output).get(_UNREAD, ())):
        _join_entry(output, name)


def _whole_output(output: Any) -> Any:
    """The object with all entries, in its own class."""
    _join_unread(output)
    kind = type(output)._scatterpar_class
    if kind is dict:
        return dict(output.items())
    result = kind.__new__(kind)
    if isinstance(output, dict):
        for key, value in output.items():
            _set(result, key, value)
    vars(result).update(vars(output))
    vars(result).pop(_UNREAD, None)
    return result
