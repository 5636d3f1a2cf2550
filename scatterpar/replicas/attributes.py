"""What Python keeps on tensors: their classes, and attributes such as ``bias.scale = 5.0``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from scatterpar.replicas.mirror import Snapshot

__all__ = ["Attributes", "Change", "Watch", "parameter_like", "take_attributes", "take_class"]

_MISSING = object()  # in place of the value of an attribute that is not there
_Of = Callable[[Any], Any]
_MARKS = "_dynamo"  # what torch's compiler notes down on tensors begins with this


class Change(NamedTuple):
    """An attribute of an original that was set or deleted."""

    position: int
    name: str
    before: Any
    after: Any


def parameter_like(original: Tensor, values: Tensor) -> Tensor:
    """A parameter on the memory of ``values``, of the original's own class of parameters."""
    kind = type(original)
    is_own = issubclass(kind, nn.Parameter)
    # Not its constructor, which may ask for more than values.
    return nn.Parameter.__new__(kind if is_own else nn.Parameter, values, requires_grad=False)


def take_class(original: Tensor, copy: Tensor) -> None:
    """Give a copy inside a graph the original's class, where that is the user's own parameter."""
    kind = type(original)
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        with contextlib.suppress(TypeError):  # it has a layout of its own, such as ``__slots__``
            copy.__class__ = kind


def take_attributes(original: Tensor, copy: Tensor, of: _Of) -> None:
    """Give a copy the attributes of the original."""
    if _is_followed(original):
        vars(copy).update({name: _own(value, of) for name, value in vars(original).items()})


def _own(value: Any, of: _Of) -> Any:
    """The replica's counterpart of another tensor, or of a module; other values are shared."""
    return of(value) if isinstance(value, (Tensor, nn.Module)) else value


class Watch:
    """Tells what was done to the attributes of some tensors since it was asked last."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._held = [vars(tensor) if _is_followed(tensor) else {} for tensor in tensors]
        self._remember()

    def _remember(self) -> None:
        self._kept = [dict(held) for held in self._held]
        self._snapshot = Snapshot(self._held)

    def changes(self) -> list[Change]:
        """What was set and deleted, tensor by tensor."""
        if self._snapshot.unchanged():
            return []
        found = [
            Change(position, name, kept.get(name, _MISSING), now.get(name, _MISSING))
            for position, (now, kept) in enumerate(zip(self._held, self._kept, strict=True))
            for name in dict.fromkeys([*kept, *now])
            if now.get(name, _MISSING) is not kept.get(name, _MISSING)
        ]
        self._remember()
        return found


class Attributes:
    """The attributes of a replica's tensors: the originals', until a forward pass sets others.

    What torch's compiler notes down on the replica's tensors is left to it.

    Args:
        originals: the master's tensors.
        copies: the replica's, which take over what the originals have.
        of: the replica's counterpart of a tensor or module.
    """

    def __init__(self, originals: Sequence[Tensor], copies: Sequence[Tensor], of: _Of) -> None:
        self._of = of
        pairs = list(zip(originals, copies, strict=True))
        for pair in pairs:
            take_attributes(*pair, of)
        self._held = [vars(copy) if _is_followed(original) else {} for original, copy in pairs]
        self._remember()

    def _remember(self) -> None:
        self._kept = [dict(held) for held in self._held]
        self._snapshot = Snapshot(self._held)

    def undo(self) -> None:
        """Take back what a forward pass set or deleted."""
        if self._snapshot.unchanged():
            return
        for now, kept in zip(self._held, self._kept, strict=True):
            marks = {name: value for name, value in now.items() if name.startswith(_MARKS)}
            now.clear()
            now.update(kept | marks)
        self._remember()

    def assign(self, changes: Sequence[Change]) -> None:
        """Obey what was done to the originals."""
        self.undo()
        for position, name, _, after in changes:
            if after is _MISSING:
                self._held[position].pop(name, None)
            else:
                self._held[position][name] = _own(after, self._of)
        self._remember()


def _is_followed(original: Tensor) -> bool:
    """Whether its attributes are no tensors that it is made of, as those of wrappers are."""
    return isinstance(original, nn.Parameter) or not hasattr(original, "__tensor_flatten__")
