"""Looks compute in a wider format than the step, because rounding hides differences.

::

    precision     float16, bfloat16    float32     asked
    SINGLE        float32              as it is    first
    AS_IN_STEP    as they are          as it is    if user code fails in the first
    DOUBLE        float64              float64     before a refusal

In a look a module is what ``module.float()`` or ``module.double()`` makes of it, and
gets inputs in this format::

    parameter or buffer    float16    ─ widen ─►    float32    ─ narrow ─►    float16
                                                                  in the memory it had

This file knows neither the engine nor its steps.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from scatterpar.numerics.rounding import HALF_PRECISION

# A look has no memory for copies of larger models, and computes them as in the step.
MAX_BYTES_IN_SINGLE = 2**27
# Before a refusal more is worth it, while the step's gradients need no memory yet.
MAX_BYTES_IN_DOUBLE = 2**29
# Others are quantised, or consist of several tensors.
_CAST_CLASSES = (Tensor, nn.Parameter, nn.Buffer)

Formats = Mapping[torch.dtype, torch.dtype]  # the wider dtype of each

_TO_SINGLE: Formats = dict.fromkeys(HALF_PRECISION, torch.float32)
_TO_DOUBLE: Formats = {
    **dict.fromkeys((*HALF_PRECISION, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}


class Precision(enum.Enum):
    """The formats that a look computes in."""

    AS_IN_STEP = enum.auto()
    SINGLE = enum.auto()
    DOUBLE = enum.auto()

    @property
    def formats(self) -> Formats:
        """The wider dtype of each dtype that is widened."""
        return _FORMATS_OF_PRECISION[self]

    @property
    def max_bytes(self) -> int:
        """The size of the largest model that is widened."""
        return MAX_BYTES_IN_DOUBLE if self is Precision.DOUBLE else MAX_BYTES_IN_SINGLE

    def widened(self, tensor: Tensor) -> Tensor:
        """A tensor in the wider dtype, or the tensor itself if there is none."""
        return tensor.type(self.formats.get(tensor.dtype, tensor.dtype))


_FORMATS_OF_PRECISION: Mapping[Precision, Formats] = {
    Precision.AS_IN_STEP: {},
    Precision.SINGLE: _TO_SINGLE,
    Precision.DOUBLE: _TO_DOUBLE,
}


class WiderLayers:
    """Parameters and buffers of layers, which can be widened."""

    def __init__(self, layers: Iterable[nn.Module], formats: Formats) -> None:
        self._layers = list(layers)
        self._formats = formats
        # By id: each tensor, its data and the dtype of its gradients.
        self._saved: dict[int, tuple[Tensor, Tensor, torch.dtype | None]] = {}
        # A replica's weights are in the memory of the user's, and so are their copies.
        self._weights: dict[tuple[Any, ...], Tensor] = {}

    @property
    def size(self) -> int:
        """The bytes of all tensors that would be widened, those in one memory once."""
        tensors = {tensor.data_ptr(): tensor for tensor in self._narrow()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def widen(self) -> None:
        """Let the tensors have copies of their values in the wider dtype."""
        for tensor in self._narrow():
            data = tensor.data
            wider = self._formats[data.dtype]
            self._saved.setdefault(id(tensor), (tensor, data, tensor.grad_dtype))
            if isinstance(tensor, nn.Parameter):
                memory = data.data_ptr(), data.shape, data.stride()
                tensor.data = self._weights.setdefault(memory, data.type(wider))
            else:  # calls write into buffers, so each restart makes another copy
                tensor.data = data.type(wider)
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

    def _narrow(self) -> Iterator[Tensor]:
        for layer in self._layers:
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                if tensor is None or type(tensor) not in _CAST_CLASSES:
                    continue
                if tensor.is_leaf and tensor.dtype in self._formats:
                    yield tensor


_CASTS: Mapping[Any, torch.dtype] = {
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
    Tensor.float: torch.float32,
}


class WiderCasts(TorchFunctionMode):
    """In its body casts to a dtype give the wider one, as operators require one dtype.

    So do functions that get such a dtype, such as ``torch.zeros``. In double precision
    a tensor that no layer holds, such as a teacher's weight, is widened when it meets
    one in float64.
    """

    def __init__(self, precision: Precision) -> None:
        super().__init__()
        self._formats = precision.formats
        self._is_double = precision is Precision.DOUBLE

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _CASTS:
            dtype = _CASTS[func]
            return args[0].type(self._formats.get(dtype, dtype))
        args = tuple(map(self._wider_dtype, args))
        keywords = {
            name: self._wider_dtype(value) for name, value in (kwargs or {}).items()
        }
        if self._is_double and self._has_mixed_dtypes([*args, *keywords.values()]):
            # What is written into keeps its memory.
            first = 1 if _writes(func) else 0
            args = (*args[:first], *map(self._widened, args[first:]))
            keywords = {
                name: value if name == "out" else self._widened(value)
                for name, value in keywords.items()
            }
        return func(*args, **keywords)

    def _wider_dtype(self, value: Any) -> Any:
        """The wider dtype if an argument is one; else the argument itself."""
        if isinstance(value, torch.dtype):
            return self._formats.get(value, value)
        return value

    def _has_mixed_dtypes(self, values: Iterable[Any]) -> bool:
        dtypes = {tensor.dtype for tensor in _tensors_among(values)}
        widened = dtypes & self._formats.keys()
        return bool(widened) and not dtypes.isdisjoint(self._formats.values())

    def _widened(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value)(map(self._widened, value))
        if isinstance(value, Tensor) and value.dtype in self._formats:
            return value.type(self._formats[value.dtype])
        return value


def _tensors_among(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif type(value) in (tuple, list):
            yield from _tensors_among(value)


def _writes(func: Any) -> bool:
    """Whether a function writes into its first argument, judged by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith("__i") or name in ("__set__", "__setitem__")
    return name.endswith("_")
