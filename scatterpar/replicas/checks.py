"""Which modules and tensors replicas can copy: plain ones, and frozen quantised
weights.

Quantised weights hold other tensors (bitsandbytes) or consist of them (torchao). If
they are frozen, their tensors are shared, sent and guarded as parameters are.
"""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices.device_ids import physical
from scatterpar.devices.transfers import pieces_of

# The files of the classes ``QuantState`` and ``MatmulLtState``.
_STATES = {"bitsandbytes.functional", "bitsandbytes.autograd._functions"}

_SCRIPT = (
    "a TorchScript module, whose tensors live in C++: pass the nn.Module that "
    "torch.jit was given; "
    "a criterion that is a function may call a TorchScript module"
)


def is_composite(tensor: Any) -> bool:
    """Whether ``tensor`` is of a subclass whose tensors consist of others."""
    return hasattr(tensor, "__tensor_flatten__")


def is_quantised(tensor: Tensor) -> bool:
    """Whether ``tensor`` is more than its memory: it consists of others, or is
    bitsandbytes'.
    """
    state = getattr(tensor, "quant_state", None)
    is_of_bitsandbytes = type(tensor).__module__.startswith("bitsandbytes.")
    return state is not None or is_of_bitsandbytes or is_composite(tensor)


def is_state(value: Any) -> bool:
    """Whether ``value`` is bitsandbytes' state of a weight, or of a layer, which
    forward writes.
    """
    return type(value).__module__ in _STATES and hasattr(value, "__dict__")


def held_by(value: Any) -> list[Any]:
    """The tensors of which a weight consists; else those, and objects with some, that
    it holds.
    """
    if is_composite(value):
        names, _ = value.__tensor_flatten__()
        return [getattr(value, name) for name in names]
    return [held for held in vars(value).values() if _holds_tensors(held)]


def _holds_tensors(value: Any) -> bool:
    """Whether ``value`` is a tensor, or an object with tensors, such as a
    ``QuantState``.
    """
    if isinstance(value, (type, nn.Module, types.FunctionType, types.MethodType)):
        return False
    held = getattr(value, "__dict__", {}).values()
    return (
        isinstance(value, Tensor)
        or is_state(value)
        or any(isinstance(t, Tensor) for t in held)
    )


def composite_like(like: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """A frozen tensor of ``like``'s class and shape that consists of ``parts``."""
    if like.requires_grad:
        raise _only_frozen(
            f"a module holds a tensor of shape {tuple(like.shape)}", like
        )
    kind: Any = like
    names, context = kind.__tensor_flatten__()
    named = dict(zip(names, parts, strict=True))
    made = type(kind).__tensor_unflatten__(named, context, like.size(), like.stride())
    return (
        nn.Parameter(made, requires_grad=False)
        if isinstance(like, nn.Parameter)
        else made
    )


def new_like(module: nn.Module) -> nn.Module:
    """A shallow copy of a module, whose contents ``ModuleCopy`` replaces.

    Raises ``TypeError`` if the module is TorchScript, or its class has ``__slots__``.
    """
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"the module holds, in something that is no module, {_SCRIPT}")
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        problem = f"the class {kind.__name__} of a module has __slots__"
        raise TypeError(
            f"{problem}, whose values replicas do not copy; remove __slots__"
        )
    replica = module
    # A ``__new__`` of its own may want arguments, return one object for all calls, or
    # make another class, as that of ``torch.fx.GraphModule``.
    if kind.__new__ is object.__new__:
        replica = module._replicate_for_data_parallel()
    if replica is module:
        replica = object.__new__(kind)
        vars(replica).update(vars(module))
    state: dict[str, Any] = vars(replica)
    state.pop("_is_replica", None)  # makes torch's ``zero_grad`` of a copy warn
    state["zero_grad"] = _ZeroGradInForward(replica)
    return replica


class _ZeroGradInForward:
    """``self.zero_grad()`` inside a forward pass, as in ``nn.DataParallel``: warns.

    It would wipe the gradients of earlier sub-steps. A deep copy of the replica, as
    meta-learning makes it, has gradients of its own, and its class's ``zero_grad``.
    """

    def __init__(self, replica: nn.Module | None = None) -> None:
        self._replica = (lambda: None) if replica is None else weakref.ref(replica)

    def __call__(self, set_to_none: bool = True) -> None:
        text = (
            "zero_grad() inside forward has no effect; call it before forward_backward"
        )
        warnings.warn(text, stacklevel=2)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._replica()))
        if copied is None:  # the replica is not copied
            return self
        return types.MethodType(type(copied).zero_grad, copied)

    def __reduce__(self) -> Any:
        return _ZeroGradInForward, ()


def refuse_sparse(what: str, tensor: Tensor) -> None:
    """Raise ``TypeError`` if a tensor that a module holds is sparse."""
    if len(pieces_of(tensor)) > 1:
        raise TypeError(
            f"{what} a sparse tensor of shape {tuple(tensor.shape)}, which replicas "
            "do not copy; "
            "pass it with the batch, as scatterpar.Replicated(tensor), or keep its "
            "indices and "
            f"values as dense buffers"
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
            raise TypeError(f"{kind} cannot be replicated, since {which} {_SCRIPT}")
    parameters = [("parameter", *one) for one in root.named_parameters()]
    for what, name, tensor in parameters + [
        ("buffer", *one) for one in root.named_buffers()
    ]:
        if is_lazy(tensor):
            if lazy:
                continue
            raise RuntimeError(
                f"{kind} has an uninitialised lazy {what}, {name!r}: call the module "
                "once on "
                f"one micro-batch before the first step"
            )
        if tensor.is_meta:
            raise ValueError(
                f"{kind} must be on device_ids[0], which is {device_ids[0]}, but its "
                f"{what} {name!r} is on meta, without values; call "
                f".to_empty(device={str(expected)!r}), and load or initialise its values"
            )
        if tensor.device != expected:
            raise ValueError(
                f"{kind} must be on device_ids[0], which is {device_ids[0]}, but its "
                f"{what} "
                f"{name!r} is on {tensor.device}; call .to({str(expected)!r})"
            )
        refuse_sparse(f"{kind} has the {what} {name!r},", tensor)
        if tensor.is_quantized:
            raise TypeError(
                f"{kind} has the {what} {name!r}, which is of torch's quantised dtype "
                f"{tensor.dtype}: replicas cannot have copies of it; keep its "
                ".int_repr(), scale "
                f"and zero point as plain buffers"
            )
        is_packed = is_composite(tensor) or (
            len(set(device_ids)) > 1 and is_quantised(tensor)
        )
        is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if is_packed and (not is_frozen or hasattr(tensor, "device_mesh")):
            raise _only_frozen(f"{kind} has the {what} {name!r}", tensor)


def _only_frozen(what: str, tensor: Tensor) -> TypeError:
    kind, remedy = (
        "quantised as bitsandbytes does it",
        "use one device, such as device_ids=[0]",
    )
    if is_composite(tensor):
        kind = "made of other tensors, as torchao's are"
        remedy = "make it a plain tensor, as its .dequantize() or .full_tensor() does"
    return TypeError(
        f"{what}, a {type(tensor).__name__}, which is {kind}: replicas have copies of "
        "frozen "
        "parameters of this kind only; call .requires_grad_(False) and train "
        f"adapters, or {remedy}"
    )
