"""The schedule of ``nn.DataParallel`` on CPU memories: everything anew in each call.

``torch.nn.parallel`` runs on accelerators alone. These are its steps in its order:
scatter the inputs, replicate the module (torch's own ``replicate``, with a broadcast
that works on the CPU), one new thread per replica, gather the outputs to the master;
backward scatters the outputs' gradients, and reduces those of the parameters to the
master. What crosses from one memory to another goes through a transfers, in pieces of
10 MB, as torch coalesces them.
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

_replicate = importlib.import_module("torch.nn.parallel.replicate")

_COALESCED_BYTES = 10 * 1024 * 1024


class PerCall(nn.Module):
    """Like ``nn.DataParallel(module, device_ids)``, on CPU memories that ``device_ids``
    names.
    """

    def __init__(self, module: nn.Module, device_ids: Sequence[torch.device]) -> None:
        super().__init__()
        self.module = module
        self.device_ids = tuple(device_ids)
        self.transfers = Transfers()

    def forward(self, inputs: Tensor) -> Any:
        """Scatter, replicate, apply, gather."""
        shares = [
            share
            if share.device == device
            else self.transfers.copy(share, device, "scatter")
            for share, device in zip(
                inputs.chunk(len(self.device_ids)), self.device_ids, strict=True
            )
        ]
        with mock.patch.object(
            _replicate, "_broadcast_coalesced_reshape", self._broadcast
        ):
            replicas = _replicate.replicate(self.module, range(len(self.device_ids)))
        outputs = parallel_apply(replicas, shares)
        return Gather.apply(self.transfers, self.device_ids, *outputs)

    def _broadcast(
        self, tensors: Sequence[Tensor], devices: Any, detach: bool = False
    ) -> list[list[Tensor]]:
        if not tensors:
            return []
        with torch.set_grad_enabled(torch.is_grad_enabled() and not detach):
            copies = Broadcast.apply(self.transfers, self.device_ids, *tensors)
        return [
            list(copies[i : i + len(tensors)])
            for i in range(0, len(copies), len(tensors))
        ]


class Broadcast(torch.autograd.Function):
    """The master's tensors on every device; backward sums the gradients
    on the master.
    """

    @staticmethod
    def forward(
        ctx: Any,
        transfers: Transfers,
        devices: Sequence[torch.device],
        *tensors: Tensor,
    ) -> Any:
        ctx.transfers, ctx.devices, ctx.count = transfers, devices, len(tensors)
        copies = []
        for device in devices:
            here = (
                tensors
                if device == devices[0]
                else _sent(tensors, device, transfers, "replicate")
            )
            copies += [tensor.detach() for tensor in here]
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = None
        for i, device in enumerate(ctx.devices):
            own = gradients[i * ctx.count : (i + 1) * ctx.count]
            if device != ctx.devices[0]:
                own = _sent(own, ctx.devices[0], ctx.transfers, "reduce")
            total = own if total is None else torch._foreach_add(total, own)
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
        ctx.transfers, ctx.devices, ctx.rows = (
            transfers,
            devices,
            [len(output) for output in outputs],
        )
        return torch.cat(
            [
                output
                if device == devices[0]
                else transfers.copy(output, devices[0], "compute")
                for output, device in zip(outputs, devices, strict=True)
            ]
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        shares = [
            share
            if device == ctx.devices[0]
            else ctx.transfers.copy(share, device, "compute")
            for share, device in zip(gradient.split(ctx.rows), ctx.devices, strict=True)
        ]
        return None, None, *shares


def parallel_apply(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Any]:
    """A new thread per module, as torch starts them, each with its part
    of the cores.
    """
    outputs: list[Any] = [None] * len(modules)
    before = torch.get_num_threads()

    def work(i: int) -> None:
        # initialises the thread, which would undo the next line
        torch.get_num_threads()
        torch.set_num_threads(max(1, before // len(modules)))
        outputs[i] = modules[i](inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(modules))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.set_num_threads(before)
    return outputs


def _sent(
    tensors: Sequence[Tensor], device: torch.device, transfers: Transfers, phase: str
) -> list[Tensor]:
    """Copies of ``tensors`` on ``device``, coalesced."""
    copies = {}
    for chunk in _take_tensors(tensors, _COALESCED_BYTES):
        flat = transfers.copy(_flatten_dense_tensors(chunk), device, phase)
        arrived = _unflatten_dense_tensors(flat, chunk)
        copies.update(
            {id(tensor): copy for tensor, copy in zip(chunk, arrived, strict=True)}
        )
    return [copies[id(tensor)] for tensor in tensors]
