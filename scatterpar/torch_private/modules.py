"""Parametrized modules, and optimizers within others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from scatterpar.torch_private.settings import ForAllThreads

# --- parametrizations ---


@ForAllThreads
@contextlib.contextmanager
def parametrized_in_threads() -> Iterator[None]:
    """In the body, modules may be parametrized in forward passes of several threads.

    PEFT does so for parameters of fused experts. Two things would be wrong:

    - ``parametrize.cached()`` clears its cache when all threads have left it. While
      others are inside, a replica's weights would stay, with the last sub-step's graph.
    - a parameter is set to the memory that it has. That counts as a write of it, and a
      forward pass must not write parameters.
    """
    names = vars(parametrize)
    cached = names["cached"]
    set_to = names["_maybe_set"]

    @contextlib.contextmanager
    def cached_and_cleared() -> Iterator[None]:
        with cached():
            try:
                yield
            finally:
                names["_cache"].clear()

    def set_if_elsewhere(tensor: Tensor, source: Tensor) -> None:
        if not tensor.is_set_to(source):
            set_to(tensor, source)

    names |= {"cached": cached_and_cleared, "_maybe_set": set_if_elsewhere}
    try:
        yield
    finally:
        names |= {"cached": cached, "_maybe_set": set_to}


@ForAllThreads
@contextlib.contextmanager
def parametrizations_uncached() -> Iterator[None]:
    """In the body, a ``parametrize.cached()`` around it has no effect.

    Weights in its cache are parts of the caller's graph, whose backward pass comes
    later.
    """
    names = vars(parametrize)
    entered = names["_cache_enabled"]
    kept = names["_cache"]
    names |= {"_cache_enabled": 0, "_cache": {}}
    try:
        yield
    finally:
        # Other threads may have entered or left meanwhile.
        names["_cache_enabled"] += entered
        names["_cache"] = kept if names["_cache_enabled"] else {}


# --- an optimizer within another: the outer one runs the hooks, once ---


def step_without_hooks(optimizer: Optimizer, *args: Any) -> Any:
    """Run ``optimizer.step(*args)`` without hooks and the profiler's annotation."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch has replaced it by ``profile_hook_step``
        step = step.__wrapped__
    return step(optimizer, *args)


def saving_hooks(optimizer: Optimizer) -> list[list[Callable[..., Any]]]:
    """The hooks that run before and after ``optimizer.state_dict``."""
    hooks: Any = optimizer
    before = list(hooks._optimizer_state_dict_pre_hooks.values())
    after = list(hooks._optimizer_state_dict_post_hooks.values())
    return [before, after]


def loading_hooks(optimizer: Optimizer) -> list[list[Callable[..., Any]]]:
    """The hooks that run before and after ``optimizer.load_state_dict``."""
    hooks: Any = optimizer
    before = list(hooks._optimizer_load_state_dict_pre_hooks.values())
    after = list(hooks._optimizer_load_state_dict_post_hooks.values())
    return [before, after]
