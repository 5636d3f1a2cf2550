"""The pair's looks: do losses of parts of outputs combine to the loss of all their
rows?

The pair has outputs and targets, and no module. So the engine's look is asked about a
module that gives the outputs of a few rows, by their numbers::

    rows 0 … 15 of the call     outputs, without their graph: leaves of the module
    the engine's look           module([3, 7]) → the outputs of rows 3 and 7
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from scatterpar.batch import nested
from scatterpar.batch.batch import batch_of
from scatterpar.batch.joining import join_rows
from scatterpar.batch.markers import Rows
from scatterpar.causes.batch_normalisation import uses_batch_statistics
from scatterpar.devices.copies import to_device
from scatterpar.numerics.comparison import magnitudes
from scatterpar.objects.references import module_of
from scatterpar.plan import Plan, make_plan
from scatterpar.replicas.replicas import ReplicaOptions, Replicas
from scatterpar.spans import Part
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import compute_loss_weights
from scatterpar.step.request import CountFunction, Request
from scatterpar.step.scatter import scatter
from scatterpar.step.task import make_tasks
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.autograd import (
    hooks_taken_off,
    is_function_of_user,
    leaves_of,
    nodes_reached,
)
from scatterpar.verify.choice import candidate_of
from scatterpar.verify.look_request import LookRequest, LossWays
from scatterpar.verify.output_differences import cut_rows
from scatterpar.verify.rows import RowChoice, affordable_rows, ignored_values
from scatterpar.verify.schedule import Stage, informative_tensors, ranges_of_step
from scatterpar.verify.verdicts import in_lines, refused_injection
from scatterpar.verify.verifier import Verifier

_MAX_ROWS = 16
_MAX_ROWS_THAT_BROADCAST = 256
_REMEDIES_OF_PAIR = (
    "Pass count= for a mean over other terms, reduction= for a sum; if it compares "
    "rows with each other, or is a ratio of sums, call the plain criterion on "
    "gather(outputs, device). verify=False does not check."
)

_NORMALISES = in_lines(
    "the criterion has a batch normalisation. DataParallelCriterion computes one loss "
    "per device, and normalises over the rows of this device only.",
    "To normalise over all rows, call your own criterion on gather(outputs, device).",
)


class OutputLooks(Verifier):
    """Looks at calls of one criterion of the pair."""

    def check_call(
        self, request: Request, plan: Plan, outputs: Sequence[Any], workers: Workers
    ) -> None:
        """Look at a few rows of a call, if that is due.

        ``request`` has the targets of all rows.

        Raises:
            ValueError: the losses of parts, weighted as in the call, do not give the
                loss or the gradient of all their rows.
        """
        self._waiting.clear()  # of a call that has failed
        kind, details = self.kinds.kind_of(request, is_divided=True, flags=())
        if not kind.count_step(ranges_of_step(request), details):
            return
        # One graph shows it, because all replicas have the same layers.
        if injects_gradient(outputs[-1]):
            kind.stage = Stage.REFUSED
            raise ValueError(refused_injection("the model").text)
        module = module_of(request.criterion)
        if module is not None and any(map(uses_batch_statistics, module.modules())):
            self.warn("batch normalisation", _NORMALISES)
        choice = RowChoice(
            request,
            informative_tensors(request),
            plan,
            ignored_values(request.criterion, request.count),
            kind.looks,
            is_divided=True,
            most=_MAX_ROWS,
        )
        with torch.inference_mode(False):  # else the leaves would have no gradients
            look_request = _look_request(choice, outputs, workers)
        self.look_at(look_request, kind)


class RowsOfOutputs(nn.Module):
    """Gives the outputs of rows by their numbers."""

    def __init__(self, entries: Sequence[Any], dim: int) -> None:
        """``entries`` are the outputs of single rows."""
        super().__init__()
        self._dim = dim
        atoms, self._build = nested.flatten(list(entries))
        # Values that are no tensors are entries of this list as they are.
        self._leaves = nn.ParameterList(
            _as_parameter(atom) if isinstance(atom, Tensor) else atom for atom in atoms
        )

    def forward(self, rows: Sequence[int]) -> Any:
        """The outputs of these rows, joined."""
        entries = self._build(iter(self._leaves))
        return join_rows([entries[row] for row in rows], self._dim, [1] * len(rows))


def _as_parameter(tensor: Tensor) -> nn.Parameter:
    has_gradient = tensor.is_floating_point() or tensor.is_complex()
    return nn.Parameter(tensor, has_gradient)


def _look_request(
    choice: RowChoice, outputs: Sequence[Any], workers: Workers
) -> LookRequest:
    """Asks whether losses of a few rows of the outputs combine."""
    of_call = choice.request
    dim = of_call.dim
    rows = _rows_of_look(choice, outputs)
    module = RowsOfOutputs(list(_outputs_of_rows(rows, choice.plan, outputs, dim)), dim)
    count = of_call.count
    if count is not None:  # of outputs and targets
        count = partial(_count_of_outputs, count, module)
    targets = of_call.batches[0].select(rows).targets
    # The inputs are the numbers of rows.
    batch = batch_of(Rows(range(len(rows))), targets, len(rows), dim)
    request = replace(of_call, batches=[batch], count=count)
    device = choice.plan.shares[0].device
    plan = make_plan(len(rows), [device], accum=_num_parts(choice, rows))
    replicas = Replicas([device], ReplicaOptions())
    attempt = Attempt(request, plan, replicas, workers)
    loaders = scatter(request.batches, plan, attempt.transfers)
    replicas.refresh(module, request.criterion, attempt.transfers)
    attempt.weights = compute_loss_weights(request, plan, None)
    (task,) = make_tasks(attempt, loaders)
    candidates = [candidate_of(request)]
    ways = LossWays(_REMEDIES_OF_PAIR)
    return LookRequest(attempt, request, task, True, candidates, ways)


def _num_parts(choice: RowChoice, rows: Part) -> int:
    """The number of parts of the rows of a look: the shares of the call, if these are
    even and all its rows are looked at.
    """
    rows_of_shares = [share.rows for share in choice.plan.shares]
    most, least = rows_of_shares[0], rows_of_shares[-1]
    # As a plan divides rows: the first shares may have one row more.
    is_sorted = rows_of_shares == sorted(rows_of_shares, reverse=True)
    is_even = is_sorted and most - least <= 1
    if is_even and most < len(rows) == choice.plan.rows:
        return len(rows_of_shares)
    return 2


def _rows_of_look(choice: RowChoice, outputs: Sequence[Any]) -> Part:
    """The rows that the choice takes; all rows if they are few, or may broadcast.

    An output with as many columns as its share has rows broadcasts with a tensor of one
    entry per row. The look finds out, if its own parts are as large.
    """
    tensors = nested.tensors(list(outputs))
    num_rows = choice.plan.rows
    affordable = affordable_rows(tensors, num_rows)
    if num_rows <= min(_MAX_ROWS, affordable):
        return range(num_rows)
    sizes = {share.rows for share in choice.plan.shares}
    dim = choice.request.dim
    rows_of_two = 2 * min(sizes)
    is_even = len(sizes) == 1 and rows_of_two <= min(affordable, num_rows)
    for tensor in tensors:
        columns = list(tensor.shape)
        if -len(columns) <= dim < len(columns):
            del columns[dim]
        if is_even and sizes <= {*columns}:
            is_small = num_rows <= min(_MAX_ROWS_THAT_BROADCAST, affordable)
            return range(num_rows if is_small else rows_of_two)
    # Sorted, because the rows of a range may be views of the caller's tensors.
    return sorted({*chain(*choice.parts(affordable))})


def _count_of_outputs(
    count: CountFunction, module: RowsOfOutputs, numbers: Sequence[int], targets: Any
) -> Any:
    return count(module(numbers), targets)


def _outputs_of_rows(
    rows: Sequence[int], plan: Plan, outputs: Sequence[Any], dim: int
) -> Iterator[Any]:
    """Yield the output of each row, without its graph, in the master's memory."""
    master = plan.shares[0].device

    def on_master(tensor: Tensor, *, is_copied: bool) -> Tensor:
        return to_device(tensor.detach(), master, copy=is_copied)

    for share, output in zip(plan.shares, outputs, strict=True):
        # Torch sees no difference between virtual devices.
        move = partial(on_master, is_copied=share.device != master)
        for row in rows:
            if share.start <= row < share.stop:
                cut = cut_rows(output, row - share.start, 1, share.rows, dim)
                yield nested.map_tensors(move, cut)


def injects_gradient(output: Any) -> bool:
    """Whether the graph of a replica's output adds a gradient of its own.

    Then a loss times zero has a gradient behind an ``autograd.Function`` of the user's.
    The backward pass ends there: it reaches none of the user's parameters, so gradients
    that wait at replicas stay as they are.
    """
    roots = [tensor for tensor in nested.tensors(output) if tensor.requires_grad]
    nodes = list(chain.from_iterable(map(nodes_reached, roots)))
    edges: list[GradientEdge] = []
    for node in filter(is_function_of_user, nodes):
        for next_node, place in node.next_functions:
            if next_node is not None:
                edges.append(GradientEdge(next_node, place))
    if not edges:
        return False
    zeros = [torch.zeros_like(root) for root in roots]
    try:
        with hooks_taken_off(leaves_of(nodes)):
            gradients = torch.autograd.grad(
                roots, edges, zeros, retain_graph=True, allow_unused=True
            )
    except RuntimeError:  # a graph that allows one backward pass only
        return False
    sizes = magnitudes(gradients)
    return any(sizes) and all(map(math.isfinite, sizes))
