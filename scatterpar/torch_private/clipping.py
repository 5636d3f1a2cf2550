"""Functions that clip gradients, replaced in a training step that is only looked at."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from scatterpar.torch_private.entry_points import find

# Gets the parameters whose gradients are limited.
Clip = Callable[[list[Tensor]], None]
_clips: list[Clip] = []  # the last one is called in the place of torch's functions


@contextlib.contextmanager
def clipping_replaced(clip: Clip) -> Iterator[None]:
    """In the body, torch's functions that clip gradients call ``clip`` in their place.

    Their code is exchanged, not a name in a module: others may have imported them by
    name.
    """
    name = "torch.nn.utils.clip_grad"
    exchanged = (
        (inspect.unwrap(find(name, "_clip_grads_with_norm_")), _by_norm),
        (inspect.unwrap(find(name, "clip_grad_value_")), _by_value),
    )
    codes = [function.__code__ for function, _ in exchanged]
    _clips.append(clip)
    try:
        for function, replacement in exchanged:
            function.__code__ = replacement.__code__
        yield
    finally:
        for (function, _), code in zip(exchanged, codes, strict=True):
            function.__code__ = code
        _clips.pop()


def _by_norm(
    parameters: Any, max_norm: Any, total_norm: Any, foreach: Any = None
) -> None:
    """Runs with the globals of ``torch.nn.utils.clip_grad``."""
    import sys

    sys.modules["scatterpar.torch_private.clipping"].clip_to(parameters, max_norm)


def _by_value(parameters: Any, clip_value: Any, foreach: Any = None) -> None:
    """Runs with the globals of ``torch.nn.utils.clip_grad``."""
    import sys

    sys.modules["scatterpar.torch_private.clipping"].clip_to(parameters, clip_value)


def clip_to(parameters: Any, limit: Any) -> None:
    """Call the function that ``clipping_replaced`` got."""
    if not math.isfinite(float(limit)):
        return  # the caller only asks for the norm
    is_single = isinstance(parameters, Tensor)
    _clips[-1]([parameters] if is_single else list(parameters))
