"""What an engine can be made of, and what is refused, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scatterpar.replicas.wrapper import Wrapper
from scatterpar.report import warn

__all__ = [
    "check_dim",
    "check_function",
    "check_module",
    "check_noise",
    "check_options",
    "check_synchronised",
]


def check_options(
    module: Any,
    accum: Any,
    micro_batch_size: Any,
    dim: Any,
    buffers: Any,
    accumulate_dtype: Any,
) -> None:
    """Refuse what an engine cannot be made of.

    Raises:
        TypeError: an argument of the wrong type, or a module that cannot be replicated.
        ValueError: an argument out of range.
    """
    check_module(module)
    for name, value in (("accum", accum), ("micro_batch_size", micro_batch_size)):
        if name == "accum" and value == "auto":
            continue
        if name == "micro_batch_size" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            also = ' or "auto"' if name == "accum" else ""
            raise TypeError(f"{name} must be an int{also}, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if micro_batch_size is not None and accum != 1:
        raise ValueError(
            f"accum={accum} and micro_batch_size={micro_batch_size} both say how a share is "
            f"cut; pass one of them"
        )
    check_dim(dim)
    if buffers not in ("master", "mean", "batch"):
        raise ValueError(f'buffers must be "master", "mean" or "batch", got {buffers!r}')
    _check_accumulate_dtype(accumulate_dtype)


def _check_accumulate_dtype(dtype: Any) -> None:
    """Refuse a dtype that gradients cannot add up in.

    Raises:
        TypeError: it is none.
        ValueError: it is not a real floating-point dtype.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"accumulate_dtype must be a torch.dtype, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(
            f"accumulate_dtype must be a floating-point dtype such as torch.float32, got {dtype}"
        )


def check_noise(device_ids: Sequence[torch.device], ranks: int) -> None:
    """Refuse to compare the gradients of replicas where there is one.

    Raises:
        ValueError: there is one.
    """
    if len(device_ids) * ranks < 2:
        only = str(device_ids[0])
        raise ValueError(
            "measure_noise=True compares the gradients of replicas, and there is one; name its "
            f"device twice: device_ids={[only] * 2}"
        )


def check_module(module: Any) -> None:
    """Refuse what cannot be replicated.

    Raises:
        TypeError: no ``nn.Module``, or one that something else has wrapped to replicate it.
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        name = module.__name__
        raise TypeError(f"module is the class {name}; pass an instance, {name}(...)")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, nn.DataParallel):
        raise TypeError(
            "module is wrapped in nn.DataParallel, whose work this does; pass the model itself, "
            "which is its .module"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "module is wrapped in DistributedDataParallel, which reduces gradients in every "
            "backward pass; pass the model itself, which is its .module, and process_group= for "
            "several processes"
        )
    if isinstance(module, Wrapper):
        raise TypeError(
            f"module is wrapped in {type(module).__name__}, which makes replicas itself; pass the "
            f"model itself, which is its .module"
        )


def check_synchronised(module: nn.Module) -> None:
    """Say what becomes of ``nn.SyncBatchNorm``.

    Raises:
        ValueError: torch would have it exchange its statistics between processes.
    """
    kind = nn.SyncBatchNorm
    found = {name: child for name, child in module.named_modules() if isinstance(child, kind)}
    is_distributed = dist.is_available() and dist.is_initialized()
    for name, child in found.items():
        if is_distributed and dist.get_world_size(child.process_group) > 1:
            raise ValueError(
                f"{name!r} is an nn.SyncBatchNorm, which exchanges its statistics between "
                f"processes in every forward pass: the replicas of one process would do so in "
                f"no order, and wait for ever; {_PLAIN}"
            )
    if found:
        warn(
            f"{next(iter(found))!r} is an nn.SyncBatchNorm: replicas do not exchange its "
            f"statistics, and it normalises each micro-batch by itself, as nn.BatchNorm2d; {_PLAIN}"
        )


_PLAIN = (
    "use nn.BatchNorm2d, whose state dict has the same keys, with larger micro-batches, and "
    'buffers="batch" for running statistics of the whole batch'
)


def check_function(name: str, value: Any) -> None:
    """Refuse what is no function, for ``criterion`` or ``count``.

    Raises:
        TypeError: it cannot be called, or only makes what can.
    """
    if isinstance(value, type):
        raise TypeError(
            f"{name} is the class {value.__name__}; pass an instance, {value.__name__}()"
        )
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")


def check_dim(dim: Any) -> None:
    """Refuse a dimension that is no int.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
