"""Refuse modules that replicas cannot copy, or that are in another memory.

What is refused or told of a module is one list, which the engine and the pair ask::

    rule                                        asked by
    TorchScript, sparse and other tensors,      ``check_placement``, before a call
    other devices, ``meta``, lazy
    ``forward`` writes a parameter              ``ParameterGuard``, around a call
    ``forward`` makes a parameter               ``refuse_created``, after a call
    ``backward()`` that reaches a parameter     ``step/inner_backward.py``, after it
    an ``nn.SyncBatchNorm`` that cannot wait    ``refuse_to_wait``
    what ``forward`` sets in attributes         ``verify/moved_state.py``
    a transform of ``torch.func``               ``Workers.exclusive``

``tests/exact/test_engine_and_pair.py`` has a row per program, and both answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices.bits import pieces_of
from scatterpar.devices.virtual_devices import physical
from scatterpar.objects.quantised import is_composite, is_quantised, only_frozen

SCRIPT = (
    "a TorchScript module, whose tensors live in C++; pass the nn.Module that you gave "
    "to torch.jit. TorchScript modules are allowed in a criterion that is a function"
)


def refuse_uncopied(name: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` if a tensor that a module holds is not one plain array.

    ``name`` begins the error: which tensor it is. The memory of replicas is laid out
    by strides, which the others do not have, or not on the device ``meta``.
    """
    kind = remedy = ""
    if len(pieces_of(tensor)) > 1:
        kind = "sparse"
        remedy = (
            "register the indices and values of a sparse tensor as buffers, or pass "
            "this tensor with the batch, as scatterpar.Replicated(tensor)"
        )
    elif tensor.is_quantized:
        kind = "quantised"
        remedy = (
            "register the .int_repr(), scale and zero point of a quantised tensor as "
            "buffers"
        )
    elif tensor.is_nested:
        kind = "nested"
        remedy = "register the .values() and .offsets() of a nested tensor as buffers"
    elif tensor.is_mkldnn:
        kind = "oneDNN"
        remedy = "register the .to_dense() of a oneDNN tensor as a buffer"
    if kind:
        raise TypeError(
            f"{name} is a {kind} tensor, which replicas do not copy; {remedy}"
        )


def parameters_of(root: Any) -> Iterable[tuple[str, Tensor]]:
    """The named parameters of a module; those that a partial binds have no names."""
    return root.named_parameters() if isinstance(root, nn.Module) else ()


def refuse_created(root: Any, known: Iterable[Tensor]) -> None:
    """Refuse trained parameters that a forward pass has created in a replica.

    The user's module lacks them. ``known`` are the tensors of the replica.
    """
    # By identity: ``==`` of tensors compares their elements.
    ids = set(map(id, known))
    # A parameter of a submodule that the first forward pass makes, for example.
    for name, parameter in parameters_of(root):
        if parameter.requires_grad and id(parameter) not in ids:
            raise ValueError(
                f"the forward pass creates the parameter {name!r} on each replica, "
                "where no optimizer finds it; create the parameter before the first "
                "step: call the module once on one micro-batch. Nothing was changed"
            )


def check_placement(
    root: Any, device_ids: Sequence[torch.device], *, lazy: bool = False
) -> None:
    """Refuse a module that cannot be replicated from the master.

    With ``lazy``, uninitialised parameters are accepted. A partial is not checked:
    tensors that it binds may be on other devices.
    """
    if not isinstance(root, nn.Module):
        return
    kind = type(root).__name__
    for name, part in root.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            child = f"its child {name!r}" if name else "it"
            raise TypeError(f"{kind} cannot be replicated, since {child} is {SCRIPT}")
    tensors: list[tuple[str, str, Tensor]] = []
    tensors += [("parameter", *pair) for pair in root.named_parameters()]
    tensors += [("buffer", *pair) for pair in root.named_buffers()]
    for role, name, tensor in tensors:
        if not is_lazy(tensor):
            _check_tensor(kind, role, name, tensor, device_ids)
        elif not lazy:
            raise RuntimeError(
                f"{kind} has an uninitialised lazy {role}, {name!r}; call the module "
                "once on one micro-batch before the first step"
            )


def _check_tensor(
    kind: str,
    role: str,
    name: str,
    tensor: Tensor,
    device_ids: Sequence[torch.device],
) -> None:
    """Refuse a tensor that replicas cannot have, or not from where it is."""
    expected = physical(device_ids[0])
    place = f"{kind} must be on device_ids[0], which is {device_ids[0]}"
    # Before its device is compared: no ``.to`` gives it values.
    if tensor.is_meta:
        raise ValueError(
            f"{place}, but its {role} {name!r} is on meta, without values; call "
            f".to_empty(device={str(expected)!r}), and load or initialise its values"
        )
    if tensor.device != expected:
        raise ValueError(
            f"{place}, but its {role} {name!r} is on {tensor.device}; call "
            f".to({str(expected)!r})"
        )
    refuse_uncopied(f"the {role} {name!r} of {kind}", tensor)
    # In one memory replicas share bitsandbytes' weights as they are.
    has_copies = len(set(device_ids)) > 1
    is_packed = is_composite(tensor) or (has_copies and is_quantised(tensor))
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    is_sharded = hasattr(tensor, "device_mesh")  # a DTensor
    if is_packed and (is_sharded or not is_frozen):
        raise only_frozen(f"{kind} has the {role} {name!r}", tensor)
