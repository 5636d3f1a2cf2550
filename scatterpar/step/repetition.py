"""Whether the second forward pass over a micro-batch gave what the first one gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.plan import Share
from scatterpar.step import nested
from scatterpar.step.task import noted

__all__ = ["differences", "require_unchanged"]


def differences(output: Any, piece: Any) -> list[Tensor]:
    """By how much of the tolerance an output of the second pass is not that of the first.

    Left on the device: to ask for the numbers here would make the next sub-step wait.

    Raises:
        RuntimeError: the outputs are not of the same kind.
    """
    now, before = list(nested.tensors(output)), list(nested.tensors(piece))
    if [_kind(tensor) for tensor in now] != [_kind(tensor) for tensor in before]:
        raise RuntimeError(f"the second forward pass gave outputs of another kind: {_WHY}")
    return [
        _distance(one.detach(), other.detach())
        for one, other in zip(now, before, strict=True)
        if other.numel() and other.grad is not None
    ]


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.requires_grad


def _distance(now: Tensor, before: Tensor) -> Tensor:
    """The largest difference, in units of the tolerance; NaN where only one of them is NaN.

    Kernels may round otherwise the second time; another mask is further off than any rounding.
    """
    equal = torch.isclose(now, before, rtol=0.0, atol=0.0, equal_nan=True)
    off = torch.where(equal, 0, now - before).abs().amax()
    wide = torch.promote_types(off.dtype, torch.float32)  # not float64: MPS has none
    off, size = off.to(wide), before.abs().nan_to_num(0.0, 0.0, 0.0).amax().to(wide)
    return torch.where(off == 0, 0.0, off / (size * torch.finfo(now.dtype).eps ** 0.5)).float()


def require_unchanged(changes: Sequence[Sequence[Tensor]], share: Share) -> None:
    """Refuse gradients that belong to other outputs than the loss was computed from.

    Raises:
        RuntimeError: an output of the second pass is not that of the first.
    """
    for number, found in enumerate(changes):
        if not all(change.item() <= 1 for change in found):
            with noted(share, number):
                raise RuntimeError(f"the second forward pass gave other outputs: {_WHY}")


_WHY = (
    "whole_batch=True computes every micro-batch but a replica's last one twice, and this module "
    "depends on something that is not the same the second time, such as the random numbers of "
    "Python or NumPy, or a counter outside of it; draw from torch's generators and keep state in "
    "the module, or have one sub-step per replica, which is computed once. Nothing was changed"
)
