"""Which buffers modules have, where a forward pass registers, deletes or parts them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from scatterpar.replicas.kinds import buffers_of, is_script

__all__ = ["Registered", "Registry", "Tied", "registered_by", "tied_names", "values_after"]

_Buffers = MutableMapping[str, "Tensor | None"]
Tied = list[list[tuple[int, str]]]


class Registered(NamedTuple):
    """The buffers of a module, and the names of those that state dicts leave out."""

    buffers: _Buffers
    left_out: set[str]


def registered_by(module: nn.Module) -> Registered:
    """What a module has registered, to read and to write."""
    left_out = set() if is_script(module) else module._non_persistent_buffers_set
    return Registered(buffers_of(module), left_out)


class Registry(MutableMapping[str, "Tensor | None"]):
    """The buffers of a module that a forward pass registered in another way on a copy.

    Args:
        module: the user's.
        copy: what the forward pass ran on, as it is now.
        parted: buffers that were one tensor, and are tensors of their own on the copy.
    """

    def __init__(self, module: Registered, copy: Registered, parted: Collection[str] = ()) -> None:
        self._buffers, self._left_out = module
        self._names, self._copy_left_out = frozenset(copy.buffers), frozenset(copy.left_out)
        self._parted = parted

    def register(self, name: str) -> None:
        """Have this buffer or not, and in state dicts or not, as the copy does."""
        if name not in self._names:
            self._buffers.pop(name, None)
        elif name in self._parted or name not in self._buffers:
            self._buffers[name] = None  # to be bound
        if name in self._copy_left_out:
            self._left_out.add(name)
        else:
            self._left_out.discard(name)

    def remember(self) -> Callable[[], None]:
        """How to put back what is registered now, in the same order."""
        return partial(self._put_back, dict(self._buffers), set(self._left_out))

    def _put_back(self, buffers: dict[str, Tensor | None], left_out: set[str]) -> None:
        self._buffers.clear()
        self._buffers.update(buffers)
        self._left_out.clear()
        self._left_out.update(left_out)

    def __getitem__(self, name: str) -> Tensor | None:
        return self._buffers[name]

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        self._buffers[name] = value

    def __delitem__(self, name: str) -> None:
        del self._buffers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffers)

    def __len__(self) -> int:
        return len(self._buffers)


def values_after(
    modules: Sequence[Registered],
    copies: Sequence[Registered],
    tied: Tied,
    of: Callable[[Any], Any],
) -> Iterator[tuple[int, _Buffers, str, Tensor | None]]:
    """What the copies' buffers are: the module's number, where to write it, its name, the value.

    Args:
        modules: the user's.
        copies: what a forward pass ran on.
        tied: the names of buffers that are one tensor.
        of: the copy of a tensor, as it was before the forward pass.
    """
    parted = _parted_names(tied, modules, copies, of) if tied else {}
    for m, (module, copy) in enumerate(zip(modules, copies, strict=True)):
        holder, own = module.buffers, copy.buffers
        if holder or own:
            place, names = holder, own
            if m in parted or module.left_out != copy.left_out or holder.keys() != own.keys():
                place, names = Registry(module, copy, parted.get(m, ())), {**holder, **own}
            for name in names:
                yield m, place, name, own.get(name)


def tied_names(modules: Sequence[Registered]) -> Tied:
    """The names, as (module, name), of each tensor that is a buffer under several of them."""
    places: dict[int, list[tuple[int, str]]] = {}
    for m, (buffers, _) in enumerate(modules):
        for name, tensor in buffers.items():
            if tensor is not None and isinstance(buffers, dict):
                places.setdefault(id(tensor), []).append((m, name))
    return [names for names in places.values() if len(names) > 1]


def _parted_names(
    tied: Tied,
    modules: Sequence[Registered],
    copies: Sequence[Registered],
    of: Callable[[Any], Any],
) -> dict[int, set[str]]:
    """By module, the tied buffers of which a forward pass made tensors of their own."""
    found: dict[int, set[str]] = {}
    for names in tied:
        values = [copies[m].buffers.get(name) for m, name in names]
        if any(value is not values[0] for value in values):
            for (m, name), value in zip(names, values, strict=True):
                if value is not of(modules[m].buffers.get(name)):
                    found.setdefault(m, set()).add(name)
    return found
