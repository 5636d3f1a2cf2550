"""Parameters that a forward pass writes: renormalised embeddings, clipped weights, moving averages.

What one device would have after one forward pass over the whole batch::

    every sub-step starts from the step's values ─┬─ what it wrote ─┬─ merged ─ commit
                                                  └─ what it wrote ─┘

Elements that several sub-steps write must get the same value from all of them, and no gradient
may have come from the old value of an element that another sub-step wrote. Then the result does
not depend on how the batch is cut; else there is none, and the step is refused.

A parameter that is written needs a copy for every replica. That is found out in the first step,
whose parameters are set aside: when one turns out to be written, the step is computed again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from scatterpar.devices import bits

__all__ = ["FirstWrite", "Writes", "Written", "close", "once_known", "renormalised"]

_Result = TypeVar("_Result")


class FirstWrite(Exception):
    """A forward pass wrote parameters that the replicas share: each gets its own, and again."""


def once_known(attempt: Callable[[], _Result]) -> _Result:
    """The result of ``attempt``, again whenever it finds parameters that are written."""
    while True:
        try:
            return attempt()
        except FirstWrite:
            continue


def renormalised(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Parameters of ``modules`` that torch's own forward passes write."""
    return [
        module.weight
        for module in modules
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None
    ]


class Written:
    """What some forward passes wrote to one parameter, and from what their gradients came.

    Attributes:
        value: the parameter, with what was written.
        written: the elements that were; ``None`` for none.
        read: the elements whose old value has a gradient, in a pass that did not write them.
    """

    def __init__(self, name: str, value: Tensor) -> None:
        self._name = name
        self.value = value
        self.written: Tensor | None = None
        self.read: Tensor | None = None

    def add(self, value: Tensor, written: Tensor | None, read: Tensor | None) -> None:
        """Take in what one more pass, or one more replica, did.

        Raises:
            ValueError: it wrote other values to the same elements.
        """
        if written is not None:
            if self.written is None:
                self.value, self.written = value, written
            else:
                both = self.written & written
                if not close(self.value[both], value[both]):
                    raise ValueError(
                        f"the forward pass writes the parameter {self._name!r}, and different "
                        f"micro-batches wrote different values to the same elements, so that the "
                        f"result would depend on how the batch is cut; make it a buffer "
                        f"(register_buffer), or update it after the step"
                    )
                self.value = torch.where(written & ~self.written, value, self.value)
                self.written = self.written | written
        if read is not None:
            self.read = read if self.read is None else self.read | read

    def brought(self, copy: Callable[[Tensor], Tensor]) -> Written:
        """The same in another memory: ``copy`` takes a tensor there."""
        arrived = Written(self._name, self.value)
        if self.written is not None:
            arrived.value, arrived.written = copy(self.value), copy(self.written)
        arrived.read = None if self.read is None else copy(self.read)
        return arrived

    def require_meaning(self) -> None:
        """Refuse a gradient that came from the old value of what was written elsewhere.

        Raises:
            ValueError: there is one.
        """
        if self.read is not None and self.written is not None and (self.read & self.written).any():
            raise ValueError(
                f"the forward pass writes elements of the parameter {self._name!r} in one "
                f"micro-batch, and another micro-batch computed with their old values, where one "
                f"device would have computed with the new ones; write it after the step instead"
            )


class Writes:
    """One replica's own copies of parameters that a forward pass writes.

    Args:
        tensors: its copies.
        homes: the memory that they lie in at the start of a sub-step.
        names: what errors call them.
    """

    def __init__(
        self, tensors: Sequence[Tensor], homes: Sequence[Tensor], names: Sequence[str]
    ) -> None:
        self._tensors = tensors
        self._homes = homes
        self._names = names
        self._sources: Sequence[Tensor] = homes
        self.found: list[Written] = []

    def begin(self, sources: Sequence[Tensor]) -> None:
        """A step begins, in which the parameters have the values of ``sources``."""
        self._sources = sources
        self.found = [
            Written(name, source.detach())
            for name, source in zip(self._names, sources, strict=True)
        ]

    @contextlib.contextmanager
    def substep(self, *, resumed: bool = False) -> Iterator[None]:
        """Give the body the step's values, and find out what it writes to them.

        With ``resumed`` it goes on where another body, whose graph it uses, has ended.
        """
        if not resumed:
            self._go_home()
        gradients = [tensor.grad for tensor in self._tensors]
        for tensor in self._tensors:
            tensor.grad = None
        yield
        with torch.no_grad():
            for i, tensor in enumerate(self._tensors):
                self._take_in(i, tensor)
                tensor.grad = _sum(gradients[i], tensor.grad)

    def _go_home(self) -> None:
        with torch.no_grad():
            for tensor, home, source in zip(self._tensors, self._homes, self._sources, strict=True):
                if not tensor.is_set_to(home):
                    tensor.data = home
                tensor.copy_(source)

    def _take_in(self, i: int, tensor: Tensor) -> None:
        source = self._sources[i]
        if tensor.shape != source.shape or tensor.dtype != source.dtype:
            raise ValueError(
                f"the forward pass turned the parameter {self._names[i]!r} of shape "
                f"{tuple(source.shape)} and {source.dtype} into one of shape "
                f"{tuple(tensor.shape)} and {tensor.dtype}, which replicas cannot follow"
            )
        written = bits.differing(tensor, source)
        read = _reached(tensor.grad, tensor)
        if not written.any():
            self.found[i].add(tensor, None, read)
        else:
            read = None if read is None else read & ~written
            self.found[i].add(tensor.detach().clone(), written, read)


def _reached(gradient: Tensor | None, like: Tensor) -> Tensor | None:
    """The elements that have a gradient."""
    if gradient is None:
        return None
    if gradient.layout == torch.strided:
        return gradient != 0
    reached = torch.zeros_like(like, dtype=torch.bool)
    reached[tuple(gradient._indices())] = True
    return reached


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The sum of two gradients of one tensor; a dense one is written in place."""
    if one is None or other is None:
        return other if one is None else one
    if one.layout == torch.strided:
        return one.add_(other)
    return one + other if other.layout != torch.strided else other.add_(one)


def close(one: Tensor, other: Tensor) -> bool:
    """Equal up to what the order of a few operations changes."""
    if not (one.is_floating_point() or one.is_complex()):
        return bool(torch.equal(one, other))
    tolerance = 16 * torch.finfo(one.dtype).eps
    return bool(torch.allclose(one, other, rtol=tolerance, atol=0.0, equal_nan=True))
