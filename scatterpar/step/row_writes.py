"""Find the tensors of a batch that user code writes, and warn once by name.

::

    state.copy_(new.detach())      in forward: the caller's tensor keeps its values
    targets["seen"].add_(1)        in a criterion: so does this one
    net(rows.div_(255))            what the call itself reads: told if the next step
                                   gets the same tensor

Nobody need read the rows again, so none is refused.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.markers import Marker
from scatterpar.devices.memory import storage_address
from scatterpar.devices.written_tensors import WrittenTensors
from scatterpar.errors import Told, warn
from scatterpar.torch_private.autograd import saved_tensors

RowAccess = tuple[str, str]  # who has written, and what
_WRITES_ARE_LOST = (
    "The replicas write into copies, and your tensors keep their old values; nothing "
    "to do if you do not need the new values. If you need them, return them from "
    "forward with return_outputs=True, and write them into your tensors after the step."
)


class KnownWrites:
    """The writes of calls so far, of one engine or of the pair.

    Attributes:
        told: the entries that were told.
        read: entries that the calls themselves read after they have written them, with
            the tensors of the last call that the caller has passed.
    """

    def __init__(self) -> None:
        self.told = Told()
        self.read: dict[RowAccess, list[weakref.ref[Tensor]]] = {}

    def __reduce__(self) -> Any:
        return KnownWrites, ()  # a copy tells again


class WatchedCall:
    """One call of user code; ``result`` is what it has returned."""

    result: Any = None


class RowWrites:
    """The entries of inputs and targets that user code has written in one step.

    Replicas' threads share it.
    """

    def __init__(self, known: KnownWrites) -> None:
        self._known = known
        self._lost: set[RowAccess] = set()
        self._read: set[RowAccess] = set()

    @contextlib.contextmanager
    def watched(self, writer: str, part: str, value: Any) -> Iterator[WatchedCall]:
        """In the body user code, ``writer``, gets ``value``, which is called ``part``.

        Inference tensors do not count how often they are written: of these nothing is
        known.
        """
        tensors = WrittenTensors(nested.tensors(value))
        tensors.begin(compares_bits=False)
        watch = WatchedCall()
        yield watch
        counted = tensors.written().counted
        if counted:
            written = [tensors.tensors[position] for position in sorted(counted)]
            self._note(writer, part, value, written, watch.result)

    def _note(
        self,
        writer: str,
        part: str,
        value: Any,
        written: list[Tensor],
        result: Any,
    ) -> None:
        """Note the entries of ``value`` that have the ``written`` tensors."""
        keys = set(map(id, written))
        names: dict[str, list[Tensor]] = {}
        for name, entry in _entries(part, value):
            of_entry = [t for t in nested.tensors(entry) if id(t) in keys]
            if of_entry:
                names[name] = of_entry
        # User code may have taken the entry out of its container.
        names = names or {part: written}
        memory: set[int] = set()
        for name, of_entry in names.items():
            # Asked once: the graph is large.
            if (writer, name) not in self._known.read:
                memory = memory or _memory_read_by(result)
                if any(storage_address(tensor) not in memory for tensor in of_entry):
                    self._lost.add((writer, name))
                    continue
            self._read.add((writer, name))

    def tell(self, inputs: Any = None) -> None:
        """Warn of the entries that no earlier call has written.

        What calls read themselves is told if the last step had the same tensor among
        the ``inputs`` that the caller passes. Targets are data, which it may well be.
        """
        passed = dict(_entries("inputs", inputs))
        for written in self._read - self._lost:
            tensors = _passed_tensors(passed.get(written[1]))
            earlier = [of_last() for of_last in self._known.read.get(written, [])]
            if any(tensor is last for tensor in tensors for last in earlier):
                self._lost.add(written)
            self._known.read[written] = [weakref.ref(tensor) for tensor in tensors]
        for writer in sorted({writer for writer, _ in self._lost}):
            names = sorted(name for by, name in self._lost if by == writer)
            mark = self._known.told.mark
            new_names = [name for name in names if mark((writer, name))]
            if new_names:
                places = ", ".join(new_names)
                warn(f"{writer} writes {places} in place. {_WRITES_ARE_LOST}")


def _memory_read_by(result: Any) -> set[int]:
    """The addresses of what the graph of ``result`` has saved for a backward pass.

    Autograd refuses to use a tensor that was written after it was saved.
    """
    return set(map(storage_address, saved_tensors(nested.tensors(result))))


def _passed_tensors(value: Any) -> list[Tensor]:
    """Every tensor of a value that the caller passes, also inside markers."""
    tensors: list[Tensor] = []
    for atom in nested.atoms(value):
        inner = atom.atoms() if isinstance(atom, Marker) else [atom]
        tensors += [leaf for leaf in inner if isinstance(leaf, Tensor)]
    return tensors


def _entries(part: str, value: Any) -> list[tuple[str, Any]]:
    """The entries of ``value``, with their names; ``value`` itself if it has none."""
    if isinstance(value, Mapping):
        return [(f"{part}[{key!r}]", entry) for key, entry in value.items()]
    if isinstance(value, (tuple, list)):
        return [(f"{part}[{number}]", entry) for number, entry in enumerate(value)]
    return [(part, value)]
