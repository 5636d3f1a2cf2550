"""How values that are written in place are saved, compared and restored.

``SAVERS`` is the table, by class; ``STORAGE`` and ``VALUES`` are its rows for tensors.
Values that cannot be set back have no row: ``substitute_for`` makes others that take
their places, such as a copy of an iterator, and for a file an object that does nothing.
"""

from __future__ import annotations

import array
import io
import os
import pickle
import queue
import random
import sys
import types
import warnings
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import pieces_of, write
from scatterpar.state.whose import Whose, is_writer, whose


class CannotSaveError(Exception):
    """A value has no row in the table, or cannot be saved in its present state."""


class Saver:
    """A row of the table.

    Attributes:
        draws: whether the values are sources of random numbers.
    """

    draws = False

    def fits(self, kind: type) -> bool:
        """Whether this row is for values of a class."""
        raise NotImplementedError

    def size(self, value: Any) -> int:
        """The bytes that are saved, if they may be many."""
        return 0

    def save(self, value: Any) -> Any:
        """What is saved of a value. Raises ``CannotSaveError``."""
        raise NotImplementedError

    def is_same(self, value: Any, saved: Any) -> bool:
        """Whether a value is what was saved."""
        return bool(self.save(value) == saved)

    def restore(self, value: Any, saved: Any) -> None:
        """Make a value what was saved."""
        raise NotImplementedError


class _PythonRandom(Saver):
    draws = True

    def fits(self, kind: type) -> bool:
        return issubclass(kind, random.Random)

    def save(self, value: Any) -> Any:
        return value.getstate()

    def restore(self, value: Any, saved: Any) -> None:
        value.setstate(saved)


class _GeneratorState(Saver):
    """torch's generators, and NumPy's with a Mersenne twister."""

    draws = True

    def fits(self, kind: type) -> bool:
        return issubclass(kind, torch.Generator) or _is_numpy_random(kind, "set_state")

    def save(self, value: Any) -> Any:
        return value.get_state()

    def is_same(self, value: Any, saved: Any) -> bool:
        state = value.get_state()
        if isinstance(state, Tensor):
            return same_bits(state, saved)
        return pickle.dumps(state) == pickle.dumps(saved)  # there are arrays in it

    def restore(self, value: Any, saved: Any) -> None:
        value.set_state(saved)


class _NumpyGenerator(Saver):
    draws = True

    def fits(self, kind: type) -> bool:
        # Its methods are those of its bit generator, which has the state.
        return _is_numpy_random(kind, "bit_generator")

    def save(self, value: Any) -> Any:
        return pickle.dumps(value.bit_generator.state)  # there are arrays in it

    def restore(self, value: Any, saved: Any) -> None:
        value.bit_generator.state = pickle.loads(saved)


def _is_numpy_random(kind: type, method: str) -> bool:
    return kind.__module__.startswith("numpy.random") and hasattr(kind, method)


class _NumpyArray(Saver):
    def fits(self, kind: type) -> bool:
        # By its protocol, because this package does not import NumPy.
        return hasattr(kind, "__array_interface__") and hasattr(kind, "flags")

    def size(self, value: Any) -> int:
        return int(value.nbytes)

    def save(self, value: Any) -> Any:
        return value.copy()

    def is_same(self, value: Any, saved: Any) -> bool:
        if value.dtype.hasobject:
            return all(map(is_, value.flat, saved.flat))
        return bool(value.tobytes() == saved.tobytes())  # a NaN equals itself

    def restore(self, value: Any, saved: Any) -> None:
        value[...] = saved


class _Bytes(Saver):
    def fits(self, kind: type) -> bool:
        return issubclass(kind, (bytearray, array.array))

    def size(self, value: Any) -> int:
        return memoryview(value).nbytes

    def save(self, value: Any) -> Any:
        return value[:]

    def restore(self, value: Any, saved: Any) -> None:
        value[:] = saved


class _TextInMemory(Saver):
    def fits(self, kind: type) -> bool:
        # Before files, which these are, too.
        return issubclass(kind, (io.StringIO, io.BytesIO))

    def save(self, value: Any) -> Any:
        return value.getvalue(), value.tell()

    def restore(self, value: Any, saved: Any) -> None:
        text, position = saved
        value.seek(0)
        value.truncate()
        value.write(text)
        # Last, because writing has moved it.
        value.seek(position)


class _FileThatIsRead(Saver):
    """A file that cannot be written: its position."""

    def fits(self, kind: type) -> bool:
        return issubclass(kind, io.IOBase)

    def save(self, value: Any) -> Any:
        # What a terminal has shown stays, and has no position.
        if value.closed or _is_of_terminal(value):
            return None
        if value.writable() or not value.seekable():
            raise CannotSaveError
        return value.tell()

    def restore(self, value: Any, saved: Any) -> None:
        if saved is not None:
            value.seek(saved)


class _Storage(Saver):
    """Where a leaf is stored: a forward pass may exchange its memory."""

    def fits(self, kind: type) -> bool:
        # Exactly these: a subclass need not have a storage.
        return kind in (Tensor, nn.Parameter, nn.Buffer)

    def save(self, value: Any) -> Any:
        return value.data

    def is_same(self, value: Any, saved: Any) -> bool:
        # The same memory, strides and shape: equal values would not be enough.
        return bool(value.data.is_set_to(saved))

    def restore(self, value: Any, saved: Any) -> None:
        value.data = saved


class _Values(Saver):
    """The values of a tensor, in the memory that it has now."""

    def fits(self, kind: type) -> bool:
        return issubclass(kind, Tensor)

    def size(self, value: Any) -> int:
        return int(value.numel() * value.element_size())

    def save(self, value: Any) -> Any:
        values = value.detach()
        # A write to a sparse tensor exchanges its pieces, which a detached one keeps.
        written = values if value.layout == torch.strided else value
        return written, values.clone()

    def is_same(self, value: Any, saved: Any) -> bool:
        return same_bits(*saved)

    def restore(self, value: Any, saved: Any) -> None:
        write(*saved)


STORAGE = _Storage()
VALUES = _Values()


def has_own_values(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read, compared and written as a whole.

    Not those of quantised or nested ones, of subclasses that consist of others, and of
    tensors whose elements share memory, as after ``expand``.
    """
    if tensor.is_quantized or tensor.is_nested:
        return False
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    if tensor.layout != torch.strided:  # sparse, or one of oneDNN's
        return len(pieces_of(tensor)) > 1
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size <= 1 for size, stride in dimensions)


GENERATOR = _GeneratorState()

# The first row that fits counts.
SAVERS: tuple[Saver, ...] = (
    _PythonRandom(),
    GENERATOR,
    _NumpyGenerator(),
    _NumpyArray(),
    _Bytes(),
    _TextInMemory(),
    _FileThatIsRead(),
)


def saver_of(kind: type) -> Saver | None:
    """The row for values of a class; ``None`` if there is none."""
    return next((saver for saver in SAVERS if saver.fits(kind)), None)


class Silent:
    """A file, writer or logger, or an object of one, in a look: its methods do nothing.

    Methods that return something, by their name, and attributes are the writer's.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # for isinstance(self.logger, TensorBoardLogger)
        return type(self._target)

    def __call__(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if callable(value) and name.startswith(("get", "is_", "has_")):
            return value
        if value is None or isinstance(value, (bool, int, float, str, os.PathLike)):
            return value
        return Silent(value)


def substitute_for(value: Any) -> Any:
    """What calls get in the place of a value that cannot be set back.

    For a writer, or a file that is only written: an object that does nothing. For an
    iterator: a copy at the same position. ``None``: calls get the value itself.

    Raises:
        CannotSaveError: calls move it, and it has no copy, such as a socket.
    """
    if isinstance(value, io.IOBase):  # it gives its lines, as an iterator
        return Silent(value) if _is_only_written(value) else None
    if is_writer(type(value)):
        return Silent(value)
    if moves_by_calls(type(value)) and not _is_of_user(value):
        return copy_of_iterator(value)
    return None


def _is_only_written(file: io.IOBase) -> bool:
    if file.closed or _is_of_terminal(file):
        return False
    return file.writable() and not file.readable()


def moves_by_calls(kind: type) -> bool:
    """Whether values of a class are iterators, coroutines, sockets, plain queues, or
    writers.

    Files are among the iterators.
    """
    if hasattr(kind, "__next__"):
        return True
    if issubclass(kind, (types.CoroutineType, queue.SimpleQueue)):
        return True
    if is_writer(kind):
        return True
    # Only if user code has it: the import of sockets takes longer than a small step.
    sockets = sys.modules.get("_socket")
    return sockets is not None and issubclass(kind, sockets.socket)


def _is_of_terminal(file: Any) -> bool:
    return file in (sys.stdin, sys.stdout, sys.stderr)


def _is_of_user(value: Any) -> bool:
    return whose(value) is Whose.USER


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator whose position no attribute of the user's has."""
    return hasattr(type(value), "__next__") and not _is_of_user(value)


def copy_of_iterator(iterator: Any) -> Any:
    """An iterator of Python at the same position, with copies of those inside it.

    Raises:
        CannotSaveError: it cannot be copied, as a generator, or another library's.
    """
    # As pickle would, but without a copy of the items.
    make, args, *states = _position(iterator)
    copied = make(*_copied(args))
    for state in states:
        if state is not None:
            # A cycle appends its first round to a list in its state.
            copied.__setstate__(_copied(state, lists=True))
    return copied


def _copied(state: Any, *, lists: bool = False) -> Any:
    """A state with copies of the iterators in it, and of its lists."""
    if isinstance(state, tuple):
        return tuple(_copied(part, lists=lists) for part in state)
    if lists and isinstance(state, list):
        return list(state)
    return copy_of_iterator(state) if _is_iterator(state) else state


def _position(iterator: Any) -> tuple[Any, ...]:
    """How to make an iterator of the same items, and the state that it then gets."""
    is_of_python = type(iterator).__module__ in ("builtins", "itertools")
    # A copy of a dictionary's or set's iterator is one of a list.
    is_other = type(iterator).__name__.startswith(("dict", "odict", "set", "generator"))
    if is_other or not is_of_python:
        raise CannotSaveError
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, in 3.12
        try:
            position: tuple[Any, ...] = iterator.__reduce__()
        except TypeError:  # as of itertools in Python 3.14
            raise CannotSaveError from None
    return position
