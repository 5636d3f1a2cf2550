"""Exact, or told: when the engine looks whether losses combine as it is about to combine them.

The engine takes the whole batch's loss for the weighted mean (or the sum) of the micro-batches'
losses, and whether that is so lies in the user's criterion. So before the first step of each kind
of criterion and batch a handful of rows is rehearsed; then before steps 8, 16, 32 … with other
rows, and before one whose labels go beyond those that were met so far.

A look never fails a step, except with what it is for: the ``ValueError`` that says what the
criterion seems to do. What could not be told is said once.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.plan import Plan
from scatterpar.replicas.replicas import Replicas, guarded
from scatterpar.report import warn
from scatterpar.step import nested
from scatterpar.step.captured import filled_by_hooks, ignored_values, may_read, surroundings
from scatterpar.step.request import Request
from scatterpar.step.scatter import scatter
from scatterpar.step.substeps import Task, hand_out, prepare_autograd
from scatterpar.step.weights import is_counted
from scatterpar.threads.attempt import Attempt
from scatterpar.threads.crew import Crew
from scatterpar.verify.rehearsal import Finding, Rehearsal, Unsure
from scatterpar.verify.rows import choose, range_of, telling
from scatterpar.verify.words import Words

__all__ = ["Verifier", "difference"]

_OFTEN = 8  # so many inconclusive looks at one kind, then in steps 16, 32, 64 … alone
_KINDS = 1000  # how many kinds are remembered
_PATIENCE_SECONDS = 20.0  # how long the other replicas wait for a look before they join it


@dataclass
class _Kind:
    """What is known of one kind of criterion and batch.

    Attributes:
        steps: how many there were.
        unsure: how many looks in a row told nothing.
        most: look at so many rows at most, where that is known.
        met: how far the labels went with which it agreed; ``None`` where it never did.
        refused: it was refused, and has not agreed since.
        told: what was said already.
    """

    steps: int = 0
    unsure: int = 0
    most: int = 0
    met: list[float] | None = None
    refused: bool = False
    told: set[str] = field(default_factory=set)

    def wants(self, ranges: list[float]) -> bool:
        """Whether to look at this step."""
        if self.refused or self.is_turn:
            return True
        if self.met is None:
            return self.unsure < _OFTEN
        return len(ranges) != len(self.met) or not all(map(float.__le__, ranges, self.met))

    @property
    def is_turn(self) -> bool:
        """Steps 8, 16, 32 …"""
        return self.steps >= _OFTEN and not self.steps & (self.steps - 1)

    def agreed(self, ranges: list[float]) -> None:
        """Labels that go so far are not looked at again before its turn."""
        self.refused, self.unsure = False, 0
        same = self.met is not None and len(self.met) == len(ranges)
        self.met = [*map(max, self.met or (), ranges)] if same else ranges


class Verifier:
    """Remembers which kinds of criterion and batch agreed, and looks at the others."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}

    def look(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[Task],
        parts: Sequence[Replicas],
        peers: object,
    ) -> None:
        """Before the sub-steps: look at a few rows, if they are new or it is their turn.

        Args:
            attempt: the step.
            request: what the user asked for.
            tasks: what each replica is given to do.
            parts: the replicas of the model, and those of the criterion.
            peers: other processes that have rows of the batch.

        Raises:
            ValueError: losses do not combine as the engine's do, or the criterion reads what
                replicas alone have.
        """
        model, criterion = parts[0].roots[0], request.criterion
        alone = peers is None and sum(len(task.share.micro_batches) for task in tasks) == 1
        counted = request.count is None and is_counted(criterion, request.reduction)
        if not request.verify or counted or (alone and not may_read(criterion, model)):
            return
        if len(self._kinds) > _KINDS:
            self._kinds.clear()
        asked = (criterion, request.count, request.reduction, request.inputs, request.targets)
        kind = self._kinds.setdefault(hash((alone, _described(asked, 5))), _Kind())
        kind.steps += 1
        tensors = telling(request)
        ranges = range_of(tensors)
        if not kind.wants(ranges):
            return
        micro = max(stop - start for task in tasks for start, stop in task.share.micro_batches)
        computes = model.forward if criterion is None else criterion
        ignored = {*ignored_values(computes), *ignored_values(request.count)}
        words = Words(request)
        name = filled_by_hooks(criterion, model) if len(tasks) > 1 else None
        if name is not None:
            _say(kind, words.of_shared(name))

        def look(most: int) -> Finding:
            turn = kind.steps.bit_length() - 3 if kind.is_turn else 0
            choose_some = partial(choose, tensors, request.sizes, most, ignored, turn)
            choices = [choose_some(again) for again in (False, True)]

            def rehearse(task: Task) -> Finding:
                return Rehearsal(request, task, parts).run(*([] if alone else choices))

            return _together(attempt, tasks, rehearse)

        try:
            try:
                found = look(kind.most or 2 * micro)
            except Unsure as error:
                if not error.rows:
                    raise
                kind.most = error.rows
                found = look(kind.most)
        except Exception as error:  # whatever the user's code makes of rows that it never met
            kind.unsure += 1
            lasting = not isinstance(error, Unsure) or error.lasting
            if kind.unsure >= (2 if lasting else _OFTEN):  # the step itself may fail by it
                kind.unsure = _OFTEN
                _say(kind, words.unsure(error))
            return
        finally:
            for part in parts:
                part.forget_step()
        if found.stale is not None:
            raise ValueError(words.of_attribute(found.stale))
        if not found.off:
            kind.agreed(ranges)
        elif not found.certain:
            _say(kind, words.of(found, tensors, ignored))
            kind.unsure = _OFTEN
        else:
            kind.refused = True
            raise ValueError(words.of(found, tensors, ignored))


def difference(crew: Crew, module: nn.Module, request: Request, plan: Plan) -> float | None:
    """How far the losses of a handful of rows are off; ``None`` where it cannot be told."""
    choose_some = partial(choose, telling(request), request.sizes)
    with crew.attempt(plan) as attempt:
        parts, criteria = crew.refresh(module, request.criterion, attempt.ledger)
        arrivals = scatter(request.batch, plan, request.dim, attempt.ledger)
        tasks = hand_out(request, plan, parts, arrivals, criteria)
        prepare_autograd()

        def look(most: int) -> Finding:
            choices = [choose_some(most, (), 0, again) for again in (False, True)]
            return _together(
                attempt, tasks, lambda task: Rehearsal(request, task, parts).run(*choices)
            )

        most = request.rows
        try:
            with guarded(parts):
                while most:
                    try:
                        return look(most).off
                    except Unsure as error:
                        most = error.rows if error.rows < most else 0
            return None
        except Exception:  # whatever the user's code makes of rows that it never met
            return None
        finally:
            for part in parts:
                part.forget_step()
            attempt.undo()


def _say(kind: _Kind, text: str) -> None:
    """Warn once of each kind."""
    start = text[:60]
    if start not in kind.told:
        warn(text)
        kind.told.add(start)


def _together(
    attempt: Attempt, tasks: Sequence[Task], function: Callable[[Task], Finding]
) -> Finding:
    """What the function makes of the first replica's task.

    The user's code may wait for the other replicas, as a loss across them does at a barrier. So
    when it takes long, the others do the same, each with its own.
    """
    ended = threading.Event()

    def first() -> Finding:
        try:
            return function(tasks[0])
        finally:
            ended.set()

    def follow(task: Task) -> None:
        if not ended.wait(_PATIENCE_SECONDS):
            function(task)

    calls: list[Callable[[], Any]] = [first, *(partial(follow, task) for task in tasks[1:])]
    devices = [task.share.device for task in tasks]
    found: Finding = attempt.workers.parallel_apply(calls, [()] * len(calls), devices=devices)[0]
    return found


def _described(value: Any, depth: int) -> Hashable:
    """What something is made of: code, flags, dtypes; no address, and nothing of the user's.

    A lambda that is made anew in every step is of one kind; the same lambda over other things
    (class weights where there were none) is of another.
    """
    inside = partial(_described, depth=depth - 1)
    if value is None or isinstance(value, (bool, str, torch.dtype)):
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if not depth:
        return name
    if isinstance(value, functools.partial):
        return tuple(map(inside, [value.func, *value.args, *sorted(value.keywords.items())]))
    if isinstance(value, types.MethodType):
        return inside(value.__func__), inside(value.__self__)
    if isinstance(value, types.FunctionType):
        own, of_file = surroundings(value)
        flags = {n: v for n, v in of_file.items() if isinstance(v, (bool, str, Tensor, type(None)))}
        return hash(value.__code__), *((n, inside(v)) for n, v in sorted((flags | own).items()))
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return value.__qualname__
    if isinstance(value, tuple):
        return tuple(map(inside, value))
    if isinstance(value, (dict, list)):  # such as a history, which gets longer in every step
        items = [*nested.leaves(value)][:32]
        return name, frozenset(map(inside, [i for i in items if not isinstance(i, (int, float))]))
    own = {n: v for n, v in getattr(value, "__dict__", {}).items() if n[0] != "_"}
    if isinstance(value, nn.Module):
        own |= dict(value.named_buffers(recurse=False)) | dict(value.named_children())
    return name, *((n, _described(v, min(depth - 1, 2))) for n, v in sorted(own.items())[:32])
