"""When the engine checks whether losses combine as it combines them, and what it reports.

It checks before the first step of each kind of criterion and batch, before steps 8, 16, 32 … with
other rows, and before a step with labels outside of the range so far. The only error of a check is
the ``ValueError`` that says what the criterion seems to do. An inconclusive check warns once.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, product
from typing import Any, cast

import torch
from torch import Tensor, nn

from scatterpar.devices.transfers import Transfers
from scatterpar.replicas.replicas import ReplicaSet, parameter_writes_refused
from scatterpar.replicas.wrapper import Wrapper
from scatterpar.report import warn
from scatterpar.step import nested
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import (
    closure_and_globals,
    closure_tensors_and_modules,
    filled_by_hooks,
    ignored_values,
)
from scatterpar.step.loss_weights import has_known_term_count
from scatterpar.step.markers import select_rows, unwrap_markers
from scatterpar.step.request import Count, Request
from scatterpar.step.scatter import LeafMover, scatter
from scatterpar.step.substeps import ReplicaTask, make_tasks, prepare_autograd
from scatterpar.threads.workers import Workers
from scatterpar.torch_private import uncompiled
from scatterpar.verify.check import has_statistics
from scatterpar.verify.layout import measure_layout
from scatterpar.verify.moving_state import StateWatch, warning_about
from scatterpar.verify.rehearsal import (
    DiffersFromPlain,
    Finding,
    ReadsOld,
    Rehearsal,
    SameNumbers,
    Unsure,
)
from scatterpar.verify.rows import Parts, choose, is_label, range_of, telling
from scatterpar.verify.untouched import untouched

_OFTEN = 8  # so many inconclusive looks at one kind, then in steps 16, 32, 64 … alone
_OFF = "Nothing was changed; an engine made with verify=False does not check."
_RETURN = "Return it from forward, and take it from the output that the criterion is given"
_KINDS = 1000  # how many kinds are remembered
_PATIENCE_SECONDS = 20.0  # how long the other replicas wait for a look before they join it


@dataclass
class _Kind:
    """What is known of one kind of criterion and batch."""

    steps: int = 0
    unsure: int = 0  # how many looks in a row told nothing
    met: list[float] | None = None  # how far the labels went with which it agreed
    refused: bool = False  # and has not agreed since
    told: set[str] = field(default_factory=set)  # how what was said begins

    def wants(self, ranges: list[float]) -> bool:
        """Whether to look at this step."""
        if self.refused or self.is_turn:
            return True
        if self.met is None:
            return self.unsure < _OFTEN
        return len(ranges) != len(self.met) or not all(map(float.__le__, ranges, self.met))

    @property
    def is_turn(self) -> bool:
        """Steps 8, 16, 32 …"""
        return self.steps >= _OFTEN and not self.steps & (self.steps - 1)

    def agreed(self, ranges: list[float]) -> None:
        """Labels that go so far are not looked at again before its turn."""
        self.refused, self.unsure = False, 0
        same = self.met is not None and len(self.met) == len(ranges)
        self.met = [*map(max, self.met or (), ranges)] if same else ranges

    def disagreed(self, text: str, *, certain: bool) -> None:
        """Refuse it, from now on in every step; where that is not certain, say so once."""
        if certain:
            self.refused = True
            raise ValueError(text)
        self.say(text)
        self.unsure = _OFTEN

    def could_not_tell(self, error: Exception, request: Request) -> None:
        """Say so, unless later steps may still tell."""
        self.unsure += 1
        lasting = not isinstance(error, Unsure) or error.lasting
        if self.unsure >= (2 if lasting else _OFTEN):  # the step itself may fail by it
            self.unsure = _OFTEN
            self.say(_unchecked(request, error))

    def say(self, text: str) -> None:
        """Warn, once."""
        if text[:60] not in self.told:
            warn(text)
            self.told.add(text[:60])


class Verifier:
    """Remembers which kinds of criterion and batch agreed, and rehearses the others."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        self._layouts: dict[Hashable, Any] = {}
        self._state_steps = 0
        self._warned: set[str] = set()  # names of state that moves

    def watch_state(
        self, request: Request, tasks: Sequence[ReplicaTask], parts: Sequence[ReplicaSet]
    ) -> Callable[[], None]:
        """Returns a function that warns of state changed since this call, each name once."""
        sub_steps = sum(len(task.share.micro_batches) for task in tasks)
        self._state_steps += 1
        if not request.verify or sub_steps == 1 or self._state_steps > _OFTEN:
            return lambda: None
        watch = StateWatch(parts[:1] if request.whole_batch else parts)

        def tell() -> None:
            moved = [name for name in watch.moved() if name not in self._warned]
            if moved:
                warn(warning_about(moved, sub_steps))
                self._warned.update(moved)

        return tell

    def layout_of(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        output_of: Callable[[Any], Any],
        piece: Any,
    ) -> Any:
        """The number of entries per row in each output, measured once for each kind of output.

        Raises:
            ValueError: the outputs of parts, joined, are not the output of one call.
        """
        if not request.verify:
            return None
        start, stop = task.share.micro_batches[0]
        shapes = [[n / (stop - start) for n in t.shape] for t in nested.tensors(piece)]
        module = cast(nn.Module, task.module)
        key = str((shapes, module.training, request.whole_batch, bool(request.return_outputs)))
        if key in self._layouts:
            return self._layouts[key]
        few = request.of_largest() if request.sizes else request
        rows = few.rows or attempt.plan.rows
        some = sorted({0, rows // 2, rows - 1})
        look = partial(_outputs_of, attempt, few, task, output_of, [some, some[:-1], some[-1:]])
        (outputs,) = attempt.workers.parallel_apply([look], [()], devices=[task.share.device])
        layout, shows = measure_layout(outputs, [len(some), len(some) - 1, 1], request.dim)
        if shows:
            self._layouts[key] = layout
        return layout

    def verify(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[ReplicaTask],
        parts: Sequence[ReplicaSet],
        peers: object,
    ) -> None:
        """Before the sub-steps: rehearse a few rows, if they are new or it is their turn.

        With one sub-step, or a criterion of the whole batch, nothing is combined: then only if the
        criterion leads to the model.

        Raises:
            ValueError: losses do not combine as the engine's do, or the criterion reads what
                replicas alone have.
        """
        model, criterion = parts[0].roots[0], request.criterion
        alone = peers is None and sum(len(task.share.micro_batches) for task in tasks) == 1
        alone = alone or request.whole_batch
        counted = request.count is None and has_known_term_count(criterion, request.reduction)
        if not request.verify or counted or (alone and not _leads_to(criterion, model)):
            return
        kind = self._kind_of(request, alone)
        few = request.of_largest()
        tensors = telling(few)
        ranges = range_of(tensors)
        if not kind.wants(ranges):
            return
        plain = _leads_to(criterion, model)
        shared = None
        if len(tasks) > 1 and not request.whole_batch:
            shared = filled_by_hooks(criterion, model)
        if shared is not None:
            kind.say(_shares(request, shared))
        computes = model.forward if criterion is None else criterion
        ignored = {*ignored_values(computes), *ignored_values(request.count)}
        micro = max(stop - start for task in tasks for start, stop in task.share.micro_batches)
        turn = kind.steps.bit_length() - 3 if kind.is_turn else 0
        some = None if alone else partial(choose, tensors, few.rows, ignored=ignored, turn=turn)
        try:
            found = _rehearsed(attempt.workers, few, tasks, parts, some, 2 * micro, plain=plain)
        except ReadsOld as error:
            raise ValueError(_reads_old(request, error)) from None
        except DiffersFromPlain as error:
            kind.disagreed(_differs(request, *error.args), certain=True)
        except Exception as error:  # whatever the user's code makes of rows that it never met
            kind.could_not_tell(error, request)
            return
        if not found.off:
            kind.agreed(ranges)
        else:
            kind.disagreed(_refusal(request, found, tensors, ignored), certain=found.certain)

    def _kind_of(self, request: Request, alone: bool) -> _Kind:
        """What is known of the request's kind, of which this is one step more."""
        if len(self._kinds) > _KINDS:
            self._kinds.clear()
        losses = request.criterion, request.count, request.reduction
        described = _described((*losses, request.inputs, request.targets), 5)
        kind = self._kinds.setdefault(hash((alone, described)), _Kind())
        kind.steps += 1
        return kind


def difference(
    engine: Any, inputs: Any, *, reduction: str | None = None, count: Count | None = None
) -> float | None:
    """Measure, on a few rows, how far the losses of an engine's module are from combining so.

    The first replica computes them, in the caller's thread, and its state is restored. Returns the
    largest relative difference of a gradient, zero if that is only rounding, ``None`` if the check
    was inconclusive.

    Raises:
        ValueError: as ``forward_backward``.
    """
    request = Request(inputs, reduction=reduction, count=count, dim=engine.dim)
    request = request.checked(engine.device_ids[0])
    plan = engine.plan(request.sizes)
    some = partial(choose, telling(request), request.rows)
    prepare_autograd()
    with engine.replicas_for_update() as copies:
        loaders = scatter(request.batch, plan, request.dim, Transfers())
        first, parts = make_tasks(request, plan, copies, loaders)[:1], [copies]
        with (
            contextlib.suppress(Exception),
            parameter_writes_refused(parts),
        ):  # the user's, of rows it never met
            return _rehearsed(engine._workers, request, first, parts, some, request.rows).off
    return None


def _outputs_of(
    attempt: Attempt,
    request: Request,
    task: ReplicaTask,
    output_of: Callable[[Any], Any],
    choices: Sequence[Sequence[int]],
) -> list[Any]:
    """The outputs for each choice of rows. The state that forward passes change is restored."""
    user_state, same_numbers = untouched([], [task.share.device]), SameNumbers()
    bring = partial(LeafMover(Transfers()).move, task.share.device)
    outputs = []
    for rows in choices:
        with attempt.isolated(task), user_state, uncompiled(), same_numbers, torch.no_grad():
            for replica in task.replicas:
                for layer in replica.roots[0].modules():
                    if has_statistics(layer):
                        layer.training = False
            inputs = nested.map_leaves(bring, select_rows(request.inputs, rows, request.dim))
            outputs.append(output_of(unwrap_markers(inputs, copy=True)))
    return outputs


def _rehearsed(
    workers: Workers,
    request: Request,
    tasks: Sequence[ReplicaTask],
    parts: Sequence[ReplicaSet],
    choose: Callable[[int], Sequence[Parts]] | None,
    most: int,
    *,
    plain: bool = False,
) -> Finding:
    """What the first replica finds, and with ``plain`` whether its loss is the user's module's.

    The user's code may wait for the other replicas, as a loss across them does at a barrier. So
    when it takes long, the others do the same, each with its own.
    """
    ended = threading.Event()

    def look(task: ReplicaTask) -> Any:
        if task is not tasks[0] and ended.wait(_PATIENCE_SECONDS):
            return None
        try:
            model = parts[0].roots[0] if task is tasks[0] else task.module
            return Rehearsal(request, task, cast(nn.Module, model), plain).run(choose, most)
        finally:
            if task is tasks[0]:
                ended.set()

    devices = [task.share.device for task in tasks]
    looks, arguments = [look] * len(tasks), [(task,) for task in tasks]
    try:
        found: Finding = workers.parallel_apply(looks, arguments, devices=devices)[0]
        return found
    finally:
        for part in parts:
            part.clear_gradients()
        if tasks[0].stash is not None:
            tasks[0].stash.drop_gradients()


def _leads_to(criterion: Any, model: nn.Module) -> bool:
    """Whether the criterion brings along the model, a part of it or a parameter, by any name."""
    brought = [
        value for value in closure_tensors_and_modules(criterion) if not isinstance(value, Wrapper)
    ]
    own = {id(each) for each in (*model.modules(), *model.parameters())} if brought else set()
    each = (v.modules() if isinstance(v, nn.Module) else [v] for v in brought)
    return not own.isdisjoint(map(id, chain(*each)))


def _described(value: Any, depth: int) -> Hashable:
    """What something is made of: code, flags, dtypes; no address, and nothing of the user's.

    A lambda that is made anew in every step is of one kind; the same lambda over other things
    (class weights where there were none) is of another.
    """
    inside = partial(_described, depth=depth - 1)
    if value is None or isinstance(value, (bool, str, torch.dtype)):
        return value
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if not depth:
        return name
    if isinstance(value, (types.BuiltinFunctionType, type)):
        return value.__qualname__
    if isinstance(value, types.FunctionType):
        own, of_file = closure_and_globals(value)
        flags = {n: v for n, v in of_file.items() if isinstance(v, (bool, str, Tensor, type(None)))}
        return hash(value.__code__), *((n, inside(v)) for n, v in sorted((flags | own).items()))
    if isinstance(value, types.MethodType):
        value = value.__func__, value.__self__
    elif isinstance(value, functools.partial):
        value = value.func, *value.args, *sorted(value.keywords.items())
    if isinstance(value, tuple):
        return tuple(map(inside, value))
    if isinstance(value, (dict, list)):  # such as a history, which gets longer in every step
        items = [*nested.leaves(value)][:32]
        return name, frozenset(map(inside, [i for i in items if not isinstance(i, (int, float))]))
    own = {n: v for n, v in getattr(value, "__dict__", {}).items() if n[0] != "_"}
    if isinstance(value, nn.Module):
        own |= dict(value.named_buffers(recurse=False)) | dict(value.named_children())
    return name, *((n, _described(v, min(depth - 1, 2))) for n, v in sorted(own.items())[:32])


def _shares(request: Request, name: str) -> str:
    """That replicas at work at the same time fill the same container, of this name."""
    return (
        f"{_name_of(request)} and a hook of the module share {name!r}: replicas compute at "
        f"the same time, so what the criterion finds there may be another replica's. {_RETURN}; "
        f"an engine made with verify=False does not check"
    )


def _reads_old(request: Request, error: ReadsOld) -> str:
    """That the criterion looks at the user's module for what replicas alone have."""
    return (
        f"{_name_of(request)} reads {str(error)!r} of a module that it closes over, and "
        f"the forward pass sets it, on each replica alone: what the criterion finds is "
        f"old. {_RETURN}. {_OFF}"
    )


def _differs(request: Request, expected: float, found: float) -> str:
    """That the criterion does not find on the user's module what replicas have."""
    return (
        f"{_name_of(request)} leads to the module that is trained, and the loss of a few rows is "
        f"{expected:.4g} with your own module in plain torch, but {found:.4g} on a replica: it "
        f"reads what the forward pass leaves on the module, such as an auxiliary loss, or asks "
        f"autograd for gradients by your own parameters, of which replicas have copies. {_RETURN}; "
        f"forward can compute gradients, too. No count=, reduction= or whole_batch= says that. "
        f"{_OFF}"
    )


def _refusal(
    request: Request, found: Finding, tensors: Sequence[Tensor], ignored: Iterable[int]
) -> str:
    """What the criterion seems to do instead, and what to pass."""
    sizes = " + ".join(str(len(part)) for part in found.parts)
    rows = " + ".join(", ".join(map(str, part)) for part in found.parts)
    off = f"off by {100 * found.off:.2g} %" if math.isfinite(found.off) else "NaN or infinite"
    its = f"; your loss weights them with {_listed(found.weights)}" if found.weights else ""
    doubt = (
        "For this look every row had the same random numbers, and batch normalisation its "
        "running statistics, so the step goes on; an engine made with verify=False "
        "does not check."
    )
    return (
        f"{_name_of(request)}: your loss of {sum(map(len, found.parts))} rows is not the "
        f"{'mean' if request.is_mean else 'sum'} of the losses of {sizes} rows, and the engine "
        f"takes it for that. The engine would weight these with {_listed(found.factors)}{its}: the "
        f"{'loss' if found.of_losses else 'gradient'} would be {off}. "
        f"{_advice(request, found, tensors, ignored)} (Rows {rows} of {request.rows}.) "
        f"{_OFF if found.certain else doubt}"
    )


def _advice(
    request: Request, found: Finding, tensors: Sequence[Tensor], ignored: Iterable[int]
) -> str:
    its, rows = found.weights, sum(map(len, found.parts))
    tolerance = max(1e-3, 10 * found.tolerance)
    if found.of_losses:
        return (
            "It seems to add something that does not depend on the rows, such as a penalty on "
            "weights, which every micro-batch would add once more: multiply that by "
            f"len(output) / {request.rows}, the micro-batch's part of the rows (no "
            f"count= or reduction= says that, and whole_batch=True needs none)."
        )
    if its and _near(its, [1.0] * len(its), tolerance):
        return (
            'It seems to be a sum: pass reduction="sum" (for a mean, count= says of what; '
            "whole_batch=True for a loss that compares rows)."
        )
    if its and _near(its, [len(part) / rows for part in found.parts], tolerance):
        return (
            'It seems to be a mean over rows: pass reduction="mean", without count= '
            "(whole_batch=True for a loss that compares rows)."
        )
    if not its and math.isfinite(found.off):
        return (
            "It seems to compare rows with each other, or to be a ratio of sums: pass "
            "whole_batch=True, which calls it once with all rows; or make it a mean of one "
            "loss per row (per image). No count= or reduction= can say what it is now."
        )
    reduction = "" if request.is_mean else 'reduction="mean" and '
    return (
        f"It seems to be a mean over something else than what was counted: pass {reduction}count=, "
        f"a function of (inputs, targets) that gives the number of its terms"
        f"{_hint(found, tensors, ignored)}; or make it a mean of one loss per row (per "
        'image). For a sum, reduction="sum"; if it compares rows with each other, such as a '
        "router's load balance, whole_batch=True."
    )


def _hint(found: Finding, tensors: Sequence[Tensor], ignored: Iterable[int]) -> str:
    """Whether it is the labels that are not ignored, shifted or not."""
    values = dict.fromkeys([-100, 255, -1, *ignored])
    for labels, value, shifted in product(filter(is_label, tensors), values, (False, True)):
        if shifted and labels.ndim < 2:
            continue
        counted = (labels[:, 1:] if shifted else labels) != value
        terms = [sum(int(counted[row].sum()) for row in part) for part in found.parts]
        total = sum(terms)
        if found.weights and total and _near(found.weights, [n / total for n in terms], 1e-3):
            said = ", ".join([str(value)] * (value != -100) + ["shifted=True"] * shifted)
            return (
                f", here the labels that are not {value}, of which these rows have "
                f"{_listed(terms)}: count=scatterpar.count_labels({said})"
            )
    return ""


def _unchecked(request: Request, error: Exception) -> str:
    """That nobody could tell, and what to do if it is something else."""
    terms = "what count= gives" if request.count else "rows"
    why = str(error) if isinstance(error, Unsure) else f"{type(error).__name__}: {error}"
    return (
        f"whether {_name_of(request)} combines micro-batches as the engine does could not be "
        f"checked ({why[:120]}). The engine takes it for "
        f"{f'a mean over {terms}' if request.is_mean else 'a sum'}. If it is a mean over something "
        f"else, such as labels that are not ignored, pass count=, for instance "
        f'scatterpar.count_labels(); if it is a sum, reduction="sum"; if it compares rows '
        f"with each other, whole_batch=True. An engine made with verify=False does not check"
    )


def _name_of(request: Request) -> str:
    criterion = request.criterion
    if criterion is None:
        return "the module's own loss"
    while isinstance(criterion, partial):
        criterion = criterion.func
    name = getattr(criterion, "__qualname__", None)
    return f"the criterion {name if isinstance(name, str) else type(criterion).__name__}"


def _near(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < tolerance


def _listed(numbers: Sequence[float]) -> str:
    *most, last = (f"{number:.4g}" for number in numbers)
    return f"{', '.join(most)} and {last}"
