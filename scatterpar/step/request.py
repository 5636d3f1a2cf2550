"""The arguments of an engine and of one step, and the errors for invalid ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scatterpar.batch.batch import Batch
from scatterpar.batch.several_batches import batches_of
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.virtual_devices import physical
from scatterpar.objects.references import module_of, read_attribute
from scatterpar.option_checks import (
    check_bool,
    check_int,
    check_shares,
)
from scatterpar.wrapper import Wrapper

# Of an output, which is the user's, and of targets.
# It returns the loss, or the loss and numbers to log.
Criterion = Callable[[Any, Any], Tensor | tuple[Tensor, Mapping[str, Tensor | float]]]
CountFunction = Callable[[Any, Any], float | Tensor]
Reduction = Literal["mean", "sum"]
Buffers = Literal["master", "batch"]
Accum = int | Literal["auto"]


@dataclass
class EngineOptions:
    """The options of an engine; its docstring says what they mean.

    ``dataclasses.replace`` checks again. Raises ``TypeError`` or ``ValueError`` for
    invalid values.

    Attributes:
        shares: one number per replica.
    """

    device_ids: Sequence[torch.device]
    accum: Accum = 1
    micro_batch_size: int | Sequence[int] | None = None
    dim: int = 0
    buffers: Buffers = "master"
    check_finite: bool = False
    shares: Sequence[float] | None = None
    accumulate_dtype: torch.dtype | None = None
    verify: bool = True
    graphs: bool | None = None

    def __post_init__(self) -> None:
        for name in ("check_finite", "verify"):
            check_bool(name, getattr(self, name))
        if self.graphs is not None:
            check_bool("graphs", self.graphs)
        check_int("dim", self.dim)
        if self.buffers not in ("master", "batch"):
            raise ValueError(
                f'buffers must be "master" or "batch" (running statistics once per '
                f"step, from all rows), got {self.buffers!r}"
            )
        dtype = self.accumulate_dtype
        if not isinstance(dtype, (torch.dtype, type(None))):
            raise TypeError(f"accumulate_dtype must be a torch.dtype, got {dtype!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(
                "accumulate_dtype must be floating-point, as torch.float32 is, got "
                f"{dtype}"
            )
        self._check_cuts()
        self.shares = check_shares(self.shares, len(self.device_ids))

    def _check_cuts(self) -> None:
        """Refuse invalid sizes of micro-batches, and two ways to cut a share."""
        size = self.micro_batch_size
        if self.accum != "auto":
            check_int("accum", self.accum, least=1, also=' or "auto"')
        if isinstance(size, (list, tuple)):
            replicas = len(self.device_ids)
            are_sizes = all(type(rows) is int and rows > 0 for rows in size)
            if len(size) != replicas or not are_sizes:
                raise ValueError(
                    f"micro_batch_size={size} must have one int of at least 1 for each "
                    f"of the {replicas} replicas; pass one number for each entry of "
                    f"device_ids"
                )
        elif size is not None:
            also = " or a list with one per replica"
            check_int("micro_batch_size", size, least=1, also=also)
        # ``accum`` is 1 by default, and so says nothing beside ``micro_batch_size``.
        if size is not None and self.accum != 1:
            raise ValueError(
                f"accum={self.accum} and micro_batch_size={size} both say how a share "
                f"is cut; pass one of them"
            )


class StepOptions(TypedDict, total=False):
    """The keywords of ``forward_backward`` on which the type of its result does not
    depend.
    """

    reduction: Reduction | None
    count: CountFunction | None
    scaler: torch.amp.GradScaler | None
    whole_batch: bool


@dataclass(frozen=True)
class Call:
    """The arguments of ``forward_backward`` or ``loss``, as the user passed them.

    The docstring of ``forward_backward`` says what they mean.
    """

    inputs: Any
    targets: Any = None
    criterion: Callable[[Any, Any], Any] | None = None
    reduction: str | None = None
    count: CountFunction | None = None
    scaler: torch.amp.GradScaler | None = None
    return_outputs: bool | Callable[[Any], Any] = False
    whole_batch: bool = False


@dataclass(frozen=True, eq=False)
class LossCandidate:
    """A way in which the losses of micro-batches may combine into that of the batch.

    Attributes:
        words: the way, as texts name it, such as "a mean over rows".
        reduction: ``"mean"`` or ``"sum"``.
        count: the number of terms of a mean; ``None`` for rows or labels.
    """

    words: str
    reduction: str = "mean"
    count: CountFunction | None = None


@dataclass(frozen=True)
class Request:
    """A checked call: what a step needs of it and of the engine's options.

    It never changes.

    Attributes:
        batches: the rows; several if ``Rows.from_batches`` has marked them.
        dim: the dimension along which tensors have their rows.
        criterion: the user's; ``None`` if the module returns its loss.
        reduction: ``"mean"`` or ``"sum"``: how losses of micro-batches combine.
        count: the user's number of terms of a mean; ``None`` for rows or labels.
        return_outputs: whether outputs are returned, or the function that selects.
        whole_batch: whether one loss sees all rows.
        scale: the scaler's factor of gradients.
        backward: whether gradients are computed; else sub-steps are forward passes.
        check_finite: whether a loss that is not finite is an error.
        loss_name: what texts call the loss if there is no criterion.
    """

    batches: Sequence[Batch]
    dim: int
    criterion: Callable[[Any, Any], Any] | None = None
    reduction: str = "mean"
    count: CountFunction | None = None
    return_outputs: bool | Callable[[Any], Any] = False
    whole_batch: bool = False
    scale: float = 1.0
    backward: bool = True
    check_finite: bool = False
    loss_name: str = "the module's own loss"

    @property
    def sizes(self) -> list[int]:
        """The number of rows of each batch."""
        return [batch.rows for batch in self.batches]

    @property
    def rows(self) -> int:
        """The number of rows in the step."""
        return sum(self.sizes)

    def of_largest_batch(self) -> Self:
        """The request with its largest batch only."""
        if len(self.batches) == 1:
            return self
        # A look shows more in a batch with more rows.
        largest = max(self.batches, key=lambda batch: batch.rows)
        return replace(self, batches=[replace(largest, first_row=0)])

    def combined_by(self, candidate: LossCandidate) -> Self:
        """The request if losses combine as a candidate says."""
        return replace(self, reduction=candidate.reduction, count=candidate.count)

    @property
    def is_mean(self) -> bool:
        """Whether the loss is a mean of its terms, not a sum."""
        return self.reduction == "mean"


def checked(
    call: Call,
    dim: int,
    master: torch.device,
    finite: bool = False,
    backward: bool = True,
) -> Request:
    """The request of a call: rows counted, reduction resolved.

    Raises ``TypeError`` or ``ValueError`` for invalid arguments.
    """
    criterion = call.criterion
    targets = call.targets
    # First: swapped arguments would be told as rows that disagree.
    if callable(targets) or isinstance(criterion, Tensor):
        raise TypeError(
            f"got targets={targets!r:.60} and criterion={criterion!r:.60}, which look "
            f"swapped or misplaced; call forward_backward(inputs, targets, criterion), "
            f"or pass criterion= by name if there are no targets"
        )
    for name, function in (("criterion", criterion), ("count", call.count)):
        if function is not None:
            check_function(name, function)
    if not (isinstance(call.return_outputs, bool) or callable(call.return_outputs)):
        raise TypeError(
            f"return_outputs must be bool or callable, got {call.return_outputs!r}"
        )
    if not isinstance(call.scaler, (torch.amp.GradScaler, type(None))):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, got {call.scaler!r}")
    # ``count=`` may read targets that the module's own loss does not.
    if targets is not None and criterion is None and call.count is None:
        raise ValueError("targets were given without a criterion; pass criterion=")
    splits = read_attribute(criterion, "num_splits", 1)  # timm's JsdCrossEntropy has it
    if isinstance(splits, int) and splits > 1 and not call.whole_batch:
        raise ValueError(
            f"{type(criterion).__name__} expects {splits} versions of each image in a "
            f"batch, and a micro-batch has some of them only; pass whole_batch=True"
        )
    batches = batches_of(call.inputs, targets, dim)
    # With whole_batch each share has a part of one loss.
    reduction = "sum"
    if not call.whole_batch:
        reduction = resolve_reduction(criterion, call.reduction)
    scale = 1.0
    if call.scaler is not None:
        scale = to_numbers(call.scaler.scale(torch.ones((), device=physical(master))))
    return Request(
        batches,
        dim,
        criterion=criterion,
        reduction=reduction,
        count=call.count,
        return_outputs=call.return_outputs,
        whole_batch=call.whole_batch,
        scale=scale,
        backward=backward,
        check_finite=finite,
    )


def check_module(module: Any) -> None:
    """Refuse what is no module, and modules that are wrapped to be replicated."""
    # A forgotten pair of parentheses is a frequent slip.
    if isinstance(module, type):
        name = module.__name__
        raise TypeError(
            f"module must be an nn.Module, got the class itself; pass {name}(...)"
        )
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
    if isinstance(module, _WRAPPERS):
        raise TypeError(
            f"module is already wrapped in {type(module).__name__}, which does the "
            "same work; pass the model inside of this wrapper, its .module (and "
            "process_group= for several processes)"
        )


_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, Wrapper)


def check_synchronised(module: nn.Module) -> None:
    """Refuse ``nn.SyncBatchNorm`` if there are several processes: it would hang."""
    # In one process its layers exchange statistics between replicas instead.
    if not (dist.is_available() and dist.is_initialized()):
        return
    for name, part in module.named_modules():
        if not isinstance(part, nn.SyncBatchNorm):
            continue
        if dist.get_world_size(part.process_group) > 1:
            raise ValueError(
                f"{name!r} is an nn.SyncBatchNorm with a process group of several "
                "processes: replicas, which are threads, would exchange statistics "
                "with other processes in no fixed order, and wait for ever; "
                f"{_INSTEAD_OF_SYNC_BATCH_NORM}"
            )


_INSTEAD_OF_SYNC_BATCH_NORM = (
    "use nn.BatchNorm2d, whose state dict has the same keys, and make micro-batches "
    "larger. If running statistics must be of the whole batch, also pass "
    'buffers="batch"'
)


def check_function(name: str, value: Any) -> None:
    """Refuse values that are not functions, for ``criterion`` or ``count``."""
    if isinstance(value, type):
        raise TypeError(
            f"{name} is the class {value.__name__}; pass {value.__name__}()"
        )
    if not callable(value):
        raise TypeError(f"{name} must be callable, got {value!r}")


def resolve_reduction(criterion: Any, reduction: str | None) -> str:
    """``"mean"`` or ``"sum"``, as passed or as the criterion says.

    A criterion that says nothing takes a mean.
    """
    if reduction is None:
        reduction = "mean"
        option = option_of(criterion, "reduction", "mean")
        # ``batchmean`` is a mean over rows, which is what micro-batches are weighted
        # by.
        if isinstance(option, str) and option != "batchmean":
            reduction = option
    if reduction == "none":
        raise ValueError(
            'reduction="none" gives one loss per term; make the criterion with '
            'reduction="mean" or "sum". If your own criterion takes the mean of these '
            'losses, pass reduction="mean" to the engine\'s call'
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    return reduction


def option_of(criterion: Any, name: str, default: Any) -> Any:
    """An option of a criterion: a module's attribute, or a partial's keyword."""
    if isinstance(criterion, partial):
        return criterion.keywords.get(name, option_of(criterion.func, name, default))
    owner = module_of(criterion)
    return read_attribute(criterion if owner is None else owner, name, default)
