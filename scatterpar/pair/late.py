"""Gradients of the pair's parameters that cross together, at the end of a backward pass.

A node of autograd has to give its gradient when it is run, and there is one for each parameter. So
gradients would cross one by one. Where nobody can tell the difference, a node gives none, and all
of them cross in a few messages, in a callback that autograd runs before ``backward()`` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from scatterpar.devices.ledger import Ledger
from scatterpar.devices.lists import add_each
from scatterpar.devices.verbs import current_streams, on
from scatterpar.step.reduce import sum_in_order
from scatterpar.torch_private import (
    accumulates,
    after_backward,
    current_graph_task,
    has_gradient_hooks,
    held_nodes,
    keep_node,
    node_of,
)

__all__ = ["LateGradients"]


class LateGradients:
    """What the backward passes through one forward pass have found, until each of them ends.

    Args:
        device_ids: of the replicas, the master's first.
    """

    def __init__(self, device_ids: Sequence[torch.device]) -> None:
        self._device_ids = tuple(device_ids)
        self._streams = current_streams()
        self._unwatched: set[int] = set()
        self._found: dict[int, list[tuple[Tensor, Sequence[Tensor | None]]]] = {}

    def attach(self, leaf: Tensor, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What ``make`` hangs on ``leaf``, after a look whether somebody else has its node.

        Who has it may have put hooks there, which nothing tells.
        """
        several = len(set(self._device_ids)) > 1
        if not (several and torch.is_grad_enabled() and leaf.is_leaf):
            return make()
        if any(held_nodes([leaf], but_for=LateGradients)):
            return make()
        self._unwatched.add(id(leaf))
        attached = make()
        keep_node(node_of(attached[0]), LateGradients)
        return attached

    def take(self, leaf: Tensor, node: object, gradients: Sequence[Tensor | None]) -> bool:
        """Keep back the gradients of the replicas' copies of ``leaf``; not where it would show.

        That is: with hooks on the leaf, with ``create_graph``, in ``torch.autograd.grad``.
        """
        if torch.is_grad_enabled() or id(leaf) not in self._unwatched:
            return False
        if leaf._backward_hooks or has_gradient_hooks(leaf) or not accumulates(node):
            return False
        if all(gradient is None for gradient in gradients):  # a function gives none for its input
            return False
        dtype = leaf.grad_dtype or leaf.dtype
        dense = [g for g in (*gradients, leaf.grad) if g is not None]
        if any(g.layout != torch.strided or g.dtype != dtype for g in dense):
            return False
        task = current_graph_task()
        if task not in self._found:
            self._found[task] = []
            after_backward(lambda: self._bring(task))
        self._found[task].append((leaf, gradients))
        return True

    def _bring(self, task: int) -> None:
        """Add up what was kept back, and give it to the leaves."""
        found = self._found.pop(task)
        leaves = [leaf for leaf, _ in found]
        with torch.no_grad(), on(self._device_ids[0], self._streams):
            by_replica: list[dict[int, Tensor]] = [{} for _ in self._device_ids]
            while found:
                leaf, gradients = found.pop()
                strides = torch.empty_like(leaf, device="meta").stride()
                for own, gradient in zip(by_replica, gradients, strict=True):
                    if gradient is not None:  # it may be somebody else's too, and is not written
                        copy = gradient.new_empty_strided(leaf.shape, strides)
                        own[len(found)] = copy.copy_(gradient)
                del gradients, gradient, copy
            sums = sum_in_order(by_replica, self._device_ids, Ledger(), in_place=True)
            del by_replica
            for number, leaf in enumerate(leaves):
                if leaf.grad is None:
                    leaf.grad = sums.pop(number)
            there = [leaves[i].grad for i in sums]
            add_each([gradient for gradient in there if gradient is not None], list(sums.values()))
