"""Copies between memories. Those of a step are counted, in ``transfers.py``.

No other package copies between memories.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.streams import has_streams, record_event, use_device
from scatterpar.devices.virtual_devices import HOST, physical

# Pairs (source, target) whose copies go through host memory: see ``check_links``.
VIA_HOST: set[tuple[torch.device, torch.device]] = set()


def to_device(
    tensor: Tensor,
    device: torch.device,
    *,
    copy: bool = False,
    non_blocking: bool = False,
) -> Tensor:
    """``tensor`` in the memory of ``device``: itself if torch sees it there, unless
    ``copy``.

    A copy has the same layout and memory format, and autograd records it.
    """
    if VIA_HOST:
        tensor = _via_host(tensor, device)
    return tensor.to(physical(device), copy=copy, non_blocking=non_blocking)


def write(target: Tensor, source: Tensor, *, non_blocking: bool = False) -> None:
    """Copy ``source`` to ``target``.

    The target has the same size. It may be in any memory and of any dtype.
    """
    if VIA_HOST:
        source = _via_host(source, target.device)
    target.copy_(source, non_blocking=non_blocking)


def _via_host(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor``, or its copy on the host if direct copies to ``device`` arrive
    corrupted.
    """
    return tensor.cpu() if (tensor.device, device) in VIA_HOST else tensor


def to_numbers(tensor: Tensor) -> Any:
    """The elements as Python numbers, in nested lists unless ``tensor`` is 0-dim.

    Raises the errors of kernels that ran before on the device's current stream.
    """
    return PendingNumbers(tensor).read()


class PendingNumbers:
    """The elements of a tensor that its device may still compute, copied to the host.

    ::

        pending = PendingNumbers(losses)   # the copy is launched
        …                                  # more work for the device
        pending.read()                     # waits for the copy, and not for that work
    """

    def __init__(self, tensor: Tensor) -> None:
        tensor = tensor.detach()
        self._device = tensor.device
        self._arrived: torch.Event | None = None
        if not has_streams(tensor.device):
            self._numbers = to_device(tensor, HOST)
            return
        # A copy to pageable memory would wait awake, and keep a core busy that launches
        # may need.
        self._numbers = torch.empty_like(tensor, device=HOST, pin_memory=True)
        write(self._numbers, tensor, non_blocking=True)
        self._arrived = record_event(tensor.device)

    def read(self) -> Any:
        """Wait for the elements. Returns and raises what ``to_numbers`` does."""
        if self._arrived is not None:
            self._arrived.synchronize()
            # Otherwise torch, when it frees the event, enters the caller's own device.
            with use_device(self._device, ()):
                self._arrived = None
        return self._numbers.tolist()
