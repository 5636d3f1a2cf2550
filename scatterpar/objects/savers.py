"""Save, compare and restore values that are written in place.

``SAVERS`` has the rows of the table, by class, except those of tensors. Values that
cannot be set back, such as iterators, files that are written, writers and queues of
processes, have rows that refuse them.
"""

from __future__ import annotations

import array
import functools
import io
import pickle
import random
import sys
import types
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.bits import pieces_of, same_bits
from scatterpar.devices.copies import write
from scatterpar.devices.default_generators import AcceleratorGenerator
from scatterpar.libraries import package_of
from scatterpar.objects.references import is_array
from scatterpar.objects.whose import Whose, is_writer, whose


class CannotSaveError(Exception):
    """A value has no row in the table, or cannot be saved in its present state."""


class Saved:
    """A value that is written in place, and its saved state.

    Subclasses are the rows of the table.

    Attributes:
        kinds: the classes of values that a row is for.
        draws: whether the values are sources of random numbers.
        value: the value.
        state: what was saved of it; ``None`` if it needs no restoring.
    """

    kinds: tuple[type, ...] = ()
    draws = False

    def __init__(self, value: Any) -> None:
        """Save a value. Raises ``CannotSaveError``."""
        self.value = value
        self.state = self.read()

    @classmethod
    def fits(cls, kind: type) -> bool:
        """Whether this row is for values of a class."""
        return issubclass(kind, cls.kinds)

    @classmethod
    def size(cls, value: Any) -> int:
        """The bytes of a value that may be data; 0 of one that is none."""
        return 0

    def read(self) -> Any:
        """The present state of the value."""
        raise NotImplementedError

    def is_same(self) -> bool:
        """Whether the value is what was saved."""
        return bool(self.read() == self.state)

    def restore(self) -> None:
        """Make the value what was saved."""
        raise NotImplementedError


class _Writer(Saved):
    """The lines that it was given stay in its file."""

    @classmethod
    def fits(cls, kind: type) -> bool:
        return is_writer(kind)

    def read(self) -> Any:
        raise CannotSaveError


class _PythonRandom(Saved):
    kinds = (random.Random,)
    draws = True

    def read(self) -> Any:
        return self.value.getstate()

    def restore(self) -> None:
        self.value.setstate(self.state)


class _TorchRandom(Saved):
    kinds = (torch.Generator, AcceleratorGenerator)
    draws = True

    def read(self) -> Any:
        return self.value.get_state()

    def is_same(self) -> bool:
        return same_bits(self.read(), self.state)

    def restore(self) -> None:
        self.value.set_state(self.state)


# One of these tells a generator from NumPy's other classes, such as seeds.
_OF_NUMPYS_GENERATORS = "bit_generator", "set_state", "random_raw"


class _NumpyRandom(Saved):
    """A generator of NumPy, or a source of bits, whose state that of a new one is."""

    draws = True

    @classmethod
    def fits(cls, kind: type) -> bool:
        if not any(hasattr(kind, name) for name in _OF_NUMPYS_GENERATORS):
            return False
        # By name, because this package does not import NumPy.
        return any(package_of(base) == "numpy" for base in kind.__mro__)

    def read(self) -> Any:
        source = self._source()
        is_old = hasattr(source, "get_state")
        state = source.get_state() if is_old else source.state
        # There are arrays in it. ``spawn`` counts in the sequence of seeds.
        return pickle.dumps(state), _own_state(_seeds_of(source))

    def restore(self) -> None:
        source = self._source()
        state = pickle.loads(self.state[0])
        if hasattr(source, "set_state"):
            source.set_state(state)
        else:
            source.state = state
        # The same sequence, because user code may share it.
        _set_own_state(_seeds_of(source), self.state[1])

    def _source(self) -> Any:
        """The object that has the state."""
        return getattr(self.value, "bit_generator", self.value)


def _seeds_of(source: Any) -> Any:
    """The sequence of seeds of a source of bits; ``None`` if it has none."""
    return getattr(source, "seed_seq", None)  # NumPy before 1.25 does not show it


class _NumpyArray(Saved):
    @classmethod
    def fits(cls, kind: type) -> bool:
        return is_array(kind)

    @classmethod
    def size(cls, value: Any) -> int:
        return int(value.nbytes)

    def read(self) -> Any:
        return self.value.copy()

    def is_same(self) -> bool:
        # The bytes of these strings are where they lie, and they are written there.
        if self.value.dtype.kind == "T":
            return [*self.value.flat] == [*self.state.flat]
        # A NaN equals itself. The bytes of objects are their addresses.
        return bool(self.value.tobytes() == self.state.tobytes())

    def restore(self) -> None:
        self.value[...] = self.state


class _Bytes(Saved):
    kinds = (bytearray, array.array)

    @classmethod
    def size(cls, value: Any) -> int:
        return memoryview(value).nbytes

    def read(self) -> Any:
        return self.value[:]

    def restore(self) -> None:
        self.value[:] = self.state


_POINTERS = frozenset("&OPXZz")


class _View(Saved):
    """Memory of a fixed size. A view of pointers is left alone."""

    kinds = (memoryview,)

    @classmethod
    def size(cls, value: Any) -> int:
        try:
            return int(value.nbytes)
        except ValueError:  # the view was released
            return 0

    def read(self) -> Any:
        if not self.size(self.value) or self.value.readonly:
            return None
        if not _POINTERS.isdisjoint(self.value.format):
            return None
        return self.value.cast("B").tobytes()  # raises for a view with gaps

    def restore(self) -> None:
        self.value.cast("B")[:] = self.state


class _TextInMemory(Saved):
    kinds = (io.StringIO, io.BytesIO)  # before files, which these are, too

    def read(self) -> Any:
        return self.value.getvalue(), self.value.tell()

    def restore(self) -> None:
        text, position = self.state
        self.value.seek(0)
        self.value.truncate()
        self.value.write(text)
        # Last, because writing has moved it.
        self.value.seek(position)


class _File(Saved):
    """The position of a file that is read. What is written into a file stays."""

    kinds = (io.IOBase,)

    def read(self) -> Any:
        file = self.value
        # What a terminal has shown stays, and has no position.
        if file.closed or file in (sys.stdin, sys.stdout, sys.stderr):
            return None
        if file.writable() or not file.seekable():
            raise CannotSaveError
        return file.tell()

    def restore(self) -> None:
        self.value.seek(self.state)


# Classes of what has gone elsewhere, by module. These are not imported for a look: that
# takes longer than a small step.
_CHANNELS = (
    ("_queue", "SimpleQueue"),
    ("_socket", "socket"),
    ("sqlite3", "Connection"),
    ("multiprocessing.connection", "_ConnectionBase"),
    ("multiprocessing.queues", "Queue"),
    ("multiprocessing.queues", "SimpleQueue"),
)


class _Iterator(Saved):
    """Nobody can set an iterator back, nor a coroutine, a socket or a queue."""

    @classmethod
    def fits(cls, kind: type) -> bool:
        if issubclass(kind, types.CoroutineType) or hasattr(kind, "__next__"):
            return True
        channels = [
            getattr(sys.modules.get(module), name, ()) for module, name in _CHANNELS
        ]
        return issubclass(kind, tuple(channels))

    def read(self) -> Any:
        # The position of the user's own iterator is in its attributes.
        is_iterator = hasattr(self.value, "__next__")
        if not (is_iterator and _is_of_user(self.value)):
            raise CannotSaveError


class _OwnState(Saved):
    """An object in C without attributes that gives copies its state, and takes it back.

    NumPy's sequence of seeds is one.
    """

    @classmethod
    def fits(cls, kind: type) -> bool:
        setter = getattr(kind, "__setstate__", None)
        # Python's functions are code of the user or a library, with attributes.
        if setter is None or isinstance(setter, types.FunctionType):
            return False
        # What torch has in C is packed weights and programs, whose copies are large.
        if kind.__dictoffset__ or package_of(kind) == "torch":
            return False
        # What is compared by its value is a constant.
        compares: Any = kind.__hash__
        return compares in (None, object.__hash__)

    def read(self) -> Any:
        return _own_state(self.value)

    def restore(self) -> None:
        _set_own_state(self.value, self.state)


def _own_state(value: Any) -> bytes | None:
    """The state that an object gives to its copies; ``None`` if it gives none."""
    try:
        reduced = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        has_state = len(reduced) > 2 and reduced[2] is not None
        return pickle.dumps(reduced[2]) if has_state else None
    except Exception:  # it cannot be copied
        return None


def _set_own_state(value: Any, state: bytes | None) -> None:
    if state is not None:
        value.__setstate__(pickle.loads(state))


class TensorStorage(Saved):
    """Where a leaf is stored: a forward pass may exchange its memory."""

    def read(self) -> Any:
        """The tensor that has the memory."""
        return self.value.data

    def is_same(self) -> bool:
        """Whether the memory, strides and shape are the same."""
        # Equal values would not be enough.
        return bool(self.value.data.is_set_to(self.state))

    def restore(self) -> None:
        """Put the memory back."""
        self.value.data = self.state


class TensorValues(Saved):
    """The values of a tensor, in the memory that it has now."""

    def read(self) -> Any:
        """Save the tensors that are written, and a copy of their values."""
        values = self.value.detach()
        # A write to a sparse tensor exchanges its pieces, which a detached one keeps.
        written = values if values.layout == torch.strided else self.value
        return written, values.clone()

    def is_same(self) -> bool:
        """Whether the bits are the same."""
        return same_bits(*self.state)

    def restore(self) -> None:
        """Write the values."""
        write(*self.state)


def has_own_storage(tensor: Tensor) -> bool:
    """Whether a tensor is a leaf whose memory may be exchanged."""
    # Exactly these classes: a subclass need not have a storage.
    is_plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    return is_plain and tensor.is_leaf and tensor.layout == torch.strided


def has_own_values(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read, compared and written as a whole.

    Not those of meta, quantised or nested ones, of subclasses that consist of others,
    and of tensors whose elements share memory, as after ``expand``.
    """
    if tensor.is_meta or tensor.is_quantized or tensor.is_nested:
        return False
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    if tensor.layout != torch.strided:  # sparse, or one of oneDNN's
        return len(pieces_of(tensor)) > 1
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return all(stride or size <= 1 for size, stride in dimensions)


# The first row that fits counts.
SAVERS: tuple[type[Saved], ...] = (
    _Writer,
    _PythonRandom,
    _TorchRandom,
    _NumpyRandom,
    _NumpyArray,
    _Bytes,
    _View,
    _TextInMemory,
    _File,
    _Iterator,
    _OwnState,
)


@functools.lru_cache(maxsize=1024)  # values of one class are thousands
def saver_of(kind: Any) -> type[Saved] | None:
    """The row for values of a class; ``None`` if calls do not move these."""
    return next((saver for saver in SAVERS if saver.fits(kind)), None)


def _is_of_user(value: Any) -> bool:
    return whose(value) is Whose.USER
