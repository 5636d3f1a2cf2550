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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from scatterpar.devices.transfers import to_numbers
from scatterpar.plan import Share
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.step import nested
from scatterpar.step.attempt import Attempt
from scatterpar.step.auto_accum import MORE_SUBSTEPS_CANNOT_HELP, is_out_of_memory
from scatterpar.step.markers import Marker, has_markers_with_rows, unwrap_markers
from scatterpar.step.nested import join_rows
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
from scatterpar.threads.workers import add_note
from scatterpar.torch_private import nodes_of


def _differences(tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """The differences between the outputs of both passes, as ``_distance`` measures them.

    They stay on the device: if the host read them now, the next sub-step would wait.
    """
    if [_kind(tensor) for tensor in tensors] != [_kind(leaf) for leaf in leaves]:
        raise RuntimeError(f"the second forward pass gave outputs of another kind: {_WHY}")
    return [
        _distance(tensor.detach(), leaf.detach())
        for tensor, leaf in zip(tensors, leaves, strict=True)
        if leaf.numel() and leaf.grad is not None
    ]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _distance(now: Tensor, before: Tensor) -> Tensor:
    """The largest difference, in units of the tolerance; NaN if only one of the two is NaN.

    The tolerance lets kernels round differently, but detects another dropout mask.
    """
    equal = torch.isclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
    diff = torch.where(equal, 0, now - before).abs().amax()
    dtype = torch.promote_types(diff.dtype, torch.float32)  # not float64: MPS has none
    diff, size = diff.to(dtype), before.abs().nan_to_num(0.0, 0.0, 0.0).amax().to(dtype)
    return torch.where(diff == 0, 0.0, diff / (size * torch.finfo(now.dtype).eps ** 0.5)).float()


def _require_unchanged(changes: Sequence[Sequence[Tensor]], share: Share) -> None:
    """Raise ``RuntimeError`` if the outputs of the second pass differ from those of the first."""
    for number, of_substep in enumerate(changes):
        if not all(to_numbers(change) <= 1 for change in of_substep):
            with note_replica(share, number):
                raise RuntimeError(f"the second forward pass gave other outputs: {_WHY}")


_WHY = (
    "whole_batch=True computes every micro-batch but a replica's last one twice, and this module "
    "depends on something that is not the same the second time, such as the random numbers of "
    "Python or NumPy, or a counter outside of it; draw from torch's generators and keep state in "
    "the module, or have one sub-step per replica, which is computed once. Nothing was changed"
)


class Peers(Protocol):
    """The processes of a process group; the engine passes ``Ranks``, of a package above."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    def outputs_of_all(
        self, pieces: Sequence[Any], rows: Sequence[int], targets: Any, dim: int, seed: int
    ) -> tuple[tuple[list[Any], list[int], Any], int]:
        """Outputs, row counts and targets of all ranks, and the seed of rank 0."""


class FirstPass(NamedTuple):
    """The results of the first pass over one share."""

    outputs: list[Any]  # of each micro-batch, without graphs; their tensors get gradients
    last: list[Any]  # the last output with its graph, until the second pass takes it
    states: list[State]  # the generators' states before each micro-batch
    returned: list[Any]  # the parts of outputs to return, if the user asked for outputs


class WholeBatch:
    """The outputs and targets of all rows, in row order, in the master's memory.

    Outputs are copied once to the master and their gradients once back, counted under ``compute``.
    """

    def __init__(self, attempt: Attempt, passes: Sequence[FirstPass], layout: Any) -> None:
        request = self._request = attempt.request
        self._transfers, self._layout = attempt.transfers, layout
        self._master = attempt.plan.shares[0].device
        self._copies: list[tuple[torch.device, Tensor, Tensor]] = []  # device, output, its copy
        pieces: list[tuple[tuple[int, int], Any]] = []  # each with its rows
        for first, share in zip(passes, attempt.plan.shares, strict=True):
            to_master = partial(self._on_master, share.device)
            on_master = [nested.map_tensors(to_master, output) for output in first.outputs]
            pieces += zip(share.micro_batches, on_master, strict=True)
        pieces.sort(key=lambda piece: piece[0])
        self._pieces = [piece for _, piece in pieces]
        self._rows = [stop - start for (start, stop), _ in pieces]
        self._order = request.order
        self._targets = self._joined_targets()
        self._lists = has_markers_with_rows(request.batch)

    def _on_master(self, device: torch.device, output: Tensor) -> Tensor:
        """``output`` in the master's memory, as a leaf that accumulates a gradient."""
        if device == self._master:
            return output
        copy = self._transfers.copy(output.detach(), self._master, "compute")
        self._copies.append((device, output, copy.requires_grad_(output.requires_grad)))
        return copy

    def _joined_targets(self) -> Any:
        """The targets of all batches on the master, with their markers."""
        targets = [of_batch for _, of_batch in self._request.batches]
        on_master = partial(LeafMover(self._transfers).move, self._master)
        dim, sizes = self._request.dim, self._request.sizes

        def join(leaves: list[Any]) -> Any:  # a value without rows is the first batch's
            first, *others = leaves
            if isinstance(first, Marker):
                return first.join(others)
            return join_rows(leaves, dim, sizes)

        return nested.merge(join, nested.map_leaves(on_master, targets))

    def join_peers(self, peers: Peers, seed: int) -> int:
        """Add the other processes' rows. Returns the seed that all processes use."""
        listed = self._lists and any(isinstance(piece, list) for piece in self._pieces)
        if listed or has_markers_with_rows(self._targets):
            problem, verb = "the targets have a marker with rows", "pass"
            if listed:
                problem, verb = "the outputs are lists with one entry per row", "return"
            raise ValueError(
                f"whole_batch=True with a process_group cannot join these values across ranks: "
                f"{problem}; {verb} tensors of one length on all ranks"
            )
        if self._order:  # other ranks have other orders
            self._pieces, self._rows, self._order = [self._joined()], [sum(self._rows)], ()
        args = self._pieces, self._rows, self._targets, self._request.dim
        (self._pieces, self._rows, self._targets), seed = peers.outputs_of_all(*args, seed)
        return seed

    def backward(
        self, criterion: Callable[..., Any], stash: Callable[[Tensor, Sequence[Any]], None]
    ) -> Tensor:
        """Returns the loss; adds its gradients to the outputs and to leaves of the criterion.

        ``stash(loss, nodes)`` stashes leaves that the loss reaches without passing ``nodes``.
        """
        try:
            joined, targets = self._joined(), unwrap_markers(self._targets, copy=True)
            nodes = nodes_of(nested.tensors(joined))
            loss = scalar_loss(criterion(joined, targets), "the criterion")
            stash(loss, nodes)
            if self._request.check_finite and not torch.isfinite(loss):
                raise FloatingPointError(f"the loss is {to_numbers(loss)}; nothing was changed")
            if self._request.backward:
                scale = torch.full_like(loss, self._request.scale, requires_grad=False)
                run_backward([loss], [scale], autocast_types())
        except BaseException as error:
            add_note(error, f"in the criterion, with the outputs of all {sum(self._rows)} rows")
            raise
        return loss.detach()

    def _joined(self) -> Any:
        """All outputs as one. They are not leaves, because a criterion may write them in place."""
        rows, dim = self._rows, self._request.dim
        joined = join_rows(
            self._pieces, dim, rows, rows, lists=self._lists, layout=self._layout, order=self._order
        )
        return nested.map_tensors(lambda t: t.clone() if t.is_leaf else t, joined)

    def return_gradients(self) -> None:
        """Copy the gradients of outputs to the devices of their replicas."""
        for device, output, copy in self._copies:
            if copy.grad is not None:
                output.grad = self._transfers.copy(copy.grad, device, "compute")


def train_whole(
    attempt: Attempt,
    tasks: Sequence[ReplicaTask],
    passes: Sequence[FirstPass],
    replica_set: ReplicaSet,
    peers: Peers | None,
    layout: Any,
) -> tuple[float, torch.dtype]:
    """Accumulate in the replicas' parameters the gradient of a loss that sees all outputs.

    The master's criterion is called. ``peers`` are the other processes, which have rows of the
    batch, too. Returns the loss, zero in all processes except the first, and its dtype.
    """
    generators, stash = attempt.generators, tasks[0].stash
    assert stash is not None
    batch = WholeBatch(attempt, passes, layout)
    seed = None if peers is None else batch.join_peers(peers, generators.seed_of_criterion())
    try:
        # Interrupts wait until the criterion and its backward pass have ended.
        with attempt.clock.span("criterion"), generators.of_criterion(seed):
            args = replica_set.criteria[0], stash.stash_reachable
            master = tasks[0].share.device
            (loss,) = attempt.workers.parallel_apply([batch.backward], [args], devices=[master])
            unalias(tasks[0].leaves)
        if peers is not None and peers.rank:
            stash.drop_gradients()  # of the criterion: rank 0 has them too, and they count once
            for each in replica_set.replica_sets:
                each.clear_gradients()
            for each in replica_set.replica_sets[1:]:
                for replica in each.replicas:
                    replica.recorded_moments.update({m: [] for m in replica.recorded_moments})
        batch.return_gradients()
        attempt.run(partial(second_pass, passes=passes, attempt=attempt), tasks)
    except BaseException as error:
        if peers is not None and is_out_of_memory(error):
            why = "other ranks have seen these outputs"
            add_note(error, f"{MORE_SUBSTEPS_CANNOT_HELP} in this step: {why}")
        raise
    return 0.0 if peers is not None and peers.rank else to_numbers(loss), loss.dtype


def output_at(task: ReplicaTask, rows: Any, number: int = 0, name: str = "forward") -> Any:
    """The module's output for the rows of one micro-batch."""
    with task.launch_lock(number, name):
        return task.output_of(rows[0])


def first_pass(task: ReplicaTask, *, attempt: Attempt, proceed: Callable[[], None]) -> FirstPass:
    """The module's outputs for a share, without graphs except that of the last micro-batch.

    All micro-batches run in the caller's grad mode: modules may compute other outputs without it.
    """
    share, request = task.share, attempt.request
    retain_rows = request.retain_rows and len(share.micro_batches) > 1
    first = FirstPass([], [], [], [])
    for number in range(len(share.micro_batches)):
        if number:
            proceed()
        first.last.clear()  # drops its graph before the next one is made
        with note_replica(share, number, request):
            first.states.append(attempt.generators.mark(share.replica, number))
            output = output_at(task, task.rows_of(number, retain=retain_rows), number)
            first.outputs.append(nested.map_tensors(_leaf, output))
            if request.return_outputs:
                first.returned.append(detached_output(output, request.return_outputs))
            first.last.append(output)
            del output
    return first


def second_pass(
    task: ReplicaTask,
    *,
    passes: Sequence[FirstPass],
    attempt: Attempt,
    proceed: Callable[[], None],
) -> None:
    """Accumulate gradients in the replica's parameters, given those of its outputs.

    The backward pass of the retained graph comes first, because restoring state may write tensors
    of that graph. Then each other micro-batch runs forward again, in order, from the state before
    the first one. Afterwards the state is that after the first pass and the criterion.
    """
    share, max_substeps = task.share, attempt.request.max_substeps
    outputs, retained, states, _ = passes[share.replica]
    leaves = [[*nested.tensors(output)] for output in outputs]
    *others, last = range(len(outputs))
    if max_substeps is not None:
        others = others[: max_substeps - 1]
    with note_replica(share, last):
        with task.span("backward", last):
            _run_backward([*nested.tensors(retained.pop())], leaves[last])
        without_gradient = unalias(task.leaves)
    if not others or all(leaf.grad is None for of_output in leaves for leaf in of_output):
        return
    changes: list[list[Tensor]] = []
    with attempt.isolated(task):
        for number in others:
            proceed()
            with note_replica(share, number):
                attempt.generators.set_state(share.replica, states[number])
                output = output_at(task, task.rows_of(number), number, "recompute")
                tensors = [*nested.tensors(output)]
                changes.append(_differences(tensors, leaves[number]))
                with task.span("backward", number):
                    _run_backward(tensors, leaves[number])
                without_gradient = unalias(without_gradient)
                del output, tensors
    _require_unchanged(changes, share)


def _run_backward(roots: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    """Run the backward pass of an output, given the gradients of its ``leaves``."""
    pairs = [
        (root, leaf.grad) for root, leaf in zip(roots, leaves, strict=True) if leaf.grad is not None
    ]
    if pairs:
        run_backward([root for root, _ in pairs], [grad for _, grad in pairs], autocast_types())


def _leaf(output: Tensor) -> Tensor:
    return output.detach().requires_grad_(output.requires_grad)
