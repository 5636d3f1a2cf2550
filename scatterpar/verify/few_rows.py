"""Run a replica, its criterion and the user's own module on a few rows, and undo what they change.

This shows whether a replica gives the loss of the user's own module, whether outputs depend on the
rows beside them, and whether calls keep state. Whether losses combine as the engine assumes is
shown by ``spot_check``.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scatterpar.devices.runtime import HOST, physical
from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.module_copy import root_to_replicate
from scatterpar.step import nested
from scatterpar.step.auto_accum import is_out_of_memory
from scatterpar.step.markers import select_rows, unwrap_markers
from scatterpar.step.request import Request
from scatterpar.step.scatter import LeafMover
from scatterpar.step.substeps import ReplicaTask, as_call, loss_of
from scatterpar.threads.caller_context import autocast_types
from scatterpar.torch_private import uncompiled
from scatterpar.verify.gradient_check import relative_difference, uses_batch_statistics
from scatterpar.verify.user_state import preserve_user_state

_SAME_LOSS = 1e-4  # relative difference between two computations of the same loss
_SMALLEST_LOSS = 1e-2  # smaller losses may be sums that cancel: their tolerance is absolute
_DRAWN = 0.618  # instead of random floating-point numbers
# Relative differences of outputs that are only rounding, in deep models.
_ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.1}


class Inconclusive(Exception):
    """The check is inconclusive. ``lasting``: a later step would not help."""

    def __init__(self, why: str, *, lasting: bool = False) -> None:
        super().__init__(why)
        self.lasting = lasting


class FewRows:
    """A replica and its task, on some rows of a request.

    All methods except ``outputs`` are called inside ``isolated``.
    """

    def __init__(self, request: Request, task: ReplicaTask) -> None:
        self._request, self._task = request, task
        self._module: Any = task.module
        self.device = task.share.device
        # Whether forward passes change objects that the criterion reads, and replicas share.
        self.shares_state = False

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """In the body user code may run.

        Afterwards the replicas, the generators, and what the criterion, ``count=`` and the module's
        hooks refer to are restored.
        """
        each = ((m._forward_pre_hooks, m._forward_hooks) for m in self._module.modules())
        hooks = [hook for own in chain(*each) for hook in own.values()]
        roots = [self._task.criterion, self._request.count]
        self._criterion_state = preserve_user_state(roots, [self.device])
        here = torch.inference_mode(False), torch.enable_grad()
        with preserve_user_state(hooks), self._criterion_state, uncompiled(), here[0], here[1]:
            try:
                yield
            finally:
                self._restore()

    def _restore(self) -> None:
        """Undo the changes of user code."""
        with torch.no_grad():
            for replica in self._task.replicas:
                replica.refresh()
        torch.clear_autocast_cache()  # it may hold parameters without a graph
        self._criterion_state.restore()

    def forward(self, rows: Sequence[int], *, evaluate: bool = False) -> Any:
        """The module's output for some rows, without a graph. Updates ``shares_state``.

        With ``evaluate``, in evaluation mode.
        """
        output_of = partial(self._output, rows, evaluate=evaluate)
        try:
            with torch.no_grad():
                output = output_of()
        except RuntimeError:  # forward calls autograd.grad, perhaps
            self._restore()
            output = nested.map_tensors(Tensor.detach, output_of())
        is_shared = root_to_replicate(self._request.criterion) is None  # replicas have no copies
        self.shares_state |= is_shared and self._criterion_state.is_changed()
        self._restore()
        return output

    def outputs(
        self, choices: Sequence[Sequence[int]], output_of: Callable[[Any], Any]
    ) -> list[Any]:
        """What ``output_of`` gives for each choice of rows, with the same random numbers."""
        outputs = []
        with self.isolated(), torch.no_grad():
            for rows in choices:
                with SameNumbers():
                    outputs.append(self._output(rows, output_of))
                self._restore()
        return outputs

    def losses_if_different(
        self, model: nn.Module, rows: Sequence[int]
    ) -> tuple[float, float] | None:
        """The loss of some rows by the user's own module and criterion, and by the replica.

        The latter is NaN if only the replica raises an error. ``None`` if only rounding differs, if
        one of them gives another loss each time, or if both raise an error for these rows.
        """

        def loss(module: nn.Module, criterion: Any) -> float:
            args, kwargs = as_call(self._move(self._request.inputs, rows))
            targets = self._move(self._request.targets, rows)
            value = float(loss_of(module(*args, **kwargs), targets, criterion).detach())
            self._restore()
            return value

        def both() -> tuple[float, float]:
            found = math.nan
            try:
                found = loss(self._module, self._task.criterion)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise
            self._restore()
            with preserve_user_state([model, self._request.criterion], [self.device]):
                return loss(model, self._request.criterion), found

        def differ(one: float, other: float) -> bool:
            return not abs(one - other) <= _SAME_LOSS * max(abs(one), abs(other), _SMALLEST_LOSS)

        with contextlib.suppress(Exception):  # raised by user code for these rows
            first = expected, found = both()
            again = both()
            if not differ(expected, again[0]) and differ(expected, found):
                return first if math.isnan(found) or not differ(found, again[1]) else None
        return None

    def part_difference(self, rows: Sequence[int]) -> float:
        """How far the outputs for some rows are from the joined outputs for two parts of them.

        The largest relative difference of a tensor; with ``whole_batch`` also of numbers, which are
        averaged. Zero for rounding, or if user code raises an error for these rows.
        """
        half = (len(rows) + 1) // 2
        choices = [rows, rows[:half], rows[half:]]
        errors = [0.0]

        def compare(leaves: list[Any]) -> None:
            if all(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in leaves):
                tensors = [*map(_finite, leaves)]
                errors.append(_part_error(tensors, [*map(len, choices)], self._request.whole_batch))

        with contextlib.suppress(Exception):
            self._criterion_state.drawn = False
            outputs, evaluate = [*map(self.forward, choices)], False
            if self._criterion_state.drawn:  # dropout, probably
                evaluate = True
                outputs = [self.forward(few, evaluate=True) for few in choices]
            nested.merge(compare, outputs)
            if max(errors) > self._rounding and self._is_steady(rows, evaluate=evaluate):
                return max(errors)
        return 0.0

    def keeps_state(self, rows: Sequence[int]) -> tuple[bool, bool]:
        """Whether second calls of the module, and of the criterion, give other results.

        They then read what the first calls left. False if random numbers are drawn, and for a
        criterion that replicas have copies of: ``StateWatch`` finds its state.
        """
        criterion = self._task.criterion
        if root_to_replicate(self._request.criterion) is not None:
            criterion = None
        outputs, losses = [], [0.0, 0.0]
        with contextlib.suppress(Exception):
            self._criterion_state.drawn = False
            for call in range(2):
                outputs.append(nested.map_tensors(Tensor.detach, self._output(rows)))
                if criterion is not None:
                    targets = self._move(self._request.targets, rows)
                    given = unwrap_markers(outputs[0], copy=True)
                    losses[call] = float(loss_of(given, targets, criterion).detach())
            self._restore()
            if not self._criterion_state.drawn and math.isfinite(sum(losses)):
                changed = not math.isclose(*losses, rel_tol=_SAME_LOSS, abs_tol=1e-12)
                return self._differ(*outputs) and self._is_steady(rows), changed
        self._restore()
        return False, False

    def _is_steady(self, rows: Sequence[int], *, evaluate: bool = False) -> bool:
        """Whether two calls in the same state agree, whatever the process's generators give."""
        first = self.forward(rows, evaluate=evaluate)
        random.random()
        for device in (HOST, physical(self.device)):
            torch.rand((), device=device)
        if numpy := sys.modules.get("numpy"):
            numpy.random.random()
        return not self._differ(first, self.forward(rows, evaluate=evaluate))

    def _differ(self, output: Any, again: Any) -> bool:
        """Whether two outputs differ by more than rounding."""
        first, second = (
            [_finite(t) for t in nested.tensors(each) if t.is_floating_point()]
            for each in (output, again)
        )
        return relative_difference(second, first)[0] > self._rounding

    @property
    def _rounding(self) -> float:
        """The relative difference of outputs that rounding explains."""
        dtypes = {p.dtype for p in self._module.parameters()}
        dtypes.update(map(torch.get_autocast_dtype, autocast_types()))
        return max((_ROUNDING.get(dtype, 0.0) for dtype in dtypes), default=0.0)

    def _output(
        self,
        rows: Sequence[int],
        output_of: Callable[[Any], Any] | None = None,
        *,
        evaluate: bool = False,
    ) -> Any:
        """The module's output for some rows, with running statistics in batch normalisation."""
        for layer in self._module.modules():
            if uses_batch_statistics(layer):
                if layer.running_mean is None and output_of is None:
                    raise Inconclusive("batch normalisation ties rows together", lasting=True)
                layer.training = False
            if evaluate:
                layer.training = False
        return (output_of or self._task.output_of)(self._move(self._request.inputs, rows))

    def _move(self, value: Any, rows: Sequence[int]) -> Any:
        """These rows of the caller's batch, copied to the replica's device."""
        # These copies are not counted in the step's transfers.
        move = partial(LeafMover(Transfers()).move, self.device)
        few = nested.map_leaves(move, select(value, rows, self._request.dim))
        return unwrap_markers(few, copy=True)


class SameNumbers(TorchDispatchMode):
    """Random operators that do not depend on rows.

    Dropout keeps all elements, floating-point numbers are 0.618, and others repeat the first number
    drawn.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0  # calls of random operators, without dropout

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, names = func._schema.name, [each.name for each in func._schema.arguments]
        drops = {"dropout_p", "p"} if "dropout" in name else {"dropout_p"}
        own = [0.0 if at in drops else value for at, value in zip(names, args, strict=False)]
        drawn = func(*own, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and drops.isdisjoint(names):
            self.calls += 1
            if name in ("aten::randperm", "aten::multinomial"):
                raise Inconclusive("what is drawn depends on the rows", lasting=True)
            drawn.fill_(_DRAWN if drawn.is_floating_point() else drawn.flatten()[0])
        return drawn


def select(value: Any, rows: Sequence[int], dim: int) -> Any:
    """``value`` with these rows.

    Tensors are narrowed row by row, because an index tensor would have to be on their device.
    """

    def select(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.ndim:
            return torch.cat([leaf.detach().narrow(dim, row, 1) for row in rows], dim)
        return select_rows(leaf, rows, dim)

    return nested.map_leaves(select, value)


def _finite(tensor: Tensor) -> Tensor:
    return widen(tensor.detach()).nan_to_num()


def _part_error(tensors: Sequence[Tensor], sizes: Sequence[int], averages: bool) -> float:
    """The relative error of the joined parts of an output; the first of ``tensors`` is the whole.

    ``sizes`` are their numbers of rows. Infinite if two dimensions have these sizes, such as those
    of a matrix of scores. With ``averages``, 0-dim tensors are averaged; other tensors without rows
    have no error.
    """
    whole, *parts = tensors
    if not whole.ndim:
        weighted = [part * (size / sizes[0]) for part, size in zip(parts, sizes[1:], strict=True)]
        return relative_difference([torch.stack(weighted).sum()], [whole])[0] if averages else 0.0
    dims = [dim for dim in range(whole.ndim) if [t.size(dim) for t in tensors] == sizes]
    if len(dims) != 1:
        return math.inf if dims else 0.0
    shapes = {t.movedim(dims[0], 0).shape[1:] for t in tensors}
    if len(shapes) > 1:  # for example sequences, padded to the longest
        return 0.0
    return relative_difference([torch.cat(parts, dims[0])], [whole])[0]


def widen(tensor: Tensor) -> Tensor:
    """Half-precision tensors in single precision, so that rounding does not hide wrong weights."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
