"""Restore after a failed step: values of tensors, ``.grad``, random generators."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Self

import torch
from torch import Tensor

from scatterpar.devices.bits import same_bits
from scatterpar.devices.copies import write
from scatterpar.devices.transfers import Transfers
from scatterpar.errors import restore_after
from scatterpar.threads.generators import Generators


class Undo(contextlib.AbstractContextManager["Undo"]):
    """The state before a step of all that user code and the commit may write.

    Not here: parameters, because nothing writes them before all replicas have
    succeeded, and a forward pass that does is refused
    (``replicas/parameter_guard.py``); ``.grad`` during the sub-steps
    (``set_aside`` in ``step/substeps.py``); buffers that the commit writes
    (``BufferWriter`` in ``replicas/buffers.py``).

    As a context manager, which may be entered again, it calls ``restore`` if the body
    raises::

        undo.save_values([buffer])
        with undo:
            buffer.add_(1)
            raise RuntimeError      # the buffer is as before, and the error goes on
    """

    def __init__(self, generators: Generators, transfers: Transfers) -> None:
        self._generators = generators
        self._transfers = transfers
        # Each with what it is restored to.
        self._values: list[tuple[Tensor, Tensor]] = []
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._restores: list[Callable[[], object]] = []  # of generators

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            self.restore(error)

    def save_values(self, tensors: Iterable[Tensor]) -> None:
        """Save the values of tensors that may be written before the commit is over."""
        for tensor in tensors:
            self._values.append((tensor, tensor.detach().clone()))

    def save_gradients(self, leaves: Iterable[Tensor]) -> None:
        """Save the ``.grad`` of leaves: which tensor it is, not its values."""
        for leaf in leaves:
            self._gradients.append((leaf, leaf.grad))

    def save_generator(self, generator: torch.Generator) -> None:
        """Save the state of one of the user's own random generators."""
        self._restores.append(partial(generator.set_state, generator.get_state()))

    def written(self) -> list[Tensor]:
        """The tensors with a saved value that have another value now."""
        return [
            tensor for tensor, value in self._values if not same_bits(tensor, value)
        ]

    def restore(self, error: BaseException | None = None) -> None:
        """Restore everything that was saved, and wait for pending copies.

        With ``error``, a failure becomes a note on it and the rest is restored.
        """
        restores = [self._generators.rollback, *self._restores]
        for leaf, gradient in self._gradients:
            restores.append(partial(setattr, leaf, "grad", gradient))
        for tensor, value in self._values:
            restores.append(partial(write, tensor, value))
        # Last, because it raises on a device that has failed: all else is restored.
        restores.append(self._transfers.synchronize)
        with torch.no_grad():
            restore_after(error, *restores)
