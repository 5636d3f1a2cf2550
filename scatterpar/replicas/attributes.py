"""What Python keeps on tensors: their classes, and attributes such as ``bias.scale = 5.0``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["attributes_of", "parameter_like", "take_attributes", "take_class"]

_Of = Callable[[Any], Any]


def parameter_like(original: Tensor, values: Tensor) -> Tensor:
    """A parameter on the memory of ``values``, of the original's own class of parameters."""
    kind = type(original)
    is_own = issubclass(kind, nn.Parameter)
    # Not its constructor, which may ask for more than values.
    return nn.Parameter.__new__(kind if is_own else nn.Parameter, values, requires_grad=False)


def take_class(original: Tensor, copy: Tensor) -> None:
    """Give a copy inside a graph the original's class, where that is the user's own parameter."""
    kind = type(original)
    if issubclass(kind, nn.Parameter) and kind is not nn.Parameter:
        with contextlib.suppress(TypeError):  # it has a layout of its own, such as ``__slots__``
            copy.__class__ = kind


def attributes_of(tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    """What Python keeps on each of some tensors, where a copy of it has it too."""
    return [vars(tensor) for tensor in tensors if _is_followed(tensor)]


def take_attributes(original: Tensor, copy: Tensor, of: _Of) -> None:
    """Give a copy the attributes of the original."""
    if _is_followed(original):
        vars(copy).update({name: _own(value, of) for name, value in vars(original).items()})


def _own(value: Any, of: _Of) -> Any:
    """The replica's counterpart of another tensor, or of a module; other values are shared."""
    return of(value) if isinstance(value, (Tensor, nn.Module)) else value


def _is_followed(original: Tensor) -> bool:
    """Whether its attributes are no tensors that it is made of, as those of wrappers are."""
    return isinstance(original, nn.Parameter) or not hasattr(original, "__tensor_flatten__")
