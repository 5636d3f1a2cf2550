"""What a criterion says of itself: how it combines its terms, and which of them it counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from scatterpar.devices.fingerprints import Readout
from scatterpar.replicas.compiled import unwrapped
from scatterpar.replicas.mirror import owner_of

__all__ = ["Count", "class_counts", "is_counted", "resolve_reduction"]

Count = Callable[[Any, Any], "float | Tensor"]


def resolve_reduction(criterion: Any, reduction: str | None) -> str:
    """``"mean"`` or ``"sum"``: as given, else as the criterion says of itself, else a mean.

    Raises:
        ValueError: anything else, ``"none"`` in particular.
    """
    own = _option(_as_function(criterion), "reduction", None)
    if reduction is None and isinstance(own, str):
        reduction = "mean" if own == "batchmean" else own
    if reduction is None:
        return "mean"
    if reduction == "none":
        raise ValueError(
            'reduction="none" gives one loss per term, and a backward pass needs a single one; '
            'use a criterion with reduction="mean" or "sum"'
        )
    if reduction not in ("mean", "sum"):
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}')
    return reduction


def is_counted(criterion: Any, reduction: str | None) -> bool:
    """Whether ``weigh`` is right by what ``criterion`` is: torch's own cross entropy, as it is."""
    if not _averages_classes(criterion):  # of TorchScript's classes nobody can ask for more
        return False
    owner = owner_of(criterion)
    return (owner is None or _is_torchs_own(owner)) and reduction == resolve_reduction(
        criterion, None
    )


def _is_torchs_own(loss: nn.Module) -> bool:
    """Whether its forward is torch's, with nothing around it."""
    hooked = loss._forward_hooks or loss._forward_pre_hooks or "forward" in vars(loss)
    return not hooked and type(loss).forward in (nn.CrossEntropyLoss.forward, nn.NLLLoss.forward)


def class_counts(
    criterion: Any,
    targets: Any,
    labels: Iterable[Any],
    spans: Sequence[tuple[int, int]],
    dim: int,
    readout: Readout,
) -> Sequence[float | Tensor] | None:
    """What torch's mean cross entropies divide by; ``None`` for any other criterion.

    Args:
        criterion: says what it leaves out, and what classes weigh.
        targets: the whole batch's.
        labels: the targets of each micro-batch in order.
        spans: where each of them starts and stops.
        dim: the dimension that holds the rows.
        readout: brings counts to the host.
    """
    criterion = _as_function(criterion)
    if not _averages_classes(criterion):
        return None
    if isinstance(targets, Tensor) and list(spans) == sorted(spans):
        return _count_classes(criterion, targets, dim, spans, readout)
    return [_count_piece(criterion, piece) for piece in labels]


def _as_function(criterion: Any) -> Any:
    """A loss of torch's that was scripted or traced as the function it is; all else as it is."""
    functions = {"CrossEntropyLoss": F.cross_entropy, "NLLLoss": F.nll_loss}
    if getattr(criterion, "original_name", None) in functions:  # TorchScript's
        options = {n: getattr(criterion, n) for n in ("weight", "ignore_index", "reduction")}
        return partial(functions[criterion.original_name], **options)
    if isinstance(criterion, GraphModule):
        calls = [n for n in criterion.graph.nodes if n.op.startswith("call_")]
        if len(calls) == 1 and calls[0].target in functions.values():
            options = {
                name: attrgetter(str(value.target))(criterion) if isinstance(value, Node) else value
                for name, value in calls[0].kwargs.items()
            }
            function: Any = calls[0].target
            return partial(function, **options)
    return criterion


def _averages_classes(criterion: Any) -> bool:
    """Whether ``criterion`` is one of torch's that leave targets out, or weight them."""
    function = criterion.func if isinstance(criterion, partial) else criterion
    owner, _ = unwrapped(owner_of(function))
    of_torch = (F.cross_entropy, F.nll_loss)
    return isinstance(owner, (nn.CrossEntropyLoss, nn.NLLLoss)) or function in of_torch


def _count_classes(
    criterion: Any, targets: Any, dim: int, spans: Sequence[tuple[int, int]], readout: Readout
) -> list[float]:
    """The divisors of mean cross entropies: targets that are not ignored, by class weight."""
    if targets.is_floating_point():
        # Probabilities of classes: every position is a term, whatever its weight.
        return [stop - start for start, stop in spans]
    terms = _class_terms(criterion, targets)
    if terms.ndim > 1:
        terms = terms.movedim(dim, 0).flatten(1).sum(1)
    (rows,) = readout.ask([terms])()
    sizes = torch.tensor([stop - start for start, stop in spans], device="cpu")
    counts: list[float] = torch.segment_reduce(rows.double(), "sum", lengths=sizes).tolist()
    return counts


def _count_piece(criterion: Any, targets: Any) -> float | Tensor:
    """The divisor of a mean cross entropy of one micro-batch."""
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"cross entropy takes a tensor of targets, got {type(targets).__name__}; "
            "forward_backward(inputs, targets, criterion) takes them apart from the inputs"
        )
    if targets.is_floating_point():
        return targets.numel() / max(1, targets.size(min(1, targets.ndim - 1)))
    return _class_terms(criterion, targets).sum()


def _class_terms(criterion: Any, targets: Tensor) -> Tensor:
    """How much each class index counts: nothing if ignored, else its class's weight.

    Where the targets are, and with what every accelerator knows: not in float64.
    """
    counted: Tensor = targets != _option(criterion, "ignore_index", -100)
    class_weight = _option(criterion, "weight", None)
    if class_weight is None:
        return counted
    wide = torch.promote_types(class_weight.dtype, torch.float32)
    weight = class_weight.detach().to(targets.device, wide)
    terms: Tensor = weight[targets.masked_fill(~counted, 0)] * counted
    return terms


def _option(criterion: Any, name: str, default: Any) -> Any:
    """An option of a criterion: a module's attribute, or a keyword of a partial function."""
    if isinstance(criterion, partial):
        return criterion.keywords.get(name, _option(criterion.func, name, default))
    owner = owner_of(criterion)
    return getattr(criterion if owner is None else owner, name, default)
