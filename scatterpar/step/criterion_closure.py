"""The objects that a criterion refers to beside its arguments.

They are bound, closed over, or global.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import is_unexpanded
from scatterpar.errors import add_note
from scatterpar.objects.reach import values_to_search
from scatterpar.objects.references import module_of, named_values

Referent = Tensor | nn.Module | torch.Generator


def closure_contents(function: Any) -> list[Referent]:
    """The tensors, modules and generators that a criterion refers to; nearest first.

    Its own module is left out.
    """
    own_module = module_of(function)
    if function is own_module:  # nothing inside of a module is searched
        return []
    referents: list[Referent] = []
    for value in values_to_search(function):
        if isinstance(value, Referent) and value is not own_module:
            referents.append(value)
    return referents


def trained_leaves(referents: Sequence[Referent]) -> list[Tensor]:
    """The leaves among these tensors, and in these modules, that require grad."""
    leaves: dict[int, Tensor] = {}
    for value in referents:
        tensors: Iterable[Any] = [value]
        if isinstance(value, nn.Module):
            tensors = value.parameters()
        for tensor in tensors:
            # A tensor with a graph passes its gradient on to leaves of its own.
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.is_leaf:
                leaves[id(tensor)] = tensor
    return list(leaves.values())


def training_buffers(referents: Sequence[Referent]) -> list[Tensor]:
    """The buffers that a call of these modules may write.

    Those are the buffers of parts in training mode.
    """
    buffers: dict[int, Tensor] = {}
    for value in referents:
        if not isinstance(value, nn.Module):
            continue
        for part in value.modules():
            # In evaluation mode a forward pass writes no statistics.
            if part.training:
                for buffer in part.buffers(recurse=False):
                    if _is_writable(buffer):
                        buffers[id(buffer)] = buffer
    return list(buffers.values())


def _is_writable(buffer: Tensor) -> bool:
    # What nothing can write in place needs no saved value.
    is_dense = buffer.layout == torch.strided and is_unexpanded(buffer)
    return is_dense and not buffer.is_inference()


def note_wrong_devices(
    error: BaseException, function: Any, device: torch.device
) -> None:
    """Add a note to ``error`` per tensor that ``function`` uses on another device."""
    for name, value in named_values(function).items():
        tensor = value
        if isinstance(value, nn.Module):
            # One parameter stands for the network: all are on one device, as a rule.
            tensor = next(value.parameters(), None)
        if isinstance(tensor, Tensor) and tensor.device != device:
            add_note(
                error,
                f"the criterion uses {name!r} on {tensor.device}, but this replica "
                f"computes on {device}; bind it with functools.partial(criterion, "
                f"{name}={name}), or make the criterion an nn.Module that has it as a "
                f"buffer",
            )


def not_replicated(
    leaf: Tensor, criterion: Any, module: nn.Module | None = None
) -> ValueError:
    """The error for a gradient of a leaf that no replica has.

    With ``module``, the leaf may be a parameter of it that user code reached by an
    object which replicas share.
    """
    name = _name_in_criterion(leaf, criterion)
    if not name and module is not None:
        for path, parameter in module.named_parameters():
            if parameter is leaf:
                return _reached_by_an_object(path)
    name = name or f"a parameter of shape {tuple(leaf.shape)}"
    return ValueError(
        f"a gradient arrives at {name}, which is not copied to the replicas; to train "
        "this parameter, give the criterion an argument net for the network that has "
        "the parameter, and bind it: functools.partial(criterion, net=net). Or make "
        "the criterion an nn.Module, with this network as a child. If you do not want "
        "to train it, call net.requires_grad_(False). If the criterion adds a penalty "
        "on parameters, such as weight decay, add the penalty outside of the "
        "criterion: "
        "(engine.loss(…) + penalty(model)).backward(). Nothing was changed"
    )


def _reached_by_an_object(path: str) -> ValueError:
    return ValueError(
        f"a gradient arrives at your module's own {path!r} in place of a replica's "
        f"copy: forward uses the parameter through a global variable, or through an "
        f"object that is no module, and all replicas share this object; use the "
        f"parameter through attributes of the module, or through lists and dicts in "
        f"these attributes: each replica has copies. Nothing was changed"
    )


def _name_in_criterion(leaf: Tensor, criterion: Any) -> str:
    """The name of a leaf as the criterion names it; empty if it does not."""
    name = ""
    for holder, value in named_values(criterion).items():
        if value is leaf:
            name = holder
        if isinstance(value, nn.Module):
            for inner, parameter in value.named_parameters():
                if parameter is leaf:
                    name = f"{holder}.{inner}"
    return name
