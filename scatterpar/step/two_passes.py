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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from scatterpar.devices.ledger import Clock, Ledger
from scatterpar.plan import Share
from scatterpar.replicas.replicas import Replica, Replicas
from scatterpar.step import nested
from scatterpar.step.commit import commit_buffers
from scatterpar.step.outcome import BufferValue
from scatterpar.step.scatter import join
from scatterpar.step.substeps import Result, forward, noted, pull, scalar_loss
from scatterpar.threads.context import autocast_types
from scatterpar.threads.crew import Task, run_shares
from scatterpar.threads.randomness import Position, RandomStreams
from scatterpar.threads.workers import Workers, note

__all__ = ["Peers", "train_whole"]

Criterion = Callable[[Any, Any], Any]
Whole = tuple["Sequence[Any]", "Sequence[int]", Any]  # outputs in order, rows of each, targets


class Peers(Protocol):
    """Other processes, whose outputs the criterion sees too."""

    rank: int

    def outputs_of_all(
        self, pieces: Sequence[Any], rows: Sequence[int], targets: Any, dim: int, seed: int
    ) -> tuple[Whole, int]:
        """All ranks' outputs and targets, this rank's own pieces as they are; rank 0's seed."""


@dataclass
class Seen:
    """What the first pass leaves of one share.

    Attributes:
        pieces: the outputs of each micro-batch, without their graph, ready to take gradients.
        joined: the pieces joined, so that its gradient is cut into theirs.
        kept: the last micro-batch's output, with its graph.
        positions: where the random stream was before each micro-batch.
    """

    pieces: list[Any]
    joined: Any
    kept: Any
    positions: list[Position]


def train_whole(
    workers: Workers,
    streams: RandomStreams,
    tasks: Sequence[Task],
    clock: Clock,
    parts: Sequence[Replicas],
    criterion: Criterion,
    targets: Any,
    peers: Peers | None,
    ledger: Ledger,
    *,
    dim: int,
    scale: float,
    check_finite: bool,
    keep_outputs: bool,
    most: int | None,
) -> list[Result]:
    """Accumulate in the replicas' parameters the gradient of a loss that sees all outputs.

    Args:
        workers: compute, one replica each.
        streams: the random numbers of the step.
        tasks: each replica's share of the inputs.
        clock: notes when each started and ended.
        parts: the replicas of the model, and that of the criterion.
        criterion: as it is on the master.
        targets: the whole batch's, as the caller gave them.
        peers: other processes that have rows of the batch.
        ledger: copies, and counts what it copied.
        dim: the dimension that holds the rows.
        scale: the gradient scaler's factor.
        check_finite: refuse a loss that is NaN or infinite.
        keep_outputs: keep the module's outputs.
        most: leave it at so many sub-steps in the second pass.

    Returns:
        What each replica made of its share. The loss is in the first one's, and in the first
        process's.
    """
    first = partial(first_pass, streams=streams, dim=dim)
    seen = run_shares(workers, streams, first, tasks, clock)
    shares = [task.share for task in tasks]
    master = shares[0].device
    outputs = [
        _at_home(one.joined, share, master, ledger) for one, share in zip(seen, shares, strict=True)
    ]
    whole: Whole = outputs, [share.rows for share in shares], _own(targets, master, ledger)
    seed = None
    if peers is not None:
        whole, seed = peers.outputs_of_all(*whole, dim, streams.seed_of_criterion())
    judged = partial(judge, streams=streams, seed=seed, dim=dim, scale=scale)
    call = criterion, whole, check_finite
    (loss,) = workers.parallel_apply([judged], [call], devices=[master])
    if peers is not None and peers.rank:
        _forget_gradients(parts)  # the criterion's: rank 0 has the same ones, and they count once
    gradients = [
        _sent_back(output, share, master, ledger)
        for output, share in zip(outputs, shares, strict=True)
    ]
    second = partial(second_pass, seen=seen, gradients=gradients, model=parts[0], streams=streams)
    run_shares(workers, streams, partial(second, dim=dim, most=most), tasks, clock)
    kept = [nested.transform(_detached, one.joined) if keep_outputs else None for one in seen]
    value = 0.0 if peers is not None and peers.rank else loss.cpu().double().item()
    return [
        Result(value if replica == 0 else 0.0, loss.dtype, output)
        for replica, output in enumerate(kept)
    ]


def first_pass(
    task: Task, *, streams: RandomStreams, dim: int, proceed: Callable[[], None]
) -> Seen:
    """The module's outputs on a share, each without its graph but the last.

    In grad mode, whatever becomes of the graphs: modules may compute otherwise without it.
    """
    share = task.share
    pieces: list[Any] = []
    positions: list[Position] = []
    output = None
    for number in range(len(share.micro_batches)):
        if number:
            proceed()
        with noted(share, number):
            positions.append(streams.now(share.replica))
            output = None  # its graph goes before the next one comes
            with task.substep():
                output = forward(task, number, dim)
            pieces.append(nested.transform(_leaf, output))
    if autocast_types():
        torch.clear_autocast_cache()  # what it holds is part of graphs that are gone
    joined = join(pieces, dim, [stop - start for start, stop in share.micro_batches])
    return Seen(pieces, joined, output, positions)


def judge(
    criterion: Criterion,
    whole: Whole,
    check_finite: bool,
    *,
    streams: RandomStreams,
    seed: int | None,
    dim: int,
    scale: float,
) -> Tensor:
    """The loss; its gradients are then in the leaves of the outputs and of the criterion."""
    outputs, rows, targets = whole
    output = join(outputs, dim, rows)
    if len(outputs) == 1:  # a criterion may work in place, on what it would on a module's output
        output = nested.transform(_copied, output)
    try:
        with streams.of_criterion(seed):
            loss = scalar_loss(criterion(output, targets), "the criterion")
            del output
            if check_finite and not torch.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss.item()}; nothing was changed")
            pull([loss], [torch.full_like(loss, scale, requires_grad=False)], autocast_types())
    except Exception as error:
        note(error, f"in the criterion, with the outputs of all {sum(rows)} rows")
        raise
    return loss.detach()


def second_pass(
    task: Task,
    *,
    seen: Sequence[Seen],
    gradients: Sequence[Sequence[Tensor | None]],
    model: Replicas,
    streams: RandomStreams,
    dim: int,
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
    with noted(share, last), task.substep(resumed=True):
        _pull(nested.tensors(own.kept), _gradients(own.pieces[last]))
    own.kept = None
    if not last or not any(gradient is not None for gradient in gradients[share.replica]):
        return
    position, buffers = streams.now(share.replica), _buffers(model.replicas[share.replica])
    model.rewind(share.replica)
    changes: list[Tensor] = []
    for number in range(last)[: None if most is None else most - 1]:
        proceed()
        with noted(share, number), task.substep():
            streams.rewind(share.replica, own.positions[number])
            output = forward(task, number, dim)
            changes.append(_change(output, own.pieces[number]))
            _pull(nested.tensors(output), _gradients(own.pieces[number]))
            del output
    streams.rewind(share.replica, position)
    commit_buffers(buffers)
    _require_unchanged(changes, share)


def _pull(roots: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Backward from those of the roots that have a gradient."""
    pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if g is not None]
    if pairs:
        pull([root for root, _ in pairs], [gradient for _, gradient in pairs], autocast_types())


def _gradients(piece: Any) -> list[Tensor | None]:
    return [leaf.grad for leaf in nested.tensors(piece)]


def _change(output: Any, piece: Any) -> Tensor:
    """By how much of the tolerance an output of the second pass is not that of the first.

    Left on the device: to ask for the number here would make the next sub-step wait.
    """
    pairs = list(zip(nested.tensors(output), nested.tensors(piece), strict=False))
    if len(list(nested.tensors(output))) != len(list(nested.tensors(piece))) or any(
        _kind(now) != _kind(before) for now, before in pairs
    ):
        raise RuntimeError(f"the second forward pass gave outputs of another kind: {_WHY}")
    changes = [
        _distance(now.detach(), before.detach())
        for now, before in pairs
        if before.numel() and before.grad is not None
    ]
    return torch.stack(changes).amax() if changes else torch.zeros(())


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _distance(now: Tensor, before: Tensor) -> Tensor:
    """The largest difference, in units of the tolerance; NaN where only one of them is NaN.

    Kernels may round otherwise the second time; another mask is further off than any rounding.
    """
    equal = torch.isclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
    off = torch.where(equal, 0, now - before).abs().amax().double()
    size = before.abs().nan_to_num(0.0, 0.0, 0.0).amax().double()
    return torch.where(off == 0, 0.0, off / (size * torch.finfo(now.dtype).eps ** 0.5))


def _require_unchanged(changes: Sequence[Tensor], share: Share) -> None:
    """Refuse gradients that belong to other outputs than the loss was computed from.

    Raises:
        RuntimeError: an output of the second pass is not that of the first.
    """
    found = torch.stack(list(changes)).tolist() if changes else []
    for number, change in enumerate(found):
        if not change <= 1:
            with noted(share, number):
                raise RuntimeError(f"the second forward pass gave other outputs: {_WHY}")


_WHY = (
    "whole_batch=True computes every micro-batch but a replica's last one twice, and this module "
    "depends on something that is not the same the second time, such as the random numbers of "
    "Python or NumPy, or a counter outside of it; draw from torch's generators and keep state in "
    "the module, or have one sub-step per replica, which is computed once. Nothing was changed"
)


def _at_home(joined: Any, share: Share, master: torch.device, ledger: Ledger) -> Any:
    """A share's outputs as leaves in the master's memory, ready to take gradients."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        here = leaf.detach()
        if share.device != master:
            here = ledger.copy(here, master, "compute")
        return here.requires_grad_(leaf.requires_grad)

    return nested.transform(one, joined)


def _sent_back(
    output: Any, share: Share, master: torch.device, ledger: Ledger
) -> list[Tensor | None]:
    """The gradients of a share's outputs, where its replica is."""
    return [
        gradient
        if gradient is None or share.device == master
        else ledger.copy(gradient, share.device, "compute")
        for gradient in _gradients(output)
    ]


def _own(targets: Any, master: torch.device, ledger: Ledger) -> Any:
    """The targets in the master's memory, for the criterion to write to if it likes."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.clone() if leaf.device == master else ledger.copy(leaf, master, "scatter")

    return nested.transform(one, targets)


def _buffers(replica: Replica) -> list[BufferValue]:
    """Where each buffer of a replica is, and a copy of what it is now."""
    return [
        (holder, name, None if buffer is None else buffer.detach().clone())
        for holder in replica.buffers
        for name, buffer in holder.items()
    ]


def _forget_gradients(parts: Sequence[Replicas]) -> None:
    for part in parts:
        part.clear_gradients()
        for tensor in part.trained_tensors:
            tensor.grad = None


def _leaf(value: Any) -> Any:
    return (
        value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value
    )


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
