"""What the user asks for, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from scatterpar.step.rows import batch_sizes, count_rows
from scatterpar.step.weights import Count, resolve_reduction

__all__ = ["Request", "check_accumulate_dtype", "check_dim", "check_module", "check_options"]


_ORDER = (
    "It is forward_backward(inputs, targets, criterion), with criterion= by name where there are "
    "no targets"
)


@dataclass(frozen=True)
class Request:
    """What the user asked of one step."""

    inputs: Any
    targets: Any
    criterion: Callable[[Any, Any], Any] | None
    reduction: str | None
    count: Count | None
    scaler: torch.amp.GradScaler | None
    return_outputs: bool | Callable[[Any], Any]
    whole_batch: bool = False
    rows: int = 0
    sizes: tuple[int, ...] = ()  # the rows of each batch, where it is made of several

    @property
    def batch(self) -> tuple[Any, Any]:
        """What is scattered: inputs and targets, where the criterion sees a replica's rows."""
        return self.inputs, None if self.whole_batch else self.targets

    @property
    def is_mean(self) -> bool:
        """The loss is a mean of its terms, not a sum."""
        return self.reduction == "mean"

    def checked(self, dim: int) -> Self:
        """The request with its rows counted and its reduction settled, if it makes sense.

        Args:
            dim: the dimension that holds the rows.

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
        rows = count_rows(batch, dim)
        sizes = batch_sizes(batch, dim, rows)
        if self.whole_batch:
            self._require_whole()
            # Each share has a part of one loss.
            return replace(self, rows=rows, sizes=sizes, reduction="sum")
        reduction = resolve_reduction(self.criterion, self.reduction)
        return replace(self, rows=rows, sizes=sizes, reduction=reduction)

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
        if isinstance(self.criterion, type):
            name = self.criterion.__name__
            raise TypeError(f"criterion is the class {name}; pass an instance, {name}()")
        for name, value in (("criterion", self.criterion), ("count", self.count)):
            if value is not None and not callable(value):
                raise TypeError(f"{name} must be callable, got {value!r}")

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


def check_options(module: Any, accum: Any, micro_batch_size: Any, dim: Any, buffers: Any) -> None:
    """Refuse what an engine cannot be made of, in words.

    Raises:
        TypeError: an argument of the wrong type, or a module that cannot be replicated.
        ValueError: an argument out of range.
    """
    check_module(module)
    for name, value in (("accum", accum), ("micro_batch_size", micro_batch_size)):
        if name == "accum" and value == "auto":
            continue
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            also = ' or "auto"' if name == "accum" else ""
            raise TypeError(f"{name} must be an int{also}, got {value!r}")
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if micro_batch_size is not None and accum != 1:
        raise ValueError(
            f"accum={accum} and micro_batch_size={micro_batch_size} both say how a share is "
            f"cut; pass one of them"
        )
    check_dim(dim)
    if buffers not in ("master", "mean"):
        raise ValueError(f'buffers must be "master" or "mean", got {buffers!r}')


def check_accumulate_dtype(dtype: Any) -> None:
    """Refuse a dtype that gradients cannot add up in.

    Raises:
        TypeError: it is none.
        ValueError: it is not a real floating-point dtype.
    """
    if dtype is None:
        return
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"accumulate_dtype must be a torch.dtype, got {dtype!r}")
    if not dtype.is_floating_point:
        raise ValueError(
            f"accumulate_dtype must be a floating-point dtype such as torch.float32, got {dtype}"
        )


def check_module(module: Any) -> None:
    """Refuse what cannot be replicated.

    Raises:
        TypeError: no ``nn.Module``.
    """
    if isinstance(module, type) and issubclass(module, nn.Module):
        name = module.__name__
        raise TypeError(f"module is the class {name}; pass an instance, {name}(...)")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, nn.DataParallel):
        raise TypeError(
            "module is wrapped in nn.DataParallel, whose work this does; pass the model itself, "
            "which is its .module"
        )
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise TypeError(
            "module is wrapped in DistributedDataParallel, which reduces gradients in every "
            "backward pass; pass the model itself, which is its .module, and process_group= for "
            "several processes"
        )


def check_dim(dim: Any) -> None:
    """Refuse a dimension that is no int.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"dim must be an int, got {dim!r}")
