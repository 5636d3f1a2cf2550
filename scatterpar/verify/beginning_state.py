"""State that begins in the first call of a module or criterion, and seeds in it.

A replica begins each step with the user's attributes, so such state is lost.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.copies import write
from scatterpar.spans import Part
from scatterpar.step.loss import loss_of
from scatterpar.torch_private.thread_modes import OperatorMode
from scatterpar.verify.moved_state import new_in, state_of
from scatterpar.verify.results import Result
from scatterpar.verify.runs import Runs

_OTHER_WEIGHTS = 0.1  # how much other they are, relatively
_MAX_DRAWS = 64  # of a call that are compared
_is_seed_sought = ContextVar("is_seed_sought", default=False)


def is_seed_sought() -> bool:
    """Whether the present call is to draw from generators as they are.

    A call of a library's loop begins with the state before the look, random generators
    included: with another seed it would draw the same numbers, as if it seeded itself.
    """
    return _is_seed_sought.get()


@contextlib.contextmanager
def _seed_sought() -> Iterator[None]:
    token = _is_seed_sought.set(True)
    try:
        yield
    finally:
        _is_seed_sought.reset(token)


def state_that_begins(runs: Runs, rows: Part) -> list[str]:
    """The names of attributes that the first call makes and later ones read.

    ::

        call 1    the state of the step    makes an attribute, or fills one
        call 2    other weights            with what call 1 has left
        call 3    other weights            the state of the step

    If calls 2 and 3 give the same loss, the attribute is no state: it is not read, or
    computed again, or the same for all weights. Buffers are the state of the step in
    all three, because the engine commits them.
    """
    task = runs.replica_task

    def loss_of_rows() -> float:
        runs.user_code.require_time()
        output = task.output_of(runs.inputs_of(rows))
        return float(loss_of(output, runs.targets_of(rows), task.criterion).detach())

    with runs.surroundings(task):
        buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for replica in task.replicas:
            if isinstance(replica.root, nn.Module):
                for module in replica.root.modules():
                    for name, buffer in module.named_buffers(recurse=False):
                        buffers.append((module, name, buffer, buffer.clone()))
        before = state_of(task.replicas, has_same_rows=True)
        loss_of_rows()
        names = new_in(before, state_of(task.replicas, has_same_rows=True))
        if not names:
            return []
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                write(buffer, value)
        runs.nudge(0, _OTHER_WEIGHTS)
        with_state = loss_of_rows()
    with runs.surroundings(task):
        runs.nudge(0, _OTHER_WEIGHTS)
        without_state = loss_of_rows()
    if not (math.isfinite(with_state) or math.isfinite(without_state)):
        return []  # of other weights the loss says nothing
    difference = Result(with_state, ()).difference_from(Result(without_state, ()))
    return [] if difference <= runs.rounding.limit else names


class _Seeds(OperatorMode):
    """Records the state of a generator before each operator that draws from it."""

    def __init__(self, get_state: Callable[[], Tensor]) -> None:
        super().__init__()
        self.states: list[Tensor] = []
        self._get_state = get_state

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and len(self.states) < _MAX_DRAWS:
            self.states.append(self._get_state())
        return func(*args, **(kwargs or {}))


def draws_are_seeded(runs: Runs, rows: Part) -> list[str]:
    """Names the default generator if a call draws from it after it has seeded it.

    Then each micro-batch draws the same numbers.
    """
    task = runs.replica_task
    # ``torch.manual_seed`` seeds that of the host, too, if others draw on a device.
    generator = torch.default_generator
    states: list[list[Tensor]] = []
    for is_other_seed in (False, True):
        with runs.surroundings(task):
            # Only for calls that draw: engines in other threads have this generator.
            if is_other_seed:
                generator.manual_seed(generator.initial_seed() ^ 1)
            with _seed_sought(), _Seeds(generator.get_state) as seeds:
                task.output_of(runs.inputs_of(rows))
        if not seeds.states:
            return []
        states.append(seeds.states)
    return [str(generator)] if any(map(torch.equal, *states)) else []
