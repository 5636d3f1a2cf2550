"""The replicas compute: forward and backward over their shares, or forward only.

torch.compile is not thread-safe (https://github.com/pytorch/pytorch/issues/118260), and replicas
that see a new size at the same time would each compile it. So sub-steps that compiled replicas have
not seen yet (other sizes, flags, attributes of the module) are warmed up first: forward and
backward, one replica after the other, each in its own worker. Then state is restored, and the step
finds everything compiled.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from scatterpar import torch_private
from scatterpar.devices.fingerprints import same_bits
from scatterpar.replicas.buffers import BufferWriter, running_stats_after
from scatterpar.replicas.replicas import ReplicaSet, parameter_writes_refused
from scatterpar.step import nested
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import (
    closure_contents,
    external_leaves,
    training_buffers,
)
from scatterpar.step.graphs import Graphs
from scatterpar.step.loss_weights import LossWeights
from scatterpar.step.markers import has_markers_with_rows
from scatterpar.step.nested import join_rows, needs_layout
from scatterpar.step.outcome import Computed
from scatterpar.step.reduce import gather_to_master, reduce_buffers, reduce_moments
from scatterpar.step.request import Request
from scatterpar.step.scatter import ShareLoader, scatter
from scatterpar.step.stash import Stash
from scatterpar.step.substeps import (
    ReplicaTask,
    detached_output,
    forward,
    make_tasks,
    note_replica,
    run_backward,
    train_share,
)
from scatterpar.step.whole_batch import Peers, first_pass, output_at, train_whole
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.clock import SILENT


class _Checks(Protocol):
    """The methods of ``Verifier`` that a step calls; its package is above this one."""

    def verify(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[ReplicaTask],
        replica_sets: Sequence[ReplicaSet],
        peers: Peers | None,
    ) -> None: ...

    def layout_of(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        output_of: Callable[[Any], Any],
        piece: Any,
    ) -> Any: ...

    def watch_state(
        self, request: Request, tasks: Sequence[ReplicaTask], replica_sets: Sequence[ReplicaSet]
    ) -> Callable[[], None]: ...


_PATIENCE_SECONDS = 10.0  # wait for a replica that neither compiles nor ends


def compute(
    attempt: Attempt,
    replica_set: ReplicaSet,
    loaders: Sequence[ShareLoader],
    weights: LossWeights,
    checks: _Checks,
    peers: Peers | None,
    graphs: Graphs | None,
) -> Computed:
    """Run every replica's sub-steps, each in its worker; the replicas then have the gradients.

    User code that runs meanwhile may write ``.grad`` of the user's own parameters, which is
    restored at the end of this call, and statistics, which are restored if the step fails.
    """
    request, replica_sets = attempt.request, replica_set.replica_sets
    held, generators = closure_contents(request.criterion)
    shared, _ = closure_contents([each.shared_objects for each in replica_sets])
    buffers, shared_buffers = training_buffers(held), training_buffers(shared)
    copied = set(map(id, chain(*(each.tensors for each in replica_sets))))
    written = [*buffers, *(t for t in shared_buffers if id(t) not in copied)]
    attempt.save_for_undo(written, (), generators)
    shared_leaves = external_leaves(shared, replica_sets)
    named = external_leaves([*held, *shared_leaves], replica_sets) if peers else None
    with Stash(attempt.workers.claims, replica_sets, named, shared_leaves) as stash:
        args = weights.by_share, stash, attempt.clock
        tasks = make_tasks(attempt.plan, replica_set, loaders, *args)
        with parameter_writes_refused(replica_sets):
            warm_up(attempt, tasks, replica_sets, output_at if request.whole_batch else _loss)
            before = [(t, t.clone()) for t in buffers if id(t) in copied]
            with attempt.clock.span("verify"):
                checked = tasks[: len(replica_set.criteria)]
                checks.verify(attempt, request, checked, replica_sets, peers)
            warn_of_moved_state = checks.watch_state(request, tasks, replica_sets)
            if request.whole_batch:
                passes = attempt.run(partial(first_pass, attempt=attempt), tasks)
                pieces, output_of = [first.outputs for first in passes], output_at
                returned = [first.returned for first in passes]
            else:
                work = partial(train_share, attempt=attempt)
                if graphs is not None and request.max_substeps is None and request.backward:
                    work.keywords["substeps"] = partial(graphs.of, attempt, replica_sets)
                results = attempt.run(work, tasks)
                # Not sum(): from Python 3.12 on it compensates, and so rounds in another way.
                loss = functools.reduce(operator.add, [result.loss for result in results])
                dtype = results[0].dtype
                pieces = returned = [result.outputs for result in results]
                output_of = partial(_returned_output, return_outputs=request.return_outputs)
            warn_of_moved_state()
            layout = _layout(attempt, tasks[0], output_of, pieces, checks)
        if request.whole_batch:
            peers = None if request.max_substeps else peers  # a trial runs in this process only
            with parameter_writes_refused(replica_sets, second_pass=True):
                loss, dtype = train_whole(attempt, tasks, passes, replica_set, peers, layout)
        attempt.transfers.synchronize()
        outputs = _returned_outputs(attempt, tasks, returned, layout)
        written_buffers = {id(t) for t, value in before if not same_bits(t, value)}
        return Computed(loss, dtype, outputs, stash.gradients(), written_buffers)


def _layout(
    attempt: Attempt,
    task: ReplicaTask,
    compute_rows: Callable[[ReplicaTask, Any], Any],
    outputs: Sequence[Sequence[Any]],
    checks: _Checks,
) -> Any:
    """The number of entries per row in each replica's ``outputs``; ``None`` if sizes show it.

    ``compute_rows(task, rows)`` returns the output for other rows.
    """
    request, pieces = attempt.request, [*chain(*outputs)]
    if not pieces or not needs_layout(pieces, request.dim, attempt.plan.substep_rows):
        return None

    def output_of(inputs: Any) -> Any:
        return compute_rows(task, (inputs, None))

    return checks.layout_of(attempt, request, task, output_of, pieces[0])


def _returned_outputs(
    attempt: Attempt, tasks: Sequence[ReplicaTask], outputs: Sequence[Sequence[Any]], layout: Any
) -> tuple[Any, ...]:
    """The outputs for ``return_outputs``: one entry per replica, or with costs one of all rows."""
    plan, request = attempt.plan, attempt.request
    if not request.return_outputs:
        return ()
    join = partial(join_rows, dim=request.dim, strict=True, layout=layout)
    sizes = [[stop - start for start, stop in task.share.micro_batches] for task in tasks]
    weights = sizes if request.whole_batch else [task.weights for task in tasks]
    if plan.order:
        on_master, factors = gather_to_master(outputs, plan, attempt.transfers), [*chain(*weights)]
        return (join(on_master, weights=factors, rows=plan.substep_rows, order=plan.order),)
    joined = []
    for task, pieces, rows, weights_of_share in zip(tasks, outputs, sizes, weights, strict=True):
        with note_replica(task.share):
            joined.append(join(pieces, weights=weights_of_share, rows=rows))
    return tuple(joined)


def infer(attempt: Attempt, replica_set: ReplicaSet, module: nn.Module, checks: _Checks) -> Any:
    """The module's output for the whole batch, on the master: scatter, replicate, forward, join.

    The request's ``inputs`` are a pair of positional and keyword arguments.
    """
    plan, request, transfers = attempt.plan, attempt.request, attempt.transfers
    loaders = scatter(request.batch, plan, request.dim, transfers)
    replica_set.refresh(module, None, transfers)
    tasks, replica_sets = make_tasks(plan, replica_set, loaders), replica_set.replica_sets
    with parameter_writes_refused(replica_sets):
        warm_up(attempt, tasks, replica_sets, _predicted)
        outputs = attempt.run(_infer_share, tasks)
        layout = _layout(attempt, tasks[0], _predicted, outputs, checks)
    output = join_rows(
        gather_to_master(outputs, plan, transfers),
        request.dim,
        weights=plan.substep_rows,
        rows=plan.substep_rows,
        lists=has_markers_with_rows(request.batch),
        layout=layout,
        order=plan.order,
    )
    transfers.synchronize()
    if any(part.training for part in module.modules()):
        buffers = reduce_buffers(replica_sets, plan.shares, transfers)
        for layer in reduce_moments(replica_sets, len(tasks), transfers):
            buffers += running_stats_after(layer)
        BufferWriter(buffers)()
    attempt.generators.commit()
    return output


def _returned_output(
    task: ReplicaTask, rows: Any, return_outputs: bool | Callable[[Any], Any]
) -> Any:
    return detached_output(task.output_of(rows[0]), return_outputs)


def _infer_share(task: ReplicaTask, *, proceed: Callable[[], None]) -> list[Any]:
    outputs = []
    for number in range(len(task.share.micro_batches)):
        if number:
            proceed()
        with note_replica(task.share, number):
            outputs.append(_predicted(task, task.loader.load(number)))
    return outputs


def _predicted(task: ReplicaTask, rows: Any) -> Any:
    (args, kwargs), _ = rows
    with torch.no_grad():
        output = task.module(*args, **kwargs)
    nested.refuse_generators(output)
    return output


def _loss(task: ReplicaTask, rows: Any) -> Tensor:
    return forward(task, rows)[1]


def warm_up(
    attempt: Attempt,
    tasks: Sequence[ReplicaTask],
    replica_sets: Sequence[ReplicaSet],
    compute_rows: Callable[[ReplicaTask, Any], Any],
) -> None:
    """Compile the sub-steps that compiled replicas have not seen: run them, and restore all state.

    ``compute_rows(task, rows)`` is the forward pass of a sub-step.
    """
    model = replica_sets[0]
    if not any(each.compiler.is_used for each in replica_sets):
        return
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocast_types())
    new: list[dict[Hashable, int]] = []  # per replica: the first micro-batch of each new kind
    for task in tasks:
        new.append({})
        for number in range(len(task.share.micro_batches)):
            key = _compile_key(task.loader.rows_at_source(number))
            kind = task.share.replica, compute_rows, model.flags, modes, key
            if kind not in model.warmed_up_kinds:
                new[-1].setdefault(kind, number)
    if not any(new):
        return
    done = [threading.Event() for _ in tasks]
    tasks = [replace(task, clock=SILENT) for task in tasks]

    def one_at_a_time(task: ReplicaTask, *, proceed: Callable[[], None]) -> None:
        replica = task.share.replica
        for earlier in done[:replica]:  # in order, unless an earlier one waits for this replica
            while not earlier.wait(_PATIENCE_SECONDS) and torch_private.is_compiling():
                pass
        try:
            with attempt.isolated(task), torch_private.many_graphs():
                for number in new[replica].values():
                    proceed()
                    with note_replica(task.share, number):
                        rows = task.loader.load(number, retain=True)  # the step loads them again
                        output = compute_rows(task, rows)
                        roots = [t for t in nested.tensors(output) if t.requires_grad]
                        if roots:
                            run_backward(
                                roots, [torch.zeros_like(t) for t in roots], autocast_types()
                            )
        finally:
            done[replica].set()

    try:
        with attempt.clock.span("warm-up"):
            attempt.run(one_at_a_time, tasks)
    finally:
        attempt.clock.replica_spans.clear()  # warm-up does not measure the devices' speed
        attempt.generators.rollback()  # torch draws from the process's generator while it compiles
        for each in replica_sets:
            each.clear_gradients()
        if tasks[0].stash is not None:
            tasks[0].stash.drop_gradients()
    for kinds_of_replica in new:
        model.warmed_up_kinds.update(kinds_of_replica)


def _compile_key(rows: Any) -> Hashable:
    """A key that is equal for two micro-batches if the same compiled code accepts both."""
    plain = bool, int, float, str
    return tuple(
        (leaf.shape, leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else (leaf if isinstance(leaf, plain) else None, type(leaf))
        for leaf in nested.leaves(rows)
    )
