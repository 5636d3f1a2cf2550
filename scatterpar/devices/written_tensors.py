"""Which of some tensors has a call written?

::

    watched = WrittenTensors(tensors)
    watched.begin(compares_bits=False)
    …                                   # the call
    watched.written().counted           # the positions of what it has written

Three questions, from the cheapest to the dearest::

    counted      does torch's counter say so?     one number per tensor
    exchanged    is it stored elsewhere now?      a call of C++ per tensor
    differing    are its bits others?             reads all values, at both times

No counter counts writes through ``.data``, a NumPy view or another storage, nor those
of inference tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.virtual_devices import HOST
from scatterpar.devices.write_counters import versions


class WrittenPositions(NamedTuple):
    """The positions of the tensors that a call has written, by how that is known.

    Attributes:
        counted: torch counts a write; the tensor is stored where it was.
        exchanged: the storage, shape or strides are others. The counter says nothing.
        differing: the bits are others; empty unless bits are compared.
    """

    counted: set[int]
    exchanged: set[int]
    differing: set[int]


class WrittenTensors:
    """Some tensors, watched while a call runs.

    Args:
        tensors: what is watched.
        device: their memory. Whose bits are compared are dense, and all there.
        stored_as: tensors that say where these are stored; without them nobody asks.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        device: torch.device = HOST,
        stored_as: Sequence[Tensor] | None = None,
    ) -> None:
        self.tensors = tensors
        self.device = device
        self._stored_as = stored_as
        self._versions: Sequence[int] = ()
        self._fingerprints: Fingerprints | None = None

    def begin(self, *, compares_bits: bool) -> None:
        """Remember the tensors as they are before a call."""
        self._fingerprints = self._present_fingerprints() if compares_bits else None
        self._versions = versions(self.tensors)

    def written(self) -> WrittenPositions:
        """Returns the tensors that were written since ``begin``."""
        writes = WrittenPositions(set(), set(), set())
        present = versions(self.tensors)
        # First the questions that need no Python call per tensor.
        is_in_place = self._stored_as is None or all(
            map(Tensor.is_set_to, self.tensors, self._stored_as)
        )
        if not is_in_place:
            places = enumerate(zip(self.tensors, self._stored_as or (), strict=True))
            exchanged = (at for at, (now, was) in places if not now.is_set_to(was))
            writes.exchanged.update(exchanged)
        if present != self._versions:
            counts = enumerate(zip(self._versions, present, strict=True))
            counted = {at for at, (before, now) in counts if before != now}
            writes.counted.update(counted - writes.exchanged)
        if self._fingerprints is not None:
            differing = self._present_fingerprints().differing_from(self._fingerprints)
            writes.differing.update(differing)
        return writes

    def _present_fingerprints(self) -> Fingerprints:
        by_position = dict(enumerate(self.tensors))
        with torch.inference_mode(False), torch.no_grad():
            return Fingerprints(by_position, self.device)
