"""State of modules without parameters, such as metrics, that a step function moves.

A replica calls its own copy of a module that the owner keeps. If the call changes a
number in it, as ``self.accuracy.update(…)``, the owner's module does not get that of
the other replicas. ``ModuleState`` finds it.
"""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import Any

from torch import Tensor, nn

_OF_TORCH = vars(nn.Module()).keys()


class ModuleState:
    """The state of a module before a call: buffers, and attributes that hold numbers.

    Args:
        module: the module that the call uses. With parameters, such as a teacher, it
            has no state here: each step gives replicas the owner's values.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._has_parameters = next(module.parameters(), None) is not None
        self._before = {} if self._has_parameters else _state_of(module)

    def is_moved(self) -> bool:
        """Whether the state has changed since."""
        if self._has_parameters:
            return False
        now = _state_of(self._module)
        if now.keys() != self._before.keys():
            return True
        return any(
            not _is_same(value, now[name]) for name, value in self._before.items()
        )


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Tensors with their versions, numbers, and lengths of lists, by name."""
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        attributes = [item for item in vars(part).items() if item[0] not in _OF_TORCH]
        for name, value in chain(part._buffers.items(), attributes):
            if isinstance(value, Tensor):
                version = -1 if value.is_inference() else value._version
                state[f"{path}.{name}"] = value, version
            elif type(value) in (int, float):
                state[f"{path}.{name}"] = value, 0
            elif type(value) in (list, deque):
                state[f"{path}.{name}"] = len(value), 0
    return state


def _is_same(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    value, version = before
    other, other_version = now
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return value is other and version == other_version
    return bool(value == other)
