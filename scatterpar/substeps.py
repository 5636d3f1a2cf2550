"""One replica, one share: forward and backward over its micro-batches. Knows no threads."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scatterpar import nested
from scatterpar.context import autocast_types
from scatterpar.plan import Share
from scatterpar.randomness import followed
from scatterpar.scatter import as_call, is_borrowed, join, take
from scatterpar.workers import note

__all__ = ["Result", "infer", "noted", "prepare_autograd", "scalar_loss", "train"]

Criterion = Callable[[Any, Any], Any]


@dataclass
class Result:
    """What one replica made of its share.

    Attributes:
        loss: its part of the whole batch's loss: the weighted sum over its micro-batches.
        dtype: the dtype of the losses.
        outputs: the module's outputs, detached and joined, where they were asked for.
    """

    loss: float = 0.0
    dtype: torch.dtype = torch.float32
    outputs: Any = None


@functools.cache
def prepare_autograd() -> None:
    """Let torch import what its first backward pass needs: an interrupt could cut that in half."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), requires_grad=True).mul(1).backward(torch.ones(()))


def train(
    module: Callable[..., Any],
    criterion: Criterion | None,
    share: Share,
    inputs: Any,
    targets: Any,
    weights: Sequence[float],
    *,
    dim: int,
    batch: Any,
    scale: float,
    check_finite: bool,
    keep_outputs: bool,
    most: int | None,
    proceed: Callable[[], None],
) -> Result:
    """Accumulate in ``module``'s parameters the gradient of its share of the batch's loss.

    Args:
        module: the replica.
        criterion: as in ``forward_backward``; ``None`` where the module computes the loss.
        share: which rows these are, and how they are cut into micro-batches.
        inputs: the share's rows of the inputs, on the replica's device.
        targets: likewise the targets.
        weights: the factor of each micro-batch's loss in the loss of the whole batch.
        dim: the dimension that holds the rows.
        batch: the caller's batch; where the share is views of it, each micro-batch is copied.
        scale: the gradient scaler's factor.
        check_finite: refuse losses that are NaN or infinite.
        keep_outputs: keep the module's outputs.
        most: leave it at so many sub-steps.
        proceed: called between sub-steps; raises when the step is to end.
    """
    cut = list(zip(share.micro_batches, weights, strict=True))[:most]
    borrowed = is_borrowed(batch, share.device)
    autocast = autocast_types()
    losses: list[Tensor] = []
    outputs: list[Any] = []
    for number, ((start, stop), weight) in enumerate(cut):
        if number:  # who has started comes to its first one: errors do not depend on who was faster
            proceed()
        with noted(share, number):
            micro_inputs, micro_targets = take(
                (inputs, targets), start - share.start, stop - share.start, dim, copy=borrowed
            )
            args, kwargs = as_call(micro_inputs)
            output = module(*args, **kwargs)
            loss = _loss_of(output, micro_targets, criterion)
            if keep_outputs:
                outputs.append(nested.transform(_detached, output))
            del output, args, kwargs, micro_inputs, micro_targets
            if weight:
                if check_finite:
                    _require_finite(loss, share, number)
                _backward(loss, weight * scale, autocast)
            losses.append(loss.detach())
            del loss
    joined = join(outputs, dim, weights) if keep_outputs else None
    return Result(_weighted_sum(losses, weights), losses[0].dtype, joined)


def infer(
    module: Callable[..., Any],
    share: Share,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    dim: int,
    batch: Any,
    proceed: Callable[[], None],
) -> Any:
    """The module's outputs on its share, computed without a graph in micro-batches and joined."""
    borrowed = is_borrowed(batch, share.device)
    outputs = []
    for number, (start, stop) in enumerate(share.micro_batches):
        if number:
            proceed()
        with noted(share, number), torch.no_grad():
            micro_args, micro_kwargs = take(
                (args, kwargs), start - share.start, stop - share.start, dim, copy=borrowed
            )
            outputs.append(module(*micro_args, **micro_kwargs))
    return join(outputs, dim, [stop - start for start, stop in share.micro_batches])


def _loss_of(output: Any, targets: Any, criterion: Criterion | None) -> Tensor:
    if criterion is not None:
        source = "the criterion"
        loss = criterion(output, targets)
    else:
        source = "the module"
        loss = output
        if isinstance(output, Mapping) and "loss" in output:
            loss = output["loss"]
        elif not isinstance(output, Tensor):
            loss = getattr(output, "loss", output)
    return scalar_loss(loss, source)


def scalar_loss(loss: Any, source: str) -> Tensor:
    """``loss``, if it is a 0-dim tensor; else an error that says where it came from."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"{source} must give the loss as a 0-dim tensor, got {type(loss).__name__}; "
            f"pass a criterion, or return the loss, .loss or ['loss'] from the module"
        )
    if loss.ndim:
        raise ValueError(
            f"{source} must give a 0-dim loss, got shape {tuple(loss.shape)}; "
            f'reduce it with "mean" or "sum", or pass a criterion that does'
        )
    return loss


def _backward(loss: Tensor, weight: float, autocast: Sequence[str]) -> None:
    """Backward from ``weight * loss``, outside ``autocast``, as torch advises."""
    gradient = torch.full_like(loss, weight, requires_grad=False)
    with contextlib.ExitStack() as stack:
        for kind in autocast:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(followed(loss))
        loss.backward(gradient)
    if autocast:
        torch.clear_autocast_cache()  # a plain loop leaves autocast, and so the cache, every time


def _weighted_sum(losses: Sequence[Tensor], weights: Sequence[float]) -> float:
    """In double precision, with one transfer from the device; weight zero takes out even NaN."""
    values: list[float] = torch.stack(list(losses)).cpu().double().tolist()
    return sum(value * weight for value, weight in zip(values, weights, strict=False) if weight)


def _require_finite(loss: Tensor, share: Share, number: int) -> None:
    if not torch.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss.item()} in replica {share.replica} on {share.device}, "
            f"sub-step {number}; nothing was changed"
        )


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class noted:
    """Note on whatever is raised in the body where it happened.

    Args:
        share: the replica's share.
        number: the sub-step, where there are any.
    """

    def __init__(self, share: Share, number: int | None = None) -> None:
        self._share = share
        self._number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            where = f"in replica {self._share.replica} on {self._share.device}"
            if self._number is not None:
                where += f", sub-step {self._number} of {len(self._share.micro_batches)}"
            note(error, f"{where}, counted from 0")
