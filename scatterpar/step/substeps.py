"""How shares become gradients: each replica's forward and backward over its
micro-batches.

One pass here; add-ons make other schedules of the same parts::

    one pass      every sub-step runs forward, loss and backward         Schedule
    two passes    forward, one loss of all rows, forward and backward    TwoPasses
    captured      one pass, whose sub-steps are launched as one          Captured
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from scatterpar.batch import nested
from scatterpar.batch.markers import BatchList, Marker
from scatterpar.devices.memory import no_kernel_search
from scatterpar.devices.transfers import to_numbers
from scatterpar.errors import add_note
from scatterpar.plan import Share
from scatterpar.replicas.replicas import Replica, parameter_writes_refused
from scatterpar.step.attempt import Attempt, Clock, Proceed
from scatterpar.step.criterion_closure import (
    closure_contents,
    not_replicated,
    note_wrong_devices,
    trained_leaves,
    training_buffers,
)
from scatterpar.step.inner_backward import gradient_versions, inner_backward
from scatterpar.step.request import Request
from scatterpar.step.scatter import ShareLoader
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.generators import generator_for_backward
from scatterpar.torch_private import backward, hooks_taken_off, leaves_reached, nodes_of

Gradient = tuple[Tensor, "Tensor | None"]  # a leaf of the user's, and its new gradient
_Context = contextlib.AbstractContextManager[object]
_UNTIMED = contextlib.nullcontext()


@dataclass(frozen=True)
class ReplicaTask:
    """The work of one replica in one step."""

    share: Share
    module: Callable[..., Any]  # the replica
    loader: ShareLoader  # copies the share's rows to the replica's device
    # the replica's; ``None``: the module has the loss
    criterion: Callable[[Any, Any], Any] | None
    # the factor of each micro-batch's loss in the loss of the batch
    weights: Sequence[float]
    replicas: Sequence[Replica]  # of the model, and of the criterion if it needs one
    leaves: Sequence[Tensor]  # in which backward passes accumulate gradients
    # held in calls of the criterion; ``None`` for torch's own
    criterion_lock: _Context | None
    clock: Clock | None  # ``None`` if nobody asks for times
    autocast: Sequence[str]  # device types for which the caller has enabled it

    def span(self, name: str, number: int) -> _Context:
        """Time the body as a part of sub-step ``number``."""
        return self.clock(name, self.share, number) if self.clock else _UNTIMED

    def rows_of(self, number: int, *, retain: bool = False) -> Any:
        """The rows of one micro-batch, as by ``ShareLoader.load``; timed."""
        # not an empty span: N replicas share the GIL in each sub-step
        if self.clock is None:
            return self.loader.load(number, retain=retain)
        with self.span("arrival", number):
            return self.loader.load(number, retain=retain)

    def run_backward(
        self, number: int | None, roots: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Run a backward pass with autocast off, as torch recommends; time that of a
        sub-step.
        """
        if self.clock is not None and number is not None:
            with self.span("backward", number):
                self.run_backward(None, roots, gradients)
            return
        for kind in self.autocast:
            torch.set_autocast_enabled(kind, False)
        try:
            with generator_for_backward(roots):
                backward(roots, gradients)
        finally:
            for kind in self.autocast:
                torch.set_autocast_enabled(kind, True)

    def output_of(self, inputs: Any) -> Any:
        """The module's output for the inputs of one micro-batch."""
        args, kwargs = as_call(inputs)
        return self.module(*args, **kwargs)


def criterion_lock(criterion: Callable[..., Any] | None) -> _Context | None:
    """A lock that all replicas hold in calls of the criterion; ``None`` for torch's own
    losses.

    A function is shared, with all that it refers to. Of a module each replica has a
    copy.
    """
    is_module = isinstance(criterion, nn.Module)
    kind = type(criterion) if is_module else criterion
    of_torch = "torch.nn.functional", "torch.nn.modules.loss"
    if criterion is None or getattr(kind, "__module__", None) in of_torch:
        return None
    return contextlib.nullcontext() if is_module else threading.Lock()


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module: a mapping by name, a tuple by position, any other
    value alone.
    """
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return inputs, {}
    # the Mapping check is slow
    if not isinstance(inputs, Tensor) and isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def call_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as inputs: a pair, or a marker whose ``collate`` returns
    one.
    """
    collate = (
        args[0].collate if len(args) == 1 and isinstance(args[0], Marker) else None
    )
    if collate is None or kwargs:
        return args, kwargs
    marker = copy.copy(args[0])
    marker.collate = lambda value: as_call(collate(value))
    return marker


class Computed(NamedTuple):
    """The results of one share, or of all of them, without gradients that are in
    replicas.
    """

    loss: float  # its part of the batch's loss: the weighted sum over its micro-batches
    dtype: torch.dtype  # of the losses
    # to be returned: of each micro-batch, or for each share such a list
    outputs: Sequence[Any]
    external_gradients: Sequence[Gradient] = ()  # of leaves that no replica copied


def make_tasks(attempt: Attempt, loaders: Sequence[ShareLoader]) -> list[ReplicaTask]:
    """One task per share. With fewer rows than replicas, the last
    replicas have none.
    """
    tasks, replicas, weights = [], attempt.replicas, attempt.weights.by_share
    criteria, lock = replicas.criteria, criterion_lock(replicas.criteria[0])
    for i, share in enumerate(attempt.plan.shares):
        sets = [each for each in replicas.replica_sets if i < len(each.replicas)]
        tasks.append(
            ReplicaTask(
                share,
                module=replicas.of_model.replicas[i].root,
                loader=loaders[i],
                criterion=criteria[i] if i < len(criteria) else None,
                weights=weights[i] if weights else (),
                replicas=[each.replicas[i] for each in sets],
                leaves=[
                    each.replicas[i].tensors[n] for each in sets for n in each.trained
                ],
                criterion_lock=lock,
                clock=attempt.clock,
                autocast=autocast_types(),
            )
        )
    return tasks


class Substeps:
    """The sub-steps of one replica in one step, run eagerly."""

    def __init__(self, task: ReplicaTask, request: Request) -> None:
        self._task, self._request = task, request
        self._without_gradient: Sequence[Tensor] = task.leaves

    def train(self, max_substeps: int | None, proceed: Proceed) -> Computed:
        """Accumulate in the replica's parameters the gradient of its
        share of the loss.
        """
        task, share, results = self._task, self._task.share, list[tuple[Tensor, Any]]()
        for number, weight in enumerate(task.weights[:max_substeps]):
            proceed(number)
            results.append(self.run(number, weight))
        proceed(None)
        self.finish()
        losses, outputs = zip(*results, strict=True)
        # One transfer. Errors of the device are raised here at the latest.
        values = to_numbers(torch.stack(losses))
        total = 0.0
        for number, (value, weight) in enumerate(
            zip(values, task.weights, strict=False)
        ):
            if not weight:  # ignores even NaN
                continue
            total += value * weight
            if self._request.check_finite and not math.isfinite(value):
                proceed(number)
                raise FloatingPointError(
                    f"the loss is {value} in replica {share.replica} on "
                    f"{share.device}, "
                    f"sub-step {number}; nothing was changed"
                )
        return Computed(total, losses[0].dtype, outputs)

    def run(self, number: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """Add a micro-batch's gradients. Returns its loss, and the part of its output
        to return.
        """
        task = self._task
        output, loss = forward(
            task, task.rows_of(number) if rows is None else rows, number
        )
        what = self._request.return_outputs
        returned = detached_output(output, what) if what else None
        # the graph has what the backward pass needs: a large output is freed before it
        del output
        if weight and self._request.backward:
            if not loss.requires_grad:
                require_trainable(task.module)
            factor = torch.full_like(
                loss, weight * self._request.scale, requires_grad=False
            )
            task.run_backward(number, [loss], [factor])
            # usually all get gradients in the first sub-step
            if self._without_gradient:
                self._without_gradient = unalias(self._without_gradient)
        return loss.detach(), returned

    def finish(self) -> None:
        """Called after the last sub-step; here all gradients are in the
        leaves already.
        """


class Schedule:
    """One pass: each replica adds up the gradient of its sub-steps' losses.

    Attributes:
        replicas_of_criterion: the number of replicas of the criterion; ``None`` for as
            many as the module has.
    """

    replicas_of_criterion: int | None = None

    def data(self, request: Request) -> BatchList:
        """The rows to scatter: for each batch its first row's number, its inputs and
        targets.
        """
        return request.batches

    def weights_apply(self) -> bool:
        """Whether each micro-batch has a loss, which has a factor in the loss of the
        batch.
        """
        return True

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> Substeps:
        """What runs the sub-steps of one replica in one step."""
        return Substeps(task, attempt.request)

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run all sub-steps. Afterwards the replicas have the gradients."""

        def train(task: ReplicaTask, *, proceed: Proceed) -> Computed:
            return self.substeps(attempt, task).train(attempt.max_substeps, proceed)

        def returned(task: ReplicaTask, rows: Any) -> Any:
            return detached_output(task.output_of(rows[0]), request.return_outputs)

        request = attempt.request
        with parameter_writes_refused(attempt.replicas.replica_sets):
            results = attempt.run(train, tasks)
        # Not sum(): from Python 3.12 on it compensates, and so rounds in another way.
        loss = functools.reduce(operator.add, [result.loss for result in results])
        outputs = [result.outputs for result in results]
        if request.return_outputs:
            attempt.check_join(attempt, tasks[0], outputs, returned)
        return Computed(loss, results[0].dtype, outputs)


def compute(
    attempt: Attempt, loaders: Sequence[ShareLoader], schedule: Schedule
) -> Computed:
    """Run every replica's sub-steps, each in its worker; the replicas then have the
    gradients.

    User code that runs meanwhile may move generators and statistics of networks that it
    refers to, which are restored if the step fails. Raises ``ValueError`` if a gradient
    arrives at the user's own leaves, or at those that the criterion or an object in the
    module refers to.
    """
    criterion, sets = attempt.request.criterion, attempt.replicas.replica_sets
    held = closure_contents(criterion)
    shared = [[*each.contents.objects.values()] for each in sets]
    held += closure_contents(shared) if any(shared) else []
    if held:
        generators = [value for value in held if isinstance(value, torch.Generator)]
        attempt.save_for_undo(training_buffers(held), generators=generators)
    trained = [leaf for each in sets for leaf in each.leaves.values()]
    leaves = list(
        {id(leaf): leaf for leaf in (*trained, *trained_leaves(held))}.values()
    )
    attempt.user_leaves = leaves
    with set_aside(leaves):
        tasks = make_tasks(attempt, loaders)
        if attempt.check is not None:
            with attempt.span("verify"), no_kernel_search():  # a check has other sizes
                attempt.check(attempt, tasks[: len(attempt.replicas.criteria)])
        computed = schedule.run(attempt, tasks)
        attempt.transfers.synchronize()
        for leaf in leaves:
            if leaf.grad is not None:
                raise not_replicated(leaf, criterion)
    return computed


@contextlib.contextmanager
def set_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """In the body, ``leaves`` have no ``.grad`` and no hooks; afterwards both are as
    before.

    Replicas add gradients to copies of the user's parameters. A gradient that arrives
    in a leaf of the user comes from an object that replicas share, and so is added in
    the order of arrival.
    """
    gradients = [leaf.grad for leaf in leaves]
    with hooks_taken_off(leaves):
        try:
            for leaf in leaves:
                leaf.grad = None
            yield
        finally:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient


def forward(
    task: ReplicaTask, rows: tuple[Any, Any], number: int = 0
) -> tuple[Any, Tensor]:
    """The output and loss of one micro-batch.

    One replica at a time calls a function that they share: what a call stores in a
    network that it closes over, such as features that a hook keeps, the same call
    reads.
    """
    before = gradient_versions(task.leaves)
    inputs, targets = rows
    with task.span("forward", number):
        output = task.output_of(inputs)
        del rows, inputs
        if task.criterion_lock is None:
            loss = loss_of(output, targets, task.criterion)
    if task.criterion_lock is not None:
        loss = _loss_of_function(task, output, targets, number)
    if gradient_versions(task.leaves) != before:
        raise inner_backward(task.leaves, before, task.replicas)
    return output, loss


def _loss_of_function(
    task: ReplicaTask, output: Any, targets: Any, number: int
) -> Tensor:
    """The loss of one micro-batch, from a criterion that may be a shared function."""
    # before the criterion, which may write outputs
    nodes = nodes_of(nested.tensors(output))
    # The lock first: in a trace, replicas that wait for it do not compute.
    assert task.criterion_lock is not None
    with task.criterion_lock, task.span("criterion", number):
        loss = loss_of(output, targets, task.criterion)
    # The graph shows the parameters of another network before they get a gradient,
    # wherever the criterion hides them. Leaves that are no parameters may be the
    # criterion's own.
    for leaf in leaves_reached(loss, nodes):
        if isinstance(leaf, nn.Parameter) and not any(
            leaf is own for own in task.leaves
        ):
            raise not_replicated(leaf, task.criterion)
    return loss


def loss_of(
    output: Any, targets: Any, criterion: Callable[[Any, Any], Any] | None
) -> Tensor:
    """The loss of one micro-batch, from the criterion or from the module's output."""
    if criterion is None:
        if isinstance(output, Mapping) and "loss" in output:
            return scalar_loss(output["loss"], "the module")
        is_loss = isinstance(output, Tensor)
        return scalar_loss(
            output if is_loss else getattr(output, "loss", output), "the module"
        )
    try:
        loss = criterion(output, targets)
    except Exception as error:
        for tensor in nested.tensors(output)[:1]:
            note_wrong_devices(error, criterion, tensor.device)
        if isinstance(error, TypeError) and "positional argument" in str(error):
            add_note(error, "the criterion is called as criterion(output, targets)")
        raise
    return scalar_loss(loss, "the criterion")


def scalar_loss(loss: Any, source: str) -> Tensor:
    """``loss``, if it is a real 0-dim tensor; otherwise raises an error that names
    ``source``.
    """
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{source} must give the loss as a 0-dim tensor, got "
            f"{type(loss).__name__}; "
            f"{_instead_of(loss, source)}"
        )
    if loss.ndim:
        raise ValueError(
            f"{source} must give a 0-dim loss, got shape {tuple(loss.shape)}; reduce it"
        )
    # torch refuses it in backward(), but not if a gradient is passed
    if loss.is_complex():
        raise ValueError(
            f"{source} must give a real loss, got {loss.dtype}; take its .abs()"
        )
    return loss


def _instead_of(loss: Any, source: str) -> str:
    """What to pass or return for a loss that is no tensor, but may have one in it."""
    entries = enumerate(loss) if isinstance(loss, (tuple, list)) else ()
    named = dict(loss if isinstance(loss, Mapping) else entries)
    scalars = [key for key, t in named.items() if isinstance(t, Tensor) and not t.ndim]
    if isinstance(loss, Mapping) and scalars and len(scalars) == len(named):
        one, criterion = (
            "sum(losses.values())",
            "criterion=lambda losses, _: sum(losses.values())",
        )
    else:
        which = scalars[0] if scalars else 0  # many models return (logits, loss)
        one, criterion = (
            "it alone",
            f"a criterion, such as lambda output, _: output[{which!r}]",
        )
    if source == "the module":
        return (
            f"pass {criterion}, or return the loss, .loss or ['loss'] from the module"
        )
    return f"return {one}"


def require_trainable(module: Any) -> None:
    """Raise ``ValueError`` if no parameter of the module requires grad."""
    if isinstance(module, nn.Module) and not any(
        p.requires_grad for p in module.parameters()
    ):
        raise ValueError(
            f"the module, {type(module).__name__}, has no parameter that requires "
            "grad: there is "
            f"nothing to train; call .requires_grad_() on what is to be trained"
        )


def detached_output(output: Any, return_outputs: bool | Callable[[Any], Any]) -> Any:
    """An output without its graph; if ``return_outputs`` is a function, its result for
    that.
    """
    output = nested.map_tensors(lambda tensor: tensor.detach(), output)
    if callable(return_outputs):
        with torch.no_grad():
            return nested.map_tensors(
                lambda tensor: tensor.detach(), return_outputs(output)
            )
    nested.refuse_generators(output)
    return output


def unalias(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Clone new gradients that share memory. Returns the leaves that have no gradient
    yet.

    Autograd makes an arriving gradient the ``.grad`` of a leaf without one, also if
    another leaf got a view of it. In ``a.view(1, -1) + b.view(1, -1)`` both then share
    memory, and the next backward pass adds to it twice. New gradients share memory only
    with each other.
    """
    without: list[Tensor] = []
    places: list[tuple[int, int, int]] = []
    for number, leaf in enumerate(leaves):
        gradient = leaf.grad
        if gradient is None:
            without.append(leaf)
        elif gradient.layout == torch.strided:
            places.append((gradient.data_ptr(), gradient.nbytes, number))
    upto = 0
    for start, size, number in sorted(places):
        gradient = leaves[number].grad if size and start < upto else None
        if gradient is not None:
            leaves[number].grad = gradient.clone()
        upto = max(upto, start + size)
    return without
