"""The rows of a batch: how many there are, and what has none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from scatterpar.step import nested
from scatterpar.step.markers import Batches, Rows, all_tensors

__all__ = [
    "batch_sizes",
    "count_rows",
    "has_rows",
    "sizes_of",
]

_MARK = (
    "mark what has no rows as Replicated(value), and a list with one entry per row as Rows(entries)"
)


def count_rows(batch: Mapping[str, Any], dim: int, *, data: bool = True) -> int:
    """The size along ``dim`` that all tensors of the batch agree on; 0-dim tensors have none.

    ``Rows`` count by their entries, and what is ``Replicated`` has no rows.

    Args:
        batch: the parts by the name that errors call them, such as ``inputs`` and ``targets``.
        dim: the dimension that holds the rows.
        data: the tensors are data, and none may require grad.

    Raises:
        ValueError: no rows at all, an empty batch, sizes that disagree, a tensor without ``dim``,
            of a sparse or jagged layout, or one that requires grad; a list of images, a packed
            sequence.
    """
    found: dict[int, str] = {}
    for name, part in batch.items():
        _refuse_split_in_silence(name, part, dim)
        for leaf in nested.leaves(part):
            if data:
                _require_data(name, leaf)
            size = _size(name, leaf, dim)
            if size is not None and size not in found:
                found[size] = f"{name} with {size} ({_shown(leaf)})"
    if not found:
        raise ValueError(
            "the batch has no tensor with rows: "
            + ", ".join(f"{name} is {type(part).__name__}" for name, part in batch.items())
            + "; a list with one entry per row is passed as Rows(entries)"
        )
    if len(found) > 1:
        sizes = ", ".join(found.values())
        raise ValueError(f"the batch disagrees in its rows along dim={dim}: {sizes}; {_MARK}")
    (rows,) = found
    if rows == 0:
        raise ValueError(f"the batch is empty: {found[rows]} along dim={dim}")
    return rows


def batch_sizes(batch: Mapping[str, Any], dim: int, rows: int) -> tuple[int, ...]:
    """The rows of each of several batches, where the batch is made of them; else just ``rows``.

    Raises:
        ValueError: parts of the batch are made of batches of other sizes.
    """
    found: dict[tuple[int, ...], str] = {}
    for name, part in batch.items():
        for leaf in nested.leaves(part):
            if isinstance(leaf, Batches):
                found.setdefault(sizes_of(leaf, dim, name), name)
    if len(found) > 1:
        parts = ", ".join(
            f"{name} with {' + '.join(map(str, sizes))}" for sizes, name in found.items()
        )
        raise ValueError(f"the several batches disagree in their rows along dim={dim}: {parts}")
    return next(iter(found), (rows,))


def has_rows(value: Any) -> bool:
    """Whether something in ``value`` has rows, and not only what goes to every replica."""
    return any(
        isinstance(leaf, Rows) or (isinstance(leaf, Tensor) and leaf.ndim)
        for leaf in nested.leaves(value)
    )


def _size(name: str, leaf: Any, dim: int) -> int | None:
    """How many rows a leaf has; ``None`` for what goes to every replica as it is."""
    if isinstance(leaf, Batches):
        return sum(sizes_of(leaf, dim, name))
    if isinstance(leaf, Rows):
        return len(leaf.entries)
    if not isinstance(leaf, Tensor):
        _refuse_foreign(name, leaf)
        return None
    if leaf.is_nested:
        raise ValueError(
            f"{name}: a nested tensor (torch.nested) cannot be split into rows; pass "
            f"Rows(list(tensor.unbind())), whose entries a module or collate= pads or joins, or "
            f"torch.nested.to_padded_tensor and the lengths"
        )
    shape = tuple(leaf.shape)
    if leaf.layout != torch.strided:
        raise ValueError(
            f"{name}: a tensor of layout {leaf.layout} cannot be split into rows; pass "
            f"it as a dense tensor, or its parts"
        )
    if leaf.ndim == 0:
        return None
    if not -leaf.ndim <= dim < leaf.ndim:
        raise ValueError(
            f"{name}: a tensor of shape {shape} has no dimension {dim} to split; "
            f"every tensor but 0-dim ones is split along dim={dim}, unless it is Replicated"
        )
    return leaf.size(dim)


def _refuse_foreign(name: str, leaf: Any) -> None:
    """What holds rows, but not as tensors, would go whole to every replica."""
    if isinstance(leaf, DataLoader):
        raise ValueError(
            f"{name} is a DataLoader, not a batch: iterate the loader, "
            f"for inputs, targets in loader: …"
        )
    if any(kind.__module__.startswith("torch_geometric.data") for kind in type(leaf).__mro__):
        raise ValueError(
            f"{name}: a {type(leaf).__name__} of graphs cannot be split into rows; pass "
            f"Rows(graphs, Batch.from_data_list)"
        )
    shape = getattr(leaf, "shape", None)
    if type(leaf).__module__ == "numpy" and shape:
        raise ValueError(
            f"{name}: a NumPy array of shape {shape} is no tensor: pass "
            f"torch.from_numpy(array), or Replicated(array) if it has no rows"
        )


def sizes_of(leaf: Batches, dim: int, name: str = "inputs") -> tuple[int, ...]:
    """The rows of each of several batches."""
    if leaf.sizes is not None:
        return tuple(leaf.sizes)
    return tuple(
        count_rows({f"{name}, batch {number}": batch}, dim)
        for number, batch in enumerate(leaf.entries)
    )


def _shown(leaf: Any) -> str:
    return f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)


def _require_data(name: str, leaf: Any) -> None:
    for tensor in [leaf] if isinstance(leaf, Tensor) else all_tensors(leaf):
        if tensor.requires_grad:
            raise ValueError(
                f"{name}: a tensor of shape {tuple(tensor.shape)} requires grad, but a batch is "
                f"data; pass tensor.detach()"
            )


def _refuse_split_in_silence(name: str, value: Any, dim: int) -> None:
    """What would be split along something else than rows, and nobody would know.

    Of a packed sequence the tensors inside, of a list of ``[3, H, W]`` images the channels.
    """
    if isinstance(value, PackedSequence):
        raise ValueError(
            f"{name}: a PackedSequence cannot be split into rows; pass Rows(sequences, pack), "
            f"where pack(few) returns (pack_sequence(few, enforce_sorted=False),)"
        )
    if isinstance(value, list) and value and dim == 0 and all(map(_is_image, value)):
        raise ValueError(
            f"{name}: a list of {len(value)} tensors such as {tuple(value[0].shape)} looks like "
            f"images, which would be split over their 3 channels; pass Rows(images) for one image "
            f"per row, or a tuple if dimension 0 does hold 3 rows"
        )
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            _refuse_split_in_silence(name, item, dim)


def _is_image(entry: Any) -> bool:
    if not isinstance(entry, Tensor) or entry.ndim != 3 or entry.size(0) != 3:
        return False
    return entry.is_floating_point() or entry.dtype == torch.uint8
