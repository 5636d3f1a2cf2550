"""The user's ``.grad`` and hooks during a step, where no gradient may arrive."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor

from scatterpar.step.criterion_closure import name_in
from scatterpar.torch_private import hooks_taken_off


class SetAside:
    """In the body, ``leaves`` have no ``.grad`` and no hooks; afterwards both are as before.

    Replicas add gradients to copies of the user's parameters. A gradient that arrives in a leaf of
    the user comes from an object that replicas share, and so is added in the order of arrival.
    """

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        self.leaves = leaves

    def __enter__(self) -> Self:
        self._gradients = [leaf.grad for leaf in self.leaves]
        with contextlib.ExitStack() as stack:
            stack.enter_context(hooks_taken_off(self.leaves))
            self._hooks = stack.pop_all()
        self.drop()  # last: from here on nothing can fail
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        for leaf, gradient in zip(self.leaves, self._gradients, strict=True):
            leaf.grad = gradient

    def drop(self) -> None:
        """Drop the gradients that have arrived."""
        for leaf in self.leaves:
            leaf.grad = None

    def refuse(self, criterion: Callable[..., Any] | None) -> None:
        """Raise ``ValueError`` if a gradient has arrived."""
        for leaf in self.leaves:
            if leaf.grad is not None:
                raise not_replicated(leaf, criterion)


def not_replicated(leaf: Tensor, criterion: Callable[..., Any] | None) -> ValueError:
    """The error for a gradient of a leaf that no replica has."""
    return ValueError(
        f"a gradient arrives at {name_in(criterion, leaf)}, which is no replica's: bind its "
        f"network with functools.partial(criterion, net=net), or make it a part of an nn.Module, "
        f"and replicas train it; if it is not to be trained, call net.requires_grad_(False). "
        f"Nothing was changed"
    )
