"""Tensors that a module made of its parameters before the step, and keeps: whose gradient is it?

A module may keep ``weight[0]``, and use it in every forward pass. Each replica has a copy, and so a
gradient of its own for it. That belongs to the parameter, as a plain backward pass would have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scatterpar.torch_private import hooks_taken_off

__all__ = ["pass_on"]

_Gradient = tuple[Tensor, Tensor | None]


def pass_on(kept: Sequence[tuple[Tensor, Tensor]], gradients: list[_Gradient]) -> list[_Gradient]:
    """The leaves' gradients, to which those of tensors made of leaves were added.

    The user's graph from the leaves to these tensors stays. Hooks on leaves run later, when they
    are handed the whole gradient.

    Args:
        kept: tensors made of leaves, and their gradients.
        gradients: the leaves, and theirs.

    Raises:
        RuntimeError: torch's own: part of that graph is gone, or what it needs was written since.
    """
    if not kept or not gradients:
        return gradients
    roots, leaves = [tensor for tensor, _ in kept], [leaf for leaf, _ in gradients]
    with torch.inference_mode(False), torch.enable_grad(), hooks_taken_off(leaves):
        more = torch.autograd.grad(
            roots, leaves, [g for _, g in kept], retain_graph=True, allow_unused=True
        )
    return [(leaf, _sum(own, other)) for (leaf, own), other in zip(gradients, more, strict=True)]


def _sum(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    if other is None:
        return own
    if own is None:
        return other.clone()  # both leaves of ``a + b`` are given the same tensor
    return own + other if own.layout == torch.strided else other + own  # dense first, says torch
