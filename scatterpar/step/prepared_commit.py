"""What the commit needs to know of its results, asked while devices compute them.

::

    host      launches the sum of gradients -- prepares -- waits -- commits
    devices   sub-steps ------------------------ sum ------|

After the wait no device has work until the commit and the next step launch some. So
what can be known before is asked before.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import are_whole
from scatterpar.replicas.buffers import BufferWriter

Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it
_CLASSES_OF_LEAVES = {nn.Parameter, Tensor}
_LAYOUT_OF_GRADIENT = attrgetter("layout")
_DTYPE_OF_COMPUTED = attrgetter("dtype")
_DTYPE_OF_FIRST = attrgetter("grad_dtype")


class PreparedCommit(NamedTuple):
    """What is known of the results.

    Attributes:
        buffers: writes the user's buffers.
        may_become_grads: whether autograd would make each gradient the first ``.grad``
            of its leaf.
    """

    buffers: BufferWriter
    may_become_grads: bool


def may_become_grads(pairs: Sequence[tuple[Tensor, Tensor | None]]) -> bool:
    """Whether autograd would make each gradient the first ``.grad`` of its leaf.

    Leaves without a gradient do not count.
    """
    # Few Python calls, because a model has hundreds of gradients.
    leaves: list[Tensor] = []
    gradients: list[Tensor] = []
    for leaf, gradient in pairs:
        if gradient is not None:
            leaves.append(leaf)
            gradients.append(gradient)
    return (
        _CLASSES_OF_LEAVES.issuperset(map(type, leaves))
        and {Tensor}.issuperset(map(type, gradients))
        and {torch.strided}.issuperset(map(_LAYOUT_OF_GRADIENT, gradients))
        and list(map(_DTYPE_OF_COMPUTED, gradients))
        == list(map(_DTYPE_OF_FIRST, leaves))
        # Autograd makes the first gradient like its leaf: it would copy others.
        and list(map(Tensor.stride, gradients)) == list(map(Tensor.stride, leaves))
        and are_whole(gradients)
    )
