"""The replicas compute: forward and backward over their shares, after the new kinds of sub-steps.

torch.compile is not thread-safe (https://github.com/pytorch/pytorch/issues/118260), and replicas
that meet a new size together would each compile it. So a kind of sub-step that compiled replicas
have not met (sizes, flags, attributes of the module) is warmed up: forward and backward, replica
after replica, each in its own worker, without a trace. The step then finds everything compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar import torch_private
from scatterpar.replicas.copies import Copies
from scatterpar.replicas.replicas import Replicas, guarded
from scatterpar.step import nested
from scatterpar.step.captured import brought_along, other_leaves, statistics
from scatterpar.step.markers import opened
from scatterpar.step.outcome import Computed
from scatterpar.step.request import Request
from scatterpar.step.scatter import Arrival
from scatterpar.step.substeps import Task, hand_out, loss_at, noted, prepare_autograd, pull, train
from scatterpar.step.weights import Weights
from scatterpar.step.whole_batch import Peers, output_at, train_whole
from scatterpar.threads.attempt import Attempt
from scatterpar.threads.context import autocast_types
from scatterpar.threads.sharing import Claims, Stash

Verify = Callable[[Attempt, Request, Sequence[Task], Sequence[Replicas], Peers | None], None]

_PATIENCE_SECONDS = 10.0  # how long a replica waits for one that neither compiles nor ends


def compute(
    attempt: Attempt,
    request: Request,
    copies: Copies,
    arrivals: Sequence[Arrival],
    weights: Weights,
    claims: Claims,
    verify: Verify,
    peers: Peers | None,
) -> Computed:
    """Every replica's sub-steps, each by its worker: gradients are in the replicas afterwards.

    What the user's code may write meanwhile is the step's: ``.grad`` of the user's own parameters
    until the end of this, statistics that a criterion moves until the commit.
    """
    prepare_autograd()
    parts = copies.parts
    brought = brought_along(request.criterion)
    attempt.keep(statistics(brought))
    named = other_leaves(brought, parts) if peers else None
    with Stash(claims, parts, named) as stash:
        tasks = hand_out(request, attempt.plan, copies, arrivals, weights.of_shares, stash)
        with guarded(parts):
            if request.whole_batch:
                warm_up(attempt, tasks, parts, output_at)
                peers = None if request.most else peers  # a trial is this process's own
                criterion = copies.criteria[0]
                results = train_whole(attempt, request, tasks, parts, criterion, peers)
            else:
                warm_up(attempt, tasks, parts, loss_at)
                verify(attempt, request, tasks, parts, peers)
                work = partial(train, request=request)
                if request.graphs is not None and request.most is None:
                    launch = partial(request.graphs.of, parts=parts, generators=attempt.generators)
                    work.keywords["substeps"] = launch
                results = attempt.run(work, tasks)
        attempt.ledger.settle()
        return Computed(results, stash.gradients())


def warm_up(
    attempt: Attempt,
    tasks: Sequence[Task],
    parts: Sequence[Replicas],
    forward: Callable[[Task, int], Any],
) -> None:
    """Run what the replicas have not met before, and leave no trace of it but compiled code."""
    if not any(part.compiler.is_used for part in parts):
        return
    new = [_new_kinds(task, parts[0], forward) for task in tasks]
    if not any(new):
        return
    done = [threading.Event() for _ in tasks]

    def one_at_a_time(task: Task, *, proceed: Callable[[], None]) -> None:
        replica = task.share.replica
        task = dataclasses.replace(task, keeps_rows=True)  # the step itself will ask for them
        with _after(done[:replica], done[replica]), torch_private.many_graphs():
            for number in new[replica]:
                proceed()
                with noted(task.share, number):
                    _pull_zeros(forward(task, number))

    generators = attempt.generators
    before = [generators.get_state(task.share.replica) for task in tasks]
    try:
        attempt.run(one_at_a_time, tasks, timed=False)
    finally:
        generators.rollback()  # what torch draws while it compiles is the process's own
        for task, state in zip(tasks, before, strict=True):
            generators.set_state(task.share.replica, state)
        for part in parts:
            part.forget_step()
        if tasks[0].stash is not None:
            tasks[0].stash.forget()
    for task, kinds in zip(tasks, new, strict=True):
        parts[0].rehearsed.update(_key(task, kind) for kind in kinds.values())


def _pull_zeros(output: Any) -> None:
    """A backward pass with gradients of zero, where there is a graph."""
    roots = [tensor for tensor in nested.tensors(output) if tensor.requires_grad]
    if roots:
        pull(roots, [torch.zeros_like(root) for root in roots], autocast_types())


def _new_kinds(
    task: Task, part: Replicas, forward: Callable[[Task, int], Any]
) -> dict[int, Hashable]:
    """The first micro-batch of each kind that this replica has not met, and the kind."""
    flags = (
        forward,
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple(autocast_types()),
        part.flags,
    )
    found: dict[int, Hashable] = {}
    for number in range(len(task.share.micro_batches)):
        kind = (flags, tuple(map(_outline, nested.leaves(opened(task.arrival.at_source(number))))))
        if _key(task, kind) not in part.rehearsed and kind not in found.values():
            found[number] = kind
    return found


def _key(task: Task, kind: Hashable) -> Hashable:
    return task.share.replica, kind


def _outline(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return (leaf if isinstance(leaf, (bool, int, float, str)) else None, type(leaf))


@contextlib.contextmanager
def _after(earlier: Sequence[threading.Event], own: threading.Event) -> Iterator[None]:
    """The body comes after the earlier replicas', or beside one that waits for this replica."""
    for event in earlier:
        while not event.wait(_PATIENCE_SECONDS) and torch_private.is_compiling():
            pass
    try:
        yield
    finally:
        own.set()
