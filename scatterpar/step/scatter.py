"""Batches to devices, and outputs back: scatter, hand out, join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.flat import by_dtype
from scatterpar.devices.ledger import Ledger
from scatterpar.plan import Plan
from scatterpar.replicas.replicas import Replicas
from scatterpar.step import nested
from scatterpar.step.markers import Batches, Replicated, Rows, all_tensors
from scatterpar.step.rows import take_share
from scatterpar.threads.crew import Task

__all__ = ["as_call", "hand_out", "is_borrowed", "join", "join_rows", "scatter"]

_SMALL = 2**16  # bytes: above, a copy of its own costs less than being packed


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How ``inputs`` reach a module: a mapping by name, a tuple by position, all else as one."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}


def scatter(batch: Any, plan: Plan, dim: int, ledger: Ledger) -> list[Any]:
    """Each share's rows of ``batch`` on its device, every byte copied once.

    Where the batch already is in the share's memory, nothing moves and the share is views
    of the caller's tensors, which must then not be written. What is replicated comes once to
    each memory, however many replicas are there.
    """
    crossing = _Crossing(ledger)
    return [
        nested.transform(partial(crossing.bring, share.device), take_share(batch, share, dim))
        for share in plan.shares
    ]


class _Crossing:
    """Brings a batch to devices. (Nested functions that call each other would be a cycle, and keep
    what arrived until the garbage collector runs.)
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._arrived: dict[tuple[int, torch.device], Any] = {}

    def bring(self, device: torch.device, leaf: Any) -> Any:
        if isinstance(leaf, Batches):
            entries = nested.transform(partial(self.bring, device), leaf.entries)
            return Batches(entries, leaf.sizes)
        if isinstance(leaf, Rows):
            return Rows(_bring_entries(leaf.entries, device, self._ledger), leaf.collate)
        if isinstance(leaf, Replicated):
            return Replicated(nested.transform(partial(self._bring_once, device), leaf.value))
        if not isinstance(leaf, Tensor) or leaf.device == device:
            return leaf
        return self._ledger.copy(leaf, device, "scatter")

    def _bring_once(self, device: torch.device, leaf: Any) -> Any:
        key = (id(leaf), device)
        if key not in self._arrived:
            self._arrived[key] = self.bring(device, leaf)
        return self._arrived[key]


def _bring_entries(entries: list[Any], device: torch.device, ledger: Ledger) -> list[Any]:
    """Entries on ``device``; small tensors of one dtype travel together."""
    away = [t for t in nested.tensors(entries) if t.device != device]
    small = [t for t in away if type(t) is Tensor and t.layout == torch.strided and t.numel()]
    small = [t for t in small if t.numel() * t.element_size() <= _SMALL and t.is_contiguous()]
    arrived: dict[int, Tensor] = {}
    for positions in by_dtype(enumerate(small)).values():
        group = [small[i] for i in positions]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        pieces = ledger.copy(flat, device, "scatter").split([t.numel() for t in group])
        arrived |= {id(t): p.view(t.shape) for t, p in zip(group, pieces, strict=True)}
    for tensor in away:
        if id(tensor) not in arrived:
            arrived[id(tensor)] = ledger.copy(tensor, device, "scatter")

    def one(leaf: Any) -> Any:
        return arrived.get(id(leaf), leaf)

    return [nested.transform(one, entry) for entry in entries]


def hand_out(
    batch: Any,
    plan: Plan,
    parts: Sequence[Replicas],
    scattered: Sequence[tuple[Any, Any]],
    criteria: Sequence[Any] | None = None,
    weights: Sequence[Sequence[float]] | None = None,
) -> list[Task]:
    """What each replica is given to do; with fewer rows than replicas, the last ones rest.

    Args:
        batch: the caller's, to tell what are views of it.
        plan: the shares.
        parts: the replicas of the model, and those of the criterion.
        scattered: the inputs and targets of each share.
        criteria: the criterion of each replica.
        weights: those of each share's micro-batches.
    """
    tasks = []
    for i, share in enumerate(plan.shares):
        inputs, targets = scattered[i]
        criterion = criteria[i] if criteria else None
        own = weights[i] if weights else ()
        # A compiled module's graphs hold for rows that begin where the memory does.
        copies = is_borrowed(batch, share.device) or any(part.compiler.is_used for part in parts)
        replicas = [part.replicas[i] for part in parts if i < len(part.replicas)]
        module = replicas[0].roots[0]
        writes = [replica.writes for replica in replicas if replica.writes is not None]
        tasks.append(Task(share, module, inputs, targets, criterion, own, copies, writes))
    return tasks


def is_borrowed(value: Any, device: torch.device) -> bool:
    """Whether some tensor of a batch is in the memory of ``device`` already, and not copied."""
    devices = [tensor.device for tensor in all_tensors(value)]  # no generator: see nested.py
    return device in devices


def join(pieces: Sequence[Any], dim: int, weights: Sequence[float]) -> Any:
    """One value out of the pieces of consecutive rows, of the same nested types.

    Tensors are concatenated along ``dim``; 0-dim tensors are averaged with ``weights``
    (one a piece; those with weight zero are left out). Other leaves are kept where all
    pieces have the same, and become a list with one entry a piece otherwise.

    >>> join([{"y": torch.zeros(2)}, {"y": torch.ones(1)}], 0, [2, 1])
    {'y': tensor([0., 0., 1.])}
    """

    def one(leaves: list[Any]) -> Any:
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            return leaves[0] if _all_same(leaves) else leaves
        if leaves[0].ndim:
            return torch.cat(leaves, dim)
        return _average(leaves, weights)

    return pieces[0] if len(pieces) == 1 else nested.merge(one, pieces)


def join_rows(
    pieces: Sequence[Any],
    dim: int,
    weights: Sequence[float],
    rows: Sequence[int],
    *,
    strict: bool = False,
    lists: bool = False,
) -> Any:
    """``join``, once it is sure that tensors hold the rows that are to be joined.

    Args:
        pieces: the outputs of consecutive rows.
        dim: the dimension that holds the rows.
        weights: those of 0-dim tensors.
        rows: how many each piece is of.
        strict: refuse tensors that hold several entries per row along dimension 0 too, such
            as tokens of all rows in one dimension.
        lists: a list with one entry per row is joined as such.

    Raises:
        ValueError: a tensor without the rows along ``dim``, or of another shape in the others.
    """
    if lists and all(
        isinstance(piece, list) and len(piece) == n for piece, n in zip(pieces, rows, strict=True)
    ):
        return [entry for piece in pieces for entry in piece]

    def check(leaves: list[Any]) -> None:
        if not all(isinstance(leaf, Tensor) for leaf in leaves) or not leaves[0].ndim:
            return
        for leaf, n in zip(leaves, rows, strict=True):
            size = leaf.size(dim) if -leaf.ndim <= dim < leaf.ndim else None
            flattened = not strict and dim == 0 and size is not None and size % n == 0
            if size != n and not flattened:
                raise ValueError(
                    f"an output of shape {tuple(leaf.shape)} does not have its {n} rows along "
                    f"dim={dim}, so that it cannot be joined with those of other rows; "
                    f"{_KEEP if strict else _ALONE}"
                )
        if len({leaf.shape[:dim] + leaf.shape[dim:][1:] for leaf in leaves}) > 1:
            shapes = " and ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ValueError(
                f"outputs of shapes {shapes} cannot be joined along dim={dim}; "
                f"{_KEEP if strict else _ALONE}"
            )

    if len(pieces) > 1:
        nested.merge(check, pieces)
    return join(pieces, dim, weights)


_KEEP = (
    "pass return_outputs=function: what it returns of each micro-batch's output is kept, "
    "with the rows along that dimension, or as a number"
)
_ALONE = "return the rows along that dimension, or call engine.module itself"


def _all_same(leaves: list[Any]) -> bool:
    first = leaves[0]
    if any(type(leaf) is not type(first) for leaf in leaves):
        return False
    if all(leaf is first for leaf in leaves):
        return True
    return isinstance(first, (bool, int, float, complex, str, bytes)) and all(
        leaf == first for leaf in leaves
    )


def _average(values: list[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean of 0-dim tensors, in their dtype; integers become floats."""
    counted = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    total = sum(weight for _, weight in counted)
    if not counted:
        return values[0]
    wide = torch.promote_types(values[0].dtype, torch.float32)
    mean = torch.stack([value.to(wide) * (weight / total) for value, weight in counted]).sum()
    is_integer = not (values[0].is_floating_point() or values[0].is_complex())
    return mean if is_integer else mean.to(values[0].dtype)
