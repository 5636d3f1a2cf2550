"""Tensors: flat ones, versions that stay, subclasses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from scatterpar.torch_private.entry_points import find

# Not torch's context manager around it, which calls Python for each tensor.
_set_version_counters = find("torch._C._autograd", "_unsafe_set_version_counter")
_COUNTER = attrgetter("_version")
# Compares many tensors with what they were in one call of C++, for torch.compile.
_TensorGuards: Any = find("torch._C._dynamo.guards", "TensorGuards")
# Dense tensors as one 1-D tensor, and its parts with the shapes of given tensors. In
# C++, for DDP.
flatten_dense: Callable[[Sequence[Tensor]], Tensor] = find(
    "torch._utils", "_flatten_dense_tensors"
)
unflatten: Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, ...]]
unflatten = find("torch._utils", "_unflatten_dense_tensors")


@contextlib.contextmanager
def version_counters_kept(tensors: Sequence[Tensor]) -> Iterator[None]:
    """In the body, writes to ``tensors`` are not counted.

    The body leaves the values as they were: a graph that has saved them stays valid,
    and a changed counter would refuse its backward pass.
    """
    # Inference tensors have no counter.
    kept = tuple(tensor for tensor in tensors if not tensor.is_inference())
    versions = tuple(map(_COUNTER, kept))
    try:
        yield
    finally:
        _set_version_counters(kept, versions)


class Forms:
    """The class, dtype, device, shape, strides and ``requires_grad`` of dense tensors.

    A getter of Python takes three times as long per tensor and attribute.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        # Without grad mode the guards would take all tensors for frozen ones.
        with torch.enable_grad():
            self._guards = _TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            )

    def are_same(self) -> bool:
        """Whether all tensors have the forms that they had.

        ``False`` may be wrong, such as under another autocast: ask each tensor then.
        """
        with torch.enable_grad():
            are_same: bool = self._guards.check(*self._tensors)
        return are_same


def of_class(tensor: Tensor, cls: type[Tensor]) -> Tensor:
    """The values of ``tensor``, without a graph, as a tensor of a subclass.

    Not by ``as_subclass``, whose result is a view, which keeps ``tensor`` alive.
    """
    result: Tensor = Tensor._make_subclass(cls, tensor)
    return result


def plain_functions() -> contextlib.AbstractContextManager[object]:
    """In the body, torch's functions treat a subclass as a plain tensor.

    ``super().__torch_function__`` makes every result one of the subclass.
    """
    context: contextlib.AbstractContextManager[object]
    context = torch._C.DisableTorchFunctionSubclass()
    return context
