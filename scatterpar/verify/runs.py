"""Compute a few rows of a batch in different ways, each from the same state.

::

    own task    rows at once             loss and gradients in plain torch
    replica     rows in parts            as the step is about to compute them
    replica     rows at once, nudged, …  to find out why the two differ

A run gives the loss and the gradients of its rows, and the state that each part left.
Random operators give constant numbers. Batch normalisation uses its running statistics.
Autocast is off and half precision is computed in single precision, unless user code
needs them, because rounding hides differences. Everything that user code changes is
restored before the next run.
"""

from __future__ import annotations

import contextlib
import math
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.errors import restored
from scatterpar.replicas.module_contents import root_to_replicate
from scatterpar.replicas.references import module_of
from scatterpar.state.journal import Journal
from scatterpar.state.reports import (
    State,
    attributes_of,
    moved_between,
    state_of,
    text_of_unsaved,
)
from scatterpar.state.walk import Walk
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import closure_contents
from scatterpar.step.loss import loss_of
from scatterpar.step.replica_threads import ReplicaNote
from scatterpar.step.request import Request
from scatterpar.step.task import ReplicaTask
from scatterpar.torch_private import uncompiled
from scatterpar.verify.backward_calls import BackwardCalls
from scatterpar.verify.comparison import Result, Total
from scatterpar.verify.constant_numbers import ConstantNumbers, DrawsPerRow
from scatterpar.verify.dropped_records import records_dropped
from scatterpar.verify.gradient_check import moved_to, uses_batch_statistics
from scatterpar.verify.output_differences import cut_by_parts
from scatterpar.verify.rounding import HALF_PRECISION, Rounding
from scatterpar.verify.rows import Part, Parts
from scatterpar.verify.single_precision import OneDtype, SinglePrecision

MAX_ELEMENTS = (
    2**20
)  # of parameters whose gradients are compared, the smallest ones first
NUM_NUDGES = 16  # the last ones are the largest
# The last nudge is so many times the first. Kernels for few rows round by several
# units. In half precision so large a nudge would hide an error.
_NUDGE_GROWTH = 32
_NUDGE_GROWTH_IN_HALF_PRECISION = 4
_HALF_PRECISION = 1e-5  # formats with a larger eps


class Inconclusive(Exception):
    """The look is inconclusive.

    Attributes:
        patience: after so many such looks in a row, a warning says so.
        is_final: whether this kind of step is not looked at again.
    """

    def __init__(self, why: str, patience: int = 4, is_final: bool = False) -> None:
        super().__init__(why)
        self.patience = patience
        self.is_final = is_final


@dataclass
class RunResult:
    """What one run gave.

    Attributes:
        results: the result of each part; one of all parts with ``whole_batch``. None if
            the run has weights.
        total: the sum of the results times their weights, if the run has weights.
        states: the state of the replicas after each part.
    """

    results: list[Result] = field(default_factory=list)
    total: Total = field(default_factory=Total)
    states: list[State] = field(default_factory=list)


class Runs:
    """Runs of one replica, and of the user's own module and criterion, over rows of one
    batch.

    Replicas other than the first use their own module as the user's.

    Attributes:
        own_task: the replica's task, with the user's module and criterion in its place.
        replica_task: the replica's task.
        rounding: the formats that runs have rounded to.
        scale: the factor of all losses: that of the user's scaler, or 1 after an
            overflow.
        autocast: the device types for which autocast stays enabled.
        draws_numbers: whether random operators give constant numbers.
        is_widened: whether half precision is computed in single precision.
        shares_state: whether a forward pass has changed what a criterion reads that
            replicas share.
        backward_calls: the modules that the replica's backward passes have called.
        user_states: what user code may change; the criterion's first.
    """

    def __init__(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        deadline: float = math.inf,
    ) -> None:
        """After ``deadline``, a time of ``time.monotonic``, runs are inconclusive."""
        replica_sets = attempt.replicas.replica_sets
        self.request = request
        self._inputs = request.batches[0].without_targets()
        self._targets = request.batches[0].without_inputs()
        user_module: Any = task.module if task.share.replica else replica_sets[0].root
        self.own_task = replace(task, module=user_module, criterion=request.criterion)
        self.replica_task = task
        self.rounding = Rounding(task.share.device)
        self.scale = request.scale
        self.autocast: Sequence[str] = ()
        self.draws_numbers = False
        self.is_widened = False
        self.shares_state = False
        modules_of_user: list[nn.Module] = []
        for replica_set in replica_sets:
            modules_of_user += replica_set.contents.modules.values()
        self.backward_calls = BackwardCalls(modules_of_user)
        self.user_states: list[Journal] = []
        self._deadline = deadline
        self._halfway = (time.monotonic() + deadline) / 2
        self._step_rows = set(attempt.plan.substep_rows)
        self._numbers = ConstantNumbers()
        self._single: SinglePrecision | None = None
        self._undo = contextlib.ExitStack()
        self._fixed_layers: list[nn.Module] = []
        self._leaves = _smallest_leaves(attempt, task)
        # Of a function that replicas share, one replica's forward pass may change what
        # it reads.
        self._shares_criterion = root_to_replicate(request.criterion) is None

    # --- user code runs here, and leaves nothing behind ---

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """In the body user code may run; afterwards all that it changed is restored."""
        self._fixed_layers = self._layers_to_fix()
        with_graph = torch.inference_mode(False)  # also within no_grad
        where = ReplicaNote(self.replica_task.share)
        with where, restored(self.end), uncompiled(), with_graph, records_dropped():
            self._undo.callback(self._use_running_statistics, False)
            self._use_running_statistics(
                True
            )  # before state is saved: no change of the user's
            self.user_states = self._saved_states()
            for state in self.user_states:
                state.begin()
                self._undo.callback(state.end)
            self._undo.callback(self.restart)
            self._require_restorable()
            yield

    def _require_restorable(self) -> None:
        """Raise ``Inconclusive`` if calls may move what cannot be restored."""
        why = text_of_unsaved(self.user_states)
        if why:
            raise Inconclusive(why, patience=1, is_final=True)

    def _layers_to_fix(self) -> list[nn.Module]:
        """Batch normalisations: with batch statistics they tie rows together."""
        roots = self._roots()
        for replica in self.replica_task.replicas:
            if isinstance(replica.root, nn.Module):  # else a partial that binds tensors
                roots.append(replica.root)
        layers: list[nn.Module] = []
        for root in roots:
            layers += filter(uses_batch_statistics, root.modules())
        return [layer for layer in layers if layer.running_mean is not None]

    @contextlib.contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """In the body, runs call modules in evaluation mode."""
        layers = self._fixed_layers
        roots: list[Any] = [
            *self._roots(),
            *(r.root for r in self.replica_task.replicas),
        ]
        parts = [root.modules() for root in roots if isinstance(root, nn.Module)]
        self._fixed_layers = [part for part in chain(*parts) if part.training]
        try:
            yield
        finally:
            self._use_running_statistics(False)
            self._fixed_layers = layers
            self._use_running_statistics(True)

    def _roots(self) -> list[nn.Module]:
        """The user's modules: the module itself, and those of the criterion."""
        criterion = self.request.criterion
        roots = [
            self.own_task.module,
            module_of(criterion),
            *closure_contents(criterion),
        ]
        return [root for root in roots if isinstance(root, nn.Module)]

    def _use_running_statistics(self, value: bool) -> None:
        for layer in self._fixed_layers:
            layer.training = not value

    def _saved_states(self) -> list[Journal]:
        """The state of user code. The criterion's tells whether numbers were drawn."""
        task, request = self.replica_task, self.request
        collates = [
            marker.collate for batch in request.batches for marker in batch.markers
        ]
        of_module = Journal(Walk([self.own_task.module, *collates]))
        criteria = task.criterion, request.criterion, request.count
        of_criterion = Journal(Walk(criteria), [task.share.device])
        return [of_criterion, of_module]

    def end(self) -> None:
        """Undo everything, once. From then on runs that still run change nothing."""
        self._deadline = -math.inf
        self._undo.pop_all().close()

    @property
    def has_half_precision(self) -> bool:
        """Whether user code computes in half precision, as far as runs have shown.

        A graph shows it, or tensors that have none: of a teacher, or of the batch.
        """
        if self.rounding.has_half_precision:
            return True
        tensors = [*self._inputs.tensors(), *self._targets.tensors()]
        for root in self._roots():
            tensors += [*root.parameters(), *root.buffers()]
        return any(tensor.dtype in HALF_PRECISION for tensor in tensors)

    def widen(self) -> None:
        """From now on half precision is computed in single precision."""
        self.is_widened = True
        self.rounding.widen()

    def compute_as_in_step(self) -> None:
        """From now on autocast and half precision are those of the step."""
        self.is_widened = False
        self.rounding = Rounding(self.replica_task.share.device)
        self.autocast = self.replica_task.autocast

    def restore(self) -> None:
        """Undo what user code has changed, except in replicas."""
        for state in self.user_states:
            state.restore()

    def restart(self) -> None:
        """Undo what user code has changed, in replicas, too."""
        self.restore()
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Undo what user code has changed in replicas."""
        for replica in self.replica_task.replicas:
            replica.refresh()
        self._use_running_statistics(True)
        torch.clear_autocast_cache()  # it may hold parameters without a graph

    def restore_generators(self) -> None:
        """Let random generators draw the same numbers again."""
        for state in self.user_states:
            state.rewind()

    def require_time(self) -> None:
        """Raise ``Inconclusive`` after the deadline."""
        if time.monotonic() > self._deadline:
            raise Inconclusive("it takes too long", 2)

    def is_late(self) -> bool:
        """Whether half of the time is over: a refusal needs the other half."""
        return time.monotonic() > self._halfway

    # --- runs ---

    def at_once(self, rows: Part, task: ReplicaTask) -> Result:
        """The loss and gradients of rows in one part."""
        self._numbers.calls = 0
        return self.run([rows], task).results[0]

    @property
    def random_calls(self) -> int:
        """The number of random operators since the last ``at_once``."""
        return self._numbers.calls

    def run(
        self,
        parts: Parts,
        task: ReplicaTask,
        weights: Sequence[float] = (),
        *,
        between: Callable[[], None] | None = None,
        nudge: int | None = None,
    ) -> RunResult:
        """Loss and gradients of parts of rows, one after the other, times ``weights``.

        With ``weights`` the run has the sum of the results in the place of these. With
        ``whole_batch`` the joined outputs of all parts have one loss.

        Args:
            parts: the rows of each part.
            task: the replica's task, or the user's own.
            weights: the factors of the losses; all 1 by default.
            between: is called before each part except the first.
            nudge: changes the replica's parameters by rounding, each number in another
                way.
        """
        self.require_time()
        self.restart()
        run = RunResult()
        joins = self.request.whole_batch
        with self._surroundings(task, nudge):
            outputs: list[Any] = []
            for number, rows in enumerate(parts):
                if number and between is not None:
                    between()
                self.require_time()
                if nudge is not None:
                    self._nudge(nudge)
                outputs.append(task.output_of(self.inputs_of(rows)))
                if not number and task is self.replica_task and self._shares_criterion:
                    self.shares_state |= not self.user_states[0].refers_to_same()
                if not joins:
                    weight = weights[number] if weights else 1.0
                    result = self._result(outputs.pop(), rows, task, weight)
                    _add_result(run, result, weights)
                    del result  # its gradients are freed before the next part's
                run.states.append(state_of(task.replicas))
            if joins:
                all_rows = list(chain(*parts))
                joined = self._joined(outputs, parts)
                _add_result(run, self._result(joined, all_rows, task), weights)
        return run

    def attributes_that_calls_move(self, rows: Part) -> list[str]:
        """The names of attributes that a second call of the replica moves again.

        After the step they stay on the replica, even if it makes one call.
        """
        states = []
        self.restart()
        before = attributes_of(self.replica_task.replicas)
        with self._surroundings(self.replica_task):
            for _ in range(2):
                self.require_time()
                self.replica_task.output_of(self.inputs_of(rows))
                states.append(attributes_of(self.replica_task.replicas))
                is_created = before.keys() != states[0].keys()
                if not is_created and not moved_between([before, states[0]]):
                    return []
        return moved_between(states)

    def outputs(self, parts: Parts) -> list[Any]:
        """The replica's output for each part, without its graph, from one state."""
        outputs = []
        with self._surroundings(self.replica_task):
            for rows in parts:
                self.require_time()
                self.restart()
                output = self.replica_task.output_of(self.inputs_of(rows))
                outputs.append(nested.map_tensors(_as_leaf, output))
                del output  # with its graph
        return outputs

    def uses_number(self, rows: Part) -> bool:
        """Whether the criterion's loss depends on a 0-dim output of the replica."""
        self.require_time()
        self.restart()
        task = self.replica_task
        with self._surroundings(task):
            output = task.output_of(self.inputs_of(rows))
            tensors = nested.tensors(output)
            numbers = [t for t in tensors if t.requires_grad and not t.ndim]
            if not numbers:
                return False
            loss = loss_of(output, self.targets_of(rows), task.criterion)
            gradients = torch.autograd.grad(loss, numbers, allow_unused=True)
        return any(gradient is not None and bool(gradient) for gradient in gradients)

    def losses_of_cuts(self, output: Any, parts: Parts) -> list[Result]:
        """The criterion's loss of each part of one output, and its gradients.

        The module is not called: gradients are those of the output's tensors.
        """
        self.require_time()
        self.restart()
        task = self.replica_task
        targets = [self.targets_of(rows) for rows in parts]
        with self._surroundings(task):
            return losses_of_cuts(
                output, targets, parts, self.request, task.criterion, self.rounding
            )

    def bytes_per_row(self, rows: Part) -> float:
        """The memory that the graph of a row's loss keeps; infinite if unknown."""
        storages: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            # Not the tensor itself: its node, which saves it, would never be freed.
            return tensor.detach()

        task = self.replica_task
        self.restart()
        saved_tensors = torch.autograd.graph.saved_tensors_hooks(
            pack, lambda tensor: tensor
        )
        try:
            with self._surroundings(task), saved_tensors:
                output = task.output_of(self.inputs_of(rows))
                if not self.request.whole_batch:
                    loss_of(output, self.targets_of(rows), task.criterion)
        except Exception:  # the look finds out
            return math.inf
        for leaf in chain(*self._leaves):
            storages.pop(leaf.untyped_storage().data_ptr(), None)
        return sum(storages.values()) / len(rows)

    @contextlib.contextmanager
    def _surroundings(
        self, task: ReplicaTask, nudge: int | None = None
    ) -> Iterator[None]:
        """In the body random numbers are constant, and autocast is off if possible."""
        with contextlib.ExitStack() as stack:
            if self.is_widened:
                self._single = self._single_precision(nudge)
                stack.enter_context(OneDtype())
                stack.enter_context(self._single)
            if self.draws_numbers:
                stack.enter_context(self._numbers)
            for device_type in set(task.autocast).difference(self.autocast):
                stack.enter_context(torch.autocast(device_type, enabled=False))
            try:
                yield
            except DrawsPerRow:
                raise Inconclusive("what is drawn depends on the rows", 2) from None
            finally:
                self._single = None  # it holds gradients

    def output_of(self, rows: Part, compute: Callable[[ReplicaTask, Any], Any]) -> Any:
        """What ``compute`` returns for the replica's task and rows, with constant
        numbers.
        """
        self.restart()
        with self._numbers:
            return compute(self.replica_task, (self.inputs_of(rows), None))

    def inputs_of(self, rows: Part) -> Any:
        """The inputs of these rows, copied to the replica's device; not counted."""
        device = self.replica_task.share.device
        inputs, _ = moved_to(device, self._inputs.select(rows))
        return inputs

    def targets_of(self, rows: Part) -> Any:
        """The targets of these rows, copied to the replica's device; not counted."""
        device = self.replica_task.share.device
        _, targets = moved_to(device, self._targets.select(rows))
        return targets

    def pieces_of(self, parts: Parts) -> list[Any]:
        """The inputs and targets of each part of rows, as ``count=`` gets them."""
        return pieces_of_parts(self.request, parts)

    def _result(
        self, output: Any, rows: Part, task: ReplicaTask, weight: float = 1.0
    ) -> Result:
        """The loss of these rows, and its gradients times ``weight``; none if zero."""
        self.require_time()
        if task.criterion is not None:  # which may write into what it is given
            # Not leaves that require grad: a criterion may ask for gradients by these.
            output = nested.map_tensors(_copy_of_constant, output)
        loss = loss_of(output, self.targets_of(rows), task.criterion)
        del output  # a large output is freed before the backward pass
        self.rounding.watch(loss)
        leaves = list(chain(*self._leaves)) if weight and loss.requires_grad else []
        gradients: Sequence[Tensor | None] = ()
        if leaves:
            try:
                # The weight is inside, because hooks may clamp gradients. It is
                # multiplied: for a gradient that it is given, torch imports sympy, in
                # 0.3 s.
                scaled = loss * (self.scale * weight)
                with self._watching_backward(task):
                    rounded = torch.autograd.grad(scaled, leaves, allow_unused=True)
                gradients = [self._unrounded(gradient) for gradient in rounded]
            except RuntimeError as error:
                # Reentrant checkpoints refuse autograd.grad: only losses are compared.
                if "checkpoint" not in str(error).lower():
                    raise
                self._leaves = []
                self.backward_calls.note_unknown()
        value = float(loss.detach()) * weight if weight else 0.0
        return Result(value, self._gradients_by_leaf(gradients))

    def _watching_backward(
        self, task: ReplicaTask
    ) -> contextlib.AbstractContextManager[None]:
        """In the body, a backward pass of the replica is watched."""
        if task is self.replica_task:
            return self.backward_calls
        return contextlib.nullcontext()

    def _unrounded(self, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or self._single is None:
            return gradient
        return self._single.unrounded(gradient)

    def _gradients_by_leaf(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """The sum of the gradients of each leaf of the user's and its copies."""
        sums: list[Tensor] = []
        remaining = iter(gradients or [None] * sum(map(len, self._leaves)))
        for copies in self._leaves:
            terms = [next(remaining) for _ in copies]
            dense = [term.detach().to_dense() for term in terms if term is not None]
            total = dense[0] if dense else torch.zeros_like(copies[0])
            for term in dense[1:]:
                total = total + term
            sums.append(total)
        return sums

    def _joined(self, outputs: Sequence[Any], parts: Parts) -> Any:
        """The outputs of the parts, joined as in the step, which knows the sizes alone.

        An output with as many entries as each micro-batch of the step has rows is taken
        for rows.
        """
        if len(outputs) == 1:
            return outputs[0]
        dim = self.request.dim
        sizes = [len(part) for part in parts]
        is_marked = any(batch.has_marked_rows for batch in self.request.batches)
        lists: Any = "if clear" if is_marked else "never"

        def join(leaves: list[Any]) -> Any:
            tensors = [
                t for t in leaves if isinstance(t, Tensor) and -t.ndim <= dim < t.ndim
            ]
            are_sizes_of_step = {
                tensor.size(dim) for tensor in tensors
            } == self._step_rows
            if are_sizes_of_step and len(set(sizes)) > 1:
                return torch.cat(leaves, dim)
            return join_rows(leaves, dim, sizes, sizes, lists=lists)

        return nested.merge(join, outputs)

    def _nudge(self, number: int) -> None:
        """Change the replica's parameters by rounding, in new memory: others do not see
        it.

        Each number changes them in another way, and farther. Half precision that is
        computed in single precision is changed there.
        """
        for leaf in self._copies_of_leaves():
            if not self._is_widened_leaf(leaf):
                leaf.data = self._nudged(leaf.data, number)

    def _nudged(self, tensor: Tensor, number: int) -> Tensor:
        eps = self.rounding.coarsest_eps
        is_half = eps >= _HALF_PRECISION
        growth = _NUDGE_GROWTH_IN_HALF_PRECISION if is_half else _NUDGE_GROWTH
        size = eps / 2 * growth ** (number / (NUM_NUDGES - 1))
        angles = torch.arange(tensor.numel(), device=tensor.device) * (1 + number)
        changes = (angles + number).cos().view(tensor.shape) * size
        nudged: Tensor = tensor * (1 + changes.to(tensor.dtype))
        return nudged

    def _copies_of_leaves(self) -> list[Tensor]:
        """The replica's copies of the leaves whose gradients are compared."""
        copies = chain(*(leaves[1:] for leaves in self._leaves))
        return list({id(copy): copy for copy in copies}.values())

    def _is_widened_leaf(self, leaf: Tensor) -> bool:
        return self.is_widened and leaf.dtype in HALF_PRECISION

    def _single_precision(self, nudge: int | None) -> SinglePrecision:
        """Computes half precision in single precision, with a nudge or without."""
        if nudge is None:
            return SinglePrecision()
        leaves = filter(self._is_widened_leaf, self._copies_of_leaves())
        return SinglePrecision(partial(self._nudged, number=nudge), leaves)


def _add_result(run: RunResult, result: Result, weights: Sequence[float]) -> None:
    """Add a result to those of a run, or to their sum if the run has weights."""
    if weights:
        run.total.add(result)
    else:
        run.results.append(result)


def _smallest_leaves(attempt: Attempt, task: ReplicaTask) -> list[list[Tensor]]:
    """The user's leaves whose gradients are compared, each with its copies in the
    replica.
    """
    copies: dict[int, list[Tensor]] = {}
    for replica_set, replica in zip(
        attempt.replicas.replica_sets, task.replicas, strict=False
    ):
        for number, leaf in replica_set.leaves.items():
            copies.setdefault(id(leaf), [leaf]).append(replica.tensors[number])
    by_size = sorted(copies.values(), key=lambda leaves: leaves[0].numel())
    sizes = list(accumulate(leaves[0].numel() for leaves in by_size))
    return by_size[: max(1, bisect(sizes, MAX_ELEMENTS))]


def pieces_of_parts(request: Request, parts: Parts) -> list[Any]:
    """The inputs and targets of each part of rows, as ``count=`` gets them."""
    batch = request.batches[0]
    return [batch.select(part).unwrapped(copy=True) for part in parts]


def _as_leaf(tensor: Tensor) -> Tensor:
    """The tensor without its graph. A criterion may ask for a gradient of it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def losses_of_cuts(
    output: Any,
    targets: Sequence[Any],
    parts: Parts,
    request: Request,
    criterion: Any,
    rounding: Rounding,
) -> list[Result]:
    """The criterion's loss of each part of one output, and the gradients of that.

    ``output`` has the rows of all parts, in their order, and ``targets`` an entry per
    part.
    """
    tensors = [tensor for tensor in nested.tensors(output) if tensor.requires_grad]
    results = []
    cuts = cut_by_parts(output, parts, request.dim)
    for cut, targets_of_part in zip(cuts, targets, strict=True):
        # The criterion may write into what it is given.
        loss = loss_of(
            nested.map_tensors(copy_of_leaf, cut), targets_of_part, criterion
        )
        rounding.watch(loss)
        results.append(Result(float(loss.detach()), _gradients_of(loss, tensors)))
    return results


def _gradients_of(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss; zeros for tensors that it does not depend on."""
    if not (loss.requires_grad and tensors):
        return [torch.zeros_like(tensor) for tensor in tensors]
    gradients = torch.autograd.grad(loss, tensors, allow_unused=True)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient.to_dense()
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]


def _copy_of_constant(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad else copy_of_leaf(tensor)


def copy_of_leaf(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of a leaf: code must not write into that in place."""
    return tensor.clone() if tensor.is_leaf else tensor
