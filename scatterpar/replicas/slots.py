"""Slots: what a weight is called on its way from the user's module to its gradient.

::

    the user's tensor            slot.tensor
    its copy in a memory         broadcast.at(device)[slot.number]
    its copy in a replica        replica.tensors[slot.number]
    a replica's gradient of it   replica_set.gradients_of(replica)[slot.number]
    its gradient at commit       with slot.tensor, if that is a leaf
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from scatterpar.replicas.module_contents import ModuleContents, is_leaf

REQUIRES_GRAD = attrgetter("requires_grad")


class Slot(NamedTuple):
    """A tensor of the user's modules, and its place in every replica.

    Attributes:
        number: its place among the tensors of ``ModuleContents``, which is that among
            the tensors of each replica and memory.
        tensor: the user's.
        is_parameter: whether replicas in one memory share it. Others, such as buffers,
            are private to each replica.
        is_leaf: whether autograd accumulates gradients in the user's tensor. One that
            was computed from parameters is no leaf, and replicas cannot train it.
        sum_dtype: the dtype in which its gradients are added; ``None`` if it is not
            trained.
    """

    number: int
    tensor: Tensor
    is_parameter: bool
    is_leaf: bool
    sum_dtype: torch.dtype | None

    @property
    def is_trained(self) -> bool:
        """Whether backward passes are to compute its gradient."""
        return self.sum_dtype is not None


class Slots:
    """The slots of the tensors of ``contents``, as they are trained now.

    Attributes:
        all: by number.
        trained: the slots of tensors that are trained.
        trained_numbers: the numbers of these.
        trained_leaves: the user's tensors of these that are leaves.
        requires_grad: of each tensor, when the slots were made.
    """

    def __init__(
        self, contents: ModuleContents, accumulate_dtype: torch.dtype | None
    ) -> None:
        self.requires_grad = list(map(REQUIRES_GRAD, contents.tensors.values()))
        self.all: list[Slot] = []
        for number, (key, tensor) in enumerate(contents.tensors.items()):
            is_parameter = key in contents.weights
            # torch trains no tensor that was made in inference mode.
            is_trained = tensor.requires_grad and not tensor.is_inference()
            dtype = sum_dtype(tensor, accumulate_dtype) if is_trained else None
            self.all.append(Slot(number, tensor, is_parameter, is_leaf(tensor), dtype))
        self.trained = [slot for slot in self.all if slot.is_trained]
        self.trained_numbers = [slot.number for slot in self.trained]
        # A list, because each step asks for hundreds.
        self.trained_leaves = [slot.tensor for slot in self.trained if slot.is_leaf]


def sum_dtype(tensor: Tensor, accumulate_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which gradients are added: at least ``accumulate_dtype``."""
    # Other tensors than leaves have no ``grad_dtype``.
    own_dtype = tensor.grad_dtype if is_leaf(tensor) else None
    dtype = own_dtype or tensor.dtype
    if accumulate_dtype is None:
        return dtype
    return torch.promote_types(dtype, accumulate_dtype)
