"""Compute a few rows of a batch in different ways, each from the same state.

::

    own task    rows at once             loss and gradients in plain torch
    replica     rows in parts            as the step is about to compute them
    replica     rows at once, nudged, …  to find out why the two differ

A run gives the loss and the gradients of its rows, and the state that each part left.
Everything that user code changes is restored before the next run.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.batch import Batch
from scatterpar.batch.joining import (
    Entries,
    KnownTensors,
    join_rows,
    lists_by_place,
    tensors_by_place,
)
from scatterpar.devices.copies import to_numbers
from scatterpar.numerics.constant_numbers import ConstantNumbers
from scatterpar.numerics.nudges import nudged
from scatterpar.numerics.rounding import HALF_IN_KERNELS, SINGLE_IN_DOUBLE, Rounding
from scatterpar.numerics.wider_precision import Precision, WiderCasts
from scatterpar.replicas.replicas import Replica, ReplicaSet
from scatterpar.spans import Part
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss import loss_of
from scatterpar.step.reduce import lists_in_outputs
from scatterpar.step.request import Request
from scatterpar.step.row_writes import KnownWrites, RowWrites
from scatterpar.step.substeps import set_aside
from scatterpar.step.task import ReplicaTask
from scatterpar.verify.backward_calls import BackwardCalls
from scatterpar.verify.gradient_check import copied_to
from scatterpar.verify.moved_state import State, state_of
from scatterpar.verify.results import NOTHING, ComparedLeaves, Result
from scatterpar.verify.rows import Parts
from scatterpar.verify.user_code import UserCode


@dataclass
class RunResult:
    """The result of one run.

    Attributes:
        result: the sum of the results of the parts, times their weights.
        num_with_gradient: the number of parts of which a gradient is not zero.
        num_with_loss: the number of parts of which the loss is not zero.
        states: the state of the replicas after each part.
        random_calls: the number of random operators, if these give constants.
        shares_state: whether the first forward pass has changed what the criterion
            refers to.
    """

    result: Result = NOTHING
    num_with_gradient: int = 0
    num_with_loss: int = 0
    states: list[State] = field(default_factory=list)
    random_calls: int = 0
    shares_state: bool = False

    def add(self, result: Result) -> None:
        """Add the result of a part. A look has no memory for those of all parts."""
        self.result = self.result.plus(result)
        self.num_with_gradient += result.has_gradient
        self.num_with_loss += bool(result.loss)


class _ReentrantCheckpoint(Exception):
    """The module has a reentrant checkpoint, which refuses ``autograd.grad``."""


class Runs:
    """Runs of one replica, and of the user's own module and criterion, over rows of one
    batch, under the same conditions.

    Attributes:
        own_task: the replica's task, with the user's module and criterion in its place.
        replica_task: the replica's task.
        user_code: restores what runs change; they run inside of its ``isolated`` alone.
        precision: the formats of the runs. Unless they are the step's, autocast is off,
            because rounding hides differences.
        draws_constants: random operators give constant numbers.
        rounding: the formats that runs have rounded to.
        leaves: those whose gradients are compared.
        backward_calls: whether the replica's backward passes have called modules.
        taken_for_rows: the shape of an output without rows that the step would join, or
            the length of a list.
        sizes_without_rows: the sizes along ``dim`` of outputs without rows, which a
            step with micro-batches of one of these sizes would join.
        pairs_of_rows: the shape of an output with an entry for each pair of rows, which
            parts have for their own rows alone.
    """

    def __init__(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        deadline: float = math.inf,
        *,
        precision: Precision = Precision.SINGLE,
        rows_of_substeps: int | None = None,
    ) -> None:
        """After ``deadline``, a time of ``time.monotonic``, runs are inconclusive.

        ``rows_of_substeps`` is the number of rows of each micro-batch of the step;
        ``None`` if they differ, or if there is one.
        """
        replica_sets = attempt.replicas.replica_sets
        self.request = request
        # Apart, so that a run that needs the outputs alone copies no targets.
        self._inputs = request.batches[0].without_targets()
        self._targets = request.batches[0].without_inputs()
        user_module = replica_sets[0].root
        # What a look's calls write is nobody's, and some of them have no graph.
        task = replace(task, writes=RowWrites(KnownWrites()))
        self.own_task = replace(task, module=user_module, criterion=request.criterion)
        self.replica_task = task
        # Replicas share these: a call that writes one is refused. Those of a teacher in
        # the criterion's closure are not among them.
        owners: list[ReplicaSet | Replica] = [*replica_sets, *task.replicas]
        guarded = {id(tensor) for owner in owners for tensor in owner.tensors}
        self.user_code = UserCode(
            request,
            user_module,
            task,
            guarded,
            deadline,
            precision,
        )
        self.precision = precision
        self.draws_constants = False
        self.rounding = Rounding(task.share.device)
        # The tolerance stays that of the step: a right step may differ by as much.
        if precision is Precision.DOUBLE:
            self.rounding.formats.add(SINGLE_IN_DOUBLE)
        if self.user_code.has_half_precision and self.user_code.is_widened:
            self.rounding.formats.add(HALF_IN_KERNELS)
        elif self.user_code.has_half_precision:
            # No graph shows that a teacher rounds.
            self.rounding.add(torch.float16)
        self.leaves = ComparedLeaves(attempt, task)
        trained = [*attempt.user_leaves, *task.leaves, *self.leaves.all()]
        self._trained = list({id(leaf): leaf for leaf in trained}.values())
        self._has_reentrant = False
        self.backward_calls = BackwardCalls()
        self._shapes_at_once: list[torch.Size] = []
        self.taken_for_rows: torch.Size | int | None = None
        self.sizes_without_rows: set[int] = set()
        self.pairs_of_rows: torch.Size | None = None
        self._rows_of_substeps = rows_of_substeps

    def at_once(
        self, rows: Part, task: ReplicaTask | None = None, *, scale: float = 1.0
    ) -> Result:
        """Compute the loss and gradients of rows in one part."""
        return self.run([rows], task, scale=scale).result

    def run(
        self,
        parts: Parts,
        task: ReplicaTask | None = None,
        weights: Sequence[float] = (),
        *,
        prepare: Callable[[], None] | None = None,
        scale: float = 1.0,
    ) -> RunResult:
        """Loss and gradients of parts of rows, one after the other, times ``weights``.

        With ``whole_batch`` the joined outputs of all parts have one loss.

        Args:
            parts: the rows of each part.
            task: the replica's task, which is the default, or the user's own.
            weights: the factors of the losses; all 1 by default.
            prepare: is called before each part.
            scale: the factor of all losses in backward passes. Not that of the user's
                scaler, which may overflow, and whose reason is half precision, in which
                looks seldom compute.
        """
        task = task or self.replica_task
        try:
            return self._run(parts, task, weights, prepare, scale)
        except _ReentrantCheckpoint:
            # The failed backward pass has freed a part of the graph.
            self._has_reentrant = True
            return self._run(parts, task, weights, prepare, scale)

    def _run(
        self,
        parts: Parts,
        task: ReplicaTask,
        weights: Sequence[float],
        prepare: Callable[[], None] | None,
        scale: float,
    ) -> RunResult:
        """As ``run``, whose arguments these are."""
        run = RunResult()
        joins = self.request.whole_batch
        outputs: list[Any] = []
        weights = weights or [1.0] * len(parts)
        with self.surroundings(task) as numbers:
            for rows, weight in zip(parts, weights, strict=True):
                # Between parts: a call that runs cannot be ended.
                self.user_code.require_time()
                if prepare is not None:
                    prepare()
                outputs.append(task.output_of(self.inputs_of(rows)))
                if not run.states:
                    # Later parts find what the criterion's calls have changed.
                    of_criterion = self.user_code.of_criterion
                    run.shares_state = not of_criterion.refers_to_same()
                if not joins:
                    # No name: a large output is freed before its backward pass, and
                    # gradients before the next part's.
                    run.add(self._result(outputs.pop(), rows, task, weight, scale))
                run.states.append(state_of(task.replicas))
            if joins:
                all_rows = list(chain(*parts))
                joined = self._joined(outputs, parts)
                run.add(self._result(joined, all_rows, task, 1.0, scale))
        run.random_calls = numbers.calls
        return run

    @contextlib.contextmanager
    def surroundings(self, task: ReplicaTask) -> Iterator[ConstantNumbers]:
        """Begin a run in the state of the step. In the body operators compute under the
        conditions of the runs.
        """
        self.user_code.require_time()
        self.user_code.restart()
        numbers = ConstantNumbers()
        with contextlib.ExitStack() as stack:
            if self.user_code.is_widened:
                stack.enter_context(WiderCasts(self.precision))
            if self.draws_constants:
                stack.enter_context(numbers)
            if self.precision is not Precision.AS_IN_STEP:
                for device_type in task.autocast:
                    stack.enter_context(torch.autocast(device_type, enabled=False))
            yield numbers

    def inputs_of(self, rows: Part) -> Any:
        """Copy the inputs of these rows to the replica's device; not counted."""
        inputs, _ = self._copied(self._inputs, rows)
        return inputs

    def targets_of(self, rows: Part) -> Any:
        """Copy the targets of these rows to the replica's device; not counted."""
        _, targets = self._copied(self._targets, rows)
        return targets

    def _copied(self, batch: Batch, rows: Part) -> tuple[Any, Any]:
        values = copied_to(self.replica_task.share.device, batch.select(rows))
        if self.user_code.is_widened:
            values = nested.map_tensors(self.precision.widened, values)
        return values

    def _result(
        self, output: Any, rows: Part, task: ReplicaTask, weight: float, scale: float
    ) -> Result:
        """Compute the loss of these rows, and its gradients times ``weight``.

        There are none if ``weight`` is zero.
        """
        self.user_code.require_time()
        if task.criterion is not None:  # which may write into what it is given
            # Not leaves that require grad: a criterion may ask for gradients by these.
            output = nested.map_tensors(_copy_of_constant, output)
        loss = loss_of(output, self.targets_of(rows), task.criterion)
        del output
        self.rounding.watch(loss)
        gradients: Sequence[Tensor | None] = ()
        if weight and loss.requires_grad:
            # The weight is inside, because hooks may clamp gradients. It is multiplied:
            # for a gradient that it is given, torch imports sympy, in 0.3 s.
            gradients = self._gradients(loss * (scale * weight), task)
        # Read by ``devices/``: on accelerators the read raises errors of the user's
        # kernels, which are no mistakes of a line here.
        value = to_numbers(loss) * weight if weight else 0.0
        return Result(value, self.leaves.sums(gradients))

    def _gradients(self, loss: Tensor, task: ReplicaTask) -> Sequence[Tensor | None]:
        """The gradients of the compared leaves."""
        leaves = self.leaves.all()
        if not leaves:
            return ()
        is_watched = task is self.replica_task
        with self.backward_calls if is_watched else contextlib.nullcontext():
            if self._has_reentrant:
                # What such a checkpoint computes again adds gradients to all leaves.
                with set_aside(self._trained):
                    loss.backward()
                    return [leaf.grad for leaf in leaves]
            try:
                return torch.autograd.grad(loss, leaves, allow_unused=True)
            except RuntimeError as error:
                # What other checkpoints raise says nothing about the rows: in a wider
                # format, the numbers that are computed again may have the step's.
                if "checkpoint is incompatible with .grad()" not in str(error):
                    raise
                raise _ReentrantCheckpoint from error

    def _joined(self, outputs: Sequence[Any], parts: Parts) -> Any:
        """The outputs of the parts, joined as in the step.

        What has no rows is that of the first part. If others differ, the step may take
        their entries for rows, and a loss that reads them differs here, too.
        """
        dim = self.request.dim
        sizes = [len(part) for part in parts]
        lists = lists_in_outputs(self.request.batches)
        places = tensors_by_place(outputs, sizes, dim, lists)
        # The run of all rows comes first, and shows the shapes for their number.
        if len(outputs) == 1:
            self._shapes_at_once = [tensors[0].shape for tensors in places]
            return outputs[0]
        # The number of rows tells what has none, also if each part has as many.
        constants: list[Tensor] = []
        # With other numbers a list has one entry per row in one of the runs alone.
        if len(places) == len(self._shapes_at_once):
            for (tensor, *_), shape in zip(places, self._shapes_at_once, strict=True):
                if tensor.ndim and tensor.shape == shape:
                    constants.append(tensor)
                    self._note_without_rows(tensor)
            # Nothing joins them. A loss that does not read them is right.
            constants += self._note_pairs_of_rows(places, sizes)
        if lists != "never":
            self._note_lists_without_rows(
                lists_by_place(outputs, sizes, dim, lists), sizes
            )
        positions = {
            id(tensor): position
            for position, tensor in enumerate(nested.tensors(outputs[0]))
        }
        entries = {positions[id(tensor)]: Entries.OF_FIRST for tensor in constants}
        # By the sizes of these parts, not of the step's, which join in the same way.
        return join_rows(
            outputs,
            dim,
            sizes,
            sizes,
            lists=lists,
            known=KnownTensors(entries=entries),
        )

    def _note_without_rows(self, tensor: Tensor) -> None:
        """Note a tensor without rows, which a step joins if it has as many entries as
        each micro-batch has rows.
        """
        dim = self.request.dim
        if -tensor.ndim <= dim < tensor.ndim:
            size = tensor.size(dim)
            self.sizes_without_rows.add(size)
            if size == self._rows_of_substeps:
                self.taken_for_rows = tensor.shape

    def _note_lists_without_rows(
        self, places: Sequence[Sequence[list[Any]]], sizes: Sequence[int]
    ) -> None:
        """Note lists without rows, as ``_note_without_rows`` does."""
        for values in places:
            have_rows: list[bool] = []
            for value, size in zip(values, sizes, strict=True):
                for tensor in nested.tensors(value):
                    shape = tensor.shape[self.request.dim :][:1]
                    have_rows.append(shape == (size,))
            # Of tensors with rows: each of them is joined.
            if have_rows and all(have_rows):
                continue
            size = len(values[0])
            self.sizes_without_rows.add(size)
            if size == self._rows_of_substeps:
                self.taken_for_rows = size

    def _note_pairs_of_rows(
        self, places: Sequence[Sequence[Tensor]], sizes: Sequence[int]
    ) -> list[Tensor]:
        """Note tensors with an entry for each pair of rows, such as scores of images
        and texts. Returns those of the first part.
        """
        of_pairs: list[Tensor] = []
        for tensors, shape in zip(places, self._shapes_at_once, strict=True):
            shapes = [tensor.shape for tensor in tensors]
            if {len(shape)} != {*map(len, shapes)}:
                continue
            for dim, size in enumerate(shape):
                is_of_rows = size == sum(sizes) and dim != self.request.dim % len(shape)
                if is_of_rows and [part[dim] for part in shapes] == [*sizes]:
                    self.pairs_of_rows = shape
                    of_pairs.append(tensors[0])
                    break
        return of_pairs

    def nudge(self, number: int, eps: float | None = None) -> None:
        """Nudge the replica's parameters in new memory: others do not see it."""
        eps = self.rounding.coarsest_eps if eps is None else eps
        for leaf in self.leaves.copies():
            leaf.data = nudged(leaf.data, number, eps)


def _copy_of_constant(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else copy_of_leaf(tensor)


def copy_of_leaf(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of a leaf: code must not write into that in place."""
    return tensor.clone() if tensor.is_leaf else tensor
