"""Find state that every sub-step changes, although one pass over the batch changes it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.transfers import to_host
from scatterpar.replicas.broadcast import version
from scatterpar.replicas.buffers import RUNNING
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.step.substeps import ReplicaTask

_SHOWN = 5  # at most so many names in a warning
_OF_TORCH = vars(nn.Module()).keys()


class StateWatch:
    """Finds which state the sub-steps change more than once, or differently on each replica.

    What only the first sub-step changes, such as a table that it fills, is not found.
    """

    def __init__(self, replica_sets: Sequence[ReplicaSet], tasks: Sequence[ReplicaTask]) -> None:
        self._replica_sets = [each for each in replica_sets if each.replicas]
        self._is_single = len(tasks[0].share.micro_batches) == 1
        self._before = self._start = self._state(0)
        tasks[0].loader.on_load = self._note_second

    def _note_second(self, number: int) -> None:
        if number == 1 and self._before is self._start:
            self._before = self._state(0)

    def changed(self) -> list[str]:
        """The names of buffers, and of attributes with a number or tensor, that have changed."""
        now = self._state(0)
        names = [name for name in self._start if name in now and self._has_changed(name, now[name])]
        if names and self._is_single:
            other = self._state(1)
            names = [name for name in names if name in other and _differ(now[name], other[name])]
        return names

    def _has_changed(self, name: str, now: tuple[Any, int]) -> bool:
        (before, earlier), (value, later) = self._before.get(name, (None, 0)), now
        if isinstance(value, Tensor):
            return isinstance(before, Tensor) and (value is not before or later != earlier)
        return type(before) in (int, float) and value != before

    def _state(self, number: int) -> dict[str, tuple[Any, int]]:
        """By name: each buffer and attribute of replica ``number``, with its tensor version.

        The version of a number is 0. Running statistics are left out.
        """
        found = {}
        for replica_set in self._replica_sets:
            replica = replica_set.replicas[number]
            roots = [root for root in replica_set.roots if isinstance(root, nn.Module)]
            for prefix, module in (each for root in roots for each in root.named_modules()):
                own = vars(replica.copy_of(module))
                left_out = RUNNING if isinstance(module, nn.modules.batchnorm._BatchNorm) else ()
                named = [("buffer", n, v) for n, v in own["_buffers"].items() if n not in left_out]
                named += [("attribute", n, v) for n, v in own.items() if n not in _OF_TORCH]
                for kind, name, value in named:
                    place = f"the {kind} {f'{prefix}.' * bool(prefix) + name!r}"
                    if isinstance(value, Tensor) and value.grad_fn is None:
                        found[place] = value, version(value)
                    elif type(value) in (int, float):
                        found[place] = value, 0
        return found


def _differ(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    if isinstance(one[0], Tensor) and isinstance(other[0], Tensor):
        return not torch.equal(*to_host([one[0], other[0]]))
    return bool(one[0] != other[0])


def warning_about(changed: Sequence[str], sub_steps: int) -> str:
    """The text of the warning that names the state in ``changed``."""
    more = len(changed) - _SHOWN
    names = ", ".join(changed[:_SHOWN]) + f" and {more} more" * (more > 0)
    return (
        f"forward passes move {names}: at each of the {sub_steps} sub-steps, and on "
        f"each replica apart, where one pass over the whole batch moves state once. What a later "
        f"sub-step reads there, and what your module holds after the step, is not what one device "
        f"would have. "
        f"Move such state once per step, outside of forward, or keep it in a buffer and train with "
        f"one sub-step (docs/limits.md, State in modules)"
    )
