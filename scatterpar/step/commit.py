"""The only place that writes to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices import bits
from scatterpar.devices.lists import copy_each
from scatterpar.replicas.batch_norm import running
from scatterpar.replicas.registration import Registry
from scatterpar.replicas.sparse import is_sparse, pieces_of
from scatterpar.step.handover import Sums, hand_over, unobserved
from scatterpar.step.outcome import BufferValue, Outcome
from scatterpar.threads.workers import note
from scatterpar.torch_private import flatten, has_gradient_hooks, unflatten

__all__ = ["commit", "commit_buffers"]


def commit(outcome: Outcome, settle: Callable[[], None] | None = None) -> None:
    """Write gradients, buffers and random state, or leave all of them as they are.

    Autograd itself hands the gradients to the parameters: so hooks on parameters run as under a
    plain ``backward()``, once and on the whole gradient. A parameter without a gradient takes the
    memory of the one that it is handed.

    Args:
        outcome: what the step computed. Its gradients are the parameters' afterwards.
        settle: called last; if it raises, as a hook may, everything is put back.
    """
    with outcome.attempt:  # random numbers as before, also where memory ends before the try
        gradients = [(root, g) for root, g in outcome.gradients if g is not None]
        outcome.gradients.clear()
        quiet, gradients = unobserved(gradients)
        sums = Sums(quiet)
        buffers = outcome.buffers + [value for layer in outcome.layers for value in running(layer)]
        undo: list[Callable[[], object]] = [
            *_remember_gradients([root for root, _ in gradients]),
            *_remember_buffers(buffers),
            sums.undo,
        ]
        try:
            hand_over(gradients)
            sums.add()
            commit_buffers(buffers)
            outcome.attempt.streams.commit()
            if settle is not None:
                settle()
        except BaseException as error:
            _put_back(undo, error)
            raise


def _put_back(undo: Iterable[Callable[[], object]], error: BaseException) -> None:
    """Everything as it was; where one thing cannot be put back, the others are all the same."""
    with torch.no_grad():
        for put_back in undo:
            try:
                put_back()
            except Exception as another:
                note(error, f"after that, something could not be put back: {another!r}")


def commit_buffers(buffers: Iterable[BufferValue]) -> None:
    """Give modules their new buffers: in place where shape and dtype fit, else rebound.

    Those that a forward pass registered, or deleted, are so in the module afterwards.
    """
    into: list[Tensor] = []
    values: list[Tensor] = []
    for holder, name, value in buffers:
        if type(holder) is Registry:
            holder.register(name)
        target = holder.get(name)
        if value is not None and target is not None and _is_never_written(value, target):
            if not _same(target, value):
                holder[name] = value.detach().clone()
        elif value is not None and target is not None and _fits(target, value):
            into.append(target)
            values.append(value)
        elif value is not target:
            holder[name] = None if value is None else value.detach()
    if into:
        with torch.no_grad():
            copy_each(into, values)


def _is_never_written(value: Tensor, target: Tensor) -> bool:
    """Whether a buffer is sparse, or torch refuses to write its elements."""
    if is_sparse(value) and is_sparse(target):
        return True
    return _is_read_only(target) and _fits(target, value)


def _is_read_only(tensor: Tensor) -> bool:
    """Whether ``tensor`` is expanded, or was made in inference mode."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return True
    if tensor.layout != torch.strided or 0 not in tensor.stride():
        return False
    return any(
        size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _fits(target: Tensor, value: Tensor) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype


def _same(target: Tensor, value: Tensor) -> bool:
    """Whether two tensors hold the same bits; sparse ones, in the same pieces."""
    if not is_sparse(target):
        return not any(bits.changed([target], [value]))
    pairs = list(zip(pieces_of(target), pieces_of(value), strict=False))
    if target.layout != value.layout or any(not _fits(one, other) for one, other in pairs):
        return False
    return not any(bits.changed(*zip(*pairs, strict=True)))


def _remember_gradients(roots: Sequence[Tensor]) -> Iterable[Callable[[], None]]:
    """How to put back each ``.grad``, and each parameter that a hook of its own may update."""
    return [
        partial(
            _put_back_gradient,
            root,
            root.grad,
            None if root.grad is None else root.grad.clone(),
            root.detach().clone() if has_gradient_hooks(root) else None,
        )
        for root in roots
    ]


def _put_back_gradient(
    root: Tensor, gradient: Tensor | None, kept: Tensor | None, value: Tensor | None
) -> None:
    root.grad = gradient
    if gradient is not None and kept is not None:
        gradient.copy_(kept)
    if value is not None:
        root.copy_(value)


def _remember_buffers(buffers: Iterable[BufferValue]) -> list[Callable[[], object]]:
    """How to put back each buffer, the object and its values."""
    targets = [(holder, name, holder.get(name)) for holder, name, _ in buffers]
    written = [target for *_, target in targets if target is not None and not _is_read_only(target)]
    registries = {id(holder): holder for holder, *_ in buffers if type(holder) is Registry}
    return [
        *[partial(setitem, *place) for place in targets if id(place[0]) not in registries],
        *[registry.remember() for registry in registries.values()],
        *_remember_values(written),
    ]


def _remember_values(tensors: Iterable[Tensor]) -> list[Callable[[], object]]:
    """How to put back what tensors hold. Plain ones of a dtype are one copy, not hundreds."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        is_plain = type(tensor) is Tensor and tensor.layout == torch.strided
        is_plain = is_plain and not tensor.is_quantized
        groups[tensor.dtype if is_plain else id(tensor)].append(tensor)
    return [partial(_put_back_values, group, _copy_of(group)) for group in groups.values()]


def _copy_of(tensors: Sequence[Tensor]) -> Tensor:
    values = [tensor.detach() for tensor in tensors]
    return flatten(values) if len(values) > 1 else values[0].clone()


def _put_back_values(tensors: Sequence[Tensor], kept: Tensor) -> None:
    values = unflatten(kept, tensors) if len(tensors) > 1 else [kept]
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
