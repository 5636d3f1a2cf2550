"""The pair's looks: do losses of parts of outputs combine to the loss of all their
rows?

The pair has outputs and targets, and no module. So a look computes the criterion alone,
on a few rows of the outputs, without their graph: at once and in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.joining import join_rows
from scatterpar.devices.device_ids import physical
from scatterpar.devices.transfers import to_device
from scatterpar.plan import Plan
from scatterpar.replicas.references import module_of
from scatterpar.state.journal import Journal
from scatterpar.state.walk import Walk
from scatterpar.step.loss_weights import is_cross_entropy
from scatterpar.step.request import Request
from scatterpar.torch_private import (
    hooks_taken_off,
    is_function_of_user,
    leaves_of,
    nodes_reached,
)
from scatterpar.verify.comparison import (
    Inconclusive,
    Result,
    num_with_gradient,
    weighted_sum,
)
from scatterpar.verify.constant_numbers import ConstantNumbers
from scatterpar.verify.dropped_records import records_dropped
from scatterpar.verify.dropped_warnings import warnings_dropped
from scatterpar.verify.gradient_check import moved_to, uses_batch_statistics
from scatterpar.verify.look_losses import Losses, name_of, weighted_parts
from scatterpar.verify.look_times import Looks, shown_reason
from scatterpar.verify.measurements import losses_of_cuts
from scatterpar.verify.nudges import Nudge, rounding_limit
from scatterpar.verify.output_differences import cut_rows
from scatterpar.verify.ranges import informative_tensors, ranges_of_step
from scatterpar.verify.rounding import HALF_PRECISION, Rounding
from scatterpar.verify.rows import (
    MAX_BYTES,
    MIN_ROWS,
    Part,
    Parts,
    RowChoice,
    ignored_values,
)
from scatterpar.verify.schedule import Kind
from scatterpar.verify.single_precision import OneDtype, SinglePrecision
from scatterpar.verify.verdicts import (
    in_lines,
    refused_injection,
    verdict_of,
)

_MAX_ROWS = 16


class OutputLooks:
    """Looks at calls of one criterion."""

    def __init__(self) -> None:
        self._looks = Looks()

    def check(self, request: Request, plan: Plan, outputs: Sequence[Any]) -> None:
        """Look at a few rows of a call, if that is due.

        ``request`` has the targets of all rows.

        Raises:
            ValueError: the losses of parts, weighted as in the call, do not give the
                loss or the gradient of all their rows.
        """
        self._looks.begin()
        kind, details = self._looks.kinds.kind_of(
            request, request.batches[0], is_divided=True, flags=()
        )
        ranges: Sequence[Tensor] = ()
        if not is_cross_entropy(request.criterion):  # the pair counts as torch does
            ranges = ranges_of_step(request)
        if not kind.is_due(ranges, details):
            return
        with self._looks.counted(kind), warnings_dropped():
            try:
                self._look(request, plan, outputs, kind)
            except Inconclusive as error:
                text = ""
                if not is_cross_entropy(request.criterion):
                    text = _text_of_unchecked(request, error)
                self._looks.note_inconclusive(kind, error, text)
            else:
                kind.note_agreement(ranges)

    def tell(self) -> None:
        """The call has succeeded: warn of an inconclusive look."""
        self._looks.tell()

    def _look(
        self, of_targets: Request, plan: Plan, outputs: Sequence[Any], kind: Kind
    ) -> None:
        # One graph shows it, because all replicas have the same layers.
        if injects_gradient(outputs[-1]):
            raise ValueError(refused_injection("the model").text)
        ignored = ignored_values(of_targets.criterion, of_targets.count)
        tensors = informative_tensors(of_targets)
        choice = RowChoice(tensors, plan.rows, ignored, kind.looks, is_divided=True)
        parts = choice.parts(_affordable_rows(outputs, plan))
        try:
            refusal = OutputLook(of_targets, plan, outputs, ignored).refusal(parts)
        except Inconclusive:
            raise
        except Exception as error:  # raised by user code, for these rows
            raise Inconclusive(f"{type(error).__name__}: {error}") from None
        if refusal:
            raise ValueError(refusal)


def injects_gradient(output: Any) -> bool:
    """Whether the graph of a replica's output adds a gradient of its own.

    Then a loss times zero has a gradient. It is asked of graphs alone that have an
    ``autograd.Function`` of the user's, because the answer takes a backward pass.
    """
    roots = [tensor for tensor in nested.tensors(output) if tensor.requires_grad]
    nodes: list[Any] = []
    for root in roots:
        nodes += nodes_reached(root)
    if not any(map(is_function_of_user, nodes)):
        return False
    leaves = leaves_of(nodes)
    zeros = [torch.zeros_like(root) for root in roots]
    try:
        with hooks_taken_off(leaves):
            gradients = torch.autograd.grad(
                roots, leaves, zeros, retain_graph=True, allow_unused=True
            )
    except RuntimeError:  # a graph that allows one backward pass only
        return False
    dense = [
        gradient
        for gradient in gradients
        if gradient is not None and gradient.layout == torch.strided
    ]
    result = Result(0.0, dense)
    return result.has_gradient and result.is_finite


def _text_of_unchecked(request: Request, error: Inconclusive) -> str:
    """The warning for inconclusive looks, with the assumption and what to pass."""
    assumed = "a mean over its terms" if request.is_mean else "a sum"
    return in_lines(
        f"could not check how {name_of(request)} combines the losses of "
        f"replicas: {shown_reason(error)}.",
        f"The pair assumes {assumed}. Pass count= or reduction= if it is not, or call "
        f"the plain criterion on gather(outputs, device).",
        "verify=False does not check.",
    )


def _affordable_rows(outputs: Sequence[Any], plan: Plan) -> int:
    """The number of rows of a look: fewer if outputs are large."""
    tensors = nested.tensors(list(outputs))
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    # One more, because outputs may have no tensors.
    affordable = MAX_BYTES * plan.rows // (size + 1)
    return max(MIN_ROWS, min(_MAX_ROWS, affordable))


class OutputLook:
    """One look, in the caller's thread, on the master."""

    def __init__(
        self,
        of_targets: Request,
        plan: Plan,
        outputs: Sequence[Any],
        ignored: Sequence[int],
    ) -> None:
        self._of_targets = of_targets
        self._ignored = ignored
        self._plan = plan
        self._outputs = outputs
        self._device = physical(plan.shares[0].device)
        self._rounding = Rounding(self._device)
        roots = of_targets.criterion, of_targets.count
        self._state = Journal(Walk(roots), [self._device], guarded=())

    def refusal(self, parts: Parts) -> str:
        """The text of the refusal; empty if the losses of these parts combine.

        Raises:
            Inconclusive: the look could not tell.
        """
        module = module_of(self._of_targets.criterion)
        if module is not None and any(map(uses_batch_statistics, module.modules())):
            raise Inconclusive("a batch normalisation ties rows to each other")
        # The caller may be within no_grad, and a look needs gradients.
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            self._state.restored(),
            records_dropped(),
        ):
            losses = self._losses_of(parts)
            if losses.difference <= losses.limit:
                return ""
            if losses.actual.is_finite and self._is_rounding_alone(losses):
                raise Inconclusive("its gradient may be nothing but rounding")
            return verdict_of(losses).text

    def _losses_of(self, parts: Parts) -> _LossesOfOutputs:
        """The losses of the rows of these parts, at once and in parts.

        Raises:
            Inconclusive: a gradient is NaN or infinite, or all are zero, or the
                criterion gives another loss each time.
        """
        rows = list(chain(*parts))
        request = self._request_of(rows)
        output = request.batches[0].inputs
        consecutive, weights = weighted_parts(request, _consecutive(parts))
        all_rows = [range(len(rows))]
        (expected,) = self._results(request, output, all_rows)
        results = self._results(request, output, consecutive)
        (repeated,) = self._results(request, output, all_rows)
        tolerance = self._rounding.tolerance
        if not expected.is_finite:
            raise Inconclusive("a gradient is NaN or infinite")
        if not expected.has_gradient:
            raise Inconclusive("all gradients are zero")
        if repeated.difference_from(expected) > tolerance:
            raise Inconclusive("it gives another result each time", patience=2)
        if not request.is_mean and num_with_gradient(results) < len(results):
            raise Inconclusive("some parts have no gradient: it may be a mean or a sum")
        actual = weighted_sum(results, weights)
        losses = _LossesOfOutputs(
            request, consecutive, weights, expected, actual, tolerance, self._ignored
        )
        losses.results_of_parts = results
        return losses

    def _is_rounding_alone(self, losses: _LossesOfOutputs) -> bool:
        """Whether rounding of the outputs changes the loss of all rows as much."""
        nudge = Nudge(0, self._rounding.coarsest_eps)

        def nudged(tensor: Tensor) -> Tensor:
            if not tensor.requires_grad:
                return tensor
            return nudge(tensor.detach()).requires_grad_()

        request = losses.request
        output = nested.map_tensors(nudged, request.batches[0].inputs)
        (result,) = self._results(request, output, [range(losses.num_rows)])
        effect = result.difference_from(losses.expected)
        return losses.difference <= rounding_limit([effect], losses.difference)

    def _results(self, request: Request, output: Any, parts: Parts) -> list[Result]:
        """The loss of each part, from the same state and with constant numbers."""
        targets = []
        for part in parts:
            batch = request.batches[0].without_inputs().select(part)
            targets.append(moved_to(self._device, batch)[1])
        # Before the run, too, because count= may have written something.
        self._state.restore()
        with ConstantNumbers(), OneDtype(), SinglePrecision():
            results = losses_of_cuts(
                output, targets, parts, request, request.criterion, self._rounding
            )
        self._state.restore()
        return results

    def _request_of(self, rows: Part) -> Request:
        """The call's request for these rows alone, with outputs without their graph."""
        dim = self._of_targets.dim
        # Row by row, because they come from several replicas.
        entries = [self._output_of(row) for row in rows]
        output = join_rows(entries, dim, [1] * len(rows))
        output = nested.map_tensors(_as_leaf, output)
        targets = self._of_targets.batches[0].select(rows).targets
        return replace(
            self._of_targets, batches=[batch_of(output, targets, len(rows), dim)]
        )

    def _output_of(self, row: int) -> Any:
        """The output of one row, in the master's memory."""
        for share, output in zip(self._plan.shares, self._outputs, strict=True):
            if row < share.stop:
                position = row - share.start
                cut = cut_rows(output, position, 1, share.rows, self._of_targets.dim)
                return nested.map_tensors(self._moved, cut)
        raise AssertionError("each row is in a share")

    def _moved(self, tensor: Tensor) -> Tensor:
        return to_device(tensor.detach(), self._device)


class _LossesOfOutputs(Losses):
    """The losses of rows of outputs, at once and in parts."""

    counts_inputs = False  # they are outputs

    @property
    def compares_rows(self) -> str:
        """What to do with a loss that compares rows."""
        return "call the plain criterion on gather(outputs, device)"

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of output and targets that are tensors."""
        compared = self.request.batches[0].unwrapped()
        return [tuple(value.shape) for value in compared if isinstance(value, Tensor)]


def _consecutive(parts: Parts) -> Parts:
    """Parts of the same sizes whose rows are numbered from 0 on."""
    numbered = []
    start = 0
    for part in parts:
        numbered.append(range(start, start + len(part)))
        start += len(part)
    return numbered


def _as_leaf(tensor: Tensor) -> Tensor:
    """A tensor of its own, whose gradient is computed if it can have one.

    Rounding of half precision would hide differences.
    """
    if tensor.dtype in HALF_PRECISION:
        tensor = tensor.float()
    is_differentiable = tensor.is_floating_point() or tensor.is_complex()
    return tensor.detach().clone().requires_grad_(is_differentiable)
