"""The gradients of a replica in few tensors, which are added as such.

::

    dtype       flat tensor                          gradients are parts of it
    float32     weight 0, weight 1, …, odd sizes     copied out once, of the sum
    bfloat16    …

Captured sub-steps add to the same memory in each step. So nobody asks hundreds of
gradients per replica what they are, and no message is packed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices import memory
from scatterpar.devices.coalescing import copy_each

# So many elements are a multiple of what kernels read at once, in any dtype.
_ALIGNED_ELEMENTS = 16


class FlatGradients:
    """Gradients of a replica's leaves, by position, in one flat tensor per dtype.

    Attributes:
        flat: the flat tensors, by number.
        parts: the gradients, which are parts of these.
        places: of each gradient its position, its flat tensor and where it is there.
            Replicas with equal places are added as flat tensors.
    """

    def __init__(self) -> None:
        self.flat: dict[int, Tensor] = {}
        self.parts: dict[int, Tensor] = {}
        self.places: list[tuple[Any, ...]] = []
        # The numbers of the parts of each flat tensor, in the order of ``parts``.
        self._messages: list[Sequence[int]] = []

    def add_like(self, gradients: Mapping[int, Tensor], device: torch.device) -> None:
        """Allocate parts for those of these gradients that have none."""
        by_dtype: defaultdict[torch.dtype, dict[int, Tensor]] = defaultdict(dict)
        for position, gradient in gradients.items():
            if position not in self.parts:
                by_dtype[gradient.dtype][position] = gradient
        for dtype, likes in by_dtype.items():
            number = len(self.flat)
            size = sum(map(Tensor.numel, likes.values()))
            self.flat[number] = flat = memory.empty(size, dtype, device)
            start = 0
            # Odd sizes last: all others begin where kernels can read several elements.
            positions = sorted(
                likes, key=lambda p: likes[p].numel() % _ALIGNED_ELEMENTS > 0
            )
            count = len(self.parts)
            self._messages.append(range(count, count + len(positions)))
            for position in positions:
                like = likes[position]
                strides = torch.empty_like(like, device="meta").stride()
                part = memory.empty(0, dtype, device)
                # No view, which would share its version with the others.
                part.set_(flat.untyped_storage(), start, like.shape, strides)
                self.parts[position] = part
                self.places.append((position, number, start, like.shape, strides))
                start += like.numel()

    def copied_parts(self) -> dict[int, Tensor]:
        """Copies of the gradients, each with memory of its own."""
        parts = list(self.parts.values())
        copies = list(map(torch.empty_like, parts))
        copy_each(copies, parts, self._messages)
        return dict(zip(self.parts, copies, strict=True))


def have_equal_places(gradients: Sequence[FlatGradients | None]) -> bool:
    """Whether the gradients of all replicas are flat, and in the same places."""
    first, *others = gradients
    if first is None:
        return False
    return all(other is not None and other.places == first.places for other in others)
