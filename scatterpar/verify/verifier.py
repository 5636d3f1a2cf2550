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

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from scatterpar.devices.readout import Readout
from scatterpar.plan import Plan
from scatterpar.report import warn
from scatterpar.step.captured import ignored_values
from scatterpar.step.criteria import is_counted
from scatterpar.step.markers import row_tensors
from scatterpar.step.request import Request
from scatterpar.step.slices import take
from scatterpar.verify.kinds import holes, is_plain, kind_of_batch, kind_of_function
from scatterpar.verify.look import Look
from scatterpar.verify.pairs import choose

__all__ = ["Verifier"]

_LOOKS = 8  # so many inconclusive looks at one kind, then in steps 16, 32, 64 … alone
_KINDS = 1000  # how many kinds are remembered

Holes = frozenset[Hashable]


class Verifier:
    """Remembers which kinds of criterion and batch agreed, and says when to look."""

    def __init__(self) -> None:
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
        if request.whole_batch or not request.verify:
            return None
        counted = request.count is None and is_counted(request.criterion, request.reduction)
        if counted:
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
                sum(len(share.micro_batches) for share in plan.shares) > 1,
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

    def look(self, weights: Sequence[Sequence[float]]) -> Look | None:
        """What to look at in this step; ``None`` where it is known already.

        Args:
            weights: of each micro-batch, share by share.
        """
        try:
            return self._look(list(chain(*weights)))
        except Exception:  # of something of the user's that cannot be looked at
            return None

    def _look(self, weights: list[float]) -> Look | None:
        found, dim = self.holes(), self.request.dim
        if not self.verifier.wants(self.kind, found):
            return None
        spans = [span for share in self.plan.shares for span in share.micro_batches]
        pieces = [row_tensors(take(self.labelled, start, stop, dim)) for start, stop in spans]
        both = choose(pieces, self.ignored, weights, dim) if len(pieces) > 1 else (0, 0)
        return Look(
            self.request,
            self.plan,
            both,
            labels=[pieces[position] for position in both],
            weights=[weights[position] for position in both],
            agreed=partial(self.verifier.agreed, self.kind, found),
            warn=partial(self.verifier.warn, self.kind),
        )
