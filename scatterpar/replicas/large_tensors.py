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
reads all words. Replicas count steps from the last change of a module's modes: a
forward pass in another mode may write what it did not write before.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from scatterpar.devices.bits import as_bytes
from scatterpar.devices.coalescing import has_foreach, is_part
from scatterpar.devices.copies import write
from scatterpar.devices.streams import is_async

LARGE_BYTES = 2**18  # smaller tensors are copied, or read, in less time than a kernel
_SAMPLED_WORDS = 1024  # in each part of a sample
_WORD_BYTES = 4


def is_large(tensor: Tensor) -> bool:
    """Whether a sample of ``tensor`` can be taken, and costs less than all of it."""
    # First: sparse tensors refuse the other questions, and the memory of lazily negated
    # ones has other values than the tensor.
    if not has_foreach(tensor) or tensor.nbytes < LARGE_BYTES:
        return False
    return tensor.nbytes % _WORD_BYTES == 0 and not is_part(tensor)


def sample(tensor: Tensor) -> Tensor:
    """Words from the begin, the end and all of a large tensor's memory, as a copy."""
    words = tensor.detach().as_strided((tensor.numel(),), (1,), 0)
    words = words.view(torch.uint8).view(torch.int32)
    # Every so many words: a write of a part in the middle is likely to be seen.
    step = max(1, len(words) // _SAMPLED_WORDS)
    return torch.cat([words[:_SAMPLED_WORDS], words[-_SAMPLED_WORDS:], words[::step]])


class Reading(enum.Enum):
    """The words of a large tensor that are read to find writes.

    Attributes:
        NOTHING: its version has moved, which tells.
        SAMPLE: some of its words.
        ALL: all of them.
    """

    NOTHING = 0
    SAMPLE = 1
    ALL = 2


class Freshness:
    """Finds out whether one large tensor was written since it was copied.

    ``Broadcast`` asks it of copies in other memories, ``LargeCopy`` of one in the same.

    Attributes:
        is_silent: true from a comparison that has found a write without a change of
            the version; all words are read from then on. A ``LargeCopy``'s is false
            again after a comparison without a difference.
    """

    def __init__(self) -> None:
        self.is_silent = False

    def reading(self, has_same_version: bool, reads_all: bool) -> Reading:
        """The words to read of a tensor whose version has changed, or has not."""
        if self.is_silent:
            return Reading.ALL
        if not has_same_version:
            return Reading.NOTHING
        return Reading.ALL if reads_all else Reading.SAMPLE


class LargeCopy(Freshness):
    """A replica's copy of a large tensor in its own memory, on the host.

    On an accelerator a copy takes less time than the host would wait for an answer.

    Attributes:
        copy: the replica's tensor.
        reads_all: whether all words are read in this step; set before each ``reset``
            of the replica.
    """

    def __init__(self, copy: Tensor, source: Tensor) -> None:
        super().__init__()
        self.copy = copy
        self.reads_all = True
        # Of copy and source, when they were equal; ``None`` before that, and of
        # inference tensors.
        self._versions: tuple[int, int] | None = None
        self._source = source

    def copy_source(self) -> None:
        """Copy the source's values."""
        write(self.copy, self._source)
        self._versions = self._present_versions()

    def find_difference(self) -> bool:
        """Compare the copy with its source. Returns whether it may differ."""
        present = self._present_versions()
        has_same_version = present is not None and present == self._versions
        reading = self.reading(has_same_version, self.reads_all)
        # A copy of what differs in each step costs no more than a comparison.
        if reading is Reading.NOTHING or self.is_silent:
            return True
        words_of = as_bytes if reading is Reading.ALL else sample
        is_equal = torch.equal(words_of(self.copy), words_of(self._source))
        self.is_silent = not is_equal
        return not is_equal

    def _present_versions(self) -> tuple[int, int] | None:
        if self.copy.is_inference() or self._source.is_inference():
            return None
        return self.copy._version, self._source._version


def may_stay(copy: Tensor, source: Tensor) -> bool:
    """Whether ``LargeCopy`` can tell of this pair whether it has to be copied."""
    # The host would wait for the answer in each step.
    if is_async(copy.device):
        return False
    is_alike = copy.stride() == source.stride() and copy.dtype == source.dtype
    return is_alike and is_large(copy) and is_large(source)
