"""Find state that forward passes change: every sub-step changes it, instead of once per step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from scatterpar.replicas.broadcast import versions
from scatterpar.replicas.buffers import RUNNING
from scatterpar.replicas.replicas import ReplicaSet

_SHOWN = 5  # names in a warning


class StateWatch:
    """Finds which state of the first replica has changed since the watch was made."""

    def __init__(self, replica_sets: Sequence[ReplicaSet]) -> None:
        self._sets = [part for part in replica_sets if part.replicas]
        self._versions = [
            dict(zip(map(id, found), versions(found), strict=True))
            for part in self._sets
            if (found := part.replicas[0].tensors) is not None
        ]

    def moved(self) -> list[str]:
        """The names of buffers, and of attributes with a number or tensor, that have changed."""
        pairs = zip(self._sets, self._versions, strict=True)
        return [*chain(*(_moved(part, before) for part, before in pairs))]


def _moved(part: ReplicaSet, before: dict[int, int]) -> Iterator[str]:
    replica = part.replicas[0]
    for root in part.roots:
        for prefix, module in root.named_modules() if isinstance(root, nn.Module) else ():
            copy = replica.copy_of(module)
            prefix = f"{prefix}." if prefix else ""
            for name, value in module._buffers.items():
                now = copy._buffers.get(name)
                if name in RUNNING or value is None:
                    continue
                if now is not replica.copy_of(value) or before.get(id(now)) not in (
                    None,
                    now._version,
                ):
                    yield f"the buffer {prefix + name!r}"
            own = vars(copy)
            for name, value in vars(module).items():
                if name[0] != "_" and _differs(own.get(name), value, replica.copy_of, before):
                    yield f"the attribute {prefix + name!r}"


def _differs(now: Any, value: Any, copy_of: Callable[[Any], Any], before: dict[int, int]) -> bool:
    if isinstance(value, Tensor):
        if not isinstance(now, Tensor) or now.grad_fn is not None:  # each pass computes it anew
            return False
        return now is not copy_of(value) or before.get(id(now)) not in (None, now._version)
    return type(value) in (int, float) and type(now) in (int, float) and now != value


def warning_about(moved: Sequence[str], sub_steps: int) -> str:
    """The text of the warning that names the state in ``moved``."""
    names = ", ".join(moved[:_SHOWN]) + f" and {len(moved) - _SHOWN} more" * (len(moved) > _SHOWN)
    return (
        f"forward passes move {names}: at each of the {sub_steps} sub-steps, and on each replica "
        f"apart, where one pass over the whole batch moves state once. What a later sub-step reads "
        f"there, and what your module holds after the step, is not what one device would have. "
        f"Move such state once per step, outside of forward, or train with one sub-step "
        f"(docs/limits.md, State in modules)"
    )
