"""The values of variables before calls of user code, to compare and restore them.

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
import sys
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices.default_generators import default_of
from scatterpar.devices.virtual_devices import HOST, physical
from scatterpar.devices.write_counters import version
from scatterpar.errors import defect, restored
from scatterpar.objects.savers import (
    Saved,
    TensorStorage,
    TensorValues,
    has_own_storage,
    has_own_values,
    saver_of,
)
from scatterpar.objects.snapshot import Snapshot, entries_of
from scatterpar.objects.walk import VARIABLES, Place, PlaceKind, Walk

# Of tensors that are no buffers, and of arrays; larger ones are data.
_MAX_SAVED_BYTES = 2**26
_WITH_ENTRIES = dict, list, tuple


class _SavedReferences:
    """Record the values to which the containers and variables of a walk refer now."""

    def __init__(self, walk: Walk) -> None:
        self.containers = Snapshot([container for *_, container in walk.containers])
        self._variables = [place for place in walk.places if place.kind in VARIABLES]
        self._referents = [place.read() for place in self._variables]

    def changed_variables(self) -> Iterator[tuple[Place, Any]]:
        """Yield the variables that refer to other objects, with the saved ones."""
        for place, referent in zip(self._variables, self._referents, strict=True):
            if place.read() is not referent:
                yield place, referent

    def is_same(self) -> bool:
        """Whether all refer to the same objects."""
        return self.containers.unchanged() and not any(self.changed_variables())

    def restore(self) -> None:
        """Let all refer to the same objects again."""
        if not self.containers.unchanged():
            self.containers.restore()
        for place, referent in self.changed_variables():
            place.write(referent)


def host_generators() -> dict[str, Any]:
    """The default generators of Python and NumPy, by the names of their modules."""
    generators: dict[str, Any] = {}
    # Functions of these modules are methods of a generator.
    for module, name in (("random", "getstate"), ("numpy.random", "get_state")):
        # Only if user code has NumPy: the import takes longer than a small step.
        if module in sys.modules:
            generators[module] = getattr(sys.modules[module], name).__self__
    return generators


class Journal:
    """All that a walk has found, and all random generators: saved now.

    Values of tensors are saved until they take ``max_bytes``, those of buffers always.
    Those of parameters in ``guarded``, by ``id``, are not: they are most of a model's
    memory, and somebody else refuses writes to them. ``None`` stands for all.

    Attributes:
        walk: the walk.
        unsaved: the names of values that calls may move, and that cannot be restored:
            iterators, generators, sockets, writers, files that are written, objects
            with threads.
        drawn: true from the first ``rewind`` or ``restore`` on that finds a generator
            moved.
    """

    def __init__(
        self,
        walk: Walk,
        devices: Sequence[torch.device] = (),
        *,
        guarded: Container[int] | None = None,
        max_bytes: float = _MAX_SAVED_BYTES,
    ) -> None:
        self.walk = walk
        self.unsaved: list[str] = []
        self.drawn = False
        self._generators: list[Saved] = []
        self._values: list[Saved] = []
        # Tensors whose values are not saved, with their versions.
        self._large: list[tuple[Tensor, int]] = []
        self._kinds = [(module, type(module)) for module in walk.modules]
        # Names alone, because the values are places of the walk.
        self._class_names = [(kind, {*vars(kind)}) for kind in walk.classes]
        self._save_default_generators(devices)
        self._save_values()
        self._save_tensors(guarded, max_bytes)
        self._references = _SavedReferences(walk)

    def _save_default_generators(self, devices: Sequence[torch.device]) -> None:
        for device in {HOST, *map(physical, devices)}:
            self._save_given(f"the default generator of {device}", default_of(device))
        for module, generator in host_generators().items():
            self._save_given(f"the default generator of {module}", generator)

    def _save_given(self, name: str, value: Any) -> None:
        """Save a value that this package names: it has a row, or a row is missing.

        Values of a walk are of any class, and most need none.
        """
        kind: Any = type(value)
        if saver_of(kind) is None:
            title = f"{name} ({kind.__name__})"
            defect(f"{title} is not put back: no row of SAVERS is for its class")
            self.unsaved.append(title)
            return
        self._save(value)

    def _save_values(self) -> None:
        """Save values other than tensors that are written in place."""
        unsaved = [*self.walk.threaded]
        for number, value in enumerate(self.walk.values):
            try:
                self._save(value)
            except Exception:  # also of a user's object
                unsaved.append(number)
        for number in unsaved:
            name = self.walk.name_of(number)
            self.unsaved.append(f"{name} ({type(self.walk.values[number]).__name__})")

    def _save(self, value: Any) -> None:
        kind: Any = type(value)
        saver = saver_of(kind)
        if saver is None or saver.size(value) > _MAX_SAVED_BYTES:
            return
        saved = saver(value)
        if saved.state is not None:
            values = self._generators if saver.draws else self._values
            values.append(saved)

    def _save_tensors(self, guarded: Container[int] | None, bytes_left: float) -> None:
        """Save where tensors are stored, and the values that user code may write."""
        buffers: set[int] = set()
        for module in self.walk.modules:
            buffers |= {id(buffer) for buffer in module._buffers.values()}
        for key, tensor in self.walk.tensors.items():
            if not has_own_values(tensor):
                continue
            # The error of a chunk of a weight that was written since.
            with contextlib.suppress(RuntimeError):
                if has_own_storage(tensor):
                    self._values.append(TensorStorage(tensor))
                if key in self.walk.weights and (guarded is None or key in guarded):
                    continue
                if key not in buffers:
                    bytes_left -= tensor.numel() * tensor.element_size()
                if key in buffers or bytes_left >= 0:
                    self._values.append(TensorValues(tensor))
                else:
                    self._large.append((tensor, version(tensor)))

    # --- what a caller asks ---

    def refers_to_same(self) -> bool:
        """Whether containers and variables refer to the same objects."""
        return self._references.is_same()

    def changed_numbers(self) -> list[str]:
        """The names of variables, attributes and entries with another number now.

        So are new lists, tuples and dicts with other numbers. New entries are not:
        they are those of a cache or a log, which later calls leave as they are.
        """
        names = []
        for position, container, saved in self._references.containers.changed():
            number, kind, _ = self.walk.containers[position]
            if not isinstance(saved, dict):
                if _has_other_numbers(saved, container):
                    names.append(self.walk.name_of(number))
                continue
            for key, value in container.items():
                is_told = kind is PlaceKind.ATTRIBUTE or key in saved
                if is_told and _has_other_numbers(saved.get(key), value):
                    place = Place(kind, container, key, value, number)
                    names.append(self.walk.name_of_place(place))
        for place, referent in self._references.changed_variables():
            if _has_other_numbers(referent, place.read()):
                names.append(self.walk.name_of_place(place))
        return list(dict.fromkeys(names))

    def moved(self) -> str:
        """Describe the state that calls have moved; empty if only tensors.

        What they take from an iterator or write to a file cannot be told, so each of
        these counts.
        """
        names = [*self.unsaved, *self.changed_numbers()]
        for saved in chain(self._values, self._generators):
            is_tensor = isinstance(saved, (TensorStorage, TensorValues))
            # The state of a generator of torch, which replays move, is a tensor.
            if not (is_tensor or isinstance(saved.state, Tensor) or saved.is_same()):
                names.append(type(saved.value).__name__)
        if not names and not self.refers_to_same():
            names.append("an object")
        return ", ".join(names)

    def lost(self) -> list[tuple[int, ...]]:
        """The shapes of large tensors that were written, whose values are not saved."""
        return [
            tuple(tensor.shape)
            for tensor, saved in self._large
            if version(tensor) != saved
        ]

    def rewind(self) -> None:
        """Restore the random generators."""
        moved = [saved for saved in self._generators if not saved.is_same()]
        # Noted here, because afterwards no state shows that numbers were drawn.
        self.drawn |= bool(moved)
        for saved in moved:
            saved.restore()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """In the body user code is called; afterwards everything is restored."""
        with restored(self.restore):
            yield

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything that has changed. Calls may go on."""
        self.rewind()
        self._references.restore()
        self._restore_classes()
        for saved in self._values:
            if not saved.is_same():
                saved.restore()

    def _restore_classes(self) -> None:
        """Remove attributes that calls have given to classes, and restore modules'."""
        # A class has no dictionary that a snapshot could fill again.
        for kind, names in self._class_names:
            for name in vars(kind).keys() - names:
                delattr(kind, name)
        # Calls may have given modules another one, as a parametrization does.
        for module, kind in self._kinds:
            if type(module) is not kind:
                module.__class__ = kind


def _has_other_numbers(saved: Any, value: Any) -> bool:
    """Whether ``value`` is a number, or a container of numbers, unlike ``saved``."""
    if saved is value:
        return False
    if not isinstance(value, _WITH_ENTRIES) or not isinstance(saved, _WITH_ENTRIES):
        return type(value) in (int, float) and bool(value != saved)
    entries = dict(entries_of(saved))
    for key, entry in entries_of(value):
        # What is appended is a log.
        if key in entries and _has_other_numbers(entries[key], entry):
            return True
    return False
