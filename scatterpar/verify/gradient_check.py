"""Compare the engine's gradient with that of a plain backward pass, parameter by parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from scatterpar import torch_private
from scatterpar.devices.transfers import Transfers, to_numbers
from scatterpar.replicas.module_copy import module_of
from scatterpar.step import nested
from scatterpar.step.markers import unwrap_markers
from scatterpar.step.outcome import Outcome
from scatterpar.step.request import Request
from scatterpar.step.scatter import LeafMover
from scatterpar.step.substeps import as_call, loss_of
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.workers import Workers
from scatterpar.verify.user_state import preserve_user_state

_LIMITS = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
_SMALLEST_SCALE = 1e-6  # gradients smaller than this part of the largest are only rounding

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class GradientCheck:
    """The difference between the engine's gradients and those of a plain whole-batch backward.

    Attributes:
        rows: the size of the batch.
        worst: the largest relative difference of a parameter: the largest difference of an entry
            over the largest entry. Infinite for NaN, or if only one of the two has a gradient and
            it is not zero.
        parameter: the name of this parameter.
        limit: the largest difference that rounding explains, given the coarsest dtype in the step.
        meaning: possible reasons of a difference.
    """

    rows: int
    worst: float
    parameter: str
    limit: float
    meaning: str

    @property
    def passed(self) -> bool:
        """Whether only rounding differs."""
        return self.worst <= self.limit

    def __str__(self) -> str:
        """One sentence, and a second one if something differs."""
        verdict = "only rounding differs" if self.passed else "NOT the same"
        return (
            f"gradients of {self.rows:,} rows beside those of a plain whole-batch backward: "
            f"largest relative difference {self.worst:.2e}, in {self.parameter}: {verdict} (limit "
            f"{self.limit:.0e})." + ("" if self.passed else f" {self.meaning}")
        )


def compare(
    module: nn.Module,
    request: Request,
    device: torch.device,
    workers: Workers,
    compute_step: Callable[[], Outcome],
) -> GradientCheck:
    """Compare ``compute_step``, a step without its commit, with a plain one, and change nothing.

    ``autograd.grad`` is used, since ``backward()`` would write ``.grad`` and run hooks on
    parameters, which may step an optimizer.
    """
    if len(request.sizes) > 1:
        raise ValueError(
            f"check takes one batch, which a plain backward sees whole, got {len(request.sizes)} "
            f"in one; pass one of them"
        )
    outcome = compute_step()
    drawn = outcome.attempt.generators.drawn
    outcome.attempt.undo()
    tensors = [tensor for tensor, _ in outcome.gradients]
    owner = module_of(request.criterion)
    roots = [module] if owner is None else [module, owner]
    with (
        preserve_user_state([*roots, request.criterion], [device], parameters=True) as state,
        torch_private.uncompiled(),
        torch_private.hooks_taken_off(tensors),
    ):
        plain = partial(_plain, module, request, device, tensors)
        ((dtype, expected),) = workers.parallel_apply([plain], [()], devices=[device])
    names = _names(roots)
    found = [gradient for _, gradient in outcome.gradients]
    worst, position = relative_difference(found, expected)
    place = names.get(id(tensors[position]), "a tensor of the criterion") if tensors else "nothing"
    dtypes = {dtype, *map(torch.get_autocast_dtype, autocast_types()), *(t.dtype for t in tensors)}
    limit = max(_LIMITS.get(each, 0.0) for each in dtypes)
    meaning = _meaning(module, request, drawn or state.drawn)
    if not all(map(math.isfinite, map(_magnitude, expected))):
        meaning = "The plain backward pass has NaN or infinite gradients, too."
    return GradientCheck(request.rows, worst, place, limit, meaning)


def uses_batch_statistics(layer: nn.Module) -> bool:
    """Whether the layer is a batch normalisation that uses the statistics of its input."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and (
        layer.training or layer.running_mean is None
    )


def relative_difference(
    found: Gradients, expected: Gradients, least: float = _SMALLEST_SCALE
) -> tuple[float, int]:
    """The largest relative difference between gradients of the same tensors, and its position.

    For each tensor: the largest absolute difference over the largest absolute expected entry. If
    that entry is below ``least`` times the largest entry of all tensors, over that floor instead.
    Infinite for NaN, or if only one gradient exists and is not zero.
    """
    floor = least * max(map(_magnitude, expected), default=0.0)
    worst, position = 0.0, 0
    for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
        if mine is None or other is None:
            difference = math.inf if _magnitude(mine) or _magnitude(other) else 0.0
        else:
            off = _magnitude(mine.to_dense() - other.to_dense())
            difference = off / max(_magnitude(other), floor, math.ulp(0.0)) if off else 0.0
        if math.isnan(difference):
            difference = math.inf
        if difference > worst:
            worst, position = difference, i
    return worst, position


def _magnitude(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel():
        return 0.0
    largest: float = to_numbers(torch.linalg.vector_norm(tensor.detach().to_dense(), math.inf))
    return largest


def _plain(
    module: nn.Module, request: Request, device: torch.device, tensors: Sequence[Tensor]
) -> tuple[torch.dtype, Gradients]:
    """The result of plain user code: the loss's dtype, and each tensor's gradient."""
    with Transfers() as transfers, torch.inference_mode(False), torch.enable_grad():
        bring = partial(LeafMover(transfers).move, device)
        inputs, targets = unwrap_markers(
            nested.map_leaves(bring, (request.inputs, request.targets)), copy=True
        )
        args, kwargs = as_call(inputs)
        loss = loss_of(module(*args, **kwargs), targets, request.criterion)
        return loss.dtype, torch.autograd.grad(loss, tensors, allow_unused=True)


def _names(roots: Sequence[nn.Module]) -> dict[int, str]:
    names: dict[int, str] = {}
    for prefix, root in zip(("", "criterion."), roots, strict=False):
        for name, parameter in root.named_parameters():
            names.setdefault(id(parameter), prefix + name)
    return names


def _meaning(module: nn.Module, request: Request, drawn: bool) -> str:
    if drawn:
        return (
            "The module drew random numbers (dropout?), and other ones each time: call "
            "engine.eval() first."
        )
    if any(map(uses_batch_statistics, module.modules())):
        return (
            "Batch normalisation in training mode ties the rows of a micro-batch to each other, so "
            "that no micro-batches have the whole batch's gradient: call engine.eval() first."
        )
    if request.whole_batch:
        return (
            "Outputs without rows differ between micro-batches, or the module ties the rows of "
            "a micro-batch to each other."
        )
    return (
        "The loss is no mean over rows: pass count=, the number of terms that it averages over "
        '(labels that are ignored? scatterpar.count_labels()), or reduction="sum"; if it compares '
        "rows with each other, steps need whole_batch=True. Or a row's result depends on its "
        "padding or on other rows: mask the padding."
    )
