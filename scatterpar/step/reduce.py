"""Add the gradients of replicas in pairs, always in the same order; the master has the result.

::

    0   1   2   3   4        first round:  0 += 1, 2 += 3
    0 <-+   2 <-+   4        second round: 0 += 2
    0 <-----+       4        third round:  0 += 4

The pairs depend only on the number of replicas that have rows. If both replicas of a pair share a
memory, nothing is copied. Otherwise the gradients of the second replica are copied to the device of
the first. If they are added in place, dense ones of equal layout are copied in chunks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.coalescing import (
    copy_coalesced,
    flat_view,
    grouped,
    iter_received,
    plus,
    tree_rounds,
)
from scatterpar.devices.fingerprints import Route
from scatterpar.devices.transfers import Transfers
from scatterpar.plan import Plan, Share
from scatterpar.replicas.buffers import BatchNormUpdate, BufferPolicy, BufferValue, Moments, pooled
from scatterpar.replicas.replicas import Replica, ReplicaSet
from scatterpar.step import nested
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss_weights import LossWeights
from scatterpar.step.outcome import Computed, Gradient, Outcome, Spread, measure


def reduce(
    attempt: Attempt,
    replica_sets: Sequence[ReplicaSet],
    computed: Computed,
    weights: LossWeights,
    measure_noise: bool,
) -> Outcome:
    """Combine what the replicas have; the results of the step are in the master's memory."""
    request, transfers, external = attempt.request, attempt.transfers, computed.external_gradients
    shares, spread = attempt.plan.shares, Spread()
    if measure_noise and not request.whole_batch:
        spread = measure(attempt, replica_sets, weights, external)
    buffers = reduce_buffers(replica_sets, shares, transfers)
    # Buffers that the criterion has written keep its values.
    written = computed.written_buffers
    buffers = [one for one in buffers if id(one[0].get(one[1])) not in written]
    gradients: list[Gradient] = []
    if request.backward:
        gradients = reduce_gradients(replica_sets, len(shares), transfers, external)
    return Outcome(
        attempt,
        computed.loss,
        computed.dtype,
        weights.terms,
        spread,
        computed.outputs,
        gradients,
        buffers,
        reduce_moments(replica_sets, len(shares), transfers),
    )


def reduce_gradients(
    replica_sets: Sequence[ReplicaSet],
    active: int,
    transfers: Transfers,
    external: Sequence[Gradient],
) -> list[Gradient]:
    """The user's trained leaves, each with the sum of its gradients, in the master's memory.

    The sum is ``None`` if no replica used the leaf. The first ``active`` replicas had rows.
    ``external`` has gradients that reached the user's own leaves directly. Raises ``ValueError`` if
    a gradient arrived at a tensor of the module that was computed from parameters.
    """
    gradients: list[Gradient] = []
    for each in replica_sets:
        replicas = each.replicas[:active]
        of_replicas = [
            {i: g for i in each.trained_indices if (g := replica.tensors[i].grad) is not None}
            for replica in replicas
        ]
        sums = sum_in_order(of_replicas, [r.device for r in replicas], transfers, in_place=True)
        if others := sums.keys() - each.leaf_indices:
            raise ValueError(
                f"the module holds a tensor of shape {tuple(each.tensors[min(others)].shape)} that "
                f"was computed from parameters, such as weight[0]: replicas cannot train it, and "
                f"nothing was changed; compute it in forward, from the parameters"
            )
        gradients += [(each.tensors[i], sums.get(i)) for i in each.leaf_indices]
    total: dict[int, Gradient] = {}
    for leaf, gradient in (*gradients, *external):  # model and criterion may share a leaf
        _, other = total.get(id(leaf), (leaf, None))
        both = [one for one in (other, gradient) if one is not None]
        total[id(leaf)] = leaf, functools.reduce(plus, both) if both else None
    return list(total.values())


def reduce_buffers(
    replica_sets: Sequence[ReplicaSet], shares: Sequence[Share], transfers: Transfers
) -> list[BufferValue]:
    """The master's buffers: container, name, and value after the step."""
    values: list[BufferValue] = []
    for each in replica_sets:
        replicas = each.replicas[: len(shares)]
        shares_used = shares[: len(replicas)]  # a criterion of the whole batch has one replica
        combined = combined_buffers(replicas, shares_used, transfers, each.buffer_policy)
        values += [
            (place, name, combined.get((m, name), value))
            for m, place, name, value in each.buffers_after()
        ]
    return values


def reduce_moments(
    replica_sets: Sequence[ReplicaSet], active: int, transfers: Transfers
) -> list[BatchNormUpdate]:
    """The pooled statistics of each batch normalisation that is updated once per step."""
    layers = []
    for each in replica_sets:
        replicas = each.replicas[:active]
        of_replicas = [_moments_of(replica, replicas[0].device, transfers) for replica in replicas]
        for m, module in each.batch_norms.items():
            moments = pooled([recorded[m] for recorded in of_replicas if m in recorded])
            if module.running_mean is not None:
                layers.append(BatchNormUpdate(each.registered[m].buffers, module.momentum, moments))
    return layers


def _moments_of(replica: Replica, device: torch.device, transfers: Transfers) -> dict[int, Moments]:
    """The statistics that one replica recorded, by number of the module, on ``device``."""
    by_module = {m: pooled(calls) for m, calls in replica.recorded_moments.items()}
    recorded = {m: moments for m, moments in by_module.items() if moments is not None}
    if replica.device == device or not recorded:
        return recorded
    tensors = dict(enumerate(t for moments in recorded.values() for t in moments[1:]))
    moved = copy_coalesced(tensors, device, transfers, "reduce")
    return {
        m: Moments(moments.values, moved[2 * i], moved[2 * i + 1])
        for i, (m, moments) in enumerate(recorded.items())
    }


def sum_pairs(count: int) -> Iterator[tuple[int, int]]:
    """Yield (target, source): the sum of replica ``source`` is added to that of ``target``."""
    return chain(*tree_rounds(count))


def gradient_routes(device_ids: Sequence[torch.device]) -> Iterator[Route]:
    """Yield (source, target) for copies of gradients."""
    for target, source in sum_pairs(len(device_ids)):
        yield device_ids[source], device_ids[target]


def sum_in_order(
    gradients: Sequence[dict[int, Tensor]],
    devices: Sequence[torch.device],
    transfers: Transfers,
    *,
    in_place: bool,
) -> dict[int, Tensor]:
    """For each index of a tensor: the sum of its gradients, on ``devices[0]``.

    With ``in_place``, dense gradients are overwritten with partial sums. Otherwise no given tensor
    is written, and autograd records the sum.
    """
    sums = [dict(each) for each in gradients]
    for target, source in sum_pairs(len(sums)):
        others, sums[source] = sums[source], {}
        if devices[target] == devices[source]:
            _add(sums[target], others, in_place)
        elif in_place:
            _add_received(sums[target], others, devices[target], transfers)
        else:
            copies = {i: transfers.copy(t, devices[target], "reduce") for i, t in others.items()}
            _add(sums[target], copies, in_place)
    return sums[0]


def _add_received(
    total: dict[int, Tensor],
    gradients: dict[int, Tensor],
    device: torch.device,
    transfers: Transfers,
) -> None:
    """Add gradients from another device, chunk by chunk if dtype, shape and strides are equal."""
    flats = {i: flat_view(t) for i, t in gradients.items() if i in total}
    alike = {
        i: flat
        for i, flat in flats.items()
        if flat is not None and _memory_format_key(total[i]) == _memory_format_key(gradients[i])
    }
    sums = {i: total[i].as_strided((flat.numel(),), (1,)) for i, flat in alike.items()}
    for message, parts in iter_received(alike, device, transfers, "reduce"):
        torch._foreach_add_(message.of(sums), parts)
        del parts
    others = {i: tensor for i, tensor in gradients.items() if i not in alike}
    _add(total, copy_coalesced(others, device, transfers, "reduce"), in_place=True)


def _memory_format_key(tensor: Tensor) -> tuple[Any, ...]:
    """A key that is equal for two tensors whose elements have the same order in memory."""
    if tensor.layout != torch.strided:
        return (tensor.layout,)
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()


def combined_buffers(
    replicas: Sequence[Replica],
    shares: Sequence[Share],
    transfers: Transfers,
    policy: BufferPolicy,
) -> dict[tuple[int, str], Tensor]:
    """The floating-point buffers that the policy combines over replicas, by (module, name).

    Replicas whose buffer does not have the first replica's shape are left out.
    """
    if policy.combine is None:
        return {}
    first, total = replicas[0], sum(share.rows for share in shares)
    buffers = {
        (m, name): buffer
        for m, (registered, _) in enumerate(first.registered)
        for name, buffer in registered.items()
        if buffer is not None and buffer.is_floating_point() and buffer.layout == torch.strided
    }
    values: list[list[Tensor]] = [[] for _ in buffers]
    weights: list[list[float]] = [[] for _ in buffers]
    for replica, share in zip(replicas, shares, strict=True):
        here = {
            number: other.detach()
            for number, ((m, name), buffer) in enumerate(buffers.items())
            if (other := replica.registered[m].buffers.get(name)) is not None
            and other.shape == buffer.shape
        }
        if replica.device != first.device:
            here = copy_coalesced(here, first.device, transfers, "reduce")
        for number, value in here.items():
            values[number].append(value)
            weights[number].append(share.rows / total)
    return dict(zip(buffers, map(policy.combine, values, weights), strict=True))


def gather_to_master(
    outputs: Sequence[Sequence[Any]], plan: Plan, transfers: Transfers
) -> list[Any]:
    """The outputs of all micro-batches, share by share, in the memory of the master."""
    master = plan.shares[0].device
    copy = partial(transfers.copy, device=master, phase="reduce")
    return [
        output if share.device == master else nested.map_tensors(copy, output)
        for of_share, share in zip(outputs, plan.shares, strict=True)
        for output in of_share
    ]


def _add(total: dict[int, Tensor], gradients: dict[int, Tensor], in_place: bool) -> None:
    """Add ``gradients`` to ``total``. An index that ``total`` lacks gets the gradient itself."""
    shared = []
    for i, gradient in gradients.items():
        if i not in total:
            total[i] = gradient
        elif total[i].layout == gradient.layout == torch.strided:
            shared.append(i)
        else:
            total[i] = plus(total[i], gradient)
    if shared and in_place:
        for pairs in grouped([total[i] for i in shared], [gradients[i] for i in shared]):
            torch._foreach_add_(*pairs)
    elif shared:
        sums = torch._foreach_add([total[i] for i in shared], [gradients[i] for i in shared])
        total.update(zip(shared, sums, strict=True))
