"""What is compared of two micro-batches, and what the comparison may find."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["Finding", "Pieces", "Unsure", "tolerance_of"]


class Unsure(Exception):
    """It cannot be told.

    Args:
        why: in words.
        lasting: nor will it be in the next step, because of what the module or criterion is.
    """

    def __init__(self, why: str, *, lasting: bool = True) -> None:
        super().__init__(why)
        self.lasting = lasting


@dataclass(frozen=True)
class Pieces:
    """Two micro-batches (or one of them), on one device.

    Attributes:
        given: what goes into the function that is looked at: outputs, or inputs.
        targets: the targets of each.
        factors: what the engine multiplies their losses with, to get that of both.
        rows: how many each has.
        dim: the dimension that holds them.
    """

    given: tuple[Any, ...]
    targets: tuple[Any, ...]
    factors: tuple[float, ...]
    rows: tuple[int, ...]
    dim: int

    def only(self, *positions: int) -> Pieces:
        """Some of them, in any order."""
        return replace(
            self,
            given=tuple(self.given[k] for k in positions),
            targets=tuple(self.targets[k] for k in positions),
            factors=tuple(self.factors[k] for k in positions),
            rows=tuple(self.rows[k] for k in positions),
        )

    @property
    def by_rows(self) -> tuple[float, ...]:
        """The factors of a mean over rows."""
        return tuple(rows / sum(self.rows) for rows in self.rows)


@dataclass(frozen=True)
class Finding:
    """How far the engine's arithmetic is off, and what the criterion seems to do instead.

    Attributes:
        off: the relative difference.
        seems: ``"right"``, ``"sum"``, ``"mean"`` (over the rows), ``"weighted"`` (a mean over
            something else), ``"coupled"`` (rows are compared with each other) or ``"more than a
            sum"`` (with a part that does not depend on the rows).
        weights: what the criterion multiplies the two losses with, where that can be told.
        slopes: gradients of each piece's outputs, as they are and as the engine takes them.
    """

    off: float = 0.0
    seems: str = "right"
    weights: tuple[float, ...] | None = None
    slopes: tuple[list[list[Tensor]], list[list[Tensor]]] | None = None


def tolerance_of(dtypes: set[torch.dtype], by_dtype: dict[torch.dtype, float]) -> float:
    """The tolerance of the coarsest of ``dtypes``.

    Raises:
        Unsure: there is none for it.
    """
    if not dtypes <= by_dtype.keys():
        raise Unsure(f"there is no tolerance for {dtypes - by_dtype.keys()}")
    return max((by_dtype[dtype] for dtype in dtypes), default=min(by_dtype.values()))
