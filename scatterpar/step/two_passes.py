"""A loss over the whole batch: all outputs, the criterion once, then back through every part.

What is computed is the gradient of this program, with the memory of one micro-batch::

    outputs = [module(rows) for rows in micro_batches]
    loss = criterion(join(outputs), targets)
    loss.backward()

In two passes, because the loss needs all outputs before any of them has a gradient::

    pass 1     replica 0: forward 0, 1, … n -+             each graph is dropped at once,
               replica 1: forward 0, 1, … n -+- joined     but a replica's last one
    criterion  on the master: the loss, and the gradient of every output
    pass 2     replica 0: backward n; forward 0, backward 0; forward 1, backward 1; …
               replica 1: backward n; forward 0, backward 0; forward 1, backward 1; …

The second forward of a micro-batch draws the same random numbers as the first, and finds the
same state. With one micro-batch per replica nothing is computed twice. This is gradient caching
(Gao et al. 2021, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from scatterpar.devices.memory_search import IN_VAIN, is_out_of_memory
from scatterpar.plan import Share
from scatterpar.replicas.buffers import BufferValue, Registry
from scatterpar.replicas.replicas import Replica, Replicas
from scatterpar.step import nested
from scatterpar.step.commit import commit_buffers
from scatterpar.step.join import join_rows
from scatterpar.step.markers import has_entries
from scatterpar.step.repetition import differences, require_unchanged
from scatterpar.step.request import Request
from scatterpar.step.substeps import Result, kept, pull, unalias
from scatterpar.step.task import Task, noted
from scatterpar.step.whole_batch import Peers, WholeBatch
from scatterpar.threads.attempt import Attempt
from scatterpar.threads.context import autocast_types
from scatterpar.threads.streams import Position, RandomStreams
from scatterpar.threads.workers import Workers, note

__all__ = ["output_at", "train_whole"]

Criterion = Callable[[Any, Any], Any]


@dataclass
class Seen:
    """What the first pass leaves of one share.

    Attributes:
        pieces: the outputs of each micro-batch, without their graph, ready to take gradients.
        joined: the pieces of each of the share's spans, joined, so that the gradient of a joined
            one is cut into those of its pieces.
        last: the last micro-batch's output, with its graph.
        positions: where the random stream was before each micro-batch.
        outputs: what is returned of them, where they were asked for.
    """

    pieces: list[Any]
    joined: list[Any]
    last: Any
    positions: list[Position]
    outputs: Any


def train_whole(
    attempt: Attempt,
    request: Request,
    tasks: Sequence[Task],
    parts: Sequence[Replicas],
    criterion: Criterion,
    peers: Peers | None,
) -> list[Result]:
    """Accumulate in the replicas' parameters the gradient of a loss that sees all outputs.

    Args:
        attempt: the step.
        request: has the whole batch's targets, as the caller gave them.
        tasks: each replica's share of the inputs.
        parts: the replicas of the model, and that of the criterion.
        criterion: as it is on the master.
        peers: other processes that have rows of the batch.

    Returns:
        What each replica made of its share. The loss is in the first one's, and in the first
        process's.
    """
    streams, aside = attempt.streams, tasks[0].aside
    assert aside is not None
    seen = attempt.run(partial(first_pass, request=request, streams=streams), tasks)
    shares = [task.share for task in tasks]
    lists = has_entries(request.inputs)
    joined = [one.joined for one in seen]
    batch = WholeBatch(joined, shares, request.targets, request.dim, lists, attempt.ledger)
    seed = None if peers is None else batch.join_peers(peers, streams.seed_of_criterion())
    judge = partial(batch.judge, criterion, aside.reach, request.scale, request.check_finite)
    try:
        with streams.of_criterion(seed):  # out here interrupts wait: none cuts it in half
            loss = _judged(attempt.workers, judge, tasks, seen)
            unalias(tasks[0].leaves)
        if peers is not None and peers.rank:
            aside.forget()  # the criterion's: rank 0 has them too, and they count once
            for part in parts:
                part.clear_gradients()
        second = partial(second_pass, seen=seen, gradients=batch.gradients(), model=parts[0])
        attempt.run(partial(second, streams=streams, most=request.most), tasks)
    except BaseException as error:
        if peers is not None and is_out_of_memory(error):
            note(error, f"{IN_VAIN} in this step: the other ranks have seen these outputs")
        raise
    value = 0.0 if peers is not None and peers.rank else loss.cpu().double().item()
    losses = [value] + [0.0] * (len(seen) - 1)
    return [Result(v, loss.dtype, outputs=one.outputs) for v, one in zip(losses, seen, strict=True)]


def output_at(task: Task, number: int) -> Any:
    """The module's output for one micro-batch."""
    inputs, _ = task.rows_of(number)
    return task.output_of(inputs)


def first_pass(
    task: Task, *, request: Request, streams: RandomStreams, proceed: Callable[[], None]
) -> Seen:
    """The module's outputs on a share, each without its graph but the last.

    In grad mode, whatever becomes of the graphs: modules may compute otherwise without it.
    """
    share, keep, dim = task.share, request.return_outputs, task.dim
    pieces: list[Any] = []
    returned: list[Any] = []
    positions: list[Position] = []
    output = None
    for number in range(len(share.micro_batches)):
        if number:
            proceed()
        output = None  # its graph goes before the next one comes
        with noted(share, number):
            positions.append(streams.now(share.replica))
            with task.substep(number):
                output = output_at(task, number)
            pieces.append(nested.transform(_leaf, output))
            if keep:
                returned.append(kept(output, keep))
    rows = [stop - start for start, stop in share.micro_batches]
    with noted(share):
        joined = [
            join_rows(pieces[few], dim, rows[few], rows[few], lists=has_entries(request.inputs))
            for few in _of_each_span(share)
        ]
        outputs = join_rows(returned, dim, rows, rows, strict=True) if keep else None
    return Seen(pieces, joined, output, positions, outputs)


def _judged(
    workers: Workers,
    judge: Callable[[], Tensor],
    tasks: Sequence[Task],
    seen: Sequence[Seen],
) -> Tensor:
    """The loss, computed in the caller's thread. Where it runs out of memory, whether in vain.

    It shares the memory with the graphs that were kept, which are smaller with more sub-steps, and
    with rows that were kept, which may come again.
    """
    master = tasks[0].share.device
    try:
        (loss,) = workers.parallel_apply([judge], [()], devices=[master])
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        for one in seen:
            one.last = None
        for task in tasks:
            task.arrival.let_go()
        workers.release()
        try:
            workers.parallel_apply([judge], [()], devices=[master])
        except BaseException as again:
            if not is_out_of_memory(again):
                raise
            note(error, f"it does not fit on {master} with nothing else: {IN_VAIN}")
        raise
    result: Tensor = loss
    return result


def second_pass(
    task: Task,
    *,
    seen: Sequence[Seen],
    gradients: Sequence[Sequence[Tensor | None]],
    model: Replicas,
    streams: RandomStreams,
    most: int | None,
    proceed: Callable[[], None],
) -> None:
    """Accumulate in the replica's parameters what the gradients of its outputs make of them.

    The graph that was kept comes first: what is rewound after it may be part of it. Then each
    other micro-batch runs forward again, in order, from the state before the first one. What
    stays is the state as the first pass, and the criterion, left it.
    """
    share = task.share
    own = seen[share.replica]
    _pull(nested.tensors(own.joined), gradients[share.replica])
    last = len(own.pieces) - 1
    with task.substep(last):
        _pull(nested.tensors(own.last), _gradients(own.pieces[last]))
        waiting = unalias(task.leaves)
    own.last = None
    if not last or not any(gradient is not None for gradient in gradients[share.replica]):
        return
    replica = model.replicas[share.replica]
    position, buffers, noted = streams.now(share.replica), _buffers(replica), dict(replica.seen)
    model.rewind(share.replica)
    changes: list[list[Tensor]] = []
    for number in range(last)[: None if most is None else most - 1]:
        proceed()
        with task.substep(number):
            streams.rewind(share.replica, own.positions[number])
            output = output_at(task, number)
            changes.append(differences(output, own.pieces[number]))
            _pull(nested.tensors(output), _gradients(own.pieces[number]))
            waiting = unalias(waiting)
            del output
    streams.rewind(share.replica, position)
    commit_buffers(buffers)
    replica.seen.update(noted)
    require_unchanged(changes, share)


def _pull(roots: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Backward from those of the roots that have a gradient."""
    pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if g is not None]
    if pairs:
        pull([root for root, _ in pairs], [gradient for _, gradient in pairs], autocast_types())


def _gradients(piece: Any) -> list[Tensor | None]:
    return [leaf.grad for leaf in nested.tensors(piece)]


def _of_each_span(share: Share) -> list[slice]:
    """Which micro-batches make each span of a share: one slice of all, but for several batches."""
    starts = [n for n, (start, _) in enumerate(share.micro_batches) if start in dict(share.spans)]
    return [slice(*ends) for ends in pairwise([*starts, len(share.micro_batches)])]


def _buffers(replica: Replica) -> list[BufferValue]:
    """Where each buffer of a replica is, registered as it is now, and a copy of its value."""
    places = [Registry(own, own) for own in replica.registered if own.buffers]
    return [
        (place, name, None if buffer is None else buffer.detach().clone())
        for place in places
        for name, buffer in place.items()
    ]


def _leaf(value: Any) -> Any:
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )
