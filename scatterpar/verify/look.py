"""One look at two micro-batches of a step: do their losses combine as the step combines them?"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from scatterpar.devices.ledger import Ledger
from scatterpar.plan import Plan
from scatterpar.replicas.bound import owner_of
from scatterpar.step import nested
from scatterpar.step.captured import captured_tensors, filled_by_hooks, set_by_forward
from scatterpar.step.markers import transform
from scatterpar.step.request import Request
from scatterpar.step.slices import opened, take
from scatterpar.step.substeps import Result, loss_of
from scatterpar.step.task import Task, as_call
from scatterpar.threads.attempt import Attempt
from scatterpar.threads.context import autocast_types
from scatterpar.threads.workers import Workers
from scatterpar.verify.evidence import Finding, Pieces, Unsure
from scatterpar.verify.gradients import by_gradients, in_parameters
from scatterpar.verify.kinds import has_batch_statistics, is_plain
from scatterpar.verify.untouched import untouched
from scatterpar.verify.values import by_values
from scatterpar.verify.words import Words

__all__ = ["Look"]

_PATIENCE_SECONDS = 2.0  # how long the other replicas wait for a look before they join it


@dataclass
class Look:
    """One look at two micro-batches: ``see`` their outputs in the sub-steps, then ``judge``.

    Attributes:
        request: the step's.
        plan: how its batch is cut.
        both: the positions of the two among all micro-batches, in order; twice that of the only
            one, where there are no two.
        labels: what may hold labels in each of them.
        weights: the factors of their losses.
        agreed: is called where they combine as they should.
        warn: is called, with a text, where that could not be told and matters.
        outputs: copies of what the module gave for them.
    """

    request: Request
    plan: Plan
    both: tuple[int, int]
    labels: list[list[Tensor]]
    weights: list[float]
    agreed: Callable[[], None]
    warn: Callable[[str], None]
    outputs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [len(share.micro_batches) for share in self.plan.shares]
        self._firsts = [sum(counts[:k]) for k in range(len(counts))]
        spans = [span for share in self.plan.shares for span in share.micro_batches]
        self._spans = [spans[position] for position in self.both]
        self._compares = self.both[0] != self.both[1]

    def see(self, replica: int, number: int, output: Any) -> None:
        """Keep a copy of the output, in the host's memory, if it is of one of the two."""
        position = self._firsts[replica] + number
        if self._compares and self.request.criterion is not None and position in self.both:
            try:
                own = all(map(is_plain, nested.tensors(output)))
                self.outputs[position] = nested.transform(_kept, output) if own else None
            except Exception:  # such as memory that ran out
                self.outputs[position] = None

    def judge(self, attempt: Attempt, tasks: Sequence[Task], results: Sequence[Result]) -> None:
        """Remember that the losses combine as they should, or that it could not be told.

        Args:
            attempt: the step.
            tasks: what each replica was given.
            results: what it made of it.

        Raises:
            ValueError: they do not, or the criterion reads what replicas alone have.
        """
        losses = list(chain.from_iterable(result.losses for result in results))
        task = tasks[bisect(self._firsts, self.both[0]) - 1]
        words = Words(self.request, self._spans, self.labels, self.weights)
        if (attribute := self._asked(set_by_forward, task)) is not None:
            raise ValueError(words.of_attribute(attribute))
        if len(tasks) > 1 and (name := self._asked(filled_by_hooks, task)) is not None:
            self.warn(words.of_shared(name))
        if not self._compares:
            self.agreed()
            return
        try:
            own = losses[self.both[0]], losses[self.both[1]]
            finding = self._find(attempt, task, [t for t in tasks if t is not task], own)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the user's code makes of rows it never met
            if (not isinstance(error, Unsure) or error.lasting) and words.padding_matters():
                self.warn(words.of_padding())
            return
        finally:
            self.outputs.clear()
        if finding.seems != "right":
            raise ValueError(words.of(finding))
        self.agreed()

    def _asked(self, question: Callable[[Any, nn.Module], str | None], task: Task) -> str | None:
        try:
            return question(self.request.criterion, cast(nn.Module, task.module))
        except Exception:  # of something of the user's that cannot be looked at
            return None

    def _find(
        self, attempt: Attempt, task: Task, others: Sequence[Task], losses: tuple[float, float]
    ) -> Finding:
        workers = attempt.workers
        finding: Finding | None = None
        if task.criterion is not None:
            given = [self.outputs[position] for position in self.both]
            if any(output is None for output in given):
                raise Unsure("outputs of the user's own class, or no memory for them")

            def compare(task: Task) -> Finding | None:
                assert task.criterion is not None
                return by_gradients(task.criterion, self._pieces(task, given))

            finding = _without_a_trace(task, workers, compare, others)
        if finding is not None and finding.slopes is None:
            return finding
        if finding is not None:
            inputs = self._pieces(task, self._rows(self.request.inputs))
            return _confirmed(task, workers, inputs, finding)
        if attempt.streams.drawn:
            raise Unsure("the module draws random numbers")
        if has_batch_statistics(task.module):
            raise Unsure("batch normalisation ties rows to each other")

        def look(task: Task) -> Finding:
            inputs = self._pieces(task, self._rows(self.request.inputs))
            return by_values(_forward(task), inputs, losses, _dtypes(task))

        found: Finding = _without_a_trace(task, workers, look, others)
        return found

    def _pieces(self, task: Task, given: Sequence[Any]) -> Pieces:
        with Ledger() as ledger:  # of which nobody will hear
            bring = partial(transform, partial(_brought, ledger, task.share.device))
            one, other = map(bring, given)
            first, second = map(bring, self._rows(self.request.targets))
        a, b = self.weights
        total = a + b if self.request.is_mean else 1.0
        if not total:
            raise Unsure("neither of the two adds anything", lasting=False)
        rows = [stop - start for start, stop in self._spans]
        return Pieces(
            (one, other),
            (first, second),
            (a / total, b / total),
            (rows[0], rows[1]),
            self.request.dim,
        )

    def _rows(self, value: Any) -> list[Any]:
        """The two micro-batches' rows of the caller's own batch."""
        return [take(value, start, stop, self.request.dim) for start, stop in self._spans]


def _without_a_trace(
    task: Task,
    workers: Workers,
    function: Callable[[Task], Any],
    others: Sequence[Task] = (),
    *,
    whatever: bool = False,
) -> Any:
    """The function's result, unless (but with ``whatever``) it draws or keeps a state.

    The user's code may wait for the other replicas, as a loss across them does at a barrier. So
    when it takes long, the others do the same, each with its own.
    """
    ended = threading.Event()

    def call() -> Any:
        try:
            return function(task)
        finally:
            ended.set()

    def follow(other: Task) -> None:
        if not ended.wait(_PATIENCE_SECONDS):
            with contextlib.suppress(Exception), untouched(_roots(other), (), ()):
                function(other)

    devices = [each.share.device for each in (task, *others)]
    calls: list[Callable[[], Any]] = [call, *[partial(follow, other) for other in others]]
    with untouched(_roots(task), captured_tensors(task.criterion), devices) as traces:
        result, *_ = workers.parallel_apply(calls, [()] * len(calls), devices=devices)
    if traces.any and not whatever:
        raise Unsure("random numbers were drawn, or a state was changed")
    return result


def _roots(task: Task) -> list[nn.Module]:
    owner = owner_of(task.criterion)
    return [root for root in (task.module, owner) if isinstance(root, nn.Module)]


def _confirmed(task: Task, workers: Workers, inputs: Pieces, finding: Finding) -> Finding:
    assert isinstance(task.module, nn.Module)

    def look(task: Task) -> Finding:
        assert isinstance(task.module, nn.Module)
        return in_parameters(task.module, inputs, finding, autocast_types())

    try:
        found: Finding = _without_a_trace(task, workers, look, whatever=True)
    except Exception:  # what the outputs' gradients say, stands
        return finding
    return found


def _forward(task: Task) -> Callable[[Any, Any], Tensor]:
    def loss(inputs: Any, targets: Any) -> Tensor:
        with torch.no_grad():
            args, kwargs = as_call(opened(transform(_copied, inputs)))
            output = task.module(*args, **kwargs)
            return loss_of(output, opened(transform(_copied, targets)), task.criterion).detach()

    return loss


def _dtypes(task: Task) -> set[torch.dtype]:
    """What the module computes in."""
    found = {torch.get_autocast_dtype(kind) for kind in autocast_types()}
    if isinstance(task.module, nn.Module):
        tensors = chain(task.module.parameters(), task.module.buffers())
        found |= {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return found


def _kept(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().to("cpu", copy=True).requires_grad_(leaf.requires_grad)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _brought(ledger: Ledger, device: torch.device, leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    copy = ledger.copy(leaf.detach(), device, "compute")
    return copy.requires_grad_(leaf.requires_grad)
