"""Everything that a failed step must leave alone: taken down, and
compared bit for bit.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from harness import leak_checks
from torch import Tensor, nn
from torch.optim import Optimizer

State = dict[str, tuple[Any, Any]]  # by path: the object itself, and what it held


def capture(module: nn.Module, optimizer: Optimizer | None = None) -> State:
    """What ``module`` and its surroundings are now.

    Objects are kept, so that none can be exchanged for another at the same address;
    values are copied.
    """
    _let_abandoned_threads_leave()
    state: State = {}
    for name, child in module.named_modules(remove_duplicate=False):
        for key, value in vars(child).items():
            _note(state, f"{name or 'root'}.{key}", value)
    for name, parameter in module.named_parameters():
        for what in ("grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
            _note(state, f"{name}.{what}", getattr(parameter, what))
        state[f"{name}.requires_grad"] = (None, parameter.requires_grad)
    if optimizer is not None:
        for i, own in enumerate(optimizer.state.values()):
            _note(state, f"optimizer.{i}", own)
        for i, group in enumerate(optimizer.param_groups):
            _note(
                state,
                f"group.{i}",
                {k: v for k, v in group.items() if k != "params"},
                False,
            )
    _note(state, "torch's generator", torch.default_generator.get_state(), False)
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type
        for i in range(torch.accelerator.device_count()):
            own = torch.get_device_module(kind).get_rng_state(f"{kind}:{i}")
            _note(state, f"generator of {kind}:{i}", own, False)
    state["Python's generator"] = (None, random.getstate())
    for name, value in leak_checks.globals_of_torch().items():
        state[f"torch: {name}"] = (None, value)
    return state


@contextlib.contextmanager
def nothing_changes(
    *modules: nn.Module, optimizer: Optimizer | None = None
) -> Iterator[None]:
    """The body leaves the modules and their surroundings as they were, bit for bit."""
    before = [capture(module, optimizer) for module in modules]
    yield
    for module, state in zip(modules, before, strict=True):
        assert differences(state, capture(module, optimizer)) == []


def _let_abandoned_threads_leave() -> None:
    """After two interrupts in one step, its threads keep torch's stand-in until they
    end.
    """
    deadline = time.monotonic() + 60
    while torch.random.default_generator is not torch.default_generator:
        if time.monotonic() > deadline:
            return  # the difference will be reported
        time.sleep(0.002)


def differences(before: State, after: State) -> list[str]:
    """The paths that are not what they were: another object, another value, new or
    gone.
    """
    changed = list(before.keys() ^ after.keys())
    for path in before.keys() & after.keys():
        (thing, value), (thing_now, value_now) = before[path], after[path]
        if thing is not thing_now:
            changed.append(f"{path} (another object)")
        elif not _same(value, value_now):
            changed.append(path)
    return sorted(changed)


def values_differ(one: nn.Module, other: nn.Module) -> list[str]:
    """Names of parameters, gradients and buffers whose bits differ
    between two modules.
    """
    values, others = _values(one), _values(other)
    return sorted(
        name for name in values if not _same(values[name], others.get(name, "missing"))
    )


def _values(module: nn.Module) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        values[name] = _frozen(parameter)
        values[f"{name}.grad"] = (
            None if parameter.grad is None else _frozen(parameter.grad)
        )
    return values | {name: _frozen(buffer) for name, buffer in module.named_buffers()}


def _note(state: State, path: str, value: Any, identity: bool = True) -> None:
    thing = value if identity else None
    if isinstance(value, Tensor):
        state[path] = (thing, _frozen(value))
    elif isinstance(value, (dict, list, tuple, set)):
        items: Iterable[Any] = (
            value.items() if isinstance(value, dict) else enumerate(value)
        )
        state[path] = (thing, len(value))
        for key, item in items:
            _note(state, f"{path}[{key!r}]", item, identity)
    else:
        state[path] = (thing, None if identity else value)


def _frozen(tensor: Tensor) -> tuple[Any, ...]:
    detached = tensor.detach()
    if detached.is_sparse:
        detached = detached.coalesce()
        return (_frozen(detached.indices()), _frozen(detached.values()))
    return (detached.dtype, detached.shape, detached.stride(), _bits(detached))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
