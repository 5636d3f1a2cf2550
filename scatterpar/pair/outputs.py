"""What the pair's outputs are: a tuple with one entry per replica, which ``gather`` joins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from scatterpar.devices.verbs import DeviceLike, physical, resolve
from scatterpar.step import nested
from scatterpar.step.join import join

__all__ = ["gather", "require_entries", "sizes"]


def gather(outputs: Sequence[Any], device: DeviceLike, dim: int = 0) -> Any:
    """Bring the replicas' outputs together on one device, rows in order, differentiably.

    Args:
        outputs: one entry per replica, of the same nested types.
        device: an int (ordinal of the accelerator), a string or a device.
        dim: the dimension that holds the rows.

    Returns:
        One value of the entries' nested type. 0-dim tensors in it are averaged, weighted by
        the rows of their entry.

    Raises:
        TypeError: outputs that are not a tuple or list.
        ValueError: no outputs, or a device that is not here.

    Example:
        >>> import torch
        >>> gather((torch.zeros(2), torch.ones(1)), "cpu")
        tensor([0., 0., 1.])
    """
    require_entries(outputs)
    if not outputs:
        raise ValueError("there are no outputs to gather")
    (target,) = resolve([device])

    def bring(leaf: Any) -> Any:
        return leaf.to(physical(target)) if isinstance(leaf, Tensor) else leaf

    rows = [next(iter(sizes(output, dim)), 1) for output in outputs]
    return join([nested.transform(bring, output) for output in outputs], dim, rows)


def sizes(output: Any, dim: int) -> list[int]:
    """The sizes along ``dim`` of the tensors that have it."""
    return [t.size(dim) for t in nested.tensors(output) if -t.ndim <= dim < t.ndim]


def require_entries(outputs: Any) -> None:
    """Refuse what is not a tuple or list with one entry per replica."""
    if not isinstance(outputs, (tuple, list)) or hasattr(outputs, "_fields"):
        raise TypeError(
            f"outputs must be the tuple that DataParallelModel returns, with one entry per "
            f"replica, got {type(outputs).__name__}"
        )
