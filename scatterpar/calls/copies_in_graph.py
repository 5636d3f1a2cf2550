"""Copies between memories that autograd records: gradients are copied back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.streams import current_streams, use_device
from scatterpar.devices.transfers import Transfers
from scatterpar.torch_private.compiler import never_compiled


class AutogradTransfers(Transfers):
    """Transfers that autograd records: gradients are copied back to the source."""

    def copy(
        self,
        tensor: Tensor,
        device: torch.device,
        phase: str,
        origin: torch.device | None = None,
    ) -> Tensor:
        """Copy ``tensor`` to ``device``, from ``origin`` if that is virtual.

        It is in autograd's graph if ``tensor`` requires grad.
        """
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return super().copy(tensor, device, phase)
        origin = origin or tensor.device
        copied: Tensor = _CopyInGraph.apply(  # type: ignore[no-untyped-call]
            tensor, origin, device, phase, super().copy
        )
        return copied


class _CopyInGraph(torch.autograd.Function):
    """A copy from one memory to another. The backward pass copies the gradient back."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        origin: torch.device,
        device: torch.device,
        phase: str,
        copy: Callable[..., Tensor],
    ) -> Tensor:
        # The origin is passed, because the virtual devices are one device of torch's.
        ctx.origin = origin
        ctx.device = device
        ctx.streams = current_streams()
        return copy(tensor, device, phase)

    @staticmethod
    @never_compiled  # a compiled function may call ``backward()``
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        with use_device(ctx.device, ctx.streams):
            # In a graph of its own, for a second derivative.
            copied = AutogradTransfers().copy(
                gradient, ctx.origin, "compute", ctx.device
            )
        return copied, None, None, None, None
