"""Images with their labels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Images, uint8 (rows, channels, height, width), and their labels, int64 (rows,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def split(self, rows: int) -> tuple[Split, Split]:
        """Return the first `rows` rows, and the rest."""
        return (
            Split(self.images[:rows], self.labels[:rows]),
            Split(self.images[rows:], self.labels[rows:]),
        )
