"""Replica gradients to the master's, summed in the same order every time, over a tree of devices.

Replicas that share a memory are added up there, then device by device, in pairs::

    0   1   2   3   4        first round:  0 += 1, 2 += 3
    0 <-+   2 <-+   4        second round: 0 += 2
    0 <-----+       4        third round:  0 += 4

Which pairs there are depends on the number of replicas and devices alone: so does each bit of the
sum. A gradient travels once, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices import verbs
from scatterpar.devices.chunks import bring, in_memory_order, rounds
from scatterpar.devices.flat import by_dtype
from scatterpar.devices.ledger import Ledger
from scatterpar.devices.lists import add_each, copy_each
from scatterpar.plan import Plan, Share
from scatterpar.replicas.replica import Replica
from scatterpar.replicas.replicas import Replicas
from scatterpar.step import nested
from scatterpar.step.join import join_rows
from scatterpar.step.outcome import BufferValue
from scatterpar.torch_private import flatten, unflatten

__all__ = [
    "collect",
    "mean_buffers",
    "reduce_buffers",
    "reduce_gradients",
    "sum_in_order",
]


def reduce_gradients(
    parts: Sequence[Replicas], active: int, ledger: Ledger
) -> list[tuple[Tensor, Tensor | None]]:
    """The sum of the replicas' gradients, in the master's memory.

    Args:
        parts: the replicas of the model, and those of the criterion.
        active: how many of them took part, the master's own first.
        ledger: copies, and counts what it copied.

    The master's own ``.grad`` must be set aside: what is there now, came in this step.

    Returns:
        Every trained tensor of the master's with its gradient; ``None`` for one that no
        replica used, and zero stands in where only some did. Whichever finished first, the sum
        has the same bits.
    """
    total: dict[int, tuple[Tensor, Tensor | None]] = {}
    for part in parts:
        found = _sum(part.replicas[:active], part.trained, ledger)
        for i in part.trained:
            tensor, gradient = part.tensors[i], found.get(i)
            _, other = total.get(id(tensor), (tensor, None))
            # Tied between model and criterion, or reached through a closure over the tensor itself.
            found_ones = [g for g in (other, gradient, tensor.grad) if g is not None]
            found_ones.sort(key=lambda g: g.layout != torch.strided)  # sparse + dense is not known
            total[id(tensor)] = (tensor, sum(found_ones[1:], found_ones[0]) if found_ones else None)
    return list(total.values())


def reduce_buffers(
    parts: Sequence[Replicas], shares: Sequence[Share], policy: str, ledger: Ledger
) -> list[BufferValue]:
    """Where each buffer of the master's is, its name, and its value after the step.

    Args:
        parts: the replicas of the model, and those of the criterion.
        shares: the shares of those that took part.
        policy: ``"master"`` for replica 0's buffers, ``"mean"`` for means where they exist.
        ledger: copies, and counts what it copied.
    """
    values: list[BufferValue] = []
    for part in parts:
        replicas = part.replicas[: len(shares)]
        own = shares[: len(replicas)]  # a criterion of the whole batch has one replica
        means = mean_buffers(replicas, own, ledger) if policy == "mean" else {}
        values += [
            (holder, name, means.get((m, name), own.get(name)))
            for m, (holder, own) in enumerate(zip(part.buffers, replicas[0].buffers, strict=True))
            for name in dict.fromkeys([*holder, *own])
        ]
    return values


def _sum(
    replicas: Sequence[Replica], positions: Sequence[int], ledger: Ledger
) -> dict[int, Tensor]:
    gradients = [
        {i: g for i in positions if (g := replica.tensors[i].grad) is not None}
        for replica in replicas
    ]
    return sum_in_order(gradients, [replica.device for replica in replicas], ledger, in_place=True)


def sum_in_order(
    gradients: Sequence[dict[int, Tensor]],
    devices: Sequence[torch.device],
    ledger: Ledger,
    *,
    in_place: bool,
) -> dict[int, Tensor]:
    """The sum of each position's gradients, on ``devices[0]``, over the tree.

    With ``in_place`` gradients that are given become sums; without, nothing that is given is
    written, and autograd can follow.
    """
    by_device: dict[torch.device, list[dict[int, Tensor]]] = {}
    for found, device in zip(gradients, devices, strict=True):
        by_device.setdefault(device, []).append(dict(found))
    memories = list(by_device)
    for sums in by_device.values():
        for near, far in chain(*rounds(len(sums))):
            _add(sums[near], sums[far], in_place)
            sums[far] = {}
    heads = [sums[0] for sums in by_device.values()]
    for near, far in chain(*rounds(len(heads))):
        if in_place:
            _join(heads[near], heads[far], memories[near], ledger)
        else:
            _add(heads[near], _bring(heads[far], memories[near], ledger), in_place)
        heads[far] = {}
    return heads[0]


def _join(
    near: dict[int, Tensor], far: dict[int, Tensor], device: torch.device, ledger: Ledger
) -> None:
    """Add what another device has to what ``device`` has, in place, with room for one chunk."""
    flats, sums, fresh = {}, {}, set()
    for i, gradient in far.items():
        flat = in_memory_order(gradient)
        if flat is None or (i in near and not _alike(near[i], gradient)):
            _add(near, {i: ledger.copy(gradient, device, "reduce")}, in_place=True)
            continue
        flats[i] = flat
        if i in near:
            sums[i] = near[i].as_strided(flat.shape, flat.stride())
        else:
            sums[i] = verbs.empty(len(flat), flat.dtype, device)
            near[i] = sums[i].as_strided(gradient.shape, gradient.stride(), 0)
            fresh.add(i)
    for pieces in bring(flats, device, ledger, "reduce"):
        for are_fresh, put in ((False, add_each), (True, copy_each)):
            group = [pair for pair in pieces if (pair[0].key in fresh) == are_fresh]
            if group:
                put([sums[i][start:stop] for (i, start, stop), _ in group], [t for _, t in group])
        del pieces, group


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one dtype and lie in memory in the same way."""
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()) and (
        one.layout == torch.strided and not one.is_conj() and not one.is_neg()
    )


def mean_buffers(
    replicas: Sequence[Replica], shares: Sequence[Share], ledger: Ledger
) -> dict[tuple[int, str], Tensor]:
    """Floating-point buffers averaged over the replicas, weighted by their rows.

    Returns:
        The mean by (module, name), in the master's memory, for buffers that all have in one
        shape. Where all are equal the mean is exactly that, infinities included.
    """
    first, *others = replicas
    rows = sum(share.rows for share in shares)
    means = {
        (m, name): buffer.detach().clone()
        for m, buffers in enumerate(first.buffers)
        for name, buffer in buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.layout == torch.strided
    }
    for replica, share in zip(others, shares[1:], strict=True):
        found = {
            number: buffer.detach()
            for number, (m, name) in enumerate(means)
            if (buffer := replica.buffers[m].get(name)) is not None
        }
        if replica.device != first.device:
            found = _bring(found, first.device, ledger)
        for number, (m, name) in enumerate(means):
            own = first.buffers[m][name]
            assert own is not None
            if number in found and found[number].shape == own.shape:
                difference = torch.where(found[number] == own, 0, found[number] - own)
                means[m, name] += difference * (share.rows / rows)
    return means


def collect(
    outputs: Sequence[Any], plan: Plan, dim: int, ledger: Ledger, *, lists: bool = False
) -> Any:
    """The shares' outputs joined on the master, rows in order; with ``lists``, lists too."""
    master = plan.shares[0].device
    here = [
        output if share.device == master else _moved(output, master, ledger)
        for output, share in zip(outputs, plan.shares, strict=True)
    ]
    rows = [share.rows for share in plan.shares]
    return join_rows(here, dim, rows, rows, lists=lists)


def _moved(value: Any, device: torch.device, ledger: Ledger) -> Any:
    def one(leaf: Any) -> Any:
        return ledger.copy(leaf, device, "reduce") if isinstance(leaf, Tensor) else leaf

    return nested.transform(one, value)


def _bring(tensors: dict[int, Tensor], device: torch.device, ledger: Ledger) -> dict[int, Tensor]:
    """Copies of ``tensors`` on ``device``: the dense ones in one message per dtype."""
    dense_ones = {i: tensor for i, tensor in tensors.items() if tensor.layout == torch.strided}
    brought = {
        i: ledger.copy(tensor, device, "reduce")
        for i, tensor in tensors.items()
        if i not in dense_ones
    }
    for positions in by_dtype(dense_ones.items()).values():
        dense = [tensors[i] for i in positions]
        flat = ledger.copy(flatten(dense), device, "reduce")
        brought.update(zip(positions, unflatten(flat, dense), strict=True))
    return brought


def _add(total: dict[int, Tensor], gradients: dict[int, Tensor], in_place: bool) -> None:
    """Add ``gradients`` to ``total``; what is not there yet moves in."""
    both = []
    for i, gradient in gradients.items():
        if i not in total:
            total[i] = gradient
        elif total[i].layout == gradient.layout == torch.strided:
            both.append(i)
        else:  # sparse: only dense + sparse and sparse + sparse are known to torch
            sparse_first = total[i].layout != torch.strided
            total[i] = gradient + total[i] if sparse_first else total[i] + gradient
    if both and in_place:
        add_each([total[i] for i in both], [gradients[i] for i in both])
    elif both:
        sums = torch._foreach_add([total[i] for i in both], [gradients[i] for i in both])
        total.update(zip(both, sums, strict=True))
