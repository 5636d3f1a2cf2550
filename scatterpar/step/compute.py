"""The replicas compute: forward and backward over their shares, or forward alone.

torch.compile is not thread-safe (https://github.com/pytorch/pytorch/issues/118260), and replicas
that meet a new size together would each compile it. So a kind of sub-step that compiled replicas
have not met (sizes, flags, attributes of the module) is warmed up: forward and backward, replica
after replica, each in its own worker. State is restored. The step then finds everything compiled.
"""

from __future__ import annotations

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
from scatterpar.replicas.buffers import BufferWriter, running
from scatterpar.replicas.replicas import ReplicaSet, parameter_writes_refused
from scatterpar.step import nested
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import (
    closure_generators,
    closure_tensors_and_modules,
    external_leaves,
    training_buffers,
)
from scatterpar.step.graphs import Graphs
from scatterpar.step.loss_weights import LossWeights
from scatterpar.step.markers import has_entries
from scatterpar.step.nested import join_rows, needs_layout
from scatterpar.step.outcome import Computed, Result
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
    prepare_autograd,
    run_backward,
    train_share,
)
from scatterpar.step.whole_batch import FirstPass, Peers, first_pass, output_at, train_whole
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.clock import SILENT


class Checks(Protocol):
    """Checks of a step that need passes of their own; the engine's are a ``Verifier``."""

    def verify(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[ReplicaTask],
        parts: Sequence[ReplicaSet],
        peers: Peers | None,
    ) -> None:
        """Raise ``ValueError`` if losses do not combine as the engine is about to combine them."""

    def layout_of(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        output_of: Callable[[Any], Any],
        sizes: Sequence[Any],
    ) -> Any:
        """The number of entries per row in each output; ``None`` without ``verify``."""

    def watch_state(
        self, request: Request, tasks: Sequence[ReplicaTask], parts: Sequence[ReplicaSet]
    ) -> Callable[[], None]:
        """Returns a function that warns of state that sub-steps have changed since this call."""


_PATIENCE_SECONDS = 10.0  # how long a replica waits for one that neither compiles nor ends


def compute(
    attempt: Attempt,
    request: Request,
    copies: ReplicaSet,
    loaders: Sequence[ShareLoader],
    weights: LossWeights,
    checks: Checks,
    peers: Peers | None,
    graphs: Graphs | None,
) -> Computed:
    """Every replica's sub-steps, each by its worker: gradients are in the replicas afterwards.

    What the user's code may write meanwhile is the step's: ``.grad`` of the user's own parameters
    until the end of this, statistics that a criterion moves until the commit.
    """
    prepare_autograd()
    parts = copies.replica_sets
    brought = closure_tensors_and_modules(request.criterion)
    reached = training_buffers(brought)
    attempt.save_for_undo(reached, generators=closure_generators(request.criterion))
    named = external_leaves(brought, parts) if peers else None
    with Stash(attempt.workers.claims, parts, named) as stash:
        clock = attempt.clock
        tasks = make_tasks(request, attempt.plan, copies, loaders, weights.by_share, stash, clock)
        whole = request.whole_batch
        with parameter_writes_refused(parts):
            warm_up(attempt, tasks, parts, output_at if whole else _loss)
            of_model = _buffers_of_model(reached, parts)
            with clock.span("verify"):
                criteria = zip(tasks, copies.criteria, strict=False)
                both = [replace(task, criterion=own) for task, own in criteria] if whole else tasks
                checks.verify(attempt, request, both, parts, peers)
            tell_moved = checks.watch_state(request, tasks, parts)
            if whole:
                seen = attempt.run(partial(first_pass, request=request, attempt=attempt), tasks)
            else:
                work = partial(train_share, request=request, generators=attempt.generators)
                if graphs is not None and request.most is None and request.backward:
                    launch = partial(graphs.of, parts=parts, attempt=attempt)
                    work.keywords["substeps"] = launch
                results = attempt.run(work, tasks)
            layout = _layout_of_step(attempt, request, tasks, seen if whole else results, checks)
        if whole:
            peers = None if request.most else peers  # a trial is this process's own
            criterion = copies.criteria[0]
            with parameter_writes_refused(
                parts, again=True
            ):  # the second pass undoes what the first one rebound
                results = train_whole(
                    attempt, request, tasks, seen, parts, criterion, peers, layout
                )
        attempt.transfers.synchronize()
        tell_moved()
        _join_returned(request, tasks, results, layout)
        moved = {id(t) for t, before in of_model if not same_bits(t, before)}
        return Computed(results, stash.gradients(), moved)


def _buffers_of_model(
    reached: Sequence[Tensor], parts: Sequence[ReplicaSet]
) -> list[tuple[Tensor, Tensor]]:
    """The tensors in ``reached`` of which replicas have copies, each with its value."""
    of_model = {id(t) for part in parts for t in part.tensors} if reached else set()
    return [(t, t.clone()) for t in reached if id(t) in of_model]


def _layout_of_step(
    attempt: Attempt,
    request: Request,
    tasks: Sequence[ReplicaTask],
    found: Sequence[FirstPass] | Sequence[Result],
    checks: Checks,
) -> Any:
    """The number of entries per row in outputs; ``None`` if sizes tell, or no output is joined."""
    pieces = [
        p for one in found for p in (one.pieces if isinstance(one, FirstPass) else one.outputs)
    ]
    rows = [stop - start for task in tasks for start, stop in task.share.micro_batches]
    if not pieces or not needs_layout(pieces, request.dim, rows):
        return None

    def output_of(inputs: Any) -> Any:
        output = tasks[0].output_of(inputs)
        return output if request.whole_batch else detached_output(output, request.return_outputs)

    return checks.layout_of(attempt, request, tasks[0], output_of, pieces[0])


def _join_returned(
    request: Request, tasks: Sequence[ReplicaTask], results: Sequence[Result], layout: Any
) -> None:
    """Join the outputs of each replica's micro-batches, if the user asked for outputs."""
    if request.order or not request.return_outputs:  # with costs, outputs are joined on the master
        return
    for task, result in zip(tasks, results, strict=True):
        rows = [stop - start for start, stop in task.share.micro_batches]
        weights = rows if request.whole_batch else task.weights
        with note_replica(task.share):
            result.outputs = join_rows(
                result.outputs, request.dim, weights, rows, strict=True, layout=layout
            )


def infer(
    attempt: Attempt,
    copies: ReplicaSet,
    module: nn.Module,
    request: Request,
    checks: Checks,
) -> Any:
    """The module's output for the whole batch, on the master: scatter, replicate, forward, join.

    The request's ``inputs`` are positional and keyword arguments.
    """
    plan, transfers, dim = attempt.plan, attempt.transfers, request.dim
    loaders = scatter(request.batch, plan, dim, transfers)
    copies.refresh(module, None, transfers)
    tasks, parts = make_tasks(request, plan, copies, loaders), copies.replica_sets
    lists, layout = has_entries(request.batch), None
    with parameter_writes_refused(parts):
        warm_up(attempt, tasks, parts, _predicted)
        pieces = attempt.run(_infer_share, tasks)
        rows = [[stop - start for start, stop in share.micro_batches] for share in plan.shares]
        if needs_layout([*chain(*pieces)], dim, [*chain(*rows)]):
            output_of = partial(_called, tasks[0])
            layout = checks.layout_of(attempt, request, tasks[0], output_of, pieces[0][0])
    outputs: Sequence[Any] = pieces
    if not plan.order:
        outputs = [
            join_rows(own, dim, n, n, lists=lists, layout=layout)
            for own, n in zip(pieces, rows, strict=True)
        ]
    output = gather_to_master(outputs, plan, dim, transfers, lists=lists, layout=layout)
    transfers.synchronize()
    if any(part.training for part in module.modules()):
        buffers = reduce_buffers(parts, plan.shares, transfers)
        for layer in reduce_moments(parts, len(outputs), transfers):
            buffers += running(layer)
        BufferWriter(buffers)()
    attempt.generators.commit()
    return output


def _infer_share(task: ReplicaTask, *, proceed: Callable[[], None]) -> list[Any]:
    outputs = []
    for number in range(len(task.share.micro_batches)):
        if number:
            proceed()
        with note_replica(task.share, number):
            outputs.append(_predicted(task, task.loader.load(number)))
    return outputs


def _called(task: ReplicaTask, inputs: Any) -> Any:
    args, kwargs = inputs
    with torch.no_grad():
        return task.module(*args, **kwargs)


def _predicted(task: ReplicaTask, rows: Any) -> Any:
    output = _called(task, rows[0])
    nested.refuse_generators(output)
    return output


def _loss(task: ReplicaTask, rows: Any) -> Tensor:
    return forward(task, rows)[1]


def warm_up(
    attempt: Attempt,
    tasks: Sequence[ReplicaTask],
    parts: Sequence[ReplicaSet],
    compute_rows: Callable[[ReplicaTask, Any], Any],
) -> None:
    """Compile what compiled replicas have not met: run it, and restore all but compiled code.

    ``compute_rows`` is all of a sub-step but its backward pass.
    """
    model = parts[0]
    if not any(part.compiler.is_used for part in parts):
        return
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(autocast_types())
    new: list[dict[Hashable, int]] = []  # of each replica the kinds, and a micro-batch of each
    for task in tasks:
        numbers = range(len(task.share.micro_batches))
        flags: Hashable = task.share.replica, compute_rows, model.flags, modes
        kinds = [(flags, _compile_key(task.loader.source_rows(number))) for number in numbers]
        found = zip(reversed(kinds), reversed(numbers), strict=True)  # the first one of each stays
        new.append({kind: number for kind, number in found if kind not in model.warmed_up_kinds})
    if not any(new):
        return
    done = [threading.Event() for _ in tasks]
    tasks = [replace(task, clock=SILENT) for task in tasks]

    def one_at_a_time(task: ReplicaTask, *, proceed: Callable[[], None]) -> None:
        replica = task.share.replica
        for earlier in done[:replica]:  # or beside one that waits for this replica
            while not earlier.wait(_PATIENCE_SECONDS) and torch_private.is_compiling():
                pass
        try:
            with attempt.isolated(task), torch_private.many_graphs():
                for number in sorted(new[replica].values()):
                    proceed()
                    with note_replica(task.share, number):
                        rows = task.loader.load(number, keep=True)  # the step asks for them
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
        attempt.clock.passes.clear()  # this says nothing of the devices' pace
        attempt.generators.rollback()  # what torch draws while it compiles is the process's own
        for part in parts:
            part.clear_gradients()
        if tasks[0].stash is not None:
            tasks[0].stash.drop_gradients()
    for met in new:
        model.warmed_up_kinds.update(met)


def _compile_key(rows: Any) -> Hashable:
    """What two micro-batches have alike that the same compiled code takes."""
    plain = bool, int, float, str
    return tuple(
        (leaf.shape, leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else (leaf if isinstance(leaf, plain) else None, type(leaf))
        for leaf in nested.leaves(rows)
    )
