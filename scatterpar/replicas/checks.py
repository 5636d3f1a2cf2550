"""Refuse modules that replicas cannot copy, or that are in another memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices.device_ids import physical
from scatterpar.devices.transfers import pieces_of
from scatterpar.replicas.quantised import is_composite, is_quantised, only_frozen

SCRIPT = (
    "a TorchScript module, whose tensors live in C++: pass the nn.Module that "
    "torch.jit was given; a criterion that is a function may call a TorchScript module"
)


def refuse_sparse(what: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` if a tensor that a module holds is sparse."""
    if len(pieces_of(tensor)) > 1:
        raise TypeError(
            f"{what} a sparse tensor of shape {tuple(tensor.shape)}, which replicas do "
            "not copy; pass it with the batch, as scatterpar.Replicated(tensor), or "
            "keep its indices and values as dense buffers"
        )


def parameters_of(root: Any) -> Iterable[tuple[str, Tensor]]:
    """The named parameters of a module; those that a partial binds have no names."""
    return root.named_parameters() if isinstance(root, nn.Module) else ()


def check_placement(
    root: Any, device_ids: Sequence[torch.device], *, lazy: bool = False
) -> None:
    """Refuse a module that cannot be replicated from the master; the error names the
    reason.

    With ``lazy``, uninitialised parameters are accepted. A partial is not checked:
    tensors that it binds may be on other devices.
    """
    if not isinstance(root, nn.Module):
        return
    kind, expected = type(root).__name__, physical(device_ids[0])
    for name, part in root.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            which = f"its child {name!r} is" if name else "it is"
            raise TypeError(f"{kind} cannot be replicated, since {which} {SCRIPT}")
    parameters = [("parameter", *one) for one in root.named_parameters()]
    for what, name, tensor in parameters + [
        ("buffer", *one) for one in root.named_buffers()
    ]:
        if is_lazy(tensor):
            if lazy:
                continue
            raise RuntimeError(
                f"{kind} has an uninitialised lazy {what}, {name!r}: call the module "
                "once on one micro-batch before the first step"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{kind} must be on device_ids[0], which is {device_ids[0]}, but its "
                f"{what} {name!r} is on meta, without values; call "
                f".to_empty(device={str(expected)!r}), and load or initialise its "
                "values"
            )
        if tensor.device != expected:
            raise ValueError(
                f"{kind} must be on device_ids[0], which is {device_ids[0]}, but its "
                f"{what} {name!r} is on {tensor.device}; call .to({str(expected)!r})"
            )
        refuse_sparse(f"{kind} has the {what} {name!r},", tensor)
        if tensor.is_quantized:
            raise TypeError(
                f"{kind} has the {what} {name!r}, which is of torch's quantised dtype "
                f"{tensor.dtype}: replicas cannot have copies of it; keep its "
                ".int_repr(), scale and zero point as plain buffers"
            )
        is_packed = is_composite(tensor) or (
            len(set(device_ids)) > 1 and is_quantised(tensor)
        )
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if is_packed and (not is_frozen or hasattr(tensor, "device_mesh")):
            raise only_frozen(f"{kind} has the {what} {name!r}", tensor)
