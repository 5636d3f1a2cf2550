"""The schedule of ``nn.DataParallel`` on CPU memories: everything again in each call.

``torch.nn.parallel`` runs on accelerators alone. These are its steps in its order::

    forward     scatter the inputs
                replicate the module       torch's own, with a broadcast for the CPU
                apply                      a new thread per replica
                gather the outputs to the master
    backward    scatter the outputs' gradients
                reduce the parameters' gradients to the master

All copies from one memory to another go through ``Transfers``, which counts them, in
pieces of 10 MB, as torch coalesces them.
"""

import importlib
import threading
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from scatterpar.devices.transfers import Transfers

# ``torch.nn.parallel`` has a function with the module's name.
replicate_module = importlib.import_module("torch.nn.parallel.replicate")

_COALESCED_BYTES = 10 * 1024 * 1024
# Source and target. Not the tensors' own devices: torch knows ``cpu:1`` as ``cpu``.
Route = tuple[torch.device, torch.device]


class PerCall(nn.Module):
    """Like ``nn.DataParallel(module, device_ids)``, on CPU memories."""

    def __init__(self, module: nn.Module, device_ids: Sequence[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.device_ids = tuple(device_ids)
        self.transfers = Transfers()

    def forward(self, inputs: Tensor) -> Any:
        """Scatter, replicate, apply, gather."""
        shares = []
        chunks = inputs.chunk(len(self.device_ids))
        for chunk, device in zip(chunks, self.device_ids, strict=True):
            route = inputs.device, device
            shares.append(_copied(chunk, route, self.transfers, "scatter"))
        with mock.patch.object(
            replicate_module, "_broadcast_coalesced_reshape", self._broadcast
        ):
            indices = range(len(self.device_ids))
            replicas = replicate_module.replicate(self.module, indices)
        outputs = _parallel_apply(replicas, shares)
        return Gather.apply(self.transfers, self.device_ids, *outputs)

    def _broadcast(
        self, tensors: Sequence[Tensor], devices: Any, detach: bool = False
    ) -> list[list[Tensor]]:
        """Torch's signature. Returns the copies of all tensors, by device."""
        if not tensors:
            return []
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            copies = Broadcast.apply(self.transfers, self.device_ids, *tensors)
        by_device = []
        for start in range(0, len(copies), len(tensors)):
            by_device.append(list(copies[start : start + len(tensors)]))
        return by_device


class Broadcast(torch.autograd.Function):
    """The master's tensors on every device; backward sums the gradients there."""

    @staticmethod
    def forward(
        ctx: Any,
        transfers: Transfers,
        devices: Sequence[torch.device],
        *tensors: Tensor,
    ) -> Any:
        ctx.transfers = transfers
        ctx.devices = devices
        ctx.count = len(tensors)
        copies = []
        for device in devices:
            copies += _coalesced(tensors, (devices[0], device), transfers, "replicate")
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = None
        for index, device in enumerate(ctx.devices):
            of_replica = gradients[index * ctx.count : (index + 1) * ctx.count]
            route = device, ctx.devices[0]
            arrived = _coalesced(of_replica, route, ctx.transfers, "reduce")
            total = arrived if total is None else torch._foreach_add(total, arrived)
        return None, None, *total


class Gather(torch.autograd.Function):
    """The replicas' outputs joined on the master; backward scatters their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        transfers: Transfers,
        devices: Sequence[torch.device],
        *outputs: Tensor,
    ) -> Any:
        ctx.transfers = transfers
        ctx.devices = devices
        ctx.rows = [len(output) for output in outputs]
        gathered = []
        for output, device in zip(outputs, devices, strict=True):
            route = device, devices[0]
            gathered.append(_copied(output, route, transfers, "compute"))
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares = []
        for share, device in zip(gradient.split(ctx.rows), ctx.devices, strict=True):
            route = ctx.devices[0], device
            shares.append(_copied(share, route, ctx.transfers, "compute"))
        return None, None, *shares


def _parallel_apply(
    modules: Sequence[nn.Module], inputs: Sequence[Tensor]
) -> list[Any]:
    """A new thread per module, as torch starts them, with its part of the cores."""
    outputs: list[Any] = [None] * len(modules)
    num_threads = torch.get_num_threads()

    def work(index: int) -> None:
        # This call initialises the thread, which would undo the next line.
        torch.get_num_threads()
        torch.set_num_threads(max(1, num_threads // len(modules)))
        outputs[index] = modules[index](inputs[index])

    threads = []
    for index in range(len(modules)):
        threads.append(threading.Thread(target=work, args=(index,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(num_threads)
    return outputs


def _copied(tensor: Tensor, route: Route, transfers: Transfers, phase: str) -> Tensor:
    """A copy of ``tensor`` at the end of the route; itself if both ends are the same."""
    source, target = route
    return tensor if source == target else transfers.copy(tensor, target, phase)


def _coalesced(
    tensors: Sequence[Tensor], route: Route, transfers: Transfers, phase: str
) -> Sequence[Tensor]:
    """As ``_copied``, for several tensors: copies in pieces of 10 MB."""
    source, target = route
    if source == target:
        return tensors
    copies = {}
    # A chunk has tensors of one dtype, so chunks are not in the order of ``tensors``.
    for chunk in _take_tensors(tensors, _COALESCED_BYTES):
        flat = transfers.copy(_flatten_dense_tensors(chunk), target, phase)
        arrived = _unflatten_dense_tensors(flat, chunk)
        for tensor, copy in zip(chunk, arrived, strict=True):
            copies[id(tensor)] = copy
    return [copies[id(tensor)] for tensor in tensors]
