"""A shallow copy of a module, without the values that ``ModuleCopy`` copies."""

from __future__ import annotations

import types
import warnings
import weakref
from typing import Any

import torch
from torch import nn

from scatterpar.replicas.refused_modules import SCRIPT


def new_like(module: nn.Module) -> nn.Module:
    """A shallow copy of a module, whose contents ``ModuleCopy`` replaces.

    Raises ``TypeError`` if the module is TorchScript, or its class has ``__slots__``.
    """
    kind = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(f"the module holds, in an object that is no module, {SCRIPT}")
    if any(vars(base).get("__slots__") for base in kind.__mro__):
        problem = f"the class {kind.__name__} of a module has __slots__"
        raise TypeError(
            f"{problem}, whose values replicas do not copy; remove __slots__ from it"
        )
    replica = module
    # A class may have a protocol of its own, as recurrent layers. torch's calls
    # ``__new__``, which may want arguments, return one object for all calls, or make
    # another class, as that of ``torch.fx.GraphModule``.
    protocol = kind._replicate_for_data_parallel
    has_own_protocol = protocol is not nn.Module._replicate_for_data_parallel
    if has_own_protocol and kind.__new__ is object.__new__:
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
