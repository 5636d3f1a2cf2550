"""Quantised weights: which tensors they hold, or consist of.

Quantised weights hold other tensors (bitsandbytes) or consist of them (torchao). If
they are frozen, their tensors are shared, sent and guarded as parameters are.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from scatterpar.libraries import package_of

# The files of the classes ``QuantState`` and ``MatmulLtState``.
_STATES = {"bitsandbytes.functional", "bitsandbytes.autograd._functions"}


def is_composite(tensor: Any) -> bool:
    """Whether ``tensor`` is of a subclass whose tensors consist of others."""
    return hasattr(tensor, "__tensor_flatten__")


def is_quantised(tensor: Tensor) -> bool:
    """Whether ``tensor`` is not its memory alone.

    It consists of other tensors, or is one of bitsandbytes.
    """
    state = getattr(tensor, "quant_state", None)
    is_of_bitsandbytes = package_of(type(tensor)) == "bitsandbytes"
    return state is not None or is_of_bitsandbytes or is_composite(tensor)


def is_state(value: Any) -> bool:
    """Whether ``value`` is bitsandbytes' state of a weight or of a layer.

    A forward pass writes it.
    """
    return type(value).__module__ in _STATES and hasattr(value, "__dict__")


def tensors_in(value: Any) -> list[Any]:
    """The tensors of which a weight consists.

    Of any other weight, or of a state, the attributes that are tensors or hold some.
    """
    if is_composite(value):
        names, _ = value.__tensor_flatten__()
        return [getattr(value, name) for name in names]
    attributes = vars(value).values()
    return [attribute for attribute in attributes if _holds_tensors(attribute)]


def _holds_tensors(value: Any) -> bool:
    """Whether ``value`` is a tensor, or an object with some, such as a
    ``QuantState``.
    """
    # Modules are replicated by themselves; functions have attributes for other reasons.
    if isinstance(value, (type, nn.Module, types.FunctionType, types.MethodType)):
        return False
    if isinstance(value, Tensor) or is_state(value):
        return True
    attributes = getattr(value, "__dict__", {}).values()
    return any(isinstance(attribute, Tensor) for attribute in attributes)


def composite_like(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """A frozen tensor of ``like``'s class and shape that consists of ``parts``."""
    if like.requires_grad:
        raise only_frozen(f"a module holds a tensor of shape {tuple(like.shape)}", like)
    kind: Any = like
    names, context = kind.__tensor_flatten__()
    named = dict(zip(names, parts, strict=True))
    size, stride = like.size(), like.stride()
    tensor: Tensor = type(kind).__tensor_unflatten__(named, context, size, stride)
    if isinstance(like, nn.Parameter):  # torch's protocol gives a plain subclass
        tensor = nn.Parameter(tensor, requires_grad=False)
    return tensor


def only_frozen(name: str, tensor: Tensor) -> TypeError:
    """The error for a quantised tensor that is trained; ``name`` begins the error."""
    kind_of_tensor = "quantised as bitsandbytes does it"
    remedy = "use one device, such as device_ids=[0]"
    if is_composite(tensor):
        kind_of_tensor = "made of other tensors, as torchao's are"
        remedy = "make it a plain tensor by its .dequantize() or .full_tensor()"
    return TypeError(
        f"{name}, a {type(tensor).__name__}, which is {kind_of_tensor}: replicas copy "
        "such parameters only if they are frozen; freeze this tensor by "
        f".requires_grad_(False) and train adapters. Or {remedy}"
    )
