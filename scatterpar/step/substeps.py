"""How shares become gradients: each replica computes its micro-batches in sub-steps.

One pass here; options make other schedules of the same parts::

    one pass      every sub-step runs forward, loss and backward         Schedule
    two passes    forward, one loss of all rows, forward and backward    TwoPasses
    captured      one pass, whose sub-steps are launched as one          Captured
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.refused_outputs import refuse_generators, refuse_graphs
from scatterpar.devices.clocks import DeviceClock
from scatterpar.devices.write_counters import version
from scatterpar.replicas.replicas import parameter_writes_refused
from scatterpar.replicas.sync_batch_norm import Meeting
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import (
    Referent,
    closure_contents,
    not_replicated,
    trained_leaves,
    training_buffers,
)
from scatterpar.step.flat_gradients import FlatGradients
from scatterpar.step.logged_numbers import NumbersOfShare
from scatterpar.step.loss import forward, require_trainable
from scatterpar.step.replica_threads import Proceed
from scatterpar.step.request import Request
from scatterpar.step.share_losses import ShareLosses
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.torch_private.autograd import hooks_taken_off

_GRAD = attrgetter("grad")
Gradient = tuple[Tensor, "Tensor | None"]  # a leaf of the user's, and its new gradient


class ShareResult(NamedTuple):
    """The result of one replica's sub-steps, without gradients.

    Attributes:
        losses: of the sub-steps; not read yet.
        outputs: to be returned; one per micro-batch.
        clock: how long the share has taken.
        gradients: those of all leaves, if they are flat; ``None`` if the leaves have
            them.
    """

    losses: ShareLosses
    outputs: Sequence[Any]
    clock: DeviceClock
    gradients: FlatGradients | None


class Computed(NamedTuple):
    """The results of all replicas' sub-steps, without gradients that are in replicas.

    Attributes:
        losses: of the shares; not read yet.
        outputs: to be returned; for each share one per micro-batch.
        external_gradients: those of leaves that no replica copied.
        clocks: how long the shares have taken; none of two passes.
        gradients: of the shares, if they are flat; none of two passes.
    """

    losses: Sequence[ShareLosses]
    outputs: Sequence[Sequence[Any]]
    external_gradients: Sequence[Gradient] = ()
    clocks: Sequence[DeviceClock] = ()
    gradients: Sequence[FlatGradients | None] = ()


class Substeps:
    """The sub-steps of one replica in one step, run eagerly.

    Each is this program; afterwards the leaves have the gradient of the share::

        for rows, weight in zip(micro_batches, weights):
            loss = criterion(module(inputs of rows), targets of rows)
            (loss * weight).backward()
    """

    def __init__(self, task: ReplicaTask, request: Request) -> None:
        self._task = task
        self._request = request
        self._without_gradient: Sequence[Tensor] = task.leaves
        self._numbers = NumbersOfShare()

    def train(self, max_substeps: int | None, proceed: Proceed) -> ShareResult:
        """Accumulate in the replica's parameters the gradient of its share's loss."""
        clock = DeviceClock(self._task.share.device)
        losses: list[Tensor] = []
        outputs: list[Any] = []
        for sub_step, weight in enumerate(self._task.weights[:max_substeps]):
            proceed(sub_step)
            with self._task.turn(Scope.SUBSTEP, sub_step):
                loss, output = self.run(sub_step, weight)
            losses.append(loss)
            outputs.append(output)
        proceed(None)
        gradients = self.finish()
        clock.stop()  # before the losses: whoever has read them finds it stopped
        share_losses = ShareLosses(
            self._task.share,
            losses,
            self._task.weights,
            self._numbers,
            check_finite=self._request.check_finite,
        )
        return ShareResult(share_losses, outputs, clock, gradients)

    def run(self, sub_step: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """Add a micro-batch's gradients.

        Returns its loss, and the part of its output that is returned.
        """
        task = self._task
        request = self._request
        task.restore_replicas()
        output, loss, numbers = forward(task, rows, sub_step)
        self._numbers.add(numbers)
        returned = None
        if request.return_outputs:
            returned = detached_output(output, request.return_outputs)
        # Without synchronised layers, rows that do not count have no gradient at all.
        if not weight and request.backward and task.replicas[0].affects_others():
            self._run_backward_of_nothing(sub_step, output, loss)
        # The graph has what the backward pass needs: a large output is freed before it.
        del output
        if weight and request.backward:
            if not loss.requires_grad:
                require_trainable(task.module)
            # The factor starts the backward pass: ``loss * weight`` would cost a kernel
            # and a node.
            factor = torch.full_like(loss, weight * request.scale, requires_grad=False)
            task.run_backward(sub_step, [loss], [factor])
            # Usually all leaves get gradients in the first sub-step.
            if self._without_gradient:
                self._without_gradient = unalias(self._without_gradient)
        return detached(loss), returned

    def _run_backward_of_nothing(
        self, sub_step: int, output: Any, loss: Tensor
    ) -> None:
        """Run the backward pass of a micro-batch whose loss does not count.

        Through the statistics of ``nn.SyncBatchNorm``, the gradient of other replicas'
        losses depends on its rows. Starts from the output: the loss may be NaN.
        """
        roots: list[Tensor] = []
        for tensor in nested.tensors(output):
            if tensor.requires_grad and tensor is not loss:
                roots.append(tensor)
        if roots:
            zeros = [torch.zeros_like(root) for root in roots]
            self._task.run_backward(sub_step, roots, zeros)
            # These gradients may share memory, as those of a loss that counts.
            self._without_gradient = unalias(self._without_gradient)

    def finish(self) -> FlatGradients | None:
        """Called after the last sub-step. Here the leaves have all gradients."""
        return None


class Schedule:
    """One pass: each replica adds up the gradient of its sub-steps' losses.

    A schedule is the body of this loop::

        for share in plan.shares:  # at once, each in the thread of its replica
            for micro_batch in share.micro_batches:
                forward, loss, backward

    Attributes:
        replicas_of_criterion: the number of replicas of the criterion; ``None`` for as
            many as the module has.
        may_start_again: a step that runs out of memory may begin again, with more
            sub-steps. False once other ranks have seen outputs of this step.
        replayed: the number of sub-steps of the latest step that were replayed.
        why_eager: why none was; empty with graphs.
        graphs_are_off: whether ``graphs=False`` is the reason.
        may_still_capture: whether sub-steps of later steps become graphs if devices go
            on waiting; said anew in each step.
    """

    replicas_of_criterion: int | None = None
    may_start_again = True
    replayed = 0
    why_eager = "graphs=False"
    graphs_are_off = True
    may_still_capture = False

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> Substeps:
        """Returns the object that runs the sub-steps of one replica in one step."""
        return Substeps(task, attempt.request)

    def replays(self) -> bool:
        """Whether sub-steps may be replayed, for which no replica is called."""
        return False

    def without_graphs(self, why: str) -> str:
        """Returns why another schedule has no graphs; warns if the user wants them."""
        return why

    def drop_graphs_after(self, _: Exception) -> bool:
        """Free captured graphs if that helps against an error of an attempt.

        Returns whether the attempt may run again as it is: never, without graphs.
        """
        return False

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run all sub-steps. Afterwards the replicas have the gradients."""

        def train(task: ReplicaTask, proceed: Proceed) -> ShareResult:
            return self.substeps(attempt, task).train(
                attempt.extent.max_substeps, proceed
            )

        # A new one for each pass: replicas count its sub-steps from 0.
        meeting = meeting_of(attempt)
        with parameter_writes_refused(attempt.replicas.replica_sets):
            results = attempt.threads.run(train, tasks, meeting)
        losses: list[ShareLosses] = []
        outputs: list[Sequence[Any]] = []
        clocks: list[DeviceClock] = []
        gradients: list[FlatGradients | None] = []
        for result in results:
            losses.append(result.losses)
            outputs.append(result.outputs)
            clocks.append(result.clock)
            gradients.append(result.gradients)
        return Computed(losses, outputs, clocks=clocks, gradients=gradients)


def meeting_of(attempt: Attempt) -> Meeting | None:
    """Where replicas exchange the statistics of ``nn.SyncBatchNorm`` layers in one
    pass.

    Returns ``None`` if no such layer trains. Raises ``ValueError`` if replicas cannot
    wait for each other.
    """
    if not attempt.replicas.exchange_statistics():
        return None
    shares = attempt.plan.shares
    # The second pass begins with the last sub-step of each share: these must be one
    # round.
    is_ragged = len({len(share.micro_batches) for share in shares}) > 1
    obstacles = {
        "replicas that take turns, as a step function, or a criterion that reads what "
        "forward passes leave behind, needs": attempt.threads.scope.is_ordered,
        "whole_batch=True and unequal numbers of micro-batches": (
            attempt.request.whole_batch and is_ragged
        ),
    }
    return attempt.replicas.meeting(shares, attempt.transfers, obstacles)


@contextlib.contextmanager
def user_state_guarded(attempt: Attempt) -> Iterator[None]:
    """In the body, replicas run user code, which may reach the user's own tensors.

    Generators and statistics of networks that it refers to are restored if the step
    fails. Raises ``ValueError`` if a gradient arrives at the user's own leaves, or at
    those that the criterion or an object in the module refers to.
    """
    criterion = attempt.request.criterion
    referents = save_referents(attempt, criterion)
    leaves: list[Tensor] = []
    for replica_set in attempt.replicas.replica_sets:
        leaves += replica_set.slots.trained_leaves
    leaves += trained_leaves(referents)
    # Each once: model and criterion may share leaves.
    attempt.user_leaves = list({id(leaf): leaf for leaf in leaves}.values())
    with set_aside(attempt.user_leaves):
        yield
        for leaf in attempt.user_leaves:
            if leaf.grad is not None:
                module = attempt.replicas.of_model.root
                raise not_replicated(leaf, criterion, module)


def save_referents(attempt: Attempt, function: Any) -> list[Referent]:
    """Save what user code may write: statistics of networks, and random generators.

    ``function`` is the criterion, or what ``engine.map`` calls. Objects that replicas
    share are in the module, or random generators among the arguments.

    Returns what the function and these objects refer to.
    """
    referents = closure_contents(function)
    shared_objects = [
        list(replica_set.contents.objects.values())
        for replica_set in attempt.replicas.replica_sets
    ]
    # Most modules hold no objects: nothing is searched in each step.
    if any(shared_objects):
        referents += closure_contents(shared_objects)
    for batch in attempt.request.batches:
        for atom in batch.atoms:
            if isinstance(atom, torch.Generator):
                referents.append(atom)
    for referent in referents:
        if isinstance(referent, torch.Generator):
            attempt.undo.save_generator(referent)
    attempt.undo.save_values(training_buffers(referents))
    return referents


@contextlib.contextmanager
def set_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """In the body, ``leaves`` have no ``.grad`` and no hooks; later both are as before.

    Replicas add gradients to copies of the user's parameters. A gradient that arrives
    in a leaf of the user comes from an object that replicas share, and so is added in
    the order of arrival.
    """
    gradients = list(map(_GRAD, leaves))
    # A gradient that should not arrive here would run them, in a replica's thread.
    with hooks_taken_off(leaves):
        try:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    leaf.grad = None
            yield
        finally:
            # Mostly all are as they were: to ask takes less time than to assign.
            if not all(map(is_, map(_GRAD, leaves), gradients)):
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    if leaf.grad is not gradient:
                        leaf.grad = gradient


def detached_output(output: Any, return_outputs: bool | Callable[[Any], Any]) -> Any:
    """An output without its graph, or what ``return_outputs`` makes of it."""
    # Detached before the user's function sees it: nothing of the graph stays alive.
    output = nested.map_tensors(detached, output)
    if callable(return_outputs):
        with torch.no_grad():
            output = nested.map_tensors(detached, return_outputs(output))
    refuse_generators(output)
    refuse_graphs(output)
    return output


def detached(tensor: Tensor) -> Tensor:
    """A tensor of an output without its graph, in memory that no later call writes."""
    # A tensor with a graph is new, and so is one that was never written in place.
    # Others may be the module's own, such as a buffer, which its next call writes
    # again. Inference tensors do not count how often they were written.
    may_be_old = tensor.is_inference() or version(tensor) > 0
    without_graph = tensor.detach()
    if tensor.requires_grad or not may_be_old:
        return without_graph
    return without_graph.clone()


def unalias(leaves: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> list[Tensor]:
    """Clone new gradients that share memory with each other, or with ``beside``.

    Autograd makes an arriving gradient the ``.grad`` of a leaf without one, also if
    another leaf got a view of it. In ``a.view(1, -1) + b.view(1, -1)`` both then share
    memory, and the next backward pass adds to it twice. With ``beside``, the gradients
    that a backward pass began with or left elsewhere, a leaf shares memory and version
    counter with these: ``a.view(1, -1)`` alone is enough.

    Returns the leaves that have no gradient yet.
    """
    taken = {
        tensor.untyped_storage().data_ptr()
        for tensor in beside
        if tensor.layout == torch.strided
    }
    without: list[Tensor] = []
    places: list[tuple[int, int, int]] = []  # address, bytes, the leaf's number
    for number, leaf in enumerate(leaves):
        gradient = leaf.grad
        if gradient is None:
            without.append(leaf)
        elif gradient.layout != torch.strided:
            continue
        elif taken and gradient.untyped_storage().data_ptr() in taken:
            leaf.grad = gradient.clone()
        else:
            places.append((gradient.data_ptr(), gradient.nbytes, number))
    end = 0  # of the memory that gradients at lower addresses use
    for start, size, number in sorted(places):
        gradient = leaves[number].grad
        if gradient is not None and size and start < end:
            leaves[number].grad = gradient.clone()
        end = max(end, start + size)
    return without
