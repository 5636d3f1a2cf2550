"""A broadcast that autograd sees: replicas for one forward pass, gradients to the master's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from scatterpar import devices
from scatterpar.devices import Ledger
from scatterpar.mirror import Mirror, Survey
from scatterpar.reduce import sum_in_order
from scatterpar.replicas import Bundle, check_placement

__all__ = ["replicate"]


def replicate(module: nn.Module, device_ids: Sequence[torch.device]) -> list[Mirror]:
    """Copies of ``module`` whose parameters are differentiable copies of its own.

    What ``torch.nn.parallel.replicate`` does, on any device: parameters cross to each other
    device once, in one message per dtype, and are shared by the replicas there; buffers are
    each replica's own. A backward pass through the copies adds up their gradients, in
    replica order, on the master.

    Args:
        module: a module on ``device_ids[0]``.
        device_ids: one entry per replica.

    Returns:
        A mirror per replica: ``mirror.of(module)`` is the copy.
    """
    check_placement((module,), device_ids[0])
    survey = Survey((module,))
    here = devices.physical(device_ids[0])
    survey.tensors = {i: t for i, t in survey.tensors.items() if t.device == here}
    originals = list(survey.tensors.values())
    trained = [i for i, tensor in enumerate(originals) if tensor.requires_grad]
    fixed = [i for i, tensor in enumerate(originals) if not tensor.requires_grad]
    copies: list[list[Tensor]] = [list(originals) for _ in device_ids]
    if trained:
        flat = _Broadcast.apply(  # type: ignore[no-untyped-call]
            tuple(device_ids), *(originals[i] for i in trained)
        )
        for k, copy in enumerate(copies):
            for i, tensor in zip(trained, flat[k * len(trained) :], strict=False):
                copy[i] = tensor
    with torch.no_grad():
        for copy, arrived in zip(
            copies, _broadcast([originals[i] for i in fixed], device_ids), strict=True
        ):
            for i, tensor in zip(fixed, arrived, strict=True):
                is_parameter = isinstance(originals[i], nn.Parameter)
                copy[i] = tensor.detach() if is_parameter else tensor.clone()
    return [Mirror(survey, dict(zip(survey.tensors, copy, strict=True))) for copy in copies]


class _Broadcast(torch.autograd.Function):
    """Each replica's copies of the master's tensors; replicas that share a memory share them."""

    @staticmethod
    def forward(
        ctx: Any, device_ids: tuple[torch.device, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.device_ids = device_ids
        ctx.set_materialize_grads(False)
        # A view for every replica, so that each has a gradient of its own.
        arrived = _broadcast(tensors, device_ids)
        return tuple(tensor.view_as(tensor) for copies in arrived for tensor in copies)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        device_ids: tuple[torch.device, ...] = ctx.device_ids  # type: ignore[attr-defined]
        size = len(gradients) // len(device_ids)
        by_replica = [
            {
                i: gradient
                for i, gradient in enumerate(gradients[k * size : (k + 1) * size])
                if gradient is not None
            }
            for k in range(len(device_ids))
        ]
        total = sum_in_order(by_replica, device_ids, Ledger(), in_place=False)
        return (None, *(total.get(i) for i in range(size)))


def _broadcast(
    tensors: Sequence[Tensor], device_ids: Sequence[torch.device]
) -> list[Sequence[Tensor]]:
    """The tensors as they are on each replica's device: the master's own, or one copy a device."""
    ledger = Ledger()
    here: dict[torch.device, Sequence[Tensor]] = {device_ids[0]: tensors}
    if tensors and any(device != device_ids[0] for device in device_ids):
        departure = Bundle(tensors, device_ids[0])
        torch._foreach_copy_(departure.views, list(tensors))
        for device in dict.fromkeys(device_ids[1:]):
            if device not in here:
                bundle = Bundle(tensors, device)
                for target, source in zip(bundle.flats, departure.flats, strict=True):
                    ledger.copy_into(target, source, "replicate")
                here[device] = bundle.views
    return [here.get(device, tensors) for device in device_ids]
