"""Values of parameters, saved when a call of a look is about to write them.

::

    saved_writes = SavedWrites(parameters, note)
    with saved_writes.watching():
        …                       # calls, and their backward passes
    saved_writes.restore()      # the parameters are as they were

Parameters are most of a model's memory, and calls seldom write one. So a copy is made
only of what an operator writes: of the average of a momentum encoder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.copies import write
from scatterpar.torch_private.random_key import random_key_as_outside
from scatterpar.torch_private.thread_modes import OperatorMode


class SavedWrites:
    """Saves values of ``parameters`` before they are written.

    Args:
        parameters: in several memories, some of them in one.
        note: is called with each that is written, once.
    """

    def __init__(
        self, parameters: Iterable[Tensor], note: Callable[[Tensor], object]
    ) -> None:
        self._note = note
        # By memory, for views such as ``parameter.data``.
        self._by_memory: dict[int, list[Tensor]] = {}
        for parameter in parameters:
            self._by_memory.setdefault(_memory_of(parameter), []).append(parameter)
        self._by_memory.pop(0, None)
        # Tensors that are written, and their values before.
        self._saved: list[tuple[Tensor, Tensor]] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the body, operators of this thread are watched."""
        if not self._by_memory:
            yield
            return
        with _WrittenArguments(self._save):
            yield

    def _save(self, written: Tensor) -> None:
        for parameter in self._by_memory.pop(_memory_of(written), ()):
            # The user's and a replica's may be the same memory.
            if not any(parameter.is_set_to(other) for other, _ in self._saved):
                self._saved.append((parameter, parameter.detach().clone()))
            self._note(parameter)

    def restore(self) -> None:
        """Restore the values of what was written."""
        with torch.no_grad():
            for parameter, value in self._saved:
                write(parameter, value)


class _WrittenArguments(OperatorMode):
    """Calls ``save`` with each tensor that an operator is about to write."""

    def __init__(self, save: Callable[[Tensor], object]) -> None:
        super().__init__()
        self._save_before = save

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        arguments = kwargs or {}
        if func._schema.is_mutable:
            for tensor in _written(func._schema, args, arguments):
                self._save_before(tensor)
        with random_key_as_outside():
            return func(*args, **arguments)


def _written(
    schema: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[Tensor]:
    """Yield the tensors that an operator writes."""
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from nested.tensors(value)


def _memory_of(tensor: Tensor) -> int:
    """Where a tensor is stored; 0 if it is not in one place."""
    if tensor.layout is not torch.strided:
        return 0
    return tensor.untyped_storage().data_ptr()
