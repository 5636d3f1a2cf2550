"""The master's tensors in the memory of every other device: what has changed goes out, once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from scatterpar.devices import bits
from scatterpar.devices.flat import FlatCopy
from scatterpar.devices.ledger import Ledger
from scatterpar.devices.readout import Readout

__all__ = ["Broadcast", "version"]


def version(tensor: Tensor) -> int:
    """How often ``tensor`` was written; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version


class Broadcast:
    """Copies of ``tensors`` on every device of ``device_ids`` but the first, their own.

    A parameter travels when its version has moved since it was sent last: an optimizer has
    stepped. Writes through ``.data``, a NumPy view or another storage leave the version as it
    is, so the others are compared, bit for bit, with what was sent, which stays on the master;
    so are buffers, whose versions every commit moves.

    Args:
        tensors: dense tensors on the master, whose objects stay the same.
        device_ids: the memories, the master's first; entries may repeat.
        blocks: as in ``FlatCopy``.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        device_ids: Sequence[torch.device],
        blocks: Sequence[Sequence[int]] = (),
    ) -> None:
        master, *others = dict.fromkeys(device_ids)
        self._tensors = tensors
        self._master = master
        self._arrivals = {device: FlatCopy(tensors, device, blocks) for device in others}
        self._departure = FlatCopy(tensors, master, blocks) if others else None
        self._sent: list[int] | None = None  # the versions; unknown while not all have arrived
        self._versions: list[int] = []
        self._doubtful: list[int] = []
        self._edited: Callable[[], list[Tensor]] = list

    def at(self, device: torch.device) -> Sequence[Tensor]:
        """The tensors as ``device`` has them."""
        return self._tensors if device == self._master else self._arrivals[device].views

    @property
    def kept(self) -> Sequence[Tensor] | None:
        """Copies of the tensors as they were sent last; ``None`` where nothing is sent."""
        return None if self._departure is None or self._sent is None else self._departure.views

    def compare(self, readout: Readout) -> None:
        """Find out what has changed since it was sent; ``readout`` is read when it is sent."""
        if self._departure is None:
            return
        self._versions = [version(tensor) for tensor in self._tensors]  # before the values
        self._doubtful = [] if self._sent is None else self._with_doubts(self._sent)
        tensors = [self._tensors[i] for i in self._doubtful]
        sent = [self._departure.views[i] for i in self._doubtful]
        self._edited = readout.ask(bits.changes(tensors, sent))

    def send(self, ledger: Ledger, spoilt: Collection[int] = ()) -> None:
        """Send what ``compare`` found changed, and what is ``spoilt`` at its destination.

        One message per dtype to each device.
        """
        if self._departure is None:
            return
        moving = self._changed().union(spoilt)
        if not moving:
            return
        self._sent = None
        torch._foreach_copy_(
            [self._departure.views[i] for i in moving], [self._tensors[i] for i in moving]
        )
        for number, positions in enumerate(self._departure.positions):
            self._send_some(number, [i for i in positions if i in moving], ledger)
        self._sent = self._versions

    def _with_doubts(self, sent: Sequence[int]) -> list[int]:
        """Positions of the tensors whose versions do not tell whether they have changed."""
        return [
            i
            for i, tensor in enumerate(self._tensors)
            if sent[i] == self._versions[i] or not isinstance(tensor, nn.Parameter)
        ]

    def _changed(self) -> set[int]:
        pairs = zip(self._doubtful, self._edited(), strict=True)
        quiet = {i for i, is_edited in pairs if not is_edited}
        return set(range(len(self._tensors))) - quiet

    def _send_some(self, number: int, positions: Sequence[int], ledger: Ledger) -> None:
        """Send the tensors at ``positions`` of one flat buffer: it, or what is packed of it."""
        assert self._departure is not None
        if len(positions) == len(self._departure.positions[number]):
            for arrival in self._arrivals.values():
                ledger.copy_into(arrival.flats[number], self._departure.flats[number], "replicate")
        elif positions:
            pieces = [self._departure.pieces[i] for i in positions]
            packed = torch.cat(pieces)
            sizes = [piece.numel() for piece in pieces]
            for device, arrival in self._arrivals.items():
                arrived = ledger.copy(packed, device, "replicate").split(sizes)
                torch._foreach_copy_([arrival.pieces[i] for i in positions], arrived)
