"""Run a user's step once, and return the gradients that its optimizer would receive."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.causes.batch_normalisation import uses_batch_statistics
from scatterpar.splitting.gradients import Gradients, as_double, whole
from scatterpar.splitting.operator_modes import (
    Numbers,
    RepeatedNumbers,
    Shape,
    WatchedOperators,
    fill_evenly,
)
from scatterpar.splitting.trained_leaves import TrainedGradients, leaves_of_step
from scatterpar.torch_private.clipping import clipping_replaced

# As an initial weight: outputs stay of the size that they have.
_SMALL = 0.1
# Of a Mersenne Twister, which has used all of them when it is seeded.
_WORDS_OF_STATE = 624

StepFunction = Callable[[Any, list[Any]], Any]  # of a module of the user's class


@dataclass(frozen=True)
class Settings:
    """The options of a run of the step.

    Attributes:
        in_double: parameters, buffers and new tensors are in float64, and casts to a
            lower dtype give float64.
        numbers: what random operators give.
        fixed_shapes: shapes of draws that have no rows, for ``Numbers.VARIED``.
        running_statistics: batch normalisation does not use the statistics of a part.
        watch_modules: keep the outputs of modules.
    """

    in_double: bool = True
    numbers: Numbers = Numbers.CONSTANT
    fixed_shapes: frozenset[Shape] = frozenset()
    running_statistics: bool = False
    watch_modules: bool = False


@dataclass
class StepResult:
    """The result of a step on one rank.

    Attributes:
        gradients: by the name of the parameter.
        drawn: which generators it drew from: Python, NumPy.
        coarsest: the coarsest dtype in which it computes, if that is not float64.
        has_drawn: whether it has random operators, unless numbers are as drawn.
        draws: the shapes that these drew, without those of dropout.
        uncompared: parameters that got a gradient, and cannot be compared.
        moves_weights: whether it runs a backward pass at weights that it has changed.
        moved: the names of parameters and buffers that it changes, and does not train.
        outputs: of modules by name, in the order in which they end, if
            ``watch_modules``.
    """

    gradients: Gradients
    drawn: list[str]
    coarsest: torch.dtype | None
    has_drawn: bool
    draws: Counter[Shape]
    uncompared: tuple[str, ...]
    moves_weights: bool
    moved: tuple[str, ...]
    outputs: dict[str, Tensor]


def run_step(
    step: StepFunction,
    model: nn.Module,
    batches: list[Any],
    settings: Settings,
    tensors: Iterable[Tensor],
) -> StepResult:
    """Call ``step(model, batches)``. Returns gradients; the caller restores everything.

    ``tensors`` are the user's tensors that ``step`` and ``model`` refer to.
    """
    # What a user has accumulated before is no part of this step.
    for tensor in tensors:
        if tensor.is_leaf:
            tensor.grad = None
    if settings.in_double:
        # Tensors that the step makes without a dtype follow.
        torch.set_default_dtype(torch.float64)
        _convert_to_double(tensors)
    _fill_zeros(model)
    # Hooks stay until the caller restores all that the step has changed, too.
    outputs: dict[str, Tensor] = {}
    if settings.running_statistics:
        use_running_statistics(model)
    if settings.watch_modules:
        keep_outputs(model, outputs)
    _seed()
    gradients = TrainedGradients(model, leaves_of_step(model, step))
    repeated = RepeatedNumbers(settings.numbers, settings.fixed_shapes)
    watched = WatchedOperators(settings.in_double)
    # Gradients last: they catch the end of the step, and the others end as usual.
    with repeated, watched, clipping_replaced(gradients.clippings), gradients:
        step(model, batches)
        gradients.clippings.end()
    named, uncompared = gradients.result()
    return StepResult(
        gradients=named,
        drawn=_drawn(),
        coarsest=watched.coarsest,
        has_drawn=repeated.has_drawn,
        draws=repeated.draws,
        uncompared=tuple(uncompared),
        moves_weights=gradients.moves_weights,
        moved=gradients.moved(),
        outputs=outputs,
    )


def _convert_to_double(tensors: Iterable[Tensor]) -> None:
    """Convert dense leaves to float64, in place."""
    for tensor in tensors:
        if tensor.is_leaf and tensor.layout == torch.strided and not tensor.is_meta:
            tensor.data = as_double(tensor.data)


def _fill_zeros(model: nn.Module) -> None:
    """Fill parameters that are all zero with numbers that differ, in each run alike.

    While LoRA's second factor is zero, as at the start, the first has no gradient: a
    mistake there would not show. So it is for what is behind a gate.
    """
    for parameter in model.parameters():
        is_dense = parameter.layout == torch.strided and not parameter.is_meta
        # Frozen ones may be masks. By its method, as in ``whole``.
        is_trained = parameter.requires_grad and not hasattr(parameter, "full_tensor")
        if is_dense and is_trained and not bool(parameter.any()):
            filled = torch.empty_like(parameter.data)
            fill_evenly(filled, tuple(filled.shape))
            parameter.data = _SMALL * (filled - 0.5)


# --- batch normalisation, random numbers ---


def layers_with_batch_statistics(model: nn.Module) -> list[nn.Module]:
    """Batch normalisations that have running statistics, but use those of a part."""
    layers = filter(uses_batch_statistics, model.modules())
    return [layer for layer in layers if layer.running_mean is not None]


def use_running_statistics(model: nn.Module) -> None:
    """Let batch normalisation use its running statistics.

    By a hook for each call, because a step may call ``model.train()``.
    """

    def evaluate(layer: nn.Module, _: Sequence[Any]) -> None:
        layer.training = False

    for layer in layers_with_batch_statistics(model):
        layer.register_forward_pre_hook(evaluate)


def keep_outputs(model: nn.Module, outputs: dict[str, Tensor]) -> None:
    """Let modules add the output of their first call, as they end."""
    names = {module: name for name, module in model.named_modules()}

    def keep(module: nn.Module, _: Any, output: Any) -> None:
        for tensor in nested.tensors(output):
            if tensor.ndim and tensor.is_floating_point():
                # The first: GradCache calls a module again, for each part.
                outputs.setdefault(names[module] or "the module", whole(tensor))

    for module in names:
        module.register_forward_hook(keep)


def _numpy_random() -> Any:
    # Not imported for it: that takes longer than a check.
    return sys.modules.get("numpy.random")


def _seed() -> None:
    """Seed the generators of Python and NumPy, before a step that may draw from them.

    Trainers seed at their start, too, which is no draw: nothing depends on the split.
    """
    random.seed(0)
    if _numpy_random() is not None:
        _numpy_random().seed(0)


def _drawn() -> list[str]:
    """The generators that have drawn since they were seeded."""
    drawn = []
    if random.getstate()[1][-1] != _WORDS_OF_STATE:
        drawn.append("Python")
    numpy_random = _numpy_random()
    if numpy_random is not None and numpy_random.get_state()[2] != _WORDS_OF_STATE:
        drawn.append("NumPy")
    return drawn
