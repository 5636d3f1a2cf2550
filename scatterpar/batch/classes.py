"""Tensors of a batch keep their classes and attributes when they are cut and copied.

A class such as torchvision's ``Image`` tells a module what a tensor is; torch's own
operators return plain tensors.
"""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor, nn

from scatterpar.batch import nested

_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def like(source: Tensor, result: Tensor) -> Tensor:
    """``result`` in the class of ``source``, with its attributes.

    ``result`` has rows of ``source``, or its values in another memory. A subclass that
    consists of other tensors stays as operators have made it.
    """
    if type(source) is Tensor and not vars(source):  # nearly all
        return result
    kind = type(source)
    if _consists_of_others(source):
        return result
    if kind not in _PLAIN_TENSORS and type(result) is not kind:
        result = result.as_subclass(kind)
    if result is not source:
        vars(result).update(vars(source))
    return result


def _consists_of_others(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def copy_of(tensor: Tensor) -> Tensor:
    """A copy in memory of its own, with class and attributes."""
    return like(tensor, tensor.clone())


def attribute_with_rows(tensor: Tensor, sizes: Container[int]) -> str:
    """The name of an attribute of ``tensor`` that may have rows; else nothing.

    It would go whole to every micro-batch. ``sizes`` are the numbers of rows in the
    batch.
    """
    if _consists_of_others(tensor):  # its own attributes are these
        return ""
    for name, value in vars(tensor).items():
        is_list = isinstance(value, (list, tuple)) and 1 < len(value) in sizes
        if is_list or any(inner.ndim for inner in nested.tensors(value)):
            return name
    return ""
