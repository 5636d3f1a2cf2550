"""The work of one replica in one step: its module, its rows, its criterion."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from scatterpar.batch.markers import Marker
from scatterpar.errors import restored
from scatterpar.objects.whose import is_loss_of_torch
from scatterpar.plan import Share
from scatterpar.replicas.replicas import Replica
from scatterpar.step.attempt import NO_BLOCK, Attempt, profiler_block
from scatterpar.step.misfits import misfit_of_dataclass, misfit_of_inputs
from scatterpar.step.replica_threads import Context, ReplicaThreads
from scatterpar.step.row_writes import RowWrites
from scatterpar.step.scatter import ShareLoader
from scatterpar.step.turns import Scope
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.generators import Generators, generator_for_backward
from scatterpar.torch_private.autograd import backward


@dataclass(frozen=True)
class ReplicaTask:
    """The work of one replica in one step; only the replica's thread uses it.

    Attributes:
        share: the rows, and how they are cut into micro-batches.
        module: the replica.
        loader: copies the share's rows to the replica's device.
        criterion: the replica's criterion; ``None`` if the module has the loss.
        weights: the factor of each micro-batch's loss in the loss of the batch.
        sums: whether the criterion adds its terms up.
        replicas: that of the model, and that of the criterion if it needs one.
        leaves: the tensors in which backward passes accumulate gradients.
        threads: those of the replicas, which may run parts of a sub-step in turn.
        is_loss_of_torch: whether the criterion is one of torch's own, or there is none.
        is_profiled: whether a profiler of torch is to show the parts of a sub-step.
        autocast: the device types for which the caller has enabled autocast.
        writes: what user code has written into the rows.
    """

    share: Share
    module: Callable[..., Any]
    loader: ShareLoader
    criterion: Callable[[Any, Any], Any] | None
    weights: Sequence[float]
    sums: bool
    replicas: Sequence[Replica]
    leaves: Sequence[Tensor]
    threads: ReplicaThreads
    is_loss_of_torch: bool
    is_profiled: bool
    autocast: Sequence[str]
    writes: RowWrites

    def span(self, name: str, sub_step: int) -> Context:
        """In a profiler the body is a part of a sub-step."""
        return profiler_block(name, sub_step) if self.is_profiled else NO_BLOCK

    def turn(self, scope: Scope, sub_step: int) -> Context:
        """In the body, which is this part of a sub-step, it is the replica's turn."""
        return self.threads.turn(scope, self.share.replica, sub_step)

    def restore_replicas(self) -> None:
        """Undo what earlier calls of the replicas have rebound, before the next one."""
        for replica in self.replicas:
            replica.restore()

    def rows_of(
        self, sub_step: int, *, retain: bool = False, holds_next: bool = False
    ) -> Any:
        """The rows of one micro-batch, as by ``ShareLoader.load``."""
        with self.span("arrival", sub_step):
            return self.loader.load(sub_step, retain=retain, holds_next=holds_next)

    def output_of(self, inputs: Any) -> Any:
        """The module's output for the inputs of one micro-batch."""
        # The signature is read after a failure only: it would cost each sub-step.
        args, kwargs = arguments_from_inputs(inputs)
        try:
            with self.writes.watched("forward", "inputs", inputs) as watch:
                output = self.module(*args, **kwargs)
                watch.result = output
            return output
        except (TypeError, AttributeError) as error:
            misfit = None
            if isinstance(error, TypeError):
                misfit = misfit_of_inputs(self.module, inputs, args, kwargs)
            misfit = misfit or misfit_of_dataclass(error, self.module, args, kwargs)
            if misfit is None:
                raise
            raise misfit from error

    def run_backward(
        self, sub_step: int, roots: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Run the backward pass of a sub-step, which profilers show as a part."""
        with self.span("backward", sub_step):
            self.run_unprofiled_backward(roots, gradients)

    def run_unprofiled_backward(
        self, roots: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> None:
        """Run a backward pass with autocast off, as torch recommends."""
        for device_type in self.autocast:
            torch.set_autocast_enabled(device_type, False)
        try:
            # Activation checkpoints draw again in the backward pass, in autograd's
            # thread.
            with generator_for_backward(roots):
                backward(roots, gradients)
        finally:
            for device_type in self.autocast:
                torch.set_autocast_enabled(device_type, True)

    @contextlib.contextmanager
    def isolated(self, generators: Generators) -> Iterator[None]:
        """In the body, the task's replicas start as after the last ``reset``.

        Afterwards their present state and that of the replica's generators is restored,
        but not their gradients.
        """
        replica = self.share.replica
        state = generators.get_state(replica)
        with (
            restored(partial(generators.set_state, replica, state)),
            contextlib.ExitStack() as stack,
        ):
            for replica_of_root in self.replicas:
                stack.enter_context(replica_of_root.isolated())
            yield


def make_tasks(attempt: Attempt, loaders: Sequence[ShareLoader]) -> list[ReplicaTask]:
    """Make a task per share: with fewer rows than replicas, the last ones have none.

    Replicas are refreshed before, and the attempt's weights are known.
    """
    replica_sets = attempt.replicas.replica_sets
    criteria = attempt.replicas.criteria
    weights = attempt.weights
    of_losses = weights.of_losses
    is_loss_of_torch = is_of_torch(criteria[0])
    if not is_loss_of_torch and is_shared(criteria[0]):
        attempt.threads.widen(Scope.CRITERION)
    # Asked once: all sub-steps have the caller's autocast.
    autocast = autocast_types()
    tasks: list[ReplicaTask] = []
    for number, share in enumerate(attempt.plan.shares):
        replicas: list[Replica] = []
        leaves: list[Tensor] = []
        for replica_set in replica_sets:
            # With whole_batch only the master has a replica of the criterion.
            if number < len(replica_set.replicas):
                replica = replica_set.replicas[number]
                replicas.append(replica)
                numbers = replica_set.slots.trained_numbers
                leaves += map(replica.tensors.__getitem__, numbers)
        task = ReplicaTask(
            share,
            module=replicas[0].root,
            loader=loaders[number],
            criterion=criteria[number] if number < len(criteria) else None,
            weights=of_losses[number],
            sums=weights.sums,
            replicas=replicas,
            leaves=leaves,
            threads=attempt.threads,
            is_loss_of_torch=is_loss_of_torch,
            is_profiled=attempt.is_profiled,
            autocast=autocast,
            writes=attempt.writes,
        )
        tasks.append(task)
    return tasks


def is_of_torch(criterion: Callable[..., Any] | None) -> bool:
    """Whether the criterion is one of torch's losses, or there is none."""
    return criterion is None or is_loss_of_torch(criterion)


def is_shared(criterion: Callable[..., Any] | None) -> bool:
    """Whether replicas share the criterion, with all that it refers to.

    It is a function; of a module each replica has a copy, and torch's own losses keep
    nothing.
    """
    return not (isinstance(criterion, nn.Module) or is_of_torch(criterion))


def arguments_from_inputs(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a module is called with a batch's inputs: positional and keyword arguments.

    A tuple has positional arguments, a mapping keyword arguments. Anything else is a
    single positional argument.
    """
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return inputs, {}
    # Tensor first: the Mapping check is slow.
    if not isinstance(inputs, Tensor) and isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs,), {}


def inputs_from_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The inputs of a batch for a call with these arguments: a pair of both.

    Of a single marker it is the marker, whose ``collate`` then returns such a pair.
    """
    is_single = len(args) == 1 and not kwargs
    if not is_single or not isinstance(args[0], Marker) or args[0].collate is None:
        return args, kwargs
    # A copy: the marker is the user's, and the next call gets it again.
    marker = copy.copy(args[0])
    marker.collate = partial(_collated_call, args[0].collate)
    return marker


def _collated_call(collate: Callable[[Any], Any], contents: Any) -> Any:
    return arguments_from_inputs(collate(contents))
