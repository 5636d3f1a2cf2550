"""The modules of a loop as one module, and attributes that hold for a call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.copies import to_device

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)


class Modules(nn.Module):
    """The modules of a loop, the model first; called, it calls a step function with
    itself.

    Args:
        modules: with the names that texts tell.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.training = False  # only its modules have a mode
        for name, module in modules:
            # Of another module, or of ``nn.Module``, such as ``double``.
            while hasattr(self, name):
                name += "_"
            self.add_module(name, module)

    def __getitem__(self, number: int) -> Any:
        return [*self.children()][number]

    def forward(self, work: Any, **kwargs: Any) -> Any:
        """Return ``work(self, **kwargs)``."""
        return work(self, **kwargs)


@contextlib.contextmanager
def overridden(owner: Any, **values: Any) -> Iterator[None]:
    """In the body, ``owner`` has these attributes, which may be methods.

    An owner without attributes, such as a list of batches, stays as it is.
    """
    attributes = getattr(owner, "__dict__", {})
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before:
            attributes.pop(name, None)
        attributes.update(before)  # in their places, or replicas would be made again


def replaced(module: nn.Module, **methods: Callable[..., Any]) -> Any:
    """In the body, the module has these methods, such as ``forward``, and no hooks."""
    return overridden(module, **methods, **{name: {} for name in _HOOKS})


def device_of(module: nn.Module, default: Any) -> torch.device:
    """The device of a replica: that of its first parameter, or ``default``."""
    parameter = next(module.parameters(), None)
    return torch.device(default if parameter is None else parameter.device)


def values_on_device(value: Any, device: torch.device, copy: bool = False) -> Any:
    """``value`` with its tensors on ``device``, without their graphs.

    With ``copy``, in memory that a replica does not write which goes on with its next
    batch: the module may keep an output, such as in a buffer.
    """

    def move(tensor: Tensor) -> Tensor:
        return to_device(tensor.detach(), device, copy=copy)

    return nested.map_tensors(move, value)
