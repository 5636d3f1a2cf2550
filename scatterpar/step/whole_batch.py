"""A loss over the whole batch: all outputs, the criterion once, then the backward passes.

The gradient is that of this program, with the memory of one micro-batch per replica::

    outputs = [module(rows) for rows in micro_batches]
    loss = criterion(join(outputs), targets)
    loss.backward()

There are two passes, because the loss needs all outputs before any of them has a gradient::

    pass 1     replica 0: forward 0, 1, … n -+             each graph is dropped at once,
               replica 1: forward 0, 1, … n -+- joined     except a replica's last one
    criterion  on the master: the loss, and the gradient of every output
    pass 2     replica 0: backward n; forward 0, backward 0; forward 1, backward 1; …
               replica 1: backward n; forward 0, backward 0; forward 1, backward 1; …

The second forward pass of a micro-batch draws the same random numbers as the first, and starts from
the same state. With one micro-batch per replica nothing is computed twice. This is gradient caching
(Gao et al. 2021, https://arxiv.org/abs/2101.06983).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from scatterpar.devices.transfers import Transfers
from scatterpar.plan import Share
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.step import nested
from scatterpar.step.attempt import Attempt
from scatterpar.step.auto_accum import MORE_SUBSTEPS_CANNOT_HELP, is_out_of_memory
from scatterpar.step.markers import (
    Marker,
    all_tensors,
    has_entries,
    unwrap_marker,
    unwrap_markers,
)
from scatterpar.step.nested import join_rows
from scatterpar.step.outcome import Result
from scatterpar.step.request import Request
from scatterpar.step.scatter import LeafMover
from scatterpar.step.substeps import (
    ReplicaTask,
    detached_output,
    note_replica,
    run_backward,
    scalar_loss,
    unalias,
)
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.generators import State
from scatterpar.threads.workers import Workers, add_note
from scatterpar.torch_private import nodes_of


def _differences(output: Any, piece: Any) -> list[Tensor]:
    """The differences between the outputs of both passes, in units of the tolerance.

    They stay on the device: to read them here would make the next sub-step wait.
    """
    tensors, earlier = list(nested.tensors(output)), list(nested.tensors(piece))
    if [_kind(tensor) for tensor in tensors] != [_kind(tensor) for tensor in earlier]:
        raise RuntimeError(f"the second forward pass gave outputs of another kind: {_WHY}")
    return [
        _distance(one.detach(), other.detach())
        for one, other in zip(tensors, earlier, strict=True)
        if other.numel() and other.grad is not None
    ]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _distance(now: Tensor, before: Tensor) -> Tensor:
    """The largest difference, in units of the tolerance; NaN if only one of the two is NaN.

    Kernels may round differently the second time. Another dropout mask gives a larger difference
    than rounding.
    """
    equal = torch.isclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
    off = torch.where(equal, 0, now - before).abs().amax()
    wide = torch.promote_types(off.dtype, torch.float32)  # not float64: MPS has none
    off, size = off.to(wide), before.abs().nan_to_num(0.0, 0.0, 0.0).amax().to(wide)
    return torch.where(off == 0, 0.0, off / (size * torch.finfo(now.dtype).eps ** 0.5)).float()


def _require_unchanged(changes: Sequence[Sequence[Tensor]], share: Share) -> None:
    """Raise ``RuntimeError`` if the outputs of the second pass differ from those of the first."""
    for number, found in enumerate(changes):
        if not all(change.item() <= 1 for change in found):
            with note_replica(share, number):
                raise RuntimeError(f"the second forward pass gave other outputs: {_WHY}")


_WHY = (
    "whole_batch=True computes every micro-batch but a replica's last one twice, and this module "
    "depends on something that is not the same the second time, such as the random numbers of "
    "Python or NumPy, or a counter outside of it; draw from torch's generators and keep state in "
    "the module, or have one sub-step per replica, which is computed once. Nothing was changed"
)


class Peers(Protocol):
    """Other processes, whose outputs the criterion also gets."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    def outputs_of_all(
        self, pieces: Sequence[Any], rows: Sequence[int], targets: Any, dim: int, seed: int
    ) -> tuple[tuple[list[Any], list[int], Any], int]:
        """Outputs, row counts and targets of all ranks, and the seed of rank 0.

        The outputs of this rank are returned unchanged, with their autograd graph.
        """


@dataclass
class FirstPass:
    """The results of the first pass over one share."""

    pieces: list[Any]  # each micro-batch's output without its graph, as leaves
    last: Any  # the last micro-batch's output, with its graph
    states: list[State]  # the generators' states before each micro-batch
    outputs: list[Any]  # the parts of outputs to return, if the user asked for them
    joined: Sequence[Any] = ()  # per span; its backward pass cuts a gradient into the pieces'

    def join(self, share: Share, request: Request, layout: Any) -> None:
        """Set ``joined``: the joined pieces of each span."""
        rows, lists = (
            [stop - start for start, stop in share.micro_batches],
            has_entries(request.batch),
        )
        with note_replica(share):
            self.joined = [
                join_rows(
                    self.pieces[few], request.dim, rows[few], rows[few], lists=lists, layout=layout
                )
                for few in _of_each_span(share)
            ]


class WholeBatch:
    """The outputs and targets of all rows, in row order, in the master's memory.

    Outputs are copied once to the master and their gradients once back, counted under ``compute``.
    """

    def __init__(
        self,
        request: Request,
        seen: Sequence[FirstPass],
        shares: Sequence[Share],
        transfers: Transfers,
        layout: Any,
    ) -> None:
        self._request, self._shares, self._transfers = request, shares, transfers
        self._layout = layout
        self._own = [
            nested.map_tensors(partial(self._leaf, share), one.joined)
            for one, share in zip(seen, shares, strict=True)
        ]
        spans = [
            (start, stop - start, value)
            for values, share in zip(self._own, shares, strict=True)
            for (start, stop), value in zip(share.spans, values, strict=True)
        ]
        spans.sort(key=lambda span: span[0])
        self._pieces = [piece for _, _, piece in spans]
        self._rows = [rows for _, rows, _ in spans]
        self._order = request.order
        self._entries: list[Any] = []  # collated targets of each marker with rows
        self._targets = self._whole([own for _, own in request.batches])

    def join_peers(self, peers: Peers, seed: int) -> int:
        """Add the other processes' rows. Returns the seed that all processes use."""
        self._require_tensors()
        if self._order:  # other ranks have other orders
            self._pieces, self._rows, self._order = [self._joined()], [sum(self._rows)], ()
        args = self._pieces, self._rows, self._targets, self._request.dim
        (self._pieces, self._rows, self._targets), seed = peers.outputs_of_all(*args, seed)
        return seed

    def _require_tensors(self) -> None:
        """Refuse lists with one entry per row: processes join tensors only."""
        dim, rows = self._request.dim, sum(self._rows)
        pairs = zip(self._pieces, self._rows, strict=True)
        listed = all(isinstance(piece, list) and len(piece) == n for piece, n in pairs)
        if listed and has_entries(self._request.batch):
            what = "the module's outputs are a list with one entry per row"
        elif not all(_have_rows(value, rows, dim) for value in self._entries):
            what = "Rows in the targets are no tensors with all rows along that dimension"
        else:
            return
        raise ValueError(
            f"whole_batch=True with a process_group joins what ranks have as tensors, along "
            f"dim={dim}, and {what}; return tensors from the module, and pass Rows(entries, "
            f"collate) whose collate makes tensors of entries, padded to one length on all ranks"
        )

    def backward(
        self, criterion: Callable[..., Any], reach: Callable[[Tensor, Sequence[Any]], None]
    ) -> Tensor:
        """The loss. Its gradients are accumulated in the outputs and in leaves of the criterion.

        ``reach`` stashes the leaves that the loss depends on other than through the outputs' nodes.
        """
        try:
            joined = self._joined()
            nodes = nodes_of(nested.tensors(joined))
            loss = scalar_loss(criterion(joined, unwrap_markers(self._targets)), "the criterion")
            reach(loss, nodes)
            if self._request.check_finite and not torch.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss.item()}; nothing was changed")
            if self._request.backward:
                scale = torch.full_like(loss, self._request.scale, requires_grad=False)
                run_backward([loss], [scale], autocast_types())
        except BaseException as error:
            add_note(error, f"in the criterion, with the outputs of all {sum(self._rows)} rows")
            raise
        return loss.detach()

    def gradients(self) -> list[list[Tensor | None]]:
        """For each share, the gradients of its outputs, on the device of its replica."""
        by_share = [_gradients(values) for values in self._own]
        for share, gradients in zip(self._shares, by_share, strict=True):
            if share.device != self._shares[0].device:
                copy = partial(self._transfers.copy, device=share.device, phase="compute")
                gradients[:] = [
                    gradient if gradient is None else copy(gradient) for gradient in gradients
                ]
        return by_share

    def _leaf(self, share: Share, output: Tensor) -> Tensor:
        """A share's output in the master's memory, as a leaf that accumulates a gradient."""
        master, here = self._shares[0].device, output.detach()
        if share.device != master:
            here = self._transfers.copy(here, master, "compute")
        return here.requires_grad_(output.requires_grad)

    def _joined(self) -> Any:
        """All outputs as one. They are not leaves, because a criterion may write them in place."""
        rows, lists = self._rows, has_entries(self._request.batch)
        dim, order = self._request.dim, self._order
        joined = join_rows(
            self._pieces, dim, rows, rows, lists=lists, layout=self._layout, order=order
        )
        return nested.map_tensors(lambda t: t.clone() if t.is_leaf else t, joined)

    def _whole(self, targets: list[Any]) -> Any:
        """All targets, in memory that the criterion may write; values without rows stay marked."""
        master = self._shares[0].device
        on_master = nested.map_leaves(partial(LeafMover(self._transfers).move, master), targets)
        is_on_master = master in [tensor.device for tensor in all_tensors(targets)]
        dim, sizes = self._request.dim, self._request.sizes

        def join(leaves: list[Any]) -> Any:  # what has no rows is the first batch's
            first, *others = leaves
            return (
                first.join(others) if isinstance(first, Marker) else join_rows(leaves, dim, sizes)
            )

        def unwrap(leaf: Any) -> Any:
            value = unwrap_marker(leaf, copy=is_on_master)
            if not isinstance(leaf, Marker):
                return value
            if leaf.num_rows is None:
                return leaf.around(value)
            self._entries.append(value if leaf.collate else None)
            return value

        return nested.map_leaves(unwrap, nested.merge(join, on_master))


def _have_rows(value: Any, rows: int, dim: int) -> bool:
    return all(
        isinstance(leaf, Tensor) and -leaf.ndim <= dim < leaf.ndim and leaf.size(dim) == rows
        for leaf in nested.leaves(value)
    )


def train_whole(
    attempt: Attempt,
    request: Request,
    tasks: Sequence[ReplicaTask],
    seen: Sequence[FirstPass],
    parts: Sequence[ReplicaSet],
    criterion: Callable[[Any, Any], Any],
    peers: Peers | None,
    layout: Any,
) -> list[Result]:
    """Accumulate in the replicas' parameters the gradient of a loss that sees all outputs.

    ``seen`` has the results of the first passes. ``layout`` has the numbers of entries per row in
    outputs. ``peers`` are the other processes, which have rows of the batch, too. ``criterion`` is
    that of the master. The loss is in the first replica's result; with ``peers``, in the first
    process only.
    """
    generators, stash = attempt.generators, tasks[0].stash
    assert stash is not None
    shares = [task.share for task in tasks]
    joins = [
        partial(one.join, share, request, layout) for one, share in zip(seen, shares, strict=True)
    ]
    devices = [share.device for share in shares]
    attempt.workers.parallel_apply(joins, [()] * len(joins), devices=devices)
    batch = WholeBatch(request, seen, shares, attempt.transfers, layout)
    seed = None if peers is None else batch.join_peers(peers, generators.seed_of_criterion())
    backward = partial(batch.backward, criterion, stash.stash_reachable)
    try:
        # Interrupts wait until the criterion and its backward pass have ended.
        with attempt.clock.span("criterion"), generators.of_criterion(seed):
            loss = _tried(attempt.workers, backward, tasks, seen)
            unalias(tasks[0].leaves)
        if peers is not None and peers.rank:
            stash.drop_gradients()  # of the criterion: rank 0 has them too, and they count once
            for part in parts:
                part.clear_gradients()
            for replica in chain(*(part.replicas for part in parts[1:])):
                replica.seen.update({m: [] for m in replica.seen})
        second = partial(second_pass, seen=seen, gradients=batch.gradients(), attempt=attempt)
        attempt.run(partial(second, most=request.most), tasks)
    except BaseException as error:
        if peers is not None and is_out_of_memory(error):
            add_note(
                error,
                f"{MORE_SUBSTEPS_CANNOT_HELP} in this step: other ranks have seen these outputs",
            )
        raise
    value = 0.0 if peers is not None and peers.rank else loss.cpu().double().item()
    losses = [value] + [0.0] * (len(seen) - 1)
    return [Result(v, loss.dtype, outputs=one.outputs) for v, one in zip(losses, seen, strict=True)]


def output_at(task: ReplicaTask, rows: Any, number: int = 0, name: str = "forward") -> Any:
    """The module's output for the rows of one micro-batch."""
    with task.launch_lock(number, name):
        return task.output_of(rows[0])


def first_pass(
    task: ReplicaTask, *, request: Request, attempt: Attempt, proceed: Callable[[], None]
) -> FirstPass:
    """The module's outputs for a share, without graphs except that of the last micro-batch.

    It runs in grad mode, because modules may compute other outputs without it.
    """
    share, keep = task.share, request.return_outputs
    retain_rows = request.retain_rows and len(share.micro_batches) > 1
    pieces: list[Any] = []
    returned: list[Any] = []
    states: list[State] = []
    output = None
    for number in range(len(share.micro_batches)):
        if number:
            proceed()
        output = None  # drops its graph before the next one is made
        with note_replica(share, number, request):
            states.append(attempt.generators.mark(share.replica, number))
            output = output_at(task, task.rows_of(number, keep=retain_rows), number)
            pieces.append(nested.map_tensors(_leaf, output))
            if keep:
                returned.append(detached_output(output, keep))
    return FirstPass(pieces, output, states, returned)


def _tried(
    workers: Workers,
    backward: Callable[[], Tensor],
    tasks: Sequence[ReplicaTask],
    seen: Sequence[FirstPass],
) -> Tensor:
    """Compute the loss in the caller's thread.

    If memory runs out, free graphs and rows and try again, to find out whether more sub-steps can
    help: graphs are smaller with more sub-steps, and rows can be copied again.
    """
    master = tasks[0].share.device
    compute = partial(workers.parallel_apply, [backward], [()], devices=[master])
    try:
        loss: Tensor = compute()[0]
        return loss
    except BaseException as error:
        if not is_out_of_memory(error):
            raise
        traceback.clear_frames(error.__traceback__)
        for one in seen:
            one.last = None
        for task in tasks:
            task.loader.drop_rows()
        workers.release()
        try:
            compute()
        except BaseException as again:
            if not is_out_of_memory(again):
                raise
            add_note(
                error, f"it does not fit on {master} with nothing else: {MORE_SUBSTEPS_CANNOT_HELP}"
            )
        raise


def second_pass(
    task: ReplicaTask,
    *,
    seen: Sequence[FirstPass],
    gradients: Sequence[Sequence[Tensor | None]],
    attempt: Attempt,
    most: int | None,
    proceed: Callable[[], None],
) -> None:
    """Accumulate in the replica's parameters the gradients that the gradients of its outputs imply.

    The backward pass of the retained graph comes first, because restoring state may write tensors
    of that graph. Then each other micro-batch runs forward again, in order, from the state before
    the first one. Afterwards the state is that after the first pass and the criterion.
    """
    share = task.share
    first = seen[share.replica]
    _pull(nested.tensors(first.joined), gradients[share.replica])
    last = len(first.pieces) - 1
    with note_replica(task.share, last):
        with task.span("backward", last):
            _pull(nested.tensors(first.last), _gradients(first.pieces[last]))
        leaves_left = unalias(task.leaves)
    first.last = None
    if not last or not any(gradient is not None for gradient in gradients[share.replica]):
        return
    changes: list[list[Tensor]] = []
    with attempt.isolated(task):
        for number in range(last)[: None if most is None else most - 1]:
            proceed()
            with note_replica(task.share, number):
                attempt.generators.set_state(share.replica, first.states[number])
                output = output_at(task, task.rows_of(number), number, "recompute")
                changes.append(_differences(output, first.pieces[number]))
                with task.span("backward", number):
                    _pull(nested.tensors(output), _gradients(first.pieces[number]))
                leaves_left = unalias(leaves_left)
                del output
    _require_unchanged(changes, share)


def _pull(roots: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Backward from the roots that have a gradient."""
    pairs = [(r, g) for r, g in zip(roots, gradients, strict=True) if g is not None]
    if pairs:
        run_backward(
            [root for root, _ in pairs], [gradient for _, gradient in pairs], autocast_types()
        )


def _gradients(piece: Any) -> list[Tensor | None]:
    return [leaf.grad for leaf in nested.tensors(piece)]


def _of_each_span(share: Share) -> list[slice]:
    """The micro-batches of each span of a share; for a single batch this is one slice of all."""
    starts = [n for n, (start, _) in enumerate(share.micro_batches) if start in dict(share.spans)]
    return [slice(*ends) for ends in pairwise([*starts, len(share.micro_batches)])]


def _leaf(output: Tensor) -> Tensor:
    return output.detach().requires_grad_(output.requires_grad)
