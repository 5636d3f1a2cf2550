"""A replayed sub-step beside the same sub-step run eagerly.

::

    eager    = loss and gradients of a micro-batch, by the replica's own code
    replayed = the same by its graph, from the same state and random numbers

They differ if a value has changed that the graph has frozen. ``plain_values`` names it.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.transfers import to_numbers
from scatterpar.replicas.references import parts_of
from scatterpar.state.journal import Journal
from scatterpar.state.walk import Walk
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss import forward
from scatterpar.step.substeps import set_aside
from scatterpar.step.task import ReplicaTask
from scatterpar.verify.comparison import (
    SMALLEST_SCALE,
    LeafGradients,
    relative_difference,
)
from scatterpar.verify.dropped_records import records_dropped
from scatterpar.verify.rounding import Rounding

_MAX_DEPTH = 4  # of containers and objects within each other
_MAX_VALUES = 2000


@dataclass(frozen=True)
class Comparison:
    """How a replayed sub-step differs from the same sub-step run eagerly.

    Attributes:
        difference: the largest relative difference of the loss or of a gradient; NaN if
            neither can be compared.
        limit: the largest one that rounding explains.
        draws: whether the sub-step drew random numbers. A graph may draw others.
    """

    difference: float
    limit: float
    draws: bool

    @property
    def differs(self) -> bool:
        """Whether more than rounding differs."""
        return self.difference > self.limit


def compare(
    attempt: Attempt, task: ReplicaTask, rows: Any, replay: Callable[[], Tensor]
) -> Comparison:
    """Run a micro-batch eagerly and by ``replay``, and restore all state.

    ``replay`` adds gradients to the replica's leaves and returns the loss, as a static
    tensor.
    """
    task = replace(task, clock=None)
    request = attempt.request
    module = attempt.replicas.of_model.root
    roots = module, task.criterion, request.criterion, request.count
    # The eager run is one call of user code more than the step has.
    state = Journal(Walk(roots), [task.share.device])
    rounding = Rounding(task.share.device)
    number = task.share.replica
    generators = attempt.generators

    def eager() -> Tensor:
        copied = nested.map_tensors(Tensor.clone, rows)
        _, loss = forward(task, copied)
        rounding.watch(loss)
        factor = torch.full_like(loss, request.scale, requires_grad=False)
        task.run_backward(0, [loss], [factor])
        return loss.detach()

    with state.restored():
        with task.isolated(generators), records_dropped():
            before = generators.get_state(number)
            expected_loss, expected = _result(task, eager)
            # A graph draws from an offset of its own, so other numbers are no fault.
            draws = not _equal(before, generators.get_state(number))
        state.restore()
        with task.isolated(generators):
            actual_loss, actual = _result(task, replay)
    scale = max(abs(expected_loss), abs(actual_loss), SMALLEST_SCALE)
    of_losses = abs(expected_loss - actual_loss) / scale
    of_gradients, _ = relative_difference(actual, expected)
    difference = max(of_losses, of_gradients)
    if not math.isfinite(expected_loss):
        difference = math.nan
    # The same kernels compute the same rows: a whole step's limit is enough.
    limit = min(rounding.limit, rounding.tolerance)
    return Comparison(difference, limit, draws)


def _result(
    task: ReplicaTask, run: Callable[[], Tensor]
) -> tuple[float, LeafGradients]:
    """The loss of ``run``, and the gradients that it adds to the replica's leaves.

    They are no copies: a replay's are static tensors, which the next one writes.
    """
    with set_aside(task.leaves):
        (loss,) = to_numbers(run().reshape(1))
        # Inside, because afterwards the leaves have their earlier gradients again.
        gradients = [leaf.grad for leaf in task.leaves]
    return loss, gradients


def _equal(
    before: Mapping[torch.device, Tensor], after: Mapping[torch.device, Tensor]
) -> bool:
    """Whether no generator has moved; one that was made since then has drawn."""
    if before.keys() != after.keys():
        return False
    return all(torch.equal(before[device], after[device]) for device in before)


# --- the names of values that a graph froze ---


def plain_values(functions: Sequence[Any]) -> dict[str, Any]:
    """The numbers, texts, flags and tensors that functions and objects lead to, by
    name.

    A tensor is its address: what is written in place is not frozen.
    """
    values: dict[str, Any] = {}
    seen: set[int] = set()
    pending = [("", function, 0) for function in functions]
    while pending and len(values) < _MAX_VALUES:
        name, value, depth = pending.pop(0)
        if isinstance(value, nested.PLAIN_CLASSES):
            values[name] = value
            continue
        if isinstance(value, Tensor):
            values[name] = id(value)
            continue
        # Plain values are not asked: equal ones may be one object.
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        with contextlib.suppress(Exception):  # raised by a user's object
            children = list(_named_children(name, value))
            pending += [(child, inner, depth + 1) for child, inner in children]
    return values


def changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names whose values are not the same."""
    return [name for name in before if name in after and before[name] != after[name]]


def _named_children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    parts = parts_of(value)
    if isinstance(value, types.MethodType):
        yield name, value.__func__
        yield name or "self", value.__self__
    elif parts.called is not None:
        yield name, parts.called
        for key, argument in parts.bound.items():
            keyword = f"{key}=" if key in value.keywords else key
            yield f"{keyword} of the functools.partial", argument
    elif isinstance(value, types.FunctionType):
        yield from _variables_of(value)
    elif isinstance(value, nn.Module):
        yield from _parts_of(name or type(value).__name__, value)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield f"{name}[{key!r}]", entry
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield f"{name}[{number}]", entry
    elif not isinstance(value, (type, types.ModuleType)):
        for key, attribute in parts.attributes.items():
            yield f"{name}.{key}" if name else key, attribute
        call = vars(type(value)).get("__call__")
        if isinstance(call, types.FunctionType):
            yield from _variables_of(call)


def _variables_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Globals and closed-over variables that a function names."""
    parts = parts_of(function)
    yield from parts.file_globals.items()
    yield from parts.closure.items()


def _parts_of(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What the layers of a module refer to, beside parameters, buffers and layers."""
    for path, layer in module.named_modules():
        where = f"{name}.{path}" if path else name
        forward = type(layer).forward
        # What a layer's code reads, beside its attributes: a graph froze that, too.
        if isinstance(forward, types.FunctionType):
            yield from _variables_of(forward)
        for key, value in vars(layer).items():
            # Private ones are torch's registries: their tensors are written in place.
            if not key.startswith("_"):
                yield f"{where}.{key}", value
