"""What the replicas' forward passes wrote to parameters, merged on the master."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from scatterpar.devices.ledger import Ledger
from scatterpar.replicas.replica import Replica
from scatterpar.replicas.replicas import Replicas
from scatterpar.replicas.writes import close

__all__ = ["merge_writes"]


def merge_writes(
    parts: Sequence[Replicas], active: int, ledger: Ledger
) -> list[tuple[Tensor, Tensor]]:
    """The parameters that forward passes wrote, with what one device would have in them.

    Args:
        parts: the replicas of the model, and those of the criterion.
        active: how many of them took part, the master's own first.
        ledger: copies, and counts what it copied.

    Raises:
        ValueError: they were written in a way that has no meaning for the whole batch.
        RuntimeError: from values that were written by a forward pass before, and could not be
            put back, they became other ones: they are no longer those of one forward pass.
    """
    merged = []
    for part in parts:
        lost, part.lost = part.lost, []
        for number, position in enumerate(part.replicas[0].written):
            value = _merged(part.replicas[:active], number, ledger)
            if value is None:
                continue
            tensor = part.tensors[position]
            if any(tensor is one for one in lost) and not close(value, tensor.detach()):
                raise RuntimeError(
                    f"the forward pass wrote the parameter {part.name_of(position)!r}, which it "
                    f"had not done in this engine's steps before, and writes other values when it "
                    f"is called again: no gradient was added, but the parameter's earlier values "
                    f"are lost; from now on each replica has a copy of it"
                )
            merged.append((tensor, value))
    return merged


def _merged(replicas: Sequence[Replica], number: int, ledger: Ledger) -> Tensor | None:
    """The new value of the parameter with this number among the written ones, if it has one."""
    founds = [replica.writes.found[number] for replica in replicas if replica.writes is not None]
    if all(found.written is None for found in founds):
        return None
    total, *others = founds
    master = replicas[0].device
    for replica, found in zip(replicas[1:], others, strict=True):
        if replica.device != master:
            found = found.brought(partial(ledger.copy, device=master, phase="reduce"))
        total.add(found.value, found.written, found.read)
    total.require_meaning()
    return total.value
