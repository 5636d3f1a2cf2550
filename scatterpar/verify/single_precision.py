"""Half precision computed in single precision, because its rounding hides differences.

In a look a module in half precision is what ``module.float()`` makes of it, and gets
inputs in single precision::

    parameter or buffer    float16    ─ widen ─►    float32    ─ narrow ─►    float16
                                                                  in the memory it had

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scatterpar.verify.rounding import HALF_PRECISION

# A look has no memory for copies of larger models, and computes them as in the step.
MAX_BYTES = 2**28
# Others are quantised, or consist of several tensors.
_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


class SinglePrecision:
    """Parameters and buffers of layers, which can be widened to float32."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self._layers = list(layers)
        # By id: each tensor, its data and the dtype of its gradients.
        self._saved: dict[int, tuple[Tensor, Tensor, torch.dtype | None]] = {}
        # A replica's weights are in the memory of the user's, and so are their copies.
        self._weights: dict[tuple[Any, ...], Tensor] = {}

    @property
    def size(self) -> int:
        """The bytes of all tensors in half precision."""
        return sum(tensor.nbytes for tensor in self._halves())

    def widen(self) -> None:
        """Let tensors in half precision have copies of their values in float32."""
        for tensor in self._halves():
            data = tensor.data
            self._saved.setdefault(id(tensor), (tensor, data, tensor.grad_dtype))
            if isinstance(tensor, nn.Parameter):
                memory = data.data_ptr(), data.shape, data.stride()
                tensor.data = self._weights.setdefault(memory, data.float())
            else:  # calls write into buffers, so each restart makes another copy
                tensor.data = data.float()
            # A replica's leaf has one that does not follow its data's.
            if tensor.grad_dtype != tensor.dtype:
                tensor.grad_dtype = tensor.dtype

    def narrow(self) -> None:
        """Put tensors back to where they were, with the values that they had."""
        for tensor, data, grad_dtype in self._saved.values():
            tensor.data = data
            if tensor.grad_dtype != grad_dtype:
                tensor.grad_dtype = grad_dtype
        self._saved.clear()
        self._weights.clear()

    def _halves(self) -> Iterator[Tensor]:
        for layer in self._layers:
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if tensor is None or type(tensor) not in _PLAIN:
                    continue
                if tensor.is_leaf and tensor.dtype in HALF_PRECISION:
                    yield tensor


class CastsToSingle(TorchFunctionMode):
    """In its body casts to half precision give float32, as operators require one dtype.

    So do functions that get a dtype of half precision, such as ``torch.zeros``.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.half, Tensor.bfloat16):
            func = Tensor.float
        keywords = {name: _single(value) for name, value in kwargs.items()}
        return func(*map(_single, args), **keywords)


def _single(value: Any) -> Any:
    """float32 if an argument is a dtype of half precision; else the argument itself."""
    is_half = isinstance(value, torch.dtype) and value in HALF_PRECISION
    return torch.float32 if is_half else value


def widened(tensor: Tensor) -> Tensor:
    """A tensor in float32 if it is in half precision; otherwise the tensor itself."""
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor
