"""Add the gradients of replicas in pairs, always in the same order.

::

    0   1   2   3   4        first round:  0 += 1, 2 += 3
    0 <-+   2 <-+   4        second round: 0 += 2
    0 <-----+       4        third round:  0 += 4

The pairs depend only on the number of replicas that have rows. Between memories, the
gradients of the second replica of a pair are copied to the device of the first, message
by message. Large gradients on more than two devices are added on all of them at the
same time, in the same pairs (``owners``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.batch import Batch
from scatterpar.batch.joining import (
    KnownTensors,
    Lists,
    join_rows,
    require_same_or_rows,
)
from scatterpar.devices import coalescing
from scatterpar.devices.bits import same_bits
from scatterpar.devices.clocks import DeviceClock
from scatterpar.devices.coalescing import has_foreach, is_part, iter_copies, tree_pairs
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import physical
from scatterpar.errors import warn
from scatterpar.replicas.batch_statistics import StepStatistics
from scatterpar.replicas.buffers import BufferValue, BufferWriter
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.replicas.shared_buffers import MemoryChanges
from scatterpar.step.attempt import Attempt
from scatterpar.step.flat_gradients import FlatGradients, have_equal_places
from scatterpar.step.owners import add_by_owners
from scatterpar.step.prepared_commit import PreparedCommit, may_become_grads
from scatterpar.step.replica_threads import ReplicaNote
from scatterpar.step.request import Request
from scatterpar.step.share_losses import total_of
from scatterpar.step.substeps import Computed, Gradient


@dataclass
class Outcome:
    """The results of a step: everything that the commit writes, and the times.

    With several processes, these are the results of all ranks.

    Attributes:
        attempt: the one that succeeded.
        loss: that of the whole batch.
        dtype: that of the losses.
        outputs: to be returned, if the user asked for outputs.
        logged: the criterion's numbers to log, by name.
        terms: the number of terms that a mean loss averages over; 1 for a sum.
        gradients: of every trained tensor of the user's.
        buffers: the values of the user's buffers after the step.
        memory_changes: the buffers that begin or cease to share memory in the step.
        statistics: of layers that are updated once per step.
        clocks: how long the shares have taken; none of two passes.
        prepared: what the commit needs to know, if it was asked; ``None`` if the
            results are others since, or nobody has asked.
    """

    attempt: Attempt
    loss: float
    dtype: torch.dtype
    outputs: tuple[Any, ...]
    logged: Mapping[str, float]
    terms: float
    gradients: list[Gradient]
    buffers: list[BufferValue]
    memory_changes: MemoryChanges
    statistics: StepStatistics | None
    clocks: Sequence[DeviceClock]
    prepared: PreparedCommit | None = None

    @property
    def request(self) -> Request:
        """The request of ``attempt``."""
        return self.attempt.request

    def prepared_commit(self) -> PreparedCommit:
        """What the commit needs to know.

        Raises ``ValueError`` if a buffer cannot share memory as in the replica.
        """
        running = self.statistics.values() if self.statistics else []
        values = [*self.buffers, *running]
        unchanged = self.attempt.replicas.equal_buffers()
        return PreparedCommit(
            BufferWriter(values, unchanged, self.memory_changes),
            may_become_grads(self.gradients),
        )

    def loss_tensor(self) -> Tensor:
        """The loss, on the master. Warns if no label counts.

        Raises ``FloatingPointError`` in that case with ``check_finite``.
        """
        if not self.terms and self.request.count is None:
            text = (
                "no label of this batch counts: all are ignored, and torch's mean "
                "of none is NaN"
            )
            if self.request.check_finite:
                raise FloatingPointError(f"{text}; nothing was changed")
            warn(f"{text}; here the loss is 0, and nothing is added to gradients")
        device = physical(self.attempt.plan.shares[0].device)
        # Not copied from the host, which would wait.
        return torch.full((), self.loss, dtype=self.dtype, device=device)


def reduce(attempt: Attempt, computed: Computed) -> Outcome:
    """Combine what the replicas have; the results are in the master's memory.

    Waits for the devices when all is launched, and raises their errors.
    """
    first, *_ = computed.losses
    try:
        buffers, changes, statistics = reduce_buffers(attempt)
        # Before gradients are added up: the join of outputs may refuse them.
        outputs = returned_outputs(attempt, computed.outputs)
        gradients = reduce_gradients(
            attempt, computed.external_gradients, computed.gradients
        )
        outcome = Outcome(
            attempt,
            loss=math.nan,  # not read yet
            dtype=first.dtype,
            outputs=outputs,
            logged={},
            terms=attempt.weights.terms,
            gradients=gradients,
            buffers=buffers,
            memory_changes=changes,
            statistics=statistics,
            clocks=computed.clocks,
        )
        # While devices compute. Statistics are computed once, by those of all ranks.
        if statistics is None:
            outcome.prepared = outcome.prepared_commit()
        attempt.clear_replicas()
    except Exception:
        # A device that failed in a sub-step may say so in any later call. The error of
        # its losses has a note that names the replica.
        total_of(computed.losses)
        raise
    outcome.loss, outcome.logged = total_of(computed.losses)
    attempt.transfers.synchronize()  # rows have arrived, now that the losses have
    return outcome


def reduce_gradients(
    attempt: Attempt,
    external: Sequence[Gradient],
    flat: Sequence[FlatGradients | None] = (),
) -> list[Gradient]:
    """Add up the replicas' gradients on the master. Returns the user's trained leaves,
    each with its sum.

    The sum is ``None`` if no replica used the leaf. ``external`` has gradients that
    reached the user's own leaves directly; ``flat`` those of replicas whose leaves have
    none.
    """
    gradients: list[Gradient] = []
    if attempt.request.backward:
        for replica_set in attempt.replicas.replica_sets:
            gradients += _summed(replica_set, attempt, flat)
    if len(attempt.replicas.replica_sets) == 1 and not external:
        return gradients  # a set has each leaf once
    gradients += external
    # By id: tensors have no equality that is one answer.
    total: dict[int, Gradient] = {}
    for leaf, gradient in gradients:
        # Model and criterion may share a leaf.
        _, earlier = total.get(id(leaf), (leaf, None))
        if earlier is None:
            total[id(leaf)] = leaf, gradient
        elif gradient is not None:
            total[id(leaf)] = leaf, _plus(earlier, gradient)
    return list(total.values())


def _summed(
    replica_set: ReplicaSet, attempt: Attempt, flat: Sequence[FlatGradients | None]
) -> list[Gradient]:
    """The leaves of a module, each with the sum of its replicas' gradients.

    Raises ``ValueError`` if a gradient arrived at a tensor of the module that was
    computed from parameters.
    """
    # With fewer rows than replicas the last ones have no share. With whole_batch only
    # the master has a replica of the criterion.
    active = replica_set.replicas[: len(attempt.plan.shares)]
    # The sum is where the first replica is, which is the master.
    devices = [replica.device for replica in active]
    trained = replica_set.slots.trained_numbers
    if flat and flat[0] is not None and have_equal_places(flat):
        flat_of_all = [of_replica.flat for of_replica in flat if of_replica is not None]
        sum_in_order(flat_of_all, devices, attempt.transfers, in_place=True)
        # The sums are where the gradients of the first replica were.
        sums = _by_number(flat[0], trained)
    else:
        gradients: list[dict[int, Tensor]] = []
        for number in range(len(active)):
            of_replica = flat[number] if flat else None
            if of_replica is None:
                gradients.append(replica_set.gradients_of(number))
            else:
                gradients.append(_by_number(of_replica, trained))
        sums = sum_in_order(gradients, devices, attempt.transfers, in_place=True)
    # A replica's copy of such a tensor is a leaf, and the user's has a graph.
    gradients_of_leaves: list[Gradient] = []
    for slot in replica_set.slots.trained:
        gradient = sums.get(slot.number)
        if slot.is_leaf:
            gradients_of_leaves.append((slot.tensor, gradient))
        elif gradient is not None:
            raise ValueError(
                f"the module holds a tensor of shape {tuple(slot.tensor.shape)} that "
                f"was computed from parameters, such as weight[0], and replicas cannot "
                f"train it; compute this tensor in forward. Nothing was changed"
            )
    return gradients_of_leaves


def _by_number(flat: FlatGradients, trained: Sequence[int]) -> dict[int, Tensor]:
    """Copies of flat gradients, by number of the trained tensor."""
    copies = flat.copied_parts()
    return {trained[position]: gradient for position, gradient in copies.items()}


def _one_value_per_buffer(buffers: Iterable[BufferValue]) -> list[BufferValue]:
    """Leave one value for each buffer.

    A criterion that holds the model, or a part of it, has copies of its own. The
    model's value counts, unless the step has left it as it was.
    """
    by_place: dict[tuple[int, str], BufferValue] = {}
    for container, name, value in buffers:
        place = id(container), name
        earlier = by_place.get(place)
        if earlier is not None:
            *_, of_model = earlier
            before = container.get(name)
            if of_model is None or before is None or not same_bits(of_model, before):
                continue
        by_place[place] = container, name, value
    return list(by_place.values())


def reduce_buffers(
    attempt: Attempt,
) -> tuple[list[BufferValue], MemoryChanges, StepStatistics | None]:
    """Find what the step has made of buffers. Returns their values, those that share
    memory with others than before, and the statistics of the step.

    Buffers that are updated once per step from the statistics are left out, and those
    that the criterion has written, which keep its values.
    """
    buffers: list[BufferValue] = []
    changes: MemoryChanges = {}
    for replica_set in attempt.replicas.replica_sets:
        values, changes_of_set = replica_set.buffers_after()
        if buffers and values:
            buffers = _one_value_per_buffer(buffers + values)
        else:
            buffers += values
        changes |= changes_of_set
    # Mostly none: only networks that the criterion closes over were saved.
    for tensor in attempt.undo.written():
        buffers = [
            (container, name, value)
            for container, name, value in buffers
            if container.get(name) is not tensor
        ]
    active = len(attempt.plan.shares)
    statistics = attempt.replicas.statistics_after(active, attempt.transfers)
    return buffers, changes, statistics


def sum_in_order(
    gradients: Sequence[dict[int, Tensor]],
    devices: Sequence[torch.device],
    transfers: Transfers,
    *,
    in_place: bool,
) -> dict[int, Tensor]:
    """Add up gradients, in the tree's order. Returns the sums by index of their tensor,
    on ``devices[0]``.

    With ``in_place``, dense gradients are overwritten; otherwise autograd records the
    sum.
    """
    # Copies: what has been added is taken out, so that memory is freed.
    sums = [dict(of_replica) for of_replica in gradients]
    pairs = tree_pairs(len(sums))
    by_owners: dict[int, Tensor] = {}
    # Two replicas have at most two devices, which need no owners.
    size = _block_size(devices) if in_place and len(devices) > 2 else 0
    if size and len(devices) > 2 * size:  # more than two devices
        # The first rounds of the tree, which add within each device.
        within = [pair for pair in pairs if pair[1] - pair[0] < size]
        pairs = pairs[len(within) :]
        _add_pairs(within, sums, devices, transfers, in_place)
        by_owners = add_by_owners(sums[::size], devices[::size], transfers)
    _add_pairs(pairs, sums, devices, transfers, in_place)
    return sums[0] | by_owners


def _block_size(devices: Sequence[torch.device]) -> int:
    """How many replicas each device has, if these are in blocks of a power of two; the
    last block may be smaller. Otherwise 0.
    """
    size = devices.count(devices[0])
    blocks = devices[::size]
    is_power = size & (size - 1) == 0
    is_even = all(blocks[i // size] == device for i, device in enumerate(devices))
    return size if is_power and is_even and len(set(blocks)) == len(blocks) else 0


def _add_pairs(
    pairs: Sequence[tuple[int, int]],
    sums: list[dict[int, Tensor]],
    devices: Sequence[torch.device],
    transfers: Transfers,
    in_place: bool,
) -> None:
    """Add the gradients of the second of each pair to those of the first."""
    for target, source in pairs:
        total = sums[target]
        arriving = sums[source]
        sums[source] = {}  # what arrives is freed with this pair
        messages: Iterable[dict[int, Tensor]] = iter((arriving,))
        if devices[target] != devices[source]:
            if in_place:
                _add_large(total, arriving, devices[target], transfers)
            messages = iter_copies(arriving, devices[target], transfers, "reduce")
        for message in messages:
            _add(total, message, in_place)
            del message  # only one has memory at a time


def _add_large(
    total: dict[int, Tensor],
    arriving: dict[int, Tensor],
    device: torch.device,
    transfers: Transfers,
) -> None:
    """Take gradients larger than a message out of ``arriving``, and add their parts."""
    for index in list(arriving):
        gradient = arriving[index]
        # First, as most are small. Sparse tensors have no ``nbytes``.
        if gradient.numel() * gradient.element_size() <= coalescing.CHUNK_BYTES:
            continue
        sum_so_far = total.get(index)
        if sum_so_far is None or not _are_dense(sum_so_far, gradient):
            continue
        del arriving[index]
        # Parts of a message's size: the master needs no memory for a second gradient.
        rows = max(1, len(gradient) * coalescing.CHUNK_BYTES // gradient.nbytes)
        parts = zip(sum_so_far.split(rows), gradient.split(rows), strict=True)
        for part_of_sum, part in parts:
            part_of_sum.add_(transfers.copy(part, device, "reduce"))


def _are_dense(left: Tensor, right: Tensor) -> bool:
    return left.layout == right.layout == torch.strided


def _add(total: dict[int, Tensor], message: dict[int, Tensor], in_place: bool) -> None:
    """Add the gradients of a message.

    An index that ``total`` lacks gets its gradient.
    """
    # The gradients that one operator adds: mostly all, which is asked in one call.
    together = [index for index in message if in_place and index in total]
    if not has_foreach(
        *map(total.__getitem__, together), *map(message.__getitem__, together)
    ):
        together = [
            index for index in together if has_foreach(total[index], message[index])
        ]
    if together:
        sums = [total[index] for index in together]
        torch._foreach_add_(sums, [message[index] for index in together])
    # Sparse gradients, mixed layouts, and those that this replica has alone.
    for index in message.keys() - together:
        gradient = message[index]
        if index in total:
            total[index] = _plus(total[index], gradient)
        elif is_part(gradient):
            # Else it would keep all of the message alive.
            total[index] = gradient.clone()
        else:
            total[index] = gradient


def _plus(left: Tensor, right: Tensor) -> Tensor:
    """The sum of two tensors. torch supports dense + sparse, but not sparse + dense."""
    return left + right if left.layout == torch.strided else right + left


def join_on_master(
    attempt: Attempt,
    outputs: Sequence[Sequence[Any]],
    lists: Lists = "never",
    pad: float | None = None,
    *,
    names_map: bool = False,
    known: KnownTensors,
) -> Any:
    """Join the outputs of all micro-batches on the master, in the batch's order.

    0-dim tensors are averaged with the weights of ``attempt``, unless ``known`` says
    another way. ``lists``, ``pad``, ``names_map`` and ``known`` are those of
    ``join_rows``.
    """
    plan = attempt.plan
    master = plan.shares[0].device
    copy_to_master = partial(attempt.transfers.copy, device=master, phase="reduce")
    copies: list[Sequence[Any]] = []
    for share, outputs_of_share in zip(plan.shares, outputs, strict=True):
        # Transfers count what crosses: nothing does within a memory.
        if share.device != master:
            outputs_of_share = [
                nested.map_tensors(copy_to_master, output)
                for output in outputs_of_share
            ]
        copies.append(outputs_of_share)
    return join_rows(
        plan.by_rows(copies),
        attempt.request.dim,
        weights=plan.by_rows(attempt.weights.by_share),
        rows=plan.by_rows(share.substep_rows for share in plan.shares),
        lists=lists,
        pad=pad,
        names_map=names_map,
        known=known,
    )


def lists_in_outputs(batches: Sequence[Batch]) -> Lists:
    """Whether lists that a module returns for ``batches`` may have one entry per row.

    Of inputs that are tensors they may be lists of tensors, which are not joined.
    """
    are_marked = any(batch.without_targets().has_marked_rows for batch in batches)
    return "if clear" if are_marked else "never"


def returned_outputs(
    attempt: Attempt, outputs: Sequence[Sequence[Any]]
) -> tuple[Any, ...]:
    """The outputs that ``return_outputs`` selects, one entry per replica."""
    if not attempt.request.return_outputs:
        return ()
    lists = lists_in_outputs(attempt.request.batches)
    dim = attempt.request.dim
    joined: list[Any] = []
    for share, outputs_of_share, weights in zip(
        attempt.plan.shares, outputs, attempt.weights.by_share, strict=True
    ):
        rows = share.substep_rows
        # The join may refuse outputs: the error names the replica.
        with ReplicaNote(share):
            output = join_rows(outputs_of_share, dim, weights, rows, lists=lists)
        joined.append(output)
    # What each share alone may return, such as two entries per row of its only
    # micro-batch, must not depend on how many shares there are.
    rows_by_share = [share.rows for share in attempt.plan.shares]
    require_same_or_rows(joined, rows_by_share, dim, lists)
    return tuple(joined)
