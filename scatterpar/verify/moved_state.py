"""Find state of replicas that each call of the module moves, such as a counter or a
queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from scatterpar.devices.fingerprints import same_bits
from scatterpar.replicas.replicas import Replica

_OF_TORCH = vars(nn.Module()).keys()

State = dict[str, Any]  # values by the names that a warning tells


def state_of(replicas: Sequence[Replica]) -> State:
    """The buffers of replicas, and the attributes that hold state.

    Running statistics do not change in a look, whose batch normalisations are in
    evaluation mode.
    """
    return _state_of(replicas, ("buffer", "attribute"))


def attributes_of(replicas: Sequence[Replica]) -> State:
    """The attributes of replicas with state: numbers, tensors, lengths of lists."""
    return _state_of(replicas, ("attribute",))


def _state_of(replicas: Sequence[Replica], kinds: Sequence[str]) -> State:
    state: State = {}
    for replica in replicas:
        if not isinstance(replica.root, nn.Module):
            continue
        for path, module in replica.root.named_modules():
            prefix = f"{path}." if path else ""
            for kind, name, value in _values_of(module):
                if kind not in kinds:
                    continue
                if isinstance(value, Tensor):
                    if value.grad_fn is not None:
                        continue
                    value = value.detach().clone()
                state[f"the {kind} {prefix + name!r}"] = value
    return state


def _values_of(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """Yield the kind, name and value of buffers, and of attributes that hold state.

    The value of a list or deque is its length: a forward pass that appends to it finds
    more entries in the next one.
    """
    for name, value in module._buffers.items():
        if value is not None:
            yield "buffer", name, value
    for name, value in vars(module).items():
        if name in _OF_TORCH:
            continue
        if type(value) in (int, float) or isinstance(value, Tensor):
            yield "attribute", name, value
        elif type(value) in (list, deque):
            yield "attribute", name, len(value)


def moved_between(states: Sequence[State]) -> list[str]:
    """The names of state that the second part of a look has changed, after the first.

    What only the first part changes, such as a table that it fills, is not found. If
    both parts began in the same state: what they have left different.
    """
    if len(states) < 2:
        return []
    first, second = states[:2]
    return [
        name for name, value in first.items() if not _is_same(value, second.get(name))
    ]


def _is_same(value: Any, other: Any) -> bool:
    """Whether two values are the same, or of types that cannot be compared."""
    if type(value) is not type(other):
        return True
    if isinstance(value, Tensor):
        return same_bits(value, other)
    are_nan = value != value and other != other
    return are_nan or bool(value == other)
