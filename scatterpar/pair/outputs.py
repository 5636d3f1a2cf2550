"""Outputs that stay where they are: their rows, their leaves, and their losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.calls.copies_in_graph import AutogradTransfers
from scatterpar.devices.virtual_devices import physical
from scatterpar.plan import Plan
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.torch_private.autograd import leaves_of, nodes_reached


def trained_by(
    replica_sets: Sequence[ReplicaSet], outputs: Sequence[Any]
) -> list[Tensor]:
    """The user's leaves that are replicated, and those behind ``outputs``."""
    leaves: list[Tensor] = []
    for replica_set in replica_sets:
        leaves += replica_set.slots.trained_leaves
    nodes: list[Any] = []
    for tensor in nested.tensors(list(outputs)):
        nodes += nodes_reached(tensor, nodes)
    leaves += leaves_of(nodes)
    # Each once: tensors have no equality that is one answer.
    return list({id(leaf): leaf for leaf in leaves}.values())


_ROWS_OF_SHARE = "_scatterpar_rows"


def note_rows(outputs: Sequence[Any], plan: Plan) -> None:
    """Note on each tensor of an output how many rows its replica has.

    ``gather`` weighs numbers by them, whatever the user has selected by then.
    """
    entries: dict[int, int] = {}
    for output in outputs:
        for key in {id(tensor) for tensor in nested.tensors(output)}:
            entries[key] = entries.get(key, 0) + 1
    for share, output in zip(plan.shares, outputs, strict=True):
        for tensor in nested.tensors(output):
            # What replicas share is of no share.
            if entries[id(tensor)] == 1:
                vars(tensor)[_ROWS_OF_SHARE] = share.rows


def noted_rows(tensors: Sequence[Tensor]) -> int | None:
    """The rows that ``note_rows`` has noted on one of them."""
    for tensor in tensors:
        rows: int | None = vars(tensor).get(_ROWS_OF_SHARE)
        if rows is not None:
            return rows
    return None


def combine(losses: Sequence[Tensor], weights: Sequence[float], plan: Plan) -> Tensor:
    """The weighted sum of the shares' losses, on the master.

    A loss of weight zero is ignored, even if it is NaN.
    """
    master = plan.shares[0].device
    terms: list[Tensor] = []
    for loss, weight, share in zip(losses, weights, plan.shares, strict=True):
        if weight == 0:
            continue
        # The name of a virtual device, which the loss does not have. A criterion may
        # have moved its loss to another device.
        is_at_share = loss.device == physical(share.device)
        origin = share.device if is_at_share else loss.device
        if origin != master:
            loss = AutogradTransfers().copy(loss, master, "compute", origin)
        terms.append(weight * loss)
    if not terms:
        # Not a loss times zero, which may be NaN.
        zero = torch.zeros_like(losses[0], device=physical(master))
        return zero.requires_grad_(torch.is_grad_enabled())
    return torch.stack(terms).sum()
