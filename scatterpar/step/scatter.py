"""Batches to devices, and outputs back: check, slice, scatter, join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.ledger import Ledger
from scatterpar.plan import Plan
from scatterpar.step import nested
from scatterpar.threads.crew import Task

__all__ = [
    "as_call",
    "count_rows",
    "hand_out",
    "is_borrowed",
    "join",
    "micro_batches",
    "scatter",
    "take",
]


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How ``inputs`` reach a module: a mapping by name, a tuple by position, all else as one."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, tuple):
        return inputs, {}
    return (inputs,), {}


def count_rows(batch: Mapping[str, Any], dim: int, *, data: bool = True) -> int:
    """The size along ``dim`` that all tensors of the batch agree on; 0-dim tensors have none.

    Args:
        batch: the parts by the name that errors call them, such as ``inputs`` and ``targets``.
        dim: the dimension that holds the rows.
        data: the tensors are data, and none may require grad.

    Raises:
        ValueError: no tensor, an empty batch, sizes that disagree, a tensor without ``dim``,
            of a sparse or jagged layout, or one that requires grad.
    """
    found: dict[int, str] = {}
    for name, part in batch.items():
        for tensor in nested.tensors(part):
            shape = tuple(tensor.shape)
            if data and tensor.requires_grad:
                raise ValueError(
                    f"{name}: a tensor of shape {shape} requires grad, but a batch is data; "
                    f"pass tensor.detach()"
                )
            if tensor.layout != torch.strided:
                raise ValueError(
                    f"{name}: a tensor of layout {tensor.layout} cannot be split into rows; pass "
                    f"it as a dense tensor, or its parts"
                )
            if tensor.ndim == 0:
                continue
            if not -tensor.ndim <= dim < tensor.ndim:
                raise ValueError(
                    f"{name}: a tensor of shape {shape} has no dimension {dim} to split; "
                    f"every tensor but 0-dim ones is split along dim={dim}"
                )
            found.setdefault(tensor.size(dim), f"{name} with {tensor.size(dim)} (shape {shape})")
    if not found:
        raise ValueError(
            "the batch has no tensor with rows: "
            + ", ".join(f"{name} is {type(part).__name__}" for name, part in batch.items())
        )
    if len(found) > 1:
        sizes = ", ".join(found.values())
        raise ValueError(f"the batch disagrees in its rows along dim={dim}: {sizes}")
    (rows,) = found
    if rows == 0:
        raise ValueError(f"the batch is empty: {found[rows]} along dim={dim}")
    return rows


def take(value: Any, start: int, stop: int, dim: int, *, copy: bool = False) -> Any:
    """Rows ``start:stop`` of every tensor in ``value``: views, or with ``copy`` copies.

    0-dim tensors are copied always: no two takers share one.
    """

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if not leaf.ndim:
            return leaf.clone()
        piece = leaf.narrow(dim, start, stop - start)
        return piece.clone() if copy else piece

    return nested.transform(one, value)


def micro_batches(batch: Any, plan: Plan, dim: int) -> Iterator[Any]:
    """The rows of each micro-batch in order, as views of ``batch``."""
    for share in plan.shares:
        for start, stop in share.micro_batches:
            yield take(batch, start, stop, dim)


def scatter(batch: Any, plan: Plan, dim: int, ledger: Ledger) -> list[Any]:
    """Each share's rows of ``batch`` on its device, every byte copied once.

    Where the batch already is in the share's memory, nothing moves and the share is views
    of the caller's tensors, which must then not be written.
    """

    def bring(device: torch.device, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.device == device:
            return leaf
        return ledger.copy(leaf, device, "scatter")

    return [
        nested.transform(partial(bring, share.device), take(batch, share.start, share.stop, dim))
        for share in plan.shares
    ]


def hand_out(
    batch: Any,
    plan: Plan,
    modules: Sequence[nn.Module],
    scattered: Sequence[tuple[Any, Any]],
    criteria: Sequence[Any] | None = None,
    weights: Sequence[Sequence[float]] | None = None,
) -> list[Task]:
    """What each replica is given to do; with fewer rows than replicas, the last ones rest.

    Args:
        batch: the caller's, to tell what are views of it.
        plan: the shares.
        modules: the replicas.
        scattered: the inputs and targets of each share.
        criteria: the criterion of each replica.
        weights: those of each share's micro-batches.
    """
    tasks = []
    for i, share in enumerate(plan.shares):
        inputs, targets = scattered[i]
        criterion = criteria[i] if criteria else None
        own = weights[i] if weights else ()
        borrowed = is_borrowed(batch, share.device)
        tasks.append(Task(share, modules[i], inputs, targets, criterion, own, borrowed))
    return tasks


def is_borrowed(value: Any, device: torch.device) -> bool:
    """Whether some tensor of a batch is in the memory of ``device`` already, and not copied."""
    devices = [tensor.device for tensor in nested.tensors(value)]  # no generator: see nested.py
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
