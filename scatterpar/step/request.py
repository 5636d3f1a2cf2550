"""The arguments of an engine and of one step, and the errors for invalid ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scatterpar.batch.markers import batches_of, select_rows
from scatterpar.devices.runtime import physical
from scatterpar.devices.transfers import to_numbers
from scatterpar.plan import check_int
from scatterpar.replicas.module_copy import module_of
from scatterpar.report import warn
from scatterpar.wrapper import Wrapper

Count = Callable[[Any, Any], "float | Tensor"]


@dataclass(frozen=True)
class Request:
    """The arguments of one step, and the engine's options that concern it.

    ``checked`` sets ``reduction``, ``batches``, their ``sizes``, and the ``scale`` of the scaler.
    """

    inputs: Any
    targets: Any = None
    criterion: Callable[[Any, Any], Any] | None = None
    reduction: str | None = None
    count: Count | None = None
    scaler: torch.amp.GradScaler | None = None
    return_outputs: bool | Callable[[Any], Any] = False
    whole_batch: bool = False
    costs: Any = None
    dim: int = 0
    check_finite: bool = False
    backward: bool = True  # otherwise sub-steps are forward passes only
    order: Sequence[int] = ()  # by cost: the number of the batch's row at each place of the plan
    batches: Sequence[tuple[Any, Any]] = ()  # the inputs and targets of each batch
    sizes: Sequence[int] = ()  # the number of rows of each batch
    scale: float = 1.0

    @property
    def batch(self) -> list[tuple[int, Any]]:
        """For each batch the number of its first row, its inputs and targets."""
        batches = self.batches or [(self.inputs, self.targets)]
        firsts = [0, *accumulate(self.sizes[:-1])]
        return list(zip(firsts, batches, strict=True))

    @property
    def rows(self) -> int:
        """The number of rows in the step: the sum of ``sizes``, which inference leaves empty."""
        return sum(self.sizes)

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a mean of its terms, not a sum."""
        return self.reduction == "mean"

    def in_order(self, order: Sequence[int]) -> Self:
        """The request with rows in the ``order`` of a plan by cost; unchanged if that is empty.

        With ``whole_batch``, targets keep the order of the batch.
        """
        if not order:
            return self
        ((inputs, targets),) = self.batches or [(self.inputs, self.targets)]
        inputs = select_rows(inputs, order, self.dim)
        targets = targets if self.whole_batch else select_rows(targets, order, self.dim)
        return replace(self, order=order, batches=[(inputs, targets)])

    def of_largest(self) -> Self:
        """The request with its largest batch only; unchanged in a plan by cost."""
        if self.order:
            return self
        rows = max(self.sizes)
        one = self.batches[self.sizes.index(rows)]
        if one[0] is self.inputs and one[1] is self.targets:
            return self
        return replace(self, inputs=one[0], targets=one[1], batches=[one], sizes=[rows])

    def checked(self, device: torch.device) -> Self:
        """The request with its rows counted and its reduction resolved. Refuses invalid ones."""
        if callable(self.targets) or isinstance(self.criterion, Tensor):
            raise TypeError(
                f"got targets={_shown(self.targets)} and criterion={_shown(self.criterion)}, which "
                f"look swapped or misplaced; call forward_backward(inputs, targets, criterion), or "
                f"pass criterion= by name if there are no targets"
            )
        if self.criterion is not None:
            check_function("criterion", self.criterion)
        if self.count is not None:
            check_function("count", self.count)
        if not (isinstance(self.return_outputs, bool) or callable(self.return_outputs)):
            raise TypeError(f"return_outputs must be bool or callable, got {self.return_outputs!r}")
        if not isinstance(self.scaler, (torch.amp.GradScaler, type(None))):
            raise TypeError(f"scaler must be a torch.amp.GradScaler, got {self.scaler!r}")
        if self.targets is not None and self.criterion is None and self.count is None:
            raise ValueError("targets were given without a criterion: pass criterion=")
        batches, sizes = batches_of(self.inputs, self.targets, self.dim)
        splits = getattr(self.criterion, "num_splits", 1)  # timm's JsdCrossEntropy has it
        if isinstance(splits, int) and splits > 1 and not self.whole_batch:
            raise ValueError(
                f"{type(self.criterion).__name__} splits its rows into {splits} versions of the "
                f"same images, which a micro-batch has not; pass whole_batch=True"
            )
        reduction = "sum"  # of whole_batch: each share has a part of one loss
        if not self.whole_batch:
            reduction = resolve_reduction(self.criterion, self.reduction)
        scale = 1.0
        if self.scaler is not None:
            scale = to_numbers(self.scaler.scale(torch.ones((), device=physical(device))))
        return replace(self, batches=batches, sizes=sizes, reduction=reduction, scale=scale)


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else repr(value)


def check_options(
    module: Any,
    accum: Any,
    micro_batch_size: Any,
    micro_batch_cost: Any,
    replicas: int,
    dim: Any,
    buffers: Any,
    accumulate_dtype: Any,
) -> None:
    """Refuse invalid options of an engine."""
    check_module(module)
    if accum != "auto":
        check_int("accum", accum, least=1, also=' or "auto"')
    if isinstance(micro_batch_size, (list, tuple)):
        are_sizes = all(type(size) is int and size > 0 for size in micro_batch_size)
        if len(micro_batch_size) != replicas or not are_sizes:
            raise ValueError(
                f"micro_batch_size={micro_batch_size} must have one int of at least 1 for each of "
                f"the {replicas} replicas; pass one number for each entry of device_ids"
            )
    elif micro_batch_size is not None:
        also = " or a list with one per replica"
        check_int("micro_batch_size", micro_batch_size, least=1, also=also)
    cuts = {"micro_batch_size": micro_batch_size, "micro_batch_cost": micro_batch_cost}
    given = [f"accum={accum}"] if accum != 1 else []
    given += [f"{name}={value}" for name, value in cuts.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} both say how a share is cut; pass one of them")
    check_int("dim", dim)
    if not isinstance(accumulate_dtype, (torch.dtype, type(None))):
        raise TypeError(f"accumulate_dtype must be a torch.dtype, got {accumulate_dtype!r}")
    if accumulate_dtype is not None and not accumulate_dtype.is_floating_point:
        raise ValueError(
            f"accumulate_dtype must be floating-point, as torch.float32 is, got {accumulate_dtype}"
        )
    _check_buffers(buffers)
    _check_synchronised(module)


def _check_buffers(buffers: Any) -> None:
    if buffers == "mean":
        raise ValueError(
            'buffers="mean" was removed in 0.3.0; pass "batch", which updates running statistics '
            'once per step from all rows, or "master"'
        )
    if buffers not in ("master", "batch"):
        raise ValueError(f'buffers must be "master" or "batch", got {buffers!r}')


def check_module(module: Any) -> None:
    """Refuse values that are not modules, and modules that are wrapped to be replicated."""
    _refuse_class("module", module, "...")
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel, Wrapper)):
        raise TypeError(
            f"module is already wrapped in {type(module).__name__}, which does the same work; pass "
            f"the model inside it, its .module (and process_group= for several processes)"
        )


def _refuse_class(name: str, value: Any, arguments: str = "") -> None:
    if isinstance(value, type):
        kind = value.__name__
        raise TypeError(f"{name} is the class {kind}; pass an instance, {kind}({arguments})")


def _check_synchronised(module: nn.Module) -> None:
    """Warn of ``nn.SyncBatchNorm``; refuse it if there are several processes, as it would hang."""
    children = module.named_modules()
    sync_norms = [(name, norm) for name, norm in children if isinstance(norm, nn.SyncBatchNorm)]
    is_distributed = dist.is_available() and dist.is_initialized()
    for name, norm in sync_norms:
        if is_distributed and dist.get_world_size(norm.process_group) > 1:
            raise ValueError(
                f"{name!r} is an nn.SyncBatchNorm, whose processes exchange statistics in every "
                f"forward pass: replicas would do so in no order, and wait for ever; {_PLAIN}"
            )
    for name, _ in sync_norms[:1]:
        warn(
            f"{name!r} is an nn.SyncBatchNorm: replicas do not exchange its statistics, and it "
            f"normalises each micro-batch by itself, as nn.BatchNorm2d; {_PLAIN}"
        )


_PLAIN = (
    "use nn.BatchNorm2d, whose state dict has the same keys, with larger micro-batches, and "
    'buffers="batch" for running statistics of the whole batch'
)


def check_function(name: str, value: Any) -> None:
    """Refuse values that are not functions, for ``criterion`` or ``count``."""
    _refuse_class(name, value)
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")


def resolve_reduction(criterion: Any, reduction: str | None) -> str:
    """``"mean"`` or ``"sum"``: as passed, else the criterion's own attribute, else a mean."""
    option = option_of(criterion, "reduction", None)
    if reduction is None and isinstance(option, str):
        reduction = "mean" if option == "batchmean" else option
    if reduction is None:
        return "mean"
    if reduction == "none":
        raise ValueError(
            'reduction="none" gives one loss per term; use a criterion with reduction="mean" or '
            '"sum", or if it takes the mean itself, pass reduction="mean"'
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    return reduction


def option_of(criterion: Any, name: str, default: Any) -> Any:
    """An option of a criterion: a module's attribute, or a keyword of a partial function."""
    if isinstance(criterion, partial):
        return criterion.keywords.get(name, option_of(criterion.func, name, default))
    owner = module_of(criterion)
    return getattr(criterion if owner is None else owner, name, default)
