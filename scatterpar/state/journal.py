"""What each variable was, to compare it, and to restore it after calls of user code.

::

    journal = Journal(Walk(roots))
    …                      # calls of user code
    journal.changed_numbers()  # the names of numbers that are others now
    journal.restore()          # everything is what it was

    with journal.restored():
        …                  # calls of user code, and restore() between them

What refers to objects is saved by identity: containers, attributes, variables. What is
written in place is saved by the rows of ``SAVERS``, up to 64 MiB.

Three others know what has changed, because each is cheaper for its question: ``Undo``
(tensors of a step, in the hot path), ``Snapshot`` (which replicas are stale), and
``Fingerprints`` (bytes, without a copy).
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.device_ids import HOST, physical
from scatterpar.errors import restored
from scatterpar.replicas.broadcast import version
from scatterpar.replicas.snapshot import Snapshot
from scatterpar.state.savers import (
    GENERATOR,
    STORAGE,
    VALUES,
    CannotSaveError,
    Saver,
    Silent,
    copy_of_iterator,
    has_own_values,
    moves_by_calls,
    saver_of,
    substitute_for,
)
from scatterpar.state.walk import VARIABLES, Place, PlaceKind, Walk
from scatterpar.threads.generators import default_of

# Of tensors that are no buffers, and of arrays; larger ones are data.
_MAX_BYTES = 2**26


@dataclass(frozen=True)
class SavedValue:
    """A value that is written in place, and what was saved of it."""

    value: Any
    saver: Saver
    saved: Any

    @classmethod
    def of(cls, value: Any, saver: Saver) -> SavedValue:
        """Save a value. Raises ``CannotSaveError``."""
        return cls(value, saver, saver.save(value))

    def is_same(self) -> bool:
        """Whether the value is what was saved."""
        return self.saver.is_same(self.value, self.saved)

    def restore(self) -> None:
        """Make the value what was saved."""
        self.saver.restore(self.value, self.saved)


class Substituted:
    """A value that cannot be set back: another one takes its places during calls.

    Attributes:
        original: the user's value.
        present: what is in its places.
    """

    def __init__(self, value: Any, substitute: Any, places: Sequence[Place]) -> None:
        # A substitute in some of the places would move apart from the original.
        if not places or not all(place.is_writable for place in places):
            raise CannotSaveError
        self.original = value
        self.present = value
        self._places = places
        self._saved = substitute

    def is_same(self) -> bool:
        """Whether the value in the places does what the original one would do."""
        # Nobody can ask an iterator for its position, so each restore makes a copy.
        return type(self._saved) is Silent

    def restore(self) -> None:
        """Put a substitute into the places."""
        self.put(self._saved if self.is_same() else copy_of_iterator(self._saved))

    def put(self, value: Any) -> None:
        """Put a value into the places."""
        self.present = value
        for place in self._places:
            place.write(value)


class Journal:
    """All that a walk has found, and all random generators: saved now.

    Values of tensors are saved until they take ``max_bytes``, those of buffers always.
    Those of parameters in ``guarded``, by ``id``, are not: they are most of a model's
    memory, and somebody else refuses writes to them. ``None`` stands for all.

    Attributes:
        walk: the walk.
        unsaved: the names of values that calls may move, and that can neither be
            restored nor substituted: sockets, generators, iterators of libraries, files
            that are both read and written, objects with threads.
        drawn: whether a generator had moved at a ``rewind`` or ``restore``.
    """

    def __init__(
        self,
        walk: Walk,
        devices: Sequence[torch.device] = (),
        *,
        guarded: Container[int] | None = None,
        max_bytes: float = _MAX_BYTES,
    ) -> None:
        self.walk = walk
        self.unsaved: list[str] = []
        self.drawn = False
        self._generators: list[SavedValue] = []
        self._values: list[SavedValue] = []
        self._substituted: list[Substituted] = []
        # Tensors whose values are not saved, with their versions.
        self._large: list[tuple[Tensor, int]] = []
        self._variables = [place for place in walk.places if place.kind in VARIABLES]
        # Names alone, because the values are places of the walk.
        self._class_names = [(kind, {*vars(kind)}) for _, kind in walk.classes]
        self._save_default_generators(devices)
        self._save_values()
        self._save_tensors(guarded, max_bytes)
        self._save_references()

    def _save_default_generators(self, devices: Sequence[torch.device]) -> None:
        generators = [default_of(device) for device in {HOST, *map(physical, devices)}]
        # Only if user code has it: the import takes longer than a small step.
        if numpy_random := sys.modules.get("numpy.random"):
            generators.append(numpy_random)
        for generator in generators:
            self._generators.append(SavedValue.of(generator, GENERATOR))
        # ``random.getstate`` is a method of Python's generator.
        python_random: Any = random.getstate
        self._save(-1, python_random.__self__)

    def _save_values(self) -> None:
        """Save values other than tensors that are written in place."""
        for number, value in enumerate(self.walk.values):
            kind: Any = type(value)
            if _is_moved_by_calls(kind):
                self._save(number, value)
        for number in self.walk.threaded:
            self._note_unsaved(number, self.walk.values[number])

    def _save(self, number: int, value: Any) -> None:
        saver = saver_of(type(value))
        try:
            substitute = substitute_for(value)
            if substitute is not None:
                places = [place for place in self.walk.places if place.value is value]
                self._substituted.append(Substituted(value, substitute, places))
            elif saver is not None and saver.size(value) <= _MAX_BYTES:
                saved = SavedValue.of(value, saver)
                (self._generators if saver.draws else self._values).append(saved)
        except Exception:  # also of a user's object
            self._note_unsaved(number, value)

    def _note_unsaved(self, number: int, value: Any) -> None:
        name = self.walk.name_of(number)
        self.unsaved.append(f"{name} ({type(value).__name__})")

    def _save_tensors(self, guarded: Container[int] | None, max_bytes: float) -> None:
        """Save where tensors are stored, and the values that user code may write."""
        buffers: set[int] = set()
        for module in self.walk.modules:
            buffers |= {id(buffer) for buffer in module._buffers.values()}
        bytes_left = max_bytes
        for key, tensor in self.walk.tensors.items():
            if tensor.is_meta or not has_own_values(tensor):
                continue
            is_guarded = key in self.walk.weights and (
                guarded is None or key in guarded
            )
            is_buffer = key in buffers
            # The error of a chunk of a weight that was written since.
            with contextlib.suppress(RuntimeError):
                if not (is_guarded or is_buffer):
                    bytes_left -= VALUES.size(tensor)
                is_dense = tensor.layout == torch.strided and STORAGE.fits(type(tensor))
                if is_dense and tensor.is_leaf:
                    self._values.append(SavedValue.of(tensor, STORAGE))
                if is_guarded:
                    continue
                if is_buffer or bytes_left >= 0:
                    self._values.append(SavedValue.of(tensor, VALUES))
                else:
                    self._large.append((tensor, version(tensor)))

    def _save_references(self) -> None:
        """Save what containers and variables refer to."""
        self._containers = Snapshot(
            [container for _, container in self.walk.containers]
        )
        self._referents = [place.read() for place in self._variables]

    # --- what a caller asks ---

    def refers_to_same(self) -> bool:
        """Whether containers and variables refer to the same objects."""
        return self._containers.unchanged() and not any(self._changed_variables())

    def changed_numbers(self) -> list[str]:
        """The names of variables, attributes and entries with another number now.

        So are new lists, tuples and dicts with other numbers. New entries are not:
        they are those of a cache or a log, which later calls leave as they are.
        """
        names = []
        for position, container, saved in self._containers.changed():
            number, _ = self.walk.containers[position]
            is_attributes = self.walk.values[number] is not container
            if not isinstance(saved, dict):
                if _has_other_numbers(saved, container):
                    names.append(self.walk.name_of(number))
                continue
            kind = PlaceKind.ATTRIBUTE if is_attributes else PlaceKind.ENTRY
            for key, value in container.items():
                is_told = is_attributes or key in saved
                if is_told and _has_other_numbers(saved.get(key), value):
                    names.append(self.walk.name_of_entry(number, kind, key))
        for place, referent in self._changed_variables():
            if _has_other_numbers(referent, place.read()):
                names.append(self.walk.name_of_place(place))
        return list(dict.fromkeys(names))

    def _changed_variables(self) -> Iterator[tuple[Place, Any]]:
        """Yield the variables that refer to other objects, with the saved ones."""
        for place, referent in zip(self._variables, self._referents, strict=True):
            if place.read() is not referent:
                yield place, referent

    def lost(self) -> list[tuple[int, ...]]:
        """The shapes of large tensors that were written, whose values are not saved."""
        return [
            tuple(tensor.shape)
            for tensor, saved in self._large
            if version(tensor) != saved
        ]

    def rewind(self) -> None:
        """Restore the random generators."""
        # Noted here, because afterwards no state shows that numbers were drawn.
        self.drawn |= _restore(self._generators)

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything that has changed."""
        self.rewind()
        if not self._containers.unchanged():
            self._containers.restore()
        # A list, because a write changes what the next comparison reads.
        for place, referent in [*self._changed_variables()]:
            place.write(referent)
        self._restore_classes()
        _restore(self._values)
        # Last: what containers have restored is the substitute that calls have moved.
        if _restore(self._substituted):
            self._save_references()  # from now on others are in these places

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """In the body user code is called; afterwards everything is restored.

        The calls get copies of iterators, and files in memory. Others may refer to the
        user's, too, so these stay as they are.
        """
        self.begin()
        with restored(self.end):
            yield

    def begin(self) -> None:
        """Until ``end`` calls get substitutes of what cannot be set back."""
        for value in self._substituted:
            value.restore()
        if self._substituted:
            self._save_references()

    def end(self) -> None:
        """Restore everything, and put the user's values into their places."""
        self.restore()
        for value in self._substituted:
            value.put(value.original)
        if self._substituted:
            self._save_references()

    def substitutes(self) -> dict[int, Any]:
        """What is in the places of values that cannot be set back, by their ``id``."""
        return {id(value.original): value.present for value in self._substituted}

    def _restore_classes(self) -> None:
        """Remove attributes that calls have given to classes."""
        # A class has no dictionary that a snapshot could fill again.
        for kind, names in self._class_names:
            for name in vars(kind).keys() - names:
                delattr(kind, name)


@functools.lru_cache(maxsize=1024)  # values of one class are thousands
def _is_moved_by_calls(kind: type) -> bool:
    """Whether calls may move values of a class: write them in place, or read on."""
    return moves_by_calls(kind) or saver_of(kind) is not None


def _has_other_numbers(saved: Any, value: Any) -> bool:
    """Whether ``value`` is a number, or a container of numbers, unlike ``saved``."""
    if saved is value:
        return False
    if isinstance(value, dict) and isinstance(saved, dict):
        pairs = [(saved[key], value[key]) for key in saved.keys() & value.keys()]
    elif isinstance(value, (list, tuple)) and isinstance(saved, (list, tuple)):
        pairs = list(zip(saved, value, strict=False))  # what is appended is a log
    else:
        return type(value) in (int, float) and bool(value != saved)
    return any(starmap(_has_other_numbers, pairs))


def _restore(values: Sequence[SavedValue | Substituted]) -> bool:
    """Restore values that have changed. Returns whether there were any."""
    changed = [value for value in values if not value.is_same()]
    for value in changed:
        value.restore()
    return bool(changed)
