"""Gradients that share memory: adding to one of them would add to the other too.

Autograd gives a leaf without a gradient the very memory of the one that arrives, and does not ask
whether a view of that memory went to another leaf. Both leaves of ``a.view(1, -1) + b.view(1, -1)``
have the same memory then. That is right after one backward pass, and wrong after the next.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["unalias"]


def unalias(leaves: Sequence[Tensor]) -> list[Tensor]:
    """Give each new gradient memory of its own; the leaves that still have no gradient.

    Those are what to ask about after the next backward pass: what arrives in one shares memory
    with nothing that came before.

    Args:
        leaves: in one memory, without a gradient before the backward pass that has just ended.
    """
    arrived = [(leaf.grad, leaf) for leaf in leaves]
    places = [
        (gradient.data_ptr(), gradient.nbytes, number)
        for number, (gradient, _) in enumerate(arrived)
        if gradient is not None and gradient.layout == torch.strided
    ]
    upto = 0
    for start, size, number in sorted(places):
        gradient, leaf = arrived[number]
        if size and start < upto and gradient is not None:
            leaf.grad = gradient.clone()
        upto = max(upto, start + size)
    return [leaf for gradient, leaf in arrived if gradient is None]
