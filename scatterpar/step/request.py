"""What the user asks for, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from scatterpar.devices.verbs import physical
from scatterpar.step.criteria import Count, resolve_reduction
from scatterpar.step.options import check_function
from scatterpar.step.rows import batch_sizes, count_rows

__all__ = ["Request"]

_ORDER = (
    "It is forward_backward(inputs, targets, criterion), with criterion= by name where there are "
    "no targets"
)


@dataclass(frozen=True)
class Request:
    """What the user asked of one step, and what the engine was told at construction.

    Attributes:
        keeps_rows: where a second pass needs them again, rows stay once they have arrived.
        most: leave it at so many sub-steps: a try at what fits into memory.
        rows: how many the batch has. This and what follows is known once it is ``checked``.
        sizes: those of each batch, where it is made of several.
        scale: the scaler's factor.
    """

    inputs: Any
    targets: Any = None
    criterion: Callable[[Any, Any], Any] | None = None
    reduction: str | None = None
    count: Count | None = None
    scaler: torch.amp.GradScaler | None = None
    return_outputs: bool | Callable[[Any], Any] = False
    whole_batch: bool = False
    dim: int = 0
    check_finite: bool = False
    verify: bool = True
    keeps_rows: bool = True
    most: int | None = None
    rows: int = 0
    sizes: tuple[int, ...] = ()
    scale: float = 1.0

    @property
    def batch(self) -> tuple[Any, Any]:
        """What is scattered: inputs and targets, where the criterion sees a replica's rows."""
        return self.inputs, None if self.whole_batch else self.targets

    @property
    def is_mean(self) -> bool:
        """The loss is a mean of its terms, not a sum."""
        return self.reduction == "mean"

    def as_trial(self) -> Self:
        """The same for the first sub-steps alone, which take the memory of a whole step."""
        return replace(self, return_outputs=False, verify=False, most=2)

    def checked(self, device: torch.device) -> Self:
        """The request with its rows counted and its reduction settled, if it makes sense.

        Args:
            device: the master, which a scaler gets to know.

        Raises:
            TypeError: a criterion or count that cannot be called, a scaler that is none.
            ValueError: no rows, tensors that disagree in them, no criterion for the targets or
                for ``whole_batch``, which takes neither ``reduction`` nor ``count``.
        """
        self._require_functions()
        if not (isinstance(self.return_outputs, bool) or callable(self.return_outputs)):
            raise TypeError(
                f"return_outputs must be True, False or a callable that says what to keep of an "
                f"output, got {self.return_outputs!r}"
            )
        if not isinstance(self.scaler, (torch.amp.GradScaler, type(None))):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {self.scaler!r}")
        if self.targets is not None and self.criterion is None and self.count is None:
            raise ValueError("targets were given without a criterion: pass criterion=")
        batch = {"inputs": self.inputs, "targets": self.targets}
        rows = count_rows(batch, self.dim)
        sizes = batch_sizes(batch, self.dim, rows)
        if self.whole_batch:
            self._require_whole()
            reduction = "sum"  # each share has a part of one loss
        else:
            reduction = resolve_reduction(self.criterion, self.reduction)
        scale = 1.0
        if self.scaler is not None:
            scale = float(self.scaler.scale(torch.ones((), device=physical(device))))
        return replace(self, rows=rows, sizes=sizes, reduction=reduction, scale=scale)

    def _require_functions(self) -> None:
        """Refuse what is no function, or is one in another's place."""
        if callable(self.targets):
            raise TypeError(
                f"targets is {_shown(self.targets)}, which looks like a criterion: argument "
                f"order? {_ORDER}"
            )
        if isinstance(self.criterion, Tensor):
            raise TypeError(
                f"criterion must be callable, got a tensor of shape {tuple(self.criterion.shape)}: "
                f"argument order? {_ORDER}"
            )
        for name, value in (("criterion", self.criterion), ("count", self.count)):
            if value is not None:
                check_function(name, value)

    def _require_whole(self) -> None:
        if self.criterion is None:
            raise ValueError(
                "whole_batch=True without a criterion: pass criterion=, which is called once as "
                "criterion(outputs, targets) with all rows; a loss that the module computes sees "
                "one micro-batch"
            )
        for name, value in (("reduction", self.reduction), ("count", self.count)):
            if value is not None:
                raise ValueError(
                    f"{name}= says how the losses of micro-batches combine, and with "
                    f"whole_batch=True there is one loss, of all rows; leave {name}= out"
                )


def _shown(function: Any) -> str:
    name = getattr(function, "__name__", None)
    return name if isinstance(name, str) else repr(function)
