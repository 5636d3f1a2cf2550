"""How often a tensor was written: torch's own counter.

Writes through ``.data``, a NumPy view or another storage are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from torch import Tensor

_VERSION = attrgetter("_version")


def version(tensor: Tensor) -> int:
    """How often ``tensor`` was written; 0 for inference tensors, which do not count."""
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """The version of each tensor, as from ``version``."""
    try:
        return list(map(_VERSION, tensors))  # without a Python call per tensor
    except RuntimeError:  # there are inference tensors
        return list(map(version, tensors))
