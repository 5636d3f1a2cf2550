"""Add the gradients of replicas in pairs, always in the same order: the outcome of a
step.

::

    0   1   2   3   4        first round:  0 += 1, 2 += 3
    0 <-+   2 <-+   4        second round: 0 += 2
    0 <-----+       4        third round:  0 += 4

The pairs depend only on the number of replicas that have rows. Between memories, the
gradients of the second replica of a pair are copied to the device of the first, message
by message.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices import coalescing
from scatterpar.devices.coalescing import has_foreach, is_part, iter_copies, tree_pairs
from scatterpar.devices.device_ids import physical
from scatterpar.devices.transfers import Transfers
from scatterpar.errors import warn
from scatterpar.replicas.batch_statistics import StepStatistics
from scatterpar.replicas.buffers import BufferValue
from scatterpar.report import GradientNoise, StepReport
from scatterpar.step.attempt import Attempt
from scatterpar.step.replica_threads import ReplicaNote
from scatterpar.step.request import Request
from scatterpar.step.substeps import Computed, Gradient


class ReplicaNorms(NamedTuple):
    """How large the replicas' own gradients are, for the noise scale.

    Attributes:
        squares: the sum over replicas of the squared norm, times the number of terms.
        replicas: the number of replicas that had terms.
    """

    squares: float = 0.0
    replicas: float = 0.0


@dataclass
class Outcome:
    """The results of a step: everything that the commit writes, and the report."""

    attempt: Attempt  # the one that succeeded
    loss: float  # of the whole batch
    dtype: torch.dtype  # of the losses
    outputs: Sequence[Any]  # to be returned, if the user asked for outputs
    terms: float  # the number of terms that a mean loss averages over; 1 for a sum
    rows: int  # the number of rows in the batch; of all ranks
    norms: ReplicaNorms  # of the replicas' gradients; of all ranks
    gradients: list[Gradient]  # of every trained tensor of the user's
    buffers: list[BufferValue]
    statistics: StepStatistics | None  # of layers that are updated once per step
    retries: int = 0  # earlier tries that ran out of memory

    @property
    def request(self) -> Request:
        """The request of ``attempt``."""
        return self.attempt.request

    def loss_tensor(self) -> Tensor:
        """The loss, on the master. Warns, or with ``check_finite`` raises, if no label
        counts.
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

    def report(self, noise: GradientNoise | None, waited: float) -> StepReport:
        """The report of the step, which began ``waited`` seconds after the previous
        one.
        """
        attempt = self.attempt
        return StepReport(
            plan=attempt.plan,
            loss=self.loss,
            seconds=attempt.seconds,
            bytes=attempt.transfers.bytes,
            messages=attempt.transfers.messages,
            retries=self.retries,
            noise=noise,
            waited=waited,
            replica_seconds=tuple(attempt.threads.seconds),
        )


def reduce(attempt: Attempt, computed: Computed, norms: ReplicaNorms) -> Outcome:
    """Combine what the replicas have; the results are in the master's memory."""
    buffers, statistics = reduce_buffers(attempt)
    # Buffers that the criterion has written keep its values.
    written = attempt.undo.written()
    return Outcome(
        attempt,
        loss=computed.loss,
        dtype=computed.dtype,
        outputs=returned_outputs(attempt, computed.outputs),
        terms=attempt.weights.terms,
        rows=attempt.plan.rows,
        norms=norms,
        gradients=reduce_gradients(attempt, computed.external_gradients),
        buffers=[
            (place, name, value)
            for place, name, value in buffers
            if id(place.get(name)) not in written
        ],
        statistics=statistics,
    )


def reduce_gradients(attempt: Attempt, external: Sequence[Gradient]) -> list[Gradient]:
    """The user's trained leaves, each with the sum of its gradients, in the master's
    memory.

    The sum is ``None`` if no replica used the leaf. ``external`` has gradients that
    reached the user's own leaves directly. Raises ``ValueError`` if a gradient arrived
    at a tensor of the module that was computed from parameters.
    """
    gradients: list[Gradient] = []
    for each in attempt.replicas.replica_sets if attempt.request.backward else ():
        replicas = each.replicas[: len(attempt.plan.shares)]
        of_replicas = [each.gradients_of(number) for number in range(len(replicas))]
        devices = [replica.device for replica in replicas]
        sums = sum_in_order(of_replicas, devices, attempt.transfers, in_place=True)
        if others := sums.keys() - each.leaves.keys():
            raise ValueError(
                "the module holds a tensor of shape "
                f"{tuple(each.tensors[min(others)].shape)} that "
                "was computed from parameters, such as weight[0], and replicas "
                "cannot train it; "
                f"compute it in forward. Nothing was changed"
            )
        gradients += [(leaf, sums.get(i)) for i, leaf in each.leaves.items()]
    total: dict[int, Gradient] = {}
    # model and criterion may share a leaf
    for leaf, gradient in (*gradients, *external):
        _, other = total.get(id(leaf), (leaf, None))
        both = [one for one in (other, gradient) if one is not None]
        total[id(leaf)] = leaf, functools.reduce(_plus, both) if both else None
    return list(total.values())


def reduce_buffers(
    attempt: Attempt,
) -> tuple[list[BufferValue], StepStatistics | None]:
    """The buffers' values after the step, and the statistics of layers updated once per
    step.
    """
    buffers: list[BufferValue] = []
    for replica_set in attempt.replicas.replica_sets:
        buffers += replica_set.buffers_after()
    active = len(attempt.plan.shares)
    return buffers, attempt.replicas.statistics_after(active, attempt.transfers)


def sum_in_order(
    gradients: Sequence[dict[int, Tensor]],
    devices: Sequence[torch.device],
    transfers: Transfers,
    *,
    in_place: bool,
) -> dict[int, Tensor]:
    """For each index of a tensor: the sum of its gradients, on ``devices[0]``.

    With ``in_place``, dense gradients are overwritten; otherwise autograd records the
    sum.
    """
    sums = [dict(each) for each in gradients]
    for target, source in tree_pairs(len(sums)):
        # freed with this pair
        total, others, sums[source] = sums[target], sums[source], {}
        arriving = iter((others,))
        if devices[target] != devices[source]:
            if in_place:
                _add_large(total, others, devices[target], transfers)
            arriving = iter_copies(others, devices[target], transfers, "reduce")
        for message in arriving:
            _add(total, message, in_place)
            del message  # only one has memory at a time
    return sums[0]


def _add_large(
    total: dict[int, Tensor],
    others: dict[int, Tensor],
    device: torch.device,
    transfers: Transfers,
) -> None:
    """Take gradients larger than a message out of ``others``, and add them piece by
    piece.
    """
    shared = [i for i in others if i in total and total[i].layout == torch.strided]
    for i in [i for i in shared if others[i].layout == torch.strided]:
        if others[i].nbytes > coalescing.CHUNK_BYTES:
            gradient = others.pop(i)
            rows = max(1, len(gradient) * coalescing.CHUNK_BYTES // gradient.nbytes)
            for part, piece in zip(
                total[i].split(rows), gradient.split(rows), strict=True
            ):
                part.add_(transfers.copy(piece, device, "reduce"))


def _add(total: dict[int, Tensor], message: dict[int, Tensor], in_place: bool) -> None:
    """Add the gradients of a message. An index that ``total`` lacks gets
    its gradient.
    """
    both = [(i, g) for i, g in message.items() if in_place and i in total]
    dense = [i for i, g in both if has_foreach(total[i], g)]
    if dense:
        torch._foreach_add_([total[i] for i in dense], [message[i] for i in dense])
    for i in message.keys() - dense:
        gradient = message[i]
        if i in total:
            total[i] = _plus(total[i], gradient)
        else:
            total[i] = gradient.clone() if is_part(gradient) else gradient


def _plus(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two tensors. torch supports dense + sparse, but not sparse + dense."""
    return one + other if one.layout == torch.strided else other + one


def join_on_master(
    attempt: Attempt,
    outputs: Sequence[Sequence[Any]],
    lists: nested.Lists = "never",
    pad: float | None = None,
) -> Any:
    """The outputs of all micro-batches as one, on the master, in the order of the
    batch's rows.

    0-dim tensors are averaged with the weights of ``attempt``. ``pad`` is that of
    ``join_rows``.
    """
    plan, weights = attempt.plan, [*chain(*attempt.weights.by_share)]
    master = plan.shares[0].device
    copy = partial(attempt.transfers.copy, device=master, phase="reduce")
    pieces = [
        output if share.device == master else nested.map_tensors(copy, output)
        for share, of_share in zip(plan.shares, outputs, strict=True)
        for output in of_share
    ]
    dim, rows = attempt.request.dim, plan.substep_rows
    return nested.join_rows(
        pieces, dim, weights, rows, lists=lists, order=plan.order, pad=pad
    )


def returned_outputs(
    attempt: Attempt, outputs: Sequence[Sequence[Any]]
) -> tuple[Any, ...]:
    """What ``return_outputs`` asks for: one entry per replica, or with costs one of all
    rows.
    """
    if not attempt.request.return_outputs:
        return ()
    if attempt.plan.order:
        return (join_on_master(attempt, outputs),)
    joined, shares = [], attempt.plan.shares
    for share, pieces, weights in zip(
        shares, outputs, attempt.weights.by_share, strict=True
    ):
        rows = [stop - start for start, stop in share.micro_batches]
        with ReplicaNote(share):
            joined.append(nested.join_rows(pieces, attempt.request.dim, weights, rows))
    return tuple(joined)
