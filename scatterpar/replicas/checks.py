"""Checks whether modules can be replicated; copies of fx modules and of sparse tensors."""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parameter import is_lazy

from scatterpar.devices import runtime
from scatterpar.devices.transfers import pieces_of


def new_like(module: nn.Module) -> nn.Module:
    """A shallow copy of a module, whose contents ``ModuleCopy`` replaces.

    fx gives every GraphModule a separate class, and copies only what its graph mentions. This copy
    has the same class, with its code, and all attributes.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise _no_script("the module holds, in something that is no module,")
    if isinstance(module, GraphModule):
        replica: nn.Module = object.__new__(type(module))
        vars(replica).update(vars(module))
        vars(replica)["_is_replica"] = True
    else:
        replica = module._replicate_for_data_parallel()
    vars(replica)["zero_grad"] = _zero_grad
    return replica


def _zero_grad(set_to_none: bool = True) -> None:
    """``self.zero_grad()`` inside a forward pass, as in ``nn.DataParallel``: warns."""
    warnings.warn(
        "zero_grad() inside forward has no effect: a replica's gradients are those of earlier "
        "sub-steps of the same step; call zero_grad() before forward_backward",
        stacklevel=2,
    )


def slots(module: nn.Module) -> list[tuple[types.MemberDescriptorType, Any]]:
    """The ``__slots__`` of the module's classes that are set, with their values."""
    kind: Any = type(module)
    members = _slots_of(kind)
    return [(slot, slot.__get__(module)) for slot in members if hasattr(module, slot.__name__)]


@functools.cache
def _slots_of(kind: Any) -> tuple[types.MemberDescriptorType, ...]:
    values = [value for base in kind.__mro__ for value in vars(base).values()]
    return tuple(value for value in values if isinstance(value, types.MemberDescriptorType))


def pieces_to_copy(tensor: Tensor) -> tuple[Tensor, ...]:
    """``pieces_of`` a sparse tensor. Raises ``ValueError`` if it requires grad."""
    if tensor.requires_grad:
        raise ValueError(
            f"a module holds a sparse tensor of shape {tuple(tensor.shape)} that requires grad, "
            f"which replicas cannot train; keep its values as a dense parameter and make the "
            f"sparse tensor from them in forward"
        )
    return pieces_of(tensor)


def sparse_like(like: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """A sparse tensor of ``like``'s shape and layout that uses the memory of ``pieces``."""
    if like.layout == torch.sparse_coo:
        indices, values = pieces
        return torch.sparse_coo_tensor(
            indices, values, like.shape, is_coalesced=like.is_coalesced(), check_invariants=False
        )
    outer, inner, values = pieces
    return torch.sparse_compressed_tensor(
        outer, inner, values, like.shape, layout=like.layout, check_invariants=False
    )


def check_placement(
    roots: Iterable[Any], device_ids: Sequence[torch.device], *, lazy: bool = False
) -> None:
    """Refuse modules that cannot be replicated from the master; the error names the reason.

    With ``lazy``, uninitialised parameters are accepted. A partial is not checked: tensors that it
    binds may be on other devices.
    """
    expected = runtime.physical(device_ids[0])
    for root in (root for root in roots if isinstance(root, nn.Module)):
        _refuse_script(root)
        kind = type(root).__name__
        tensors: list[tuple[str, str, Tensor]]
        tensors = [("parameter", *one) for one in root.named_parameters()]
        tensors += [("buffer", *one) for one in root.named_buffers()]
        for what, name, tensor in tensors:
            if is_lazy(tensor):
                if lazy:
                    continue
                raise RuntimeError(
                    f"{kind} has an uninitialised lazy {what}, {name!r}: call the module once on "
                    f"one micro-batch before the first step"
                )
            if tensor.device != expected:
                raise ValueError(
                    f"{kind} must be on device_ids[0], which is {device_ids[0]}, but its {what} "
                    f"{name!r} is on {tensor.device}; call .to({str(expected)!r})"
                )
            _refuse_packed(f"{kind} has the {what} {name!r}", tensor, len(set(device_ids)))


def _refuse_script(root: nn.Module) -> None:
    for name, part in root.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = f"its child {name!r} is" if name else "it is"
            raise _no_script(f"{type(root).__name__} cannot be replicated, since {which}")


def _no_script(where: str) -> TypeError:
    return TypeError(
        f"{where} a TorchScript module, whose tensors live in C++, and which torch has deprecated: "
        f"pass the nn.Module that torch.jit was given, or torch.compile of it; a criterion that is "
        f"a function may call a TorchScript module"
    )


def _refuse_packed(what: str, tensor: Tensor, memories: int) -> None:
    """Refuse tensors that are more than their memory: quantised, or made of other tensors."""
    kind = type(tensor)
    if tensor.is_quantized:
        raise TypeError(
            f"{what}, which is of torch's quantised dtype {tensor.dtype}: replicas cannot have "
            f"copies of it; keep its .int_repr(), scale and zero point as plain buffers"
        )
    if hasattr(kind, "__tensor_flatten__"):
        raise TypeError(
            f"{what}, a {kind.__name__}, which is made of other tensors, as torchao's are: "
            f"replicas of such tensors cannot be kept equal; make it a plain tensor, as its "
            f".dequantize() or .full_tensor() does, or leave the module unquantised"
        )
    state = getattr(tensor, "quant_state", None)
    if memories > 1 and (state is not None or kind.__module__.startswith("bitsandbytes.")):
        raise TypeError(
            f"{what}, a {kind.__name__}, which is quantised as bitsandbytes does it: what its "
            f"values mean stays on the first device; use one device, such as device_ids=[0], or "
            f"leave the module unquantised"
        )
