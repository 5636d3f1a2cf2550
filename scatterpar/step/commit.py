"""What a step computed, written to the user's module, after every replica has succeeded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.chunks import copy_each, in_chunks, in_memory_order, is_in_memory_order
from scatterpar.devices.fingerprints import changed
from scatterpar.replicas.buffers import BufferValue, Registry, running
from scatterpar.replicas.kinds import is_sparse, pieces_of
from scatterpar.step.outcome import Outcome
from scatterpar.threads.workers import note
from scatterpar.torch_private import backward, flatten, has_gradient_hooks, held_nodes, unflatten

__all__ = [
    "Pair",
    "Sums",
    "commit",
    "commit_buffers",
    "hand_over",
    "unobserved",
]

Pair = tuple[Tensor, Tensor]  # a leaf, and a gradient for it


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
        return not any(changed([target], [value]))
    pairs = list(zip(pieces_of(target), pieces_of(value), strict=False))
    if target.layout != value.layout or any(not _fits(one, other) for one, other in pairs):
        return False
    return not any(changed(*zip(*pairs, strict=True)))


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


def hand_over(pairs: list[Pair]) -> None:
    """Let autograd accumulate the gradients; ``pairs`` is empty afterwards.

    A leaf without a gradient takes the very memory of a tensor that nobody else refers to, which
    the roots of a backward pass never are: their caller has them. So they are what a node gives
    back.
    """
    if not pairs:
        return
    leaves = [leaf for leaf, _ in pairs]
    with torch.inference_mode(False), torch.enable_grad():
        pairs[:] = [(leaf, _of_its_own(gradient)) for leaf, gradient in pairs]
        root = _Hand.apply(pairs, *leaves)  # type: ignore[no-untyped-call]
        backward([root], [torch.zeros_like(root)])


class _Hand(torch.autograd.Function):
    """A node that has the gradients of its inputs ready."""

    @staticmethod
    def forward(ctx: Any, pairs: list[Pair], *leaves: Tensor) -> Tensor:
        ctx.pairs = pairs
        return torch.zeros((), device=leaves[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd's thread cannot free, in a free-threaded interpreter, what the caller's has made,
        # and counts who refers to a tensor: so it gets another one with the same memory.
        gradients = [g.detach() if g.layout == torch.strided else g for _, g in ctx.pairs]
        ctx.pairs.clear()
        return (None, *gradients)


def _of_its_own(gradient: Tensor) -> Tensor:
    """``gradient``, or a copy of one that is a part of something larger."""
    if gradient.layout != torch.strided:
        return gradient
    return gradient if gradient.untyped_storage().nbytes() == gradient.nbytes else gradient.clone()


def unobserved(pairs: list[Pair]) -> tuple[list[Pair], list[Pair]]:
    """Those whose leaf has a gradient that can be added to in silence, and the others.

    They are of one device, since they are added in few messages. A hook may look at any gradient,
    and may raise: where there is one, nothing is silent.
    """
    if any(leaf._backward_hooks or has_gradient_hooks(leaf) for leaf, _ in pairs):
        return [], pairs
    quiet = [(t, g) for t, g in pairs if t.device == pairs[0][0].device and _is_plain_sum(t, g)]
    held = held_nodes([leaf for leaf, _ in quiet])
    quiet = [pair for pair, is_held in zip(quiet, held, strict=True) if not is_held]
    silent = {id(leaf) for leaf, _ in quiet}
    return quiet, [pair for pair in pairs if id(pair[0]) not in silent]


def _is_plain_sum(leaf: Tensor, gradient: Tensor) -> bool:
    there = leaf.grad
    return (
        there is not None
        and type(leaf) in (Tensor, nn.Parameter)
        and there.layout == gradient.layout == torch.strided
        and (there.dtype, there.shape, there.stride())
        == (gradient.dtype, gradient.shape, gradient.stride())
        and is_in_memory_order(there)
        and is_in_memory_order(gradient)
        and not there.requires_grad
    )


class Sums:
    """Gradients that are added to what leaves have, and can be taken out again.

    What was there before moves into the memory of what was added, chunk by chunk.

    Args:
        pairs: leaves with a gradient, and what is added to it.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._sums = [_flat(leaf.grad) for leaf, _ in pairs]
        self._added = [_flat(gradient) for _, gradient in pairs]
        self._before: list[Pair] = []

    def add(self) -> None:
        """Add all of them."""
        with torch.no_grad():
            for message in in_chunks(dict(enumerate(self._sums))):
                sums, added = message.of(self._sums), message.of(self._added)
                before = torch.cat(sums).split(message.sizes)
                self._before += zip(sums, before, strict=True)
                torch._foreach_add_(sums, added)
                torch._foreach_copy_(added, before)
                self._before[-len(sums) :] = zip(sums, added, strict=True)
                del before

    def undo(self) -> None:
        """Put back what was there."""
        for part, before in self._before:
            part.copy_(before)


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    flat = in_memory_order(tensor)
    assert flat is not None
    return flat
