"""The only place that writes to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["commit_buffers", "commit_gradients"]


def commit_gradients(gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add gradients to ``.grad``, as one backward pass of the whole batch would.

    Autograd itself does it, from the parameters as roots: so hooks on parameters run, once
    and on the whole gradient, and what a hook raises leaves every ``.grad`` as it was.

    Args:
        gradients: pairs of a tensor of the user's and its gradient.

    """
    if not gradients:
        return
    roots = {id(root): root for root, _ in gradients}
    before = [
        (root, root.grad, values)
        for root, values in zip(roots.values(), _kept(roots.values()), strict=True)
    ]
    total: dict[int, Tensor] = {}
    for root, gradient in gradients:
        total[id(root)] = total[id(root)] + gradient if id(root) in total else gradient
    try:
        torch.autograd.backward(list(roots.values()), list(total.values()))
    except BaseException:
        with torch.no_grad():
            for root, there, values in before:
                root.grad = there
                if there is not None and values is not None:
                    there.copy_(values)
        raise


def commit_buffers(
    masters: Sequence[dict[str, Tensor | None]],
    values_of: Sequence[dict[str, Tensor | None]],
    means: Mapping[tuple[int, str], Tensor],
) -> None:
    """Give modules the buffers of a replica, or their means where there are any.

    Both come as one dict of buffers a module. They are written in place where shape and
    dtype are the same, and rebound otherwise.
    """
    into: list[Tensor] = []
    values: list[Tensor] = []
    for m, (master, own) in enumerate(zip(masters, values_of, strict=True)):
        for name, buffer in own.items():
            value = means.get((m, name), buffer)
            target = master.get(name)
            if value is not None and target is not None and _fits(target, value):
                into.append(target)
                values.append(value)
            elif value is not target:
                master[name] = None if value is None else value.detach()
    if into:
        with torch.no_grad():
            torch._foreach_copy_(into, values)


def _fits(target: Tensor, value: Tensor) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


def _kept(roots: Iterable[Tensor]) -> list[Tensor | None]:
    """Copies of the gradients that are there, in case somebody's hook makes the commit fail."""
    roots = list(roots)
    if not any(root._backward_hooks or root._post_accumulate_grad_hooks for root in roots):
        return [None] * len(roots)
    return [None if root.grad is None else root.grad.clone() for root in roots]
