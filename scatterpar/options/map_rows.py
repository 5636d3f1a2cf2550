"""Work without gradients on all rows of a batch.

It is the forward pass, or any function of a replica::

    outputs = [function(replica, *rows) for replica, rows in micro_batches]
    return join(outputs)

Between the two lines the engine finds how numbers combine, and what has no rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from scatterpar.batch import nested
from scatterpar.batch.joining import KnownTensors, Lists
from scatterpar.batch.refused_outputs import refuse_generators
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.errors import add_note
from scatterpar.objects.references import module_of, named_values
from scatterpar.options.call_arguments import Arguments
from scatterpar.replicas.buffers import BufferWriter
from scatterpar.replicas.replicas import ReplicaSet, parameter_writes_refused
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import compute_loss_weights
from scatterpar.step.misfits import misfit_of_dataclass, misfit_of_inputs
from scatterpar.step.reduce import join_on_master, lists_in_outputs, reduce_buffers
from scatterpar.step.replica_threads import Proceed
from scatterpar.step.scatter import scatter
from scatterpar.step.substeps import detached, save_referents
from scatterpar.step.task import ReplicaTask, make_tasks
from scatterpar.step.turns import Scope


@dataclass
class RowFunction:
    """The module, or a function for ``map``, as each replica calls it for its rows.

    Attributes:
        function: the module, a method of a part of it, or a function that gets a
            replica as its first argument.
        arguments: its positional and keyword arguments, for all rows.
        pad: that of ``join_rows``.
        may_start_again: a call that runs out of memory may begin again, with more
            sub-steps. False once memory has run out in the join of all outputs, which
            needs as much with more sub-steps.
    """

    function: Callable[..., Any]
    arguments: Arguments
    pad: float | None
    may_start_again: bool = True


@dataclass
class Mapped:
    """The results of a call without gradients, of which nothing is written yet.

    Attributes:
        attempt: the one that succeeded.
        output: the joined results; ``None`` in a trial.
        buffers: write the module's buffers; ``None`` if no part of it trains.
    """

    attempt: Attempt
    output: Any = None
    buffers: BufferWriter | None = None

    def commit(self) -> None:
        """Write buffers and random state."""
        if self.buffers is not None:
            self.buffers.write()
        self.attempt.generators.commit()


def map_rows(
    attempt: Attempt,
    module: nn.Module,
    row_function: RowFunction,
) -> list[list[Any]]:
    """Call a function for the whole batch. Returns its results by share.

    The request's inputs are a pair of positional and keyword arguments.
    """
    plan = attempt.plan
    request = attempt.request
    transfers = attempt.transfers
    replicas = attempt.replicas
    function = row_function.function
    loaders = scatter(request.batches, plan, transfers)
    # No criterion is called, so none is copied.
    replicas.refresh(module, None, transfers)
    attempt.weights = compute_loss_weights(request, plan, None)
    tasks = make_tasks(attempt, loaders)
    work = _Work(function, replicas.of_model, attempt.extent.max_substeps)
    save_referents(attempt, function)
    with parameter_writes_refused(replicas.replica_sets):
        outputs = attempt.threads.run(work.of_share, tasks)
        if attempt.extent.is_trial:
            transfers.synchronize()
    return outputs


def join_results(
    attempt: Attempt,
    module: nn.Module,
    row_function: RowFunction,
    outputs: Sequence[Sequence[Any]],
    known: KnownTensors,
) -> Mapped:
    """Join the results of ``map_rows`` on the master.

    Lists in a module's output may be lists of tensors, and then are not joined.
    ``known`` is that of ``join_rows``.
    """
    lists: Lists = "always"
    if row_function.function is module:
        lists = lists_in_outputs(attempt.request.batches)
    try:
        output = join_on_master(
            attempt,
            outputs,
            lists,
            row_function.pad,
            names_map=True,
            known=known,
        )
    except Exception as error:
        if is_out_of_memory(error):
            row_function.may_start_again = False
            add_note(error, _RESULTS_DO_NOT_FIT)
        raise
    attempt.transfers.synchronize()
    return Mapped(attempt, output, buffers_of(attempt, module))


def buffers_of(attempt: Attempt, module: nn.Module) -> BufferWriter | None:
    """Writes the module's buffers as they are after calls without gradients.

    ``None`` if no part of it trains.
    """
    if not any(part.training for part in module.modules()):
        return None
    buffers, changes, statistics = reduce_buffers(attempt)
    if statistics is not None:
        buffers += statistics.values()
    return BufferWriter(buffers, attempt.replicas.equal_buffers(), changes)


_RESULTS_DO_NOT_FIT = (
    "the results of all rows do not fit on the first device together, however many "
    "sub-steps there are: return less per row, or pass fewer rows"
)


_ENTRIES_ARE_ARGUMENTS = (
    "engine.map passes the entries of a single dict as keyword arguments, and the "
    "entries of a single tuple as positional arguments; pass (value,) to pass the dict "
    "or tuple as one argument"
)


class _Work:
    """The function as each replica calls it.

    Each replica calls its own method, or ``function`` with the replica as first
    argument. Raises ``ValueError`` if ``function`` refers to the user's module, which
    is on one device.

    Attributes:
        function: what the user passed; ``None`` for the module itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        replica_set: ReplicaSet,
        max_substeps: int | None,
    ) -> None:
        self._max_substeps = max_substeps
        inner = function
        bound: list[Any] = []
        while isinstance(inner, partial):
            bound += inner.args
            bound += inner.keywords.values()
            inner = inner.func
        # Not of a method: its object may have the module, and not use it.
        if isinstance(inner, FunctionType):
            bound += named_values(inner).values()
        self.function = None if function is replica_set.root else function
        replicas = replica_set.replicas
        if _is_of(inner, replica_set):
            # Each replica's own method: a bound method of the user's module runs on the
            # master.
            self._calls = [replica.copy_of(function) for replica in replicas]
            return
        if any(_is_of(value, replica_set) for value in bound):
            raise ValueError(
                "the function refers to the module itself, which is on one device; use "
                "the replica that the function gets as its first argument, as in "
                "lambda replica, x: replica.generate(x), or pass a method of the "
                "module, such as model.generate"
            )
        self._calls = [partial(function, replica.root) for replica in replicas]

    def __call__(self, task: ReplicaTask, rows: Any) -> Any:
        (args, kwargs), _ = rows
        call = self._calls[task.share.replica]
        writer = "forward" if self.function is None else "the function"
        arguments = dict(enumerate(args)) | kwargs
        try:
            with torch.no_grad(), task.writes.watched(writer, "inputs", arguments):
                output = call(*args, **kwargs)
        except (TypeError, AttributeError) as error:
            of_dataclass = misfit_of_dataclass(error, task.module, args, kwargs)
            if of_dataclass is not None:
                raise of_dataclass from error
            misfit = None
            if isinstance(error, TypeError):
                inputs = args[0] if len(args) == 1 and not kwargs else args
                misfit = misfit_of_inputs(call, inputs, args, kwargs)
            if misfit is None:
                raise
            if self.function is not None:
                add_note(error, _ENTRIES_ARE_ARGUMENTS)
                raise
            raise misfit from error
        refuse_generators(output)
        return nested.map_tensors(detached, output)

    def of_share(self, task: ReplicaTask, proceed: Proceed) -> list[Any]:
        """The results for a share's micro-batches; in a trial, for the first ones."""
        outputs: list[Any] = []
        sub_steps = range(len(task.share.micro_batches))
        for sub_step in sub_steps[: self._max_substeps]:
            proceed(sub_step)
            with _counting_writes():
                rows = task.loader.load(sub_step)
            # A user's function may write what it closes over: in turns, in the order of
            # the rows.
            with task.turn(Scope.FUNCTION, sub_step):
                outputs.append(self(task, rows))
        return outputs


def _counting_writes() -> contextlib.AbstractContextManager[object]:
    """In the body copies count how often they are written, as inference tensors do
    not.
    """
    if not torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(False)


def _is_of(value: Any, replica_set: ReplicaSet) -> bool:
    """Whether ``value`` is a module that is replicated, or a method of one."""
    owner = module_of(value)
    return owner is not None and replica_set.contains_all_of(owner)
