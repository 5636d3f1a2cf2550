"""What a new thread would lose of the caller's."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from scatterpar import devices

__all__ = ["AUTOCAST_TYPES", "Context"]

AUTOCAST_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu")


@dataclass(frozen=True)
class Context:
    """Grad and inference mode, autocast, default device, saved-tensor hooks, context variables.

    Captured where it is made, and entered in another thread.
    """

    grad: bool = field(default_factory=torch.is_grad_enabled)
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    autocast: tuple[tuple[str, torch.dtype], ...] = field(
        default_factory=lambda: tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in AUTOCAST_TYPES
            if torch.is_autocast_enabled(kind)
        )
    )
    autocast_cache: bool = field(default_factory=torch.is_autocast_cache_enabled)
    default_device: torch.device = field(default_factory=torch.get_default_device)
    saved_tensor_hooks: Any = field(
        default_factory=lambda: torch._C._autograd._top_saved_tensors_default_hooks(True)
    )
    variables: contextvars.Context = field(default_factory=contextvars.copy_context)

    @contextlib.contextmanager
    def entered(self, device: torch.device, stream: torch.Stream | None) -> Iterator[None]:
        """The captured context in this thread, on ``device`` and ``stream``."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(devices.on(device, stream))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, dtype in self.autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, cache_enabled=self.autocast_cache)
                )
            if self.default_device.type != "cpu":
                here = self.default_device.type == device.type
                stack.enter_context(device if here else self.default_device)
            if self.saved_tensor_hooks is not None:
                hooks = torch.autograd.graph.saved_tensors_hooks(*self.saved_tensor_hooks)
                stack.enter_context(hooks)
            yield
