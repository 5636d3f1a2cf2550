"""Large tensors that did not change are neither copied nor read.

Most large tensors that are not trained never change: tables, memory banks, frozen
weights. To copy one, or to compute its fingerprint, takes longer than a small step. ::

    its version changed              it was written
    its version is as it was         a sample of its words tells; in steps 1, 2, 4, 8, …
                                     all of them
    it was written without a         from then on it counts as written in every step
    change of its version

torch counts no version for writes through ``.data``, a NumPy array or another view of
the memory. Those that write all of a tensor, as a moving average of weights does, show
in the sample. Those that write a part of it, and begin late, show in the next step that
reads all words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scatterpar.devices.coalescing import is_part
from scatterpar.devices.streams import is_async
from scatterpar.devices.transfers import as_bytes, write

LARGE_BYTES = 2**18  # smaller tensors are copied, or read, in less time than a kernel
_WORDS = 1024  # in each part of a sample
_WORD_BYTES = 4


def is_large(tensor: Tensor) -> bool:
    """Whether a sample of ``tensor`` can be taken, and costs less than all of it."""
    if tensor.layout != torch.strided or tensor.nbytes < LARGE_BYTES:
        return False
    # The memory of these has other values than the tensor.
    is_lazy = tensor.is_conj() or tensor.is_neg()
    is_whole = tensor.nbytes % _WORD_BYTES == 0 and not is_part(tensor)
    return is_whole and not is_lazy and not tensor.is_quantized


def sample(tensor: Tensor) -> Tensor:
    """Words from the begin, the end and all of a large tensor's memory, as a copy."""
    words = tensor.detach().as_strided((tensor.numel(),), (1,), 0)
    words = words.view(torch.uint8).view(torch.int32)
    # Every so many words: a write of a part in the middle is likely to be seen.
    step = max(1, len(words) // _WORDS)
    return torch.cat([words[:_WORDS], words[-_WORDS:], words[::step]])


class LargeCopies:
    """A replica's copies of large tensors in its own memory, on the host.

    On an accelerator a copy takes less time than the host would wait for an answer.
    """

    def __init__(self, copies: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        self._copies = copies
        self._sources = sources
        # Of copy and source, when they were equal.
        self._versions: list[tuple[int, int] | None] = [None] * len(copies)
        self._without_version: set[int] = set()  # they were written nevertheless
        # Whether a forward pass in this mode was followed by a look at all words.
        self._is_trusted = False

    def distrust(self) -> None:
        """Read all words until a forward pass in the present mode is known."""
        self._is_trusted = False

    def refresh(self, *, reads_all: bool = False) -> None:
        """Copy the sources that differ."""
        # In a first refresh everything is copied, and nothing is learnt.
        was_refreshed = None not in self._versions
        for number in self.differing(reads_all=reads_all):
            write(self._copies[number], self._sources[number])
            self._versions[number] = self._present_versions(number)
        self._is_trusted |= reads_all and was_refreshed

    def differing(self, *, reads_all: bool = False) -> list[int]:
        """The numbers of the copies that may differ from their sources."""
        reads_all |= not self._is_trusted
        return [
            number
            for number in range(len(self._copies))
            if not self._is_equal(number, reads_all)
        ]

    def _is_equal(self, number: int, reads_all: bool) -> bool:
        versions = self._present_versions(number)
        # The cheap question first.
        if versions is None or versions != self._versions[number]:
            return False
        if number in self._without_version:
            return False
        copy = self._copies[number]
        source = self._sources[number]
        if reads_all:
            is_equal = torch.equal(as_bytes(copy), as_bytes(source))
        else:
            is_equal = torch.equal(sample(copy), sample(source))
        if not is_equal:
            self._without_version.add(number)
        return is_equal

    def _present_versions(self, number: int) -> tuple[int, int] | None:
        copy = self._copies[number]
        source = self._sources[number]
        if copy.is_inference() or source.is_inference():  # they have no versions
            return None
        return copy._version, source._version

    def copies(self, numbers: Sequence[int]) -> list[Tensor]:
        """The copies with these numbers."""
        return [self._copies[number] for number in numbers]

    def equal_copies(self, *, reads_all: bool = False) -> list[Tensor]:
        """The copies that are as they were, and their sources, too."""
        differing = set(self.differing(reads_all=reads_all))
        self._is_trusted = True
        return [
            copy for number, copy in enumerate(self._copies) if number not in differing
        ]


def may_stay(copy: Tensor, source: Tensor) -> bool:
    """Whether ``LargeCopies`` can tell of this pair whether it has to be copied."""
    # The host would wait for the answer in each step.
    if is_async(copy.device):
        return False
    is_alike = copy.stride() == source.stride() and copy.dtype == source.dtype
    return is_alike and is_large(copy) and is_large(source)
