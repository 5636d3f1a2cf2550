"""What an optimizer updates in the place of parameters that other devices own."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from scatterpar.batch import nested
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import HOST
from scatterpar.objects.snapshot import is_same
from scatterpar.replicas.replicas import parameter_like


def stand_in_for(parameter: Tensor, values: Tensor) -> Tensor:
    """``values`` as an optimizer updates them in the place of ``parameter``."""
    stand_in = parameter_like(parameter, values.data)
    stand_in.requires_grad_(parameter.requires_grad)
    # Gradients may have another dtype than their parameter.
    stand_in.grad_dtype = parameter.grad_dtype
    vars(stand_in).update(vars(parameter))  # attributes that optimizers may read
    return stand_in


def state_on_device(state: Any, device: torch.device, transfers: Transfers) -> Any:
    """A copy of an optimizer's ``state`` on ``device``.

    Host scalars (step counts) stay on the host.
    """

    def move(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 and tensor.device == HOST:
            return tensor.clone()
        return transfers.copy(tensor, device, "reduce")

    return nested.map_tensors(move, state)


@contextlib.contextmanager
def stepping_on(
    optimizer: Optimizer, stand_ins: Mapping[Tensor, Tensor]
) -> Iterator[None]:
    """In the body the optimizer has stand-ins instead of their parameters.

    If the body succeeds, the parameters get the state, options and attributes that
    the optimizer has given to their stand-ins.
    """
    groups = optimizer.param_groups
    state: Any = optimizer.state
    exchanged: list[dict[str, Any]] = []
    for group in groups:
        params = [stand_ins.get(parameter, parameter) for parameter in group["params"]]
        exchanged.append(group | {"params": params})
    try:
        optimizer.param_groups = exchanged
        optimizer.state = _with_keys(state, stand_ins)
        yield
        originals = {stand_in: parameter for parameter, stand_in in stand_ins.items()}
        state = _with_keys(optimizer.state, originals)
        for group, stepped in zip(groups, optimizer.param_groups, strict=True):
            # In place: schedulers refer to the group.
            params = group["params"]
            group.clear()
            group.update(stepped, params=params)
        for parameter, stand_in in stand_ins.items():
            if not is_same(vars(parameter), vars(stand_in)):
                vars(parameter).clear()
                vars(parameter).update(vars(stand_in))
    finally:
        optimizer.param_groups = groups
        optimizer.state = state


def _with_keys(
    state: Mapping[Any, Any], keys: Mapping[Tensor, Tensor]
) -> defaultdict[Any, Any]:
    """``state`` with each of its keys replaced by that in ``keys``, if it has one."""
    return defaultdict(
        dict, {keys.get(key, key): value for key, value in state.items()}
    )
