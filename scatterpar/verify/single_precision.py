"""Half precision computed in single precision, because its rounding hides differences.

::

    parameter (float16) ─┐
                         ├─ product ─ float32 ─ … ─ gradient: float16
    input     (float16) ─┘                                            as the parameter

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scatterpar.devices.transfers import write
from scatterpar.torch_private import OperatorMode, current_graph_task
from scatterpar.verify.rounding import HALF_PRECISION

_NO_BACKWARD_PASS = -1

# They require one dtype of all tensors. So do recurrent networks, before any function.
_REQUIRE_ONE_DTYPE = {
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    *(torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
    *(torch.prelu, torch.bilinear),
}


class SinglePrecision(OperatorMode):
    """In its body operators take half precision as float32, and give float32.

    Parameters, inputs and buffers keep their dtypes, and so does what operators write
    into them. Autograd requires a parameter's dtype of its gradient, which would round
    the terms of a sum that cancel, so the gradient before that is kept.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By id: a gradient in half precision, and what was rounded to it.
        self._rounded: dict[int, tuple[Tensor, Tensor]] = {}

    def unrounded(self, gradient: Any) -> Any:
        """The gradient, if any, before it was rounded to its parameter's dtype."""
        _, unrounded = self._rounded.get(id(gradient), (gradient, gradient))
        return unrounded

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view:
            return self._view(func, *args, **kwargs)
        if _is_cast_of_gradient(func):
            gradient = func(*args, **kwargs)
            self._note_rounded(gradient, self._widened(args[0]))
            return gradient
        # All arguments, because kernels require one dtype of them.
        widened_args = [self._widened(value) for value in args]
        widened_kwargs = {name: self._widened(value) for name, value in kwargs.items()}
        result = func(*widened_args, **widened_kwargs)
        written = _written_arguments(func)
        for value, widened, argument in zip(
            args, widened_args, func._schema.arguments, strict=False
        ):
            if argument.name in written:
                result = _written_back(value, widened, result)
        for name in written.intersection(kwargs):
            result = _written_back(kwargs[name], widened_kwargs[name], result)
        return result

    def _view(self, func: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        """A view, which shares the memory of ``value``: it is not widened."""
        # A widened copy would have other memory, and writes to it would be lost.
        view = func(value, *args, **kwargs)
        if id(value) in self._rounded:
            unrounded = self.unrounded(value)
            self._note_rounded(view, func(unrounded, *args, **kwargs))
        return view

    def _note_rounded(self, gradient: Any, unrounded: Any) -> None:
        if _is_half(gradient) and isinstance(unrounded, Tensor):
            self._rounded[id(gradient)] = gradient, unrounded

    def _widened(self, value: Any) -> Any:
        """An argument with float32 in the place of half precision."""
        # Such as the dtype of a sum, which would round to half precision again.
        if isinstance(value, torch.dtype):
            return torch.float32 if value in HALF_PRECISION else value
        if isinstance(value, (list, tuple)):
            return [self._widened(item) for item in value]
        if not _is_half(value):
            return value
        if id(value) in self._rounded:
            return self.unrounded(value)
        return value.float()


class OneDtype(TorchFunctionMode):
    """In its body functions that require one dtype of all tensors get float32.

    They compare dtypes before their operators run. Other functions do not keep a copy
    of a parameter until the backward pass.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _REQUIRE_ONE_DTYPE:
            return func(*args, **kwargs)
        keywords = {name: _converted(value) for name, value in kwargs.items()}
        return func(*map(_converted, args), **keywords)


def _converted(value: Any) -> Any:
    """Tensors in half precision as float32, with a graph."""
    if isinstance(value, (list, tuple)):
        return [_converted(item) for item in value]
    return value.float() if _is_half(value) else value


def _is_cast_of_gradient(func: Any) -> bool:
    """Whether autograd casts a gradient to the dtype of its tensor, which it requires.

    While checkpoints compute again, gradients are enabled.
    """
    if func is not torch.ops.aten._to_copy.default or torch.is_grad_enabled():
        return False
    return current_graph_task() != _NO_BACKWARD_PASS


def _written_arguments(func: Any) -> set[str]:
    """The names of the arguments that an operator writes."""
    return {
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    }


def _is_half(value: Any) -> bool:
    """Whether a value is a plain tensor in half precision."""
    return type(value) in (Tensor, nn.Parameter) and value.dtype in HALF_PRECISION


def _written_back(value: Any, widened: Any, result: Any) -> Any:
    """Write into an argument what was written into its copy.

    Returns the result with the argument in the place of its copy.
    """
    if isinstance(value, (list, tuple)):
        for item, widened_item in zip(value, widened, strict=True):
            result = _written_back(item, widened_item, result)
        return result
    if not _is_half(value):
        return result
    write(value, widened)
    if isinstance(result, tuple):
        return tuple(value if item is widened else item for item in result)
    return value if result is widened else result
