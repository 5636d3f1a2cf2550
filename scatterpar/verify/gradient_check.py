"""``engine.check``: the gradient of a step beside that of a plain backward pass."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import Batch
from scatterpar.batch.markers import Marker
from scatterpar.causes.batch_normalisation import uses_batch_statistics
from scatterpar.devices.transfers import Transfers
from scatterpar.numerics.comparison import (
    Inconclusive,
    LeafGradients,
    magnitudes,
    relative_differences,
)
from scatterpar.numerics.rounding import FLOAT64, Rounding
from scatterpar.numerics.wider_precision import Precision, WiderLayers
from scatterpar.objects.journal import Journal
from scatterpar.objects.references import module_of
from scatterpar.step.loss import loss_of
from scatterpar.step.reduce import Outcome
from scatterpar.step.request import Request
from scatterpar.step.scatter import batch_on_device
from scatterpar.step.substeps import set_aside
from scatterpar.step.task import arguments_from_inputs
from scatterpar.tables import Printed
from scatterpar.threads.caller_context import autocast_types
from scatterpar.torch_private.autograd import hooks_taken_off
from scatterpar.torch_private.compiler import uncompiled


@dataclass(frozen=True)
class GradientCheck(Printed):
    """The engine's gradients, compared with plain torch's over the whole batch.

    Attributes:
        rows: the size of the batch.
        worst: the largest relative difference of a parameter. For one parameter this is
            the largest difference of an entry, divided by the largest entry of the
            parameter, or by a hundredth of the largest entry of all parameters if that
            is more (a gradient of zero is computed as rounding). Infinite for NaN, or
            if only one of the two has a gradient and it is not zero.
        parameter: the name of this parameter.
        limit: the largest difference that rounding explains, given the coarsest format
            that the step rounds to.
        meaning: possible reasons of a difference.
        in_double: whether both were computed in float64, because in the step's own
            format rounding alone makes more than the limit: gradients of rows nearly
            cancel.
    """

    rows: int
    worst: float
    parameter: str
    limit: float
    meaning: str
    in_double: bool = False

    @property
    def passed(self) -> bool:
        """Whether only rounding differs."""
        return self.worst <= self.limit

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def __str__(self) -> str:
        """Two sentences, and the possible reasons if something differs."""
        verdict = "only rounding differs" if self.passed else "NOT the same"
        format_of_both = ""
        if self.in_double:
            format_of_both = ", both in float64 because gradients nearly cancel"
        report = (
            f"gradients of {self.rows:,} rows, compared with plain torch's"
            f"{format_of_both}: {verdict}. The largest relative difference is "
            f"{self.worst:.2e}, in {self.parameter} (limit {self.limit:.0e})."
        )
        return report if self.passed else f"{report} {self.meaning}"


_NAN = "The plain backward pass has NaN or infinite gradients, too."
_RANDOM = "The module drew random numbers (dropout?): call engine.eval() first."
_STATISTICS = "Batch normalisation ties rows to each other: call engine.eval() first."
_OUTPUTS = (
    "Outputs without rows differ between micro-batches, or the module ties the rows of "
    "a micro-batch to each other."
)
_NO_MEAN = (
    "The loss is no mean over rows: pass count=, its number of terms (labels are "
    'ignored? scatterpar.count_labels()), reduction="sum" for a sum, whole_batch=True '
    "if it compares rows with each other. Or a row's result depends on its padding or "
    "on other rows: mask the padding."
)


# Rounding differs from one way of computing to another by less than this factor.
_FACTOR_OF_ROUNDING = 100


@dataclass(frozen=True)
class PlainComparison:
    """A report, and the gradients of the plain backward pass.

    Attributes:
        report: of the step, compared with the plain backward pass.
        expected: the gradients of the plain backward pass.
    """

    report: GradientCheck
    expected: LeafGradients

    @property
    def may_be_rounding(self) -> bool:
        """Whether a computation in float64 may show that only rounding differs."""
        is_narrow = self.report.limit > FLOAT64.limit
        return is_narrow and not self.report.passed and math.isfinite(self.report.worst)

    def beside(self, in_double: PlainComparison) -> GradientCheck:
        """The report, given a comparison of the same step in float64.

        Gradients of rows nearly cancel if the plain pass itself is as far from its
        result in float64 as the step is from the plain pass.
        """
        own = max(relative_differences(self.expected, in_double.expected), default=0.0)
        is_rounding = self.report.worst <= own * _FACTOR_OF_ROUNDING < math.inf
        if not (is_rounding and in_double.report.worst <= self.report.limit):
            return self.report
        return replace(in_double.report, limit=self.report.limit, in_double=True)


@contextlib.contextmanager
def in_double(module: nn.Module, request: Request) -> Iterator[Request]:
    """In the body the module and the criterion are in float64. Yields the request so.

    Afterwards their tensors are as they were. Raises ``Inconclusive`` if there is no
    memory for them.
    """
    precision = Precision.DOUBLE
    roots = [module, module_of(request.criterion)]
    modules = [part for root in roots if root is not None for part in root.modules()]
    layers = WiderLayers(modules, precision.formats)
    if layers.size > precision.max_bytes:
        raise Inconclusive("the module is large")
    widen = partial(nested.map_tensors, precision.widened)

    def widened(atom: Any) -> Any:
        return atom.map(widen) if isinstance(atom, Marker) else widen(atom)

    batches = [
        replace(batch, atoms=[widened(atom) for atom in batch.atoms])
        for batch in request.batches
    ]
    leaves: dict[int, Tensor] = {}
    for part in modules:
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None and tensor.is_leaf:
                leaves[id(tensor)] = tensor
    with contextlib.ExitStack() as stack:
        for device_type in autocast_types():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        # A tensor in float64 has no gradient in another format.
        stack.enter_context(set_aside(list(leaves.values())))
        stack.callback(layers.narrow)
        layers.widen()
        yield replace(request, batches=batches)


def compare(
    module: nn.Module, outcome: Outcome, device: torch.device, state: Journal
) -> PlainComparison:
    """Undo a step that is not committed, and compare it with a plain one.

    ``state`` is from before the step. Its caller restores what the plain step changes.
    """
    attempt = outcome.attempt
    request = attempt.request
    drew_numbers = attempt.generators.drawn
    # Before the plain step, which starts from the same buffers and generators.
    attempt.undo.restore()
    state.restore()
    # The gradients of the step wait in its outcome: nothing is committed yet.
    leaves = [leaf for leaf, _ in outcome.gradients]
    actual = [gradient for _, gradient in outcome.gradients]
    roots = {"": module}
    criterion_module = module_of(request.criterion)
    if criterion_module is not None:
        roots["criterion."] = criterion_module
    rounding = Rounding(device)
    plain = partial(_plain, module, request, device, leaves, rounding)
    # Without hooks, which have seen the gradients of the step already.
    with uncompiled(), hooks_taken_off(leaves):
        expected = attempt.threads.call(device, plain)
    state.rewind()  # which sees whether numbers were drawn
    differences = relative_differences(actual, expected)
    worst = max(differences, default=0.0)
    # The surest reason first: later ones are guesses.
    if not all(map(math.isfinite, magnitudes(expected))):
        meaning = _NAN
    elif drew_numbers or state.drawn:
        meaning = _RANDOM
    elif any(map(uses_batch_statistics, module.modules())):
        meaning = _STATISTICS
    else:
        meaning = _OUTPUTS if request.whole_batch else _NO_MEAN
    parameter = "nothing"
    if leaves:
        parameter = _name_of_leaf(leaves[differences.index(worst)], roots)
    report = GradientCheck(
        rows=request.rows,
        worst=worst,
        parameter=parameter,
        limit=rounding.limit,
        meaning=meaning,
    )
    return PlainComparison(report, expected)


def _name_of_leaf(leaf: Tensor, roots: dict[str, nn.Module]) -> str:
    """The name of a parameter of the modules ``roots``, which have prefixes."""
    for prefix, root in roots.items():
        for name, parameter in root.named_parameters():
            if parameter is leaf:
                return prefix + name
    return "a tensor of the criterion"


def _plain(
    module: nn.Module,
    request: Request,
    device: torch.device,
    leaves: Sequence[Tensor],
    rounding: Rounding,
) -> LeafGradients:
    """Compute the leaves' gradients. ``backward()`` would run the user's hooks."""
    for device_type in autocast_types():
        rounding.add(torch.get_autocast_dtype(device_type))
    for leaf in leaves:
        rounding.add(leaf.dtype)
    with torch.inference_mode(False):  # also within no_grad
        inputs, targets = copied_to(device, request.batches[0])
        args, kwargs = arguments_from_inputs(inputs)
        loss = loss_of(module(*args, **kwargs), targets, request.criterion)
        rounding.watch(loss)
        return torch.autograd.grad(loss, leaves, allow_unused=True)


def copied_to(device: torch.device, batch: Batch) -> tuple[Any, Any]:
    """The inputs and targets of a batch on a device, as a module gets them.

    These copies are not counted.
    """
    return batch_on_device(batch, device, Transfers()).unwrapped(copy=True)
