"""Compare the engine's gradient with that of a plain backward pass, parameter by
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import unwrap_markers
from scatterpar.devices.transfers import Transfers, to_host
from scatterpar.errors import restored
from scatterpar.plan import Printed
from scatterpar.replicas.module_copy import module_of
from scatterpar.step.reduce import Outcome
from scatterpar.step.request import Request
from scatterpar.step.scatter import LeafMover
from scatterpar.step.substeps import as_call, loss_of
from scatterpar.threads.caller_context import autocast_types
from scatterpar.torch_private import hooks_taken_off, uncompiled
from scatterpar.verify.user_state import UserState

_LIMITS = {
    torch.float64: 1e-10,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
SMALLEST_SCALE = 1e-2  # a gradient below this part of the largest may be rounding alone

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True)
class GradientCheck(Printed):
    """The difference between the engine's gradients and those of a plain whole-batch
    backward.

    Attributes:
        rows: the size of the batch.
        worst: the largest relative difference of a parameter: the largest difference of
            an entry over the largest entry, or over a hundredth of the largest of all
            parameters, if that is more: a gradient that is zero is computed as
            rounding. Infinite for NaN, or if only one of the two has a gradient and it
            is not zero.
        parameter: the name of this parameter.
        limit: the largest difference that rounding explains, given the coarsest dtype
            in the step.
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
            f"gradients of {self.rows:,} rows beside those of a plain whole-batch "
            "backward: "
            f"largest relative difference {self.worst:.2e}, in {self.parameter}: "
            f"{verdict} (limit "
            f"{self.limit:.0e})." + ("" if self.passed else f" {self.meaning}")
        )


def compare(module: nn.Module, outcome: Outcome, device: torch.device) -> GradientCheck:
    """Undo a step that is not committed, and compare it with a plain one, which changes
    nothing.
    """
    attempt, request = outcome.attempt, outcome.attempt.request
    drawn = attempt.generators.drawn
    attempt.undo()
    tensors, found = (
        zip(*outcome.gradients, strict=True) if outcome.gradients else ((), ())
    )
    owner = module_of(request.criterion)
    roots = {"": module} if owner is None else {"": module, "criterion.": owner}
    names = {
        id(p): at + name
        for at, root in roots.items()
        for name, p in root.named_parameters()
    }
    state = UserState([*roots.values(), request.criterion], [device], weights=True)
    plain = partial(_plain, module, request, device, tensors)
    with restored(state.restore), uncompiled(), hooks_taken_off(tensors):
        ((dtype, expected),) = attempt.workers.parallel_apply(
            [plain], [()], devices=[device]
        )
    worst, position = relative_difference(found, expected)
    place = (
        names.get(id(tensors[position]), "a tensor of the criterion")
        if tensors
        else "nothing"
    )
    dtypes = {
        dtype,
        *map(torch.get_autocast_dtype, autocast_types()),
        *(t.dtype for t in tensors),
    }
    limit = max(_LIMITS.get(each, 0.0) for each in dtypes)
    has_nan = not all(map(math.isfinite, _magnitudes(expected)))
    has_statistics = any(map(uses_batch_statistics, module.modules()))
    reasons = has_nan, drawn or state.drawn, has_statistics, request.whole_batch, True
    return GradientCheck(
        request.rows, worst, place, limit, _MEANINGS[reasons.index(True)]
    )


_MEANINGS = (  # of a difference; the first that holds
    "The plain backward pass has NaN or infinite gradients, too.",
    "The module drew random numbers (dropout?): call engine.eval() first.",
    "Batch normalisation ties rows to each other: call engine.eval() first.",
    "Outputs without rows differ between micro-batches, or the module ties the rows "
    "of a "
    "micro-batch to each other.",
    "The loss is no mean over rows: pass count=, its number of terms (labels are "
    "ignored? "
    'scatterpar.count_labels()), reduction="sum" for a sum, whole_batch=True if it '
    "compares rows "
    "with each other. Or a row's result depends on its padding or on other rows: mask "
    "the padding.",
)


def uses_batch_statistics(layer: nn.Module) -> bool:
    """Whether the layer is a batch normalisation that uses the
    statistics of its input.
    """
    is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    return is_norm and (layer.training or layer.running_mean is None)


def relative_difference(found: Gradients, expected: Gradients) -> tuple[float, int]:
    """The largest relative difference between gradients of the same tensors, and its
    position.

    For each tensor as ``GradientCheck.worst`` says.
    """
    pairs = [*zip(found, expected, strict=True)]
    both = [mine is not None and other is not None for mine, other in pairs]
    off = [
        mine
        if other is None
        else other
        if mine is None
        else mine.to_dense() - other.to_dense()
        for mine, other in pairs
    ]
    sizes = _magnitudes(expected)
    floor = max(SMALLEST_SCALE * max(sizes, default=0.0), math.ulp(0.0))
    each = zip(_magnitudes(off), sizes, both, strict=True)
    errors = [
        (n / max(size, floor) if two else math.inf) if n else 0.0
        for n, size, two in each
    ]
    errors = [math.inf if math.isnan(error) else error for error in errors]
    worst = max(errors, default=0.0)
    return worst, errors.index(worst) if errors else 0


def _magnitudes(tensors: Gradients) -> list[float]:
    """The largest absolute entry of each tensor, read together; zero if
    there is none.
    """
    zero = torch.zeros(1, device="cpu")
    dense = [
        t.detach().to_dense() if t is not None and t.numel() else zero for t in tensors
    ]
    return [
        float(norm)
        for norm in to_host([torch.linalg.vector_norm(t, math.inf) for t in dense])
    ]


def moved_to(device: torch.device, value: Any) -> Any:
    """The batch on a device, as a module gets it; not counted."""
    move = partial(LeafMover(Transfers()).move, device)
    return unwrap_markers(nested.map_leaves(move, value), copy=True)


def _plain(
    module: nn.Module, request: Request, device: torch.device, tensors: Sequence[Tensor]
) -> tuple[torch.dtype, Gradients]:
    """The loss's dtype and each tensor's gradient. ``backward()`` would run the user's
    hooks.
    """
    with torch.inference_mode(False):  # also within no_grad
        inputs, targets = moved_to(device, request.batches[0][1])
        args, kwargs = as_call(inputs)
        loss = loss_of(module(*args, **kwargs), targets, request.criterion)
        return loss.dtype, torch.autograd.grad(loss, tensors, allow_unused=True)
