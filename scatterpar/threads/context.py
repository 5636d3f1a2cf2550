"""What a new thread would lose of the caller's."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from scatterpar.devices import verbs
from scatterpar.torch_private import modes, private_accelerator, saved_tensors_hooks

__all__ = ["Context", "autocast_types", "uncached"]

_AUTOCAST_TYPES = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "ipu")

_Entered = contextlib.AbstractContextManager[object]


def autocast_types() -> list[str]:
    """The device types that autocast is enabled for in this thread."""
    known = (*_AUTOCAST_TYPES, private_accelerator())
    return [kind for kind in known if torch.is_autocast_enabled(kind)]


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Without autocast's cache in this thread.

    There is one for the process, and whoever leaves autocast empties it: a weight that is used
    twice would be cast once or twice, as another replica's timing falls.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


class Context:
    """Grad and inference mode, autocast, default device, saved-tensor hooks, context variables.

    And the current streams of all devices: a worker may use what the caller has computed on
    another. Captured where it is made, and entered in another thread. What is as a new thread
    has it anyway costs nothing. Modes, which see every operator of their thread, stay behind: few
    of them can work in several threads. A warning says so.
    """

    def __init__(self) -> None:
        _tell_of(modes())
        self.variables = contextvars.copy_context()
        self._streams = verbs.current_streams()
        self._makers: list[Callable[[torch.device], _Entered]] = []
        if torch.is_inference_mode_enabled():
            self._makers.append(_anywhere(torch.inference_mode))
        elif not torch.is_grad_enabled():
            self._makers.append(_anywhere(torch.no_grad))
        for kind in autocast_types():
            autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind))
            self._makers.append(_anywhere(autocast))
        default = torch.get_default_device()
        if default.type != "cpu":
            self._makers.append(lambda here: here if here.type == default.type else default)
        hooks = saved_tensors_hooks()
        if hooks is not None:
            self._makers.append(
                _anywhere(partial(torch.autograd.graph.saved_tensors_hooks, *hooks))
            )

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """The captured context in this thread, on ``device``."""
        with verbs.on(device, self._streams), uncached(), contextlib.ExitStack() as stack:
            for make in self._makers:
                stack.enter_context(make(device))
            yield


def _anywhere(make: Callable[[], _Entered]) -> Callable[[torch.device], _Entered]:
    """A maker for whichever device."""
    return lambda _: make()


def _tell_of(names: Sequence[str]) -> None:
    if names:
        warnings.warn(
            f"{', '.join(names)}: active in the caller's thread, and sees nothing of what replicas "
            f"compute in threads of their own; enter it in the module's forward, or use one "
            f"replica, which computes in the caller's thread",
            stacklevel=2,
        )
