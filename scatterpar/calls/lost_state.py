"""Warnings of state that each replica leaves differently after a call, once by name.

::

    self.centre = rows.mean(0)     the module keeps that of the first replica's rows
    features.last = output         by a hook, into an object that replicas share
    self.calls += 1                the same on all replicas: nothing is lost

Calls 1, 2, 4, 8, … are asked. Tensors with rows are joined (``left_tensors``), and
buffers are those of the first replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from scatterpar.calls.division import Division, are_divided_alike
from scatterpar.calls.replicas_of_call import ReplicasOfCall
from scatterpar.devices.copies import to_device
from scatterpar.errors import Told, warn
from scatterpar.look_steps import is_look_step
from scatterpar.verify.moved_state import (
    SharedTensors,
    State,
    moved_between,
    state_of,
)

_PAGE = "docs/limits.md, State in modules."


class LostState:
    """Asks after the calls of one root."""

    def __init__(self) -> None:
        self._calls = 0
        self._told = Told()
        self._shared: SharedTensors | None = None
        self._lost: list[str] = []
        self._left: list[str] = []

    def begin(self, replicas: ReplicasOfCall, is_divided: bool) -> None:
        """Remember, before a call, what objects that replicas share refer to."""
        self._shared = None
        self._lost = []
        self._left = []
        self._calls += 1
        # Not in each call: it walks over all objects of the module.
        if is_divided and is_look_step(self._calls):
            copied = frozenset(map(id, replicas.replica_set.contents.containers))
            self._shared = SharedTensors([replicas.root], copied)

    def end(self, replicas: ReplicasOfCall, division: Division) -> None:
        """Find what the replicas have left in a call, before it is joined."""
        if self._shared is None:
            return
        self._left = self._shared.left()
        self._shared = None
        first, second = [
            state_of([root], has_same_rows=True)  # type: ignore[list-item]
            for root in (SimpleNamespace(root=replicas.root), replicas.others(2)[0])
        ]
        first = _without_rows(first, second, division)
        self._lost = moved_between([first, _in_memories_of(first, second)])

    def tell(self) -> None:
        """Warn, after a call that has succeeded, of what was found."""
        self._warn(
            self._lost,
            "forward sets {names} to another value on each replica: your module keeps "
            "the value of the first replica, which has seen its own rows only. Return "
            "the value from forward, one entry per row. Or set it outside of forward, "
            "from the joined output.",
        )
        self._warn(
            self._left,
            "forward or a hook leaves tensors behind in {names}, which all replicas "
            "share: a criterion that reads them gets the tensors of one replica only. "
            "Return them from forward, or keep them in an attribute of a module, a "
            "list or a dict: these are joined.",
        )

    def _warn(self, names: Sequence[str], text: str) -> None:
        # Each name once: a module may begin to keep something later.
        new = [name for name in dict.fromkeys(names) if self._told.mark(name)]
        if new:
            warn(f"{text.format(names=', '.join(new))} {_PAGE}")


def _without_rows(first: State, second: State, division: Division) -> State:
    """The state of the first replica, without tensors that are joined."""
    remaining: State = {}
    for name, contents in first.items():
        others = second.get(name, {})
        remaining[name] = {
            key: value
            for key, value in contents.items()
            if not _are_rows(value, others.get(key), division)
        }
    return remaining


def _in_memories_of(first: State, second: State) -> State:
    """The state of the second replica, its tensors where those of the first one are."""
    copied: State = {}
    for name, contents in second.items():
        of_first = first.get(name, {})
        copied[name] = {
            key: _in_memory_of(of_first.get(key), value)
            for key, value in contents.items()
        }
    return copied


def _in_memory_of(other: Any, value: Any) -> Any:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return to_device(value, other.device, copy=True)
    return value


def _are_rows(value: Any, other: Any, division: Division) -> bool:
    if not isinstance(value, Tensor) or not isinstance(other, Tensor):
        return False
    return are_divided_alike([value, other], division.rows[:2], division.dim)
