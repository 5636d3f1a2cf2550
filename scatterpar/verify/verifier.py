"""The engine checks its own arithmetic: do losses combine as it is about to combine them?

The engine takes the whole batch's loss for the weighted mean (or the sum) of the micro-batches'
losses, and whether that is so lies in the user's criterion. So, the first time that it meets a
criterion, it evaluates that on two micro-batches' outputs, joined and apart, and compares::

    d criterion(joined outputs, joined targets) / d outputs
    weight * d criterion(outputs, targets) / d outputs         of each of the two

Gradients, since wrong weights may not show in a loss: that of a model at initialisation is the
same for all rows. Where the module computes the loss there are no outputs to start from; then
the loss of one more forward pass of the joined rows is compared.

A look never fails a step, except with what it is for: the ``ValueError`` that says what the
criterion seems to do. What could not be told is looked at again in a later step.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.ledger import Ledger
from scatterpar.devices.readout import Readout
from scatterpar.plan import Plan
from scatterpar.replicas.mirror import owner_of
from scatterpar.report import warn
from scatterpar.step import nested
from scatterpar.step.captured import captured_tensors, ignored_values
from scatterpar.step.markers import row_tensors, transform
from scatterpar.step.request import Request
from scatterpar.step.rows import opened, take
from scatterpar.step.scatter import as_call
from scatterpar.step.substeps import Result, loss_of
from scatterpar.step.weights import is_counted
from scatterpar.threads.context import autocast_types
from scatterpar.threads.crew import Task
from scatterpar.threads.randomness import RandomStreams
from scatterpar.threads.workers import Workers
from scatterpar.verify.evidence import (
    Finding,
    Pieces,
    Unsure,
    by_gradients,
    by_values,
    in_parameters,
)
from scatterpar.verify.kinds import (
    has_batch_statistics,
    holes,
    is_integer,
    is_plain,
    kind_of_batch,
    kind_of_function,
)
from scatterpar.verify.pairs import choose
from scatterpar.verify.untouched import untouched

__all__ = ["Look", "Verifier"]

_LOOKS = 8  # so many inconclusive looks at one kind, then in steps 16, 32, 64 … alone
_KINDS = 1000  # how many kinds are remembered
_ALIKE = 1e-3  # so near are weights that are called the same
_PADDING = -100  # the label that torch's losses leave out by default

Holes = frozenset[Hashable]


class Verifier:
    """Remembers which kinds of criterion and batch agreed, and says when to look.

    Args:
        enabled: look at all.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self._agreed: dict[int, list[Holes]] = {}
        self._steps: Counter[tuple[int, Holes]] = Counter()
        self._warned: set[int] = set()

    def glimpse(self, request: Request, plan: Plan, readout: Readout) -> Glimpse | None:
        """What kind of step this is; ``None`` where there is nothing to look at.

        Args:
            request: what the user asked for.
            plan: how the batch is cut.
            readout: what has to be known of the batch itself is asked for here.
        """
        if request.whole_batch or not self._enabled:
            return None
        counted = request.count is None and is_counted(request.criterion, request.reduction)
        if counted or sum(len(share.micro_batches) for share in plan.shares) < 2:
            return None
        try:
            return self._glimpse(request, plan, readout)
        except Exception:  # of something of the user's that cannot be looked at
            return None

    def _glimpse(self, request: Request, plan: Plan, readout: Readout) -> Glimpse | None:
        tensors = row_tensors(request.targets)
        labelled: Any = request.targets
        if request.criterion is None or not tensors:
            labelled = (request.targets, request.inputs)
            tensors = row_tensors(labelled)
        if not all(map(is_plain, tensors)):
            return None
        kind = hash(
            (
                kind_of_function(request.criterion),
                kind_of_function(request.count),
                kind_of_batch(request.inputs, request.targets),
                request.reduction,
            )
        )
        ignored = ignored_values(request.criterion)
        found = holes(tensors, ignored, readout)
        return Glimpse(self, request, plan, labelled, kind, ignored, found)

    def wants(self, kind: int, found: Holes) -> bool:
        """Whether to look at this step: at the first of a kind, and where that told nothing."""
        if any(found <= seen for seen in self._agreed.get(kind, ())):
            return False
        if len(self._agreed) + len(self._steps) > _KINDS:
            self._agreed.clear()
            self._steps.clear()
        self._steps[kind, found] += 1
        steps = self._steps[kind, found]
        return steps <= _LOOKS or not steps & (steps - 1)

    def agreed(self, kind: int, found: Holes) -> None:
        """From now on this kind is not looked at, nor where it has fewer holes."""
        self._agreed.setdefault(kind, []).append(found)

    def warn(self, kind: int, text: str) -> None:
        """Warn once of each kind."""
        if kind not in self._warned:
            warn(text)
            self._warned.add(kind)


@dataclass(frozen=True)
class Glimpse:
    """What a step shows before it is weighed: its kind, and, once it is read, its holes."""

    verifier: Verifier
    request: Request
    plan: Plan
    labelled: Any
    kind: int
    ignored: set[int]
    holes: Callable[[], Holes]

    def look(self, weights: Sequence[Sequence[float]], dim: int) -> Look | None:
        """What to look at in this step; ``None`` where it is known already.

        Args:
            weights: of each micro-batch, share by share.
            dim: the dimension that holds the rows.
        """
        try:
            return self._look(list(chain(*weights)), dim)
        except Exception:  # of something of the user's that cannot be looked at
            return None

    def _look(self, weights: list[float], dim: int) -> Look | None:
        found = self.holes()
        if not self.verifier.wants(self.kind, found):
            return None
        spans = [span for share in self.plan.shares for span in share.micro_batches]
        pieces = [row_tensors(take(self.labelled, start, stop, dim)) for start, stop in spans]
        both = choose(pieces, self.ignored, weights, dim)
        labels = [pieces[position] for position in both]
        kind = (self.kind, found)
        return Look(self.verifier, kind, self.request, self.plan, labels, weights, both, dim)


@dataclass
class Look:
    """One look at two micro-batches: ``see`` their outputs in the sub-steps, then ``judge``."""

    verifier: Verifier
    kind: tuple[int, Holes]
    request: Request
    plan: Plan
    labels: list[list[Tensor]]
    weights: list[float]
    both: tuple[int, int]
    dim: int
    outputs: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = [len(share.micro_batches) for share in self.plan.shares]
        self._firsts = [sum(counts[:k]) for k in range(len(counts))]
        spans = [span for share in self.plan.shares for span in share.micro_batches]
        self._spans = [spans[position] for position in self.both]

    def see(self, replica: int, number: int, output: Any) -> None:
        """Keep a copy of the output, in the host's memory, if it is of one of the two."""
        position = self._firsts[replica] + number
        if self.request.criterion is not None and position in self.both:
            try:
                own = all(map(is_plain, nested.tensors(output)))
                self.outputs[position] = nested.transform(_kept, output) if own else None
            except Exception:  # such as memory that ran out
                self.outputs[position] = None

    def judge(
        self,
        tasks: Sequence[Task],
        results: Sequence[Result],
        streams: RandomStreams,
        workers: Workers,
    ) -> None:
        """Remember that the losses combine as they should, or that it could not be told.

        Args:
            tasks: what each replica was given.
            results: what it made of it.
            streams: the random numbers of the step.
            workers: who lets interrupts through.

        Raises:
            ValueError: they do not.
        """
        losses = list(chain.from_iterable(result.losses for result in results))
        task = tasks[bisect(self._firsts, self.both[0]) - 1]
        try:
            finding = self._find(
                task, (losses[self.both[0]], losses[self.both[1]]), streams, workers
            )
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever the user's code makes of rows it never met
            if not isinstance(error, Unsure) or error.lasting:
                self._warn_of_padding()
            return
        finally:
            self.outputs.clear()
        if finding.seems != "right":
            raise ValueError(self._in_words(finding))
        self.verifier.agreed(*self.kind)

    def _find(
        self,
        task: Task,
        losses: tuple[float, float],
        streams: RandomStreams,
        workers: Workers,
    ) -> Finding:
        finding: Finding | None = None
        if task.criterion is not None:
            given = [self.outputs[position] for position in self.both]
            if any(output is None for output in given):
                raise Unsure("outputs of the user's own class, or no memory for them")
            outputs = self._pieces(task, given)
            compare = partial(by_gradients, task.criterion, outputs)
            finding = _without_a_trace(task, workers, compare)
            if finding is not None and finding.seems == "right":
                return finding
        inputs = self._pieces(task, self._rows(self.request.inputs))
        if finding is not None:
            return _confirmed(task, workers, inputs, finding)
        if streams.drawn:
            raise Unsure("the module draws random numbers")
        if has_batch_statistics(task.module):
            raise Unsure("batch normalisation ties rows to each other")
        look = partial(by_values, _forward(task), inputs, losses, _dtypes(task))
        found: Finding = _without_a_trace(task, workers, look)
        return found

    def _pieces(self, task: Task, given: Sequence[Any]) -> Pieces:
        with Ledger() as ledger:  # of which nobody will hear
            bring = partial(transform, partial(_brought, ledger, task.share.device))
            one, other = map(bring, given)
            first, second = map(bring, self._rows(self.request.targets))
        a, b = (self.weights[position] for position in self.both)
        total = 1.0 if self.request.reduction == "sum" else a + b
        if not total:
            raise Unsure("neither of the two adds anything", lasting=False)
        rows = [stop - start for start, stop in self._spans]
        return Pieces(
            (one, other), (first, second), (a / total, b / total), (rows[0], rows[1]), self.dim
        )

    def _rows(self, value: Any) -> list[Any]:
        """The two micro-batches' rows of the caller's own batch."""
        return [take(value, start, stop, self.dim) for start, stop in self._spans]

    def _in_words(self, finding: Finding) -> str:
        pieces = " and ".join(f"{start}:{stop}" for start, stop in self._spans)
        adds = self.request.reduction == "sum"
        a, b = (self.weights[position] for position in self.both)
        total = 1.0 if adds else a + b
        its = _pair(finding.weights) if finding.weights else "no two numbers"
        what = "loss" if self.request.criterion is None else "gradient"
        return (
            f"{self._criterion()} does not combine micro-batches as the engine was about to "
            f"combine them. The engine {'adds up' if adds else 'averages'} their losses: those of "
            f"rows {pieces} (of {self.plan.rows}) times {_pair((a / total, b / total))}; but "
            f"the loss of these rows together is theirs times {its}. The {what} would be off by "
            f"{100 * finding.off:.2g} % of its size. {self._advice(finding)} Nothing was changed; "
            f"verify=False switches this check off."
        )

    def _advice(self, finding: Finding) -> str:
        if finding.seems == "sum":
            return 'It seems to be a sum: pass reduction="sum" (for a mean, count= says of what).'
        if finding.seems == "mean":
            return 'It seems to be a mean over rows: pass reduction="mean", without count=.'
        if finding.seems == "coupled":
            return (
                "It seems to compare rows with each other, and is neither a mean nor a sum of what "
                "it is of parts: no count= or reduction= can say that, whole_batch=True does."
            )
        return (
            "It seems to be a mean over something else than what was counted: pass "
            "count=, a function of (inputs, targets) that gives the number of its terms "
            f'(for a sum, reduction="sum").{self._hint(finding)}'
        )

    def _hint(self, finding: Finding) -> str:
        """Whether it is the labels that are not ignored, shifted or not."""
        assert finding.weights is not None
        for one, other in zip(*self.labels, strict=True):
            for shifted in (False, True):
                if not is_integer(one) or (shifted and one.ndim < 2):
                    continue
                a, b = (
                    int((labels[:, 1:] if shifted else labels).ne(_PADDING).sum())
                    for labels in (one, other)
                )
                if a + b and abs(a / (a + b) - finding.weights[0]) < _ALIKE:
                    return (
                        f" That is what labels give that are not {_PADDING}, here {a} and {b}: "
                        f"count=scatterpar.count_labels({'shifted=True' if shifted else ''})."
                    )
        return ""

    def _criterion(self) -> str:
        criterion = self.request.criterion
        if criterion is None:
            return "the module's own loss"
        while isinstance(criterion, partial):
            criterion = criterion.func
        name = getattr(criterion, "__qualname__", None)
        return f"the criterion {name if isinstance(name, str) else type(criterion).__name__}"

    def _warn_of_padding(self) -> None:
        """Where nobody could tell, and labels are padded, nobody should rely on it."""
        request = self.request
        if request.count is not None or request.reduction != "mean":
            return
        if any(is_integer(t) and (t == _PADDING).any() for own in self.labels for t in own):
            self.verifier.warn(
                self.kind[0],
                f"labels hold -100, and whether {self._criterion()} leaves them out could "
                f"not be checked; the engine weights micro-batches by their rows. If it averages "
                f"over the other labels, pass count=scatterpar.count_labels() (with shifted=True "
                f"for a causal language model); verify=False silences this",
            )


def _pair(numbers: Sequence[float]) -> str:
    return f"{numbers[0]:.4g} and {numbers[1]:.4g}"


def _without_a_trace(
    task: Task, workers: Workers, function: Callable[[], Any], *, whatever: bool = False
) -> Any:
    """The function's result, unless (but with ``whatever``) it draws or keeps a state."""
    owner = owner_of(task.criterion)
    roots = [root for root in (task.module, owner) if isinstance(root, nn.Module)]
    tensors = captured_tensors(task.criterion)
    with untouched(roots, tensors, [task.share.device]) as traces:
        (result,) = workers.parallel_apply([function], [()], devices=[task.share.device])
    if traces.any and not whatever:
        raise Unsure("random numbers were drawn, or a state was changed")
    return result


def _confirmed(task: Task, workers: Workers, inputs: Pieces, finding: Finding) -> Finding:
    assert isinstance(task.module, nn.Module)
    look = partial(in_parameters, task.module, inputs, finding, autocast_types())
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
