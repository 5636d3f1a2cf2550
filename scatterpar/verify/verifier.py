"""Decide when to check a step, run the check, and write its errors and warnings.

A kind of criterion and batch is checked in its first step, then up to seven more times while these
checks have taken less than half a second together. It is also checked at any cost

- until a check agrees (eight checks at most),
- after a refusal, until a check agrees,
- if labels leave the range that was checked,
- if a number of the criterion changes that had stayed the same; if it changes in every step, in
  steps 16, 32, 64 and so on,

and whenever all checks have taken less than 1 % of the time. The only error of a check is its
``ValueError``. If checks stay inconclusive, one warning says so.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from scatterpar.devices.transfers import Transfers
from scatterpar.plan import Plan
from scatterpar.replicas.replicas import ReplicaSet, parameter_writes_refused
from scatterpar.replicas.wrapper import Wrapper
from scatterpar.report import warn
from scatterpar.step import nested
from scatterpar.step.attempt import Attempt
from scatterpar.step.criterion_closure import (
    closure_tensors_and_modules,
    describe,
    ignored_values,
)
from scatterpar.step.loss_weights import has_known_term_count
from scatterpar.step.request import Count, Request
from scatterpar.step.scatter import scatter
from scatterpar.step.substeps import ReplicaTask, make_tasks
from scatterpar.threads.workers import Workers
from scatterpar.verify.few_rows import Inconclusive
from scatterpar.verify.layout import measure_layout
from scatterpar.verify.moving_state import StateWatch, warning_about
from scatterpar.verify.row_choice import choose_rows, informative_tensors, value_ranges
from scatterpar.verify.spot_check import Finding, SpotCheck

_FIRST = 8  # the first steps are checked
_SHARE = 0.01  # maximal part of the time for later checks
_FREE_SECONDS = 0.5  # for the checks of a kind in its second to eighth step
_FEW, _MANY = 9, 2  # rows of a check, at least; micro-batches of rows in the first check
_KINDS = 1000  # maximal number of remembered kinds
_KINDS_BY_SWITCHES = 8  # maximal number of kinds that may differ in switches
_OFF = "Nothing was changed; an engine made with verify=False does not check."
_RETURN = "Return it from forward, and take it from the output that the criterion is given"
_PATIENCE_SECONDS = 20.0  # a check that takes longer runs on the other replicas, too

_Result = TypeVar("_Result")


@dataclass
class _Kind:
    """The results of checks for one kind of criterion and batch."""

    checks: int = 0
    seconds: float = 0.0  # of all checks except the first
    inconclusive: int = 0  # inconclusive checks in a row
    verified_ranges: list[float] | None = None  # of labels, masks, lengths: see value_ranges
    steps: int = 0
    numbers: Hashable = None  # to which the criterion referred in the last step
    are_steady: bool = False  # the numbers did not change in the last step
    is_refused: bool = False  # refused, and has not agreed since
    is_serial: bool = False  # replicas run one at a time
    measured: tuple[bool, float | None] = (False, None)  # shares_state, output_ratio: last check's

    def needs_check(self, ranges: list[float], numbers: Hashable) -> bool:
        """Whether this step must be checked at any cost. Remembers its ``numbers``."""
        changed, was_steady = numbers != self.numbers, self.are_steady
        self.numbers, self.are_steady = numbers, not changed
        self.steps += 1
        known = self.verified_ranges
        if self.is_refused or known is None:
            return self.is_refused or self.checks < _FIRST
        beyond = len(ranges) != len(known) or not all(map(float.__le__, ranges, known))
        # Of numbers that always change: in steps 16, 32, 64, …
        return beyond or (
            changed and (was_steady or (self.steps > _FIRST and not self.steps & (self.steps - 1)))
        )

    def agree(self, ranges: list[float]) -> None:
        """Record that losses agree for labels within ``ranges``."""
        self.is_refused, self.inconclusive = False, 0
        known = self.verified_ranges or []
        self.verified_ranges = [*map(max, known, ranges)] if len(known) == len(ranges) else ranges


class Verifier:
    """Checks steps, and remembers the results for each kind of criterion and batch."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}
        self._layouts: dict[Hashable, Any] = {}
        self._state_steps = 0
        self._outputs_checked = self._keeps_state = False
        self._warned: set[str] = set()  # beginnings of warnings given, and names of changed state
        self._start, self._seconds = 0.0, 0.0  # when the first check began; time of all checks

    def watch_state(
        self, request: Request, tasks: Sequence[ReplicaTask], replica_sets: Sequence[ReplicaSet]
    ) -> Callable[[], None]:
        """Returns a function that warns of state changed since this call, each name once.

        It does so only in the first eight steps, if they have several sub-steps.
        """
        sub_steps = sum(len(task.share.micro_batches) for task in tasks)
        self._state_steps += 1
        if not request.verify or sub_steps == 1 or self._state_steps > _FIRST:
            return lambda: None
        watch = StateWatch(replica_sets[:1] if request.whole_batch else replica_sets, tasks)

        def tell() -> None:
            changed = watch.changed()
            new = [name for name in changed if name not in self._warned]
            if new:
                warn(warning_about(new, sub_steps))
                self._warned.update(new)
            elif self._keeps_state and not changed:
                self._warn_once(_module_state_text(tasks[0].module))

        return tell

    def layout_of(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        output_of: Callable[[Any], Any],
        piece: Any,
    ) -> Any:
        """The number of entries per row in each output; ``None`` if checks are off.

        It is kept for each kind of output once values have shown the order of entries.

        Raises:
            ValueError: the outputs of parts, joined, are not the output of one call.
        """
        if not request.verify:
            return None
        start, stop = task.share.micro_batches[0]
        shapes = [[n / (stop - start) for n in t.shape] for t in nested.tensors(piece)]
        training = getattr(task.module, "training", None)
        key = str((shapes, training, request.whole_batch, bool(request.return_outputs)))
        if key in self._layouts:
            return self._layouts[key]
        few = request.of_largest() if request.sizes else request
        rows = few.rows or attempt.plan.rows
        some = sorted({0, rows // 2, rows - 1}) if rows > 1 else [0, 0]

        def look(check: SpotCheck) -> list[Any]:
            with attempt.isolated(task):
                return check.outputs([some, some[:-1], some[-1:]], output_of)

        outputs = _run_spot_check(attempt.workers, [SpotCheck(few, task)], look)
        layout, shows = measure_layout(outputs, [len(some), len(some) - 1, 1], request.dim)
        if shows:
            self._layouts[key] = layout
        return layout

    def verify(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[ReplicaTask],
        replica_sets: Sequence[ReplicaSet],
        peers: object,
    ) -> None:
        """Before the sub-steps: check some rows, if a check is due.

        Raises:
            ValueError: losses do not combine as the engine assumes; or the user's own module and
                criterion give another loss than a replica; or, with ``whole_batch``, the criterion
                reads state that each forward pass overwrites.
        """
        if not request.verify:
            return
        is_split = peers is not None or sum(len(t.share.micro_batches) for t in tasks) > 1
        is_known = has_known_term_count(request)
        # Steps without another check get this one in the eighth: the first compute nothing else.
        is_due = self._state_steps >= _FIRST - 1 or not (is_known or request.whole_batch)
        if is_split and is_due and not self._outputs_checked:
            self._outputs_checked = True
            try:
                self._check_outputs(attempt, request.of_largest(), tasks)
            finally:
                _drop_gradients(tasks, replica_sets)
        if is_known:
            return
        combines = is_split and not request.whole_batch
        kind, numbers = self._kind_of(request, combines, replica_sets[0].flags)
        few = request.of_largest()
        tensors = informative_tensors(few)
        ranges, now = value_ranges(tensors), time.perf_counter()
        self._start = self._start or now
        is_cheap = self._seconds < _SHARE * (now - self._start)
        is_cheap |= kind.checks < _FIRST and kind.seconds < _FREE_SECONDS
        if kind.needs_check(ranges, numbers) or is_cheap:
            try:
                self._check(attempt, few, tasks, replica_sets, kind, tensors, combines)
                kind.agree(ranges)
            except Inconclusive as error:
                kind.inconclusive += 1
                if kind.inconclusive >= (2 if error.lasting else _FIRST):
                    kind.checks = _FIRST  # from now on only if a check is cheap
                    self._warn_once(_unchecked_text(request, error))
            except ValueError:
                kind.is_refused = True
                raise
            finally:
                _drop_gradients(tasks, replica_sets)
                elapsed = time.perf_counter() - now
                kind.seconds += elapsed if kind.checks else 0.0
                self._seconds += elapsed
                kind.checks += 1
        if kind.is_serial and tasks[0].stash is not None:
            tasks[0].stash.run_serially()

    def _check_outputs(
        self, attempt: Attempt, request: Request, tasks: Sequence[ReplicaTask]
    ) -> None:
        """Warn if outputs depend on other rows, or if the criterion keeps state between calls."""
        micro = max(stop - start for task in tasks for start, stop in task.share.micro_batches)
        number = min(request.rows, max(2, min(_FEW - 1, micro)))
        if number < 2:
            return
        rows = [k * (request.rows - 1) // (number - 1) for k in range(number)]

        def look(check: SpotCheck) -> tuple[float, tuple[bool, bool]]:
            with check.isolated():
                return check.part_difference(rows), check.keeps_state(rows)

        checks = [SpotCheck(request, task) for task in tasks]
        try:
            error, (self._keeps_state, by_criterion) = _run_spot_check(
                attempt.workers, checks, look
            )
        except Exception:  # the step itself raises it, with notes
            return
        if error:
            self._warn_once(_rows_depend_text(tasks[0].module, number, error))
        if by_criterion and not request.whole_batch:
            self._warn_once(_criterion_state_text(request))

    def _check(
        self,
        attempt: Attempt,
        request: Request,
        tasks: Sequence[ReplicaTask],
        replica_sets: Sequence[ReplicaSet],
        kind: _Kind,
        tensors: Sequence[Tensor],
        combines: bool,
    ) -> None:
        model, criterion = replica_sets[0].roots[0], request.criterion
        refers = _refers_to(criterion, model)
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        ignored = ignored_values(model.forward if criterion is None else criterion)
        ignored = [*dict.fromkeys([-100, 255, -1, *ignored, *ignored_values(request.count)])]
        micro = max(stop - start for task in tasks for start, stop in task.share.micro_batches)
        most = max(_FEW, _MANY * micro if not kind.checks else micro // 4)
        variant = max(0, kind.checks - 1)
        choose = partial(
            choose_rows, tensors, request.rows, ignored_labels=ignored, variant=variant
        )
        few = sorted({0, request.rows // 2, request.rows - 1})[:micro]

        def run(check: SpotCheck) -> str:
            with check.isolated():
                if refers and (losses := check.losses_if_different(model, few)):
                    return _replica_differs_text(request, *losses)
                if combines:
                    return _refusal_text(request, check.find(choose, most))
                if hooked and criterion is not None:
                    check.forward([0])
                return ""

        checks = [SpotCheck(request, task, tensors, ignored) for task in tasks]
        for check in checks:
            check.shares_state, check.output_ratio = kind.measured
        try:
            refusal = _run_spot_check(attempt.workers, checks, run)
        except Inconclusive:
            raise
        except Exception as error:  # user code may fail for rows chosen like this
            raise Inconclusive(f"{type(error).__name__}: {error}", lasting=True) from None
        finally:
            kind.measured = checks[0].shares_state, checks[0].output_ratio
            if checks[0].shares_state:
                self._tell_shared(request, attempt.plan, kind)
        if refusal:
            raise ValueError(refusal)

    def _tell_shared(self, request: Request, plan: Plan, kind: _Kind) -> None:
        """Handle a criterion that reads state that forward passes change.

        With several sub-steps of ``whole_batch`` it is refused. Otherwise replicas run one at a
        time, and a warning says so.
        """
        reads = f"{_name_of(request)} reads what forward passes leave behind (a hook?)"
        if request.whole_batch and sum(len(share.micro_batches) for share in plan.shares) > 1:
            raise ValueError(
                f"{reads}, and with whole_batch=True it finds there what the last micro-batch "
                f"left. {_RETURN}. {_OFF}"
            )
        if not request.whole_batch and len(plan.shares) > 1:
            kind.is_serial = True
            self._warn_once(
                f"{reads}, which replicas share: so they run one after the other, which is slower. "
                f"{_RETURN}; an engine made with verify=False does not check"
            )

    def _warn_once(self, text: str) -> None:
        if text[:60] not in self._warned:
            warn(text)
            self._warned.add(text[:60])

    def _kind_of(self, request: Request, combines: bool, flags: Hashable) -> tuple[_Kind, Hashable]:
        """The results for the request's kind, and the numbers that its criterion refers to.

        ``flags`` are the switches of the model.
        """
        if len(self._kinds) > _KINDS:
            self._kinds.clear()
        made_of, numbers = describe(request.criterion, request.count, request.reduction)
        leaves = list(islice(nested.leaves((request.inputs, request.targets)), 32))
        batch = [(t.dtype, t.ndim) if isinstance(t, Tensor) else type(t) for t in leaves]
        switches: Hashable = None
        if len(self._kinds) < _KINDS_BY_SWITCHES:  # else one of them changes in every step
            switches = hash((flags, *(t for t in leaves if isinstance(t, (bool, str)))))
        key = made_of, combines, request.whole_batch, hash(tuple(batch)), switches
        return self._kinds.setdefault(key, _Kind()), numbers


def difference(
    engine: Any, inputs: Any, *, reduction: str | None = None, count: Count | None = None
) -> float | None:
    """Measure on a few rows the error of ``reduction`` and ``count`` for an engine's module.

    The module computes the loss. The first replica runs it, and its state is restored. Returns the
    largest relative error, zero if there is only rounding, ``None`` if that could not be measured.

    Raises:
        ValueError: as ``forward_backward``.
    """
    request = Request(inputs, reduction=reduction, count=count, dim=engine.dim)
    request = request.checked(engine.device_ids[0])
    plan = engine.plan(request.sizes)
    choose = partial(choose_rows, informative_tensors(request), request.rows)

    def find(check: SpotCheck) -> Finding | None:
        with check.isolated():
            return check.find(choose, _FEW)

    with engine.replicas_for_update() as copies:
        loaders = scatter(request.batch, plan, request.dim, Transfers())
        checks = [SpotCheck(request, make_tasks(plan, copies, loaders)[0])]
        try:
            with parameter_writes_refused([copies]):
                finding = _run_spot_check(engine._workers, checks, find)
                return finding.relative_error if finding else 0.0
        except Exception:  # inconclusive, or raised by user code
            return None
        finally:
            copies.clear_gradients()


def _run_spot_check(
    workers: Workers, checks: Sequence[SpotCheck], run: Callable[[SpotCheck], _Result]
) -> _Result:
    """The result of the first replica's check.

    User code may wait for the other replicas, for example at a barrier. So if the check takes long,
    the others run the same check with their own modules.
    """
    ended = threading.Event()

    def check(one: SpotCheck) -> Any:
        if one is not checks[0] and ended.wait(_PATIENCE_SECONDS):
            return None
        try:
            return run(one)
        finally:
            if one is checks[0]:
                ended.set()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the user's code; the step itself warns
        each, devices = [(one,) for one in checks], [one.device for one in checks]
        found = workers.parallel_apply([check] * len(checks), each, devices=devices)
        return cast(_Result, found[0])


def _drop_gradients(tasks: Sequence[ReplicaTask], replica_sets: Sequence[ReplicaSet]) -> None:
    """Drop the gradients that user code computed in a check."""
    for replica_set in replica_sets:
        replica_set.clear_gradients()
    if tasks[0].stash is not None:
        tasks[0].stash.drop_gradients()


def _refers_to(criterion: Any, model: nn.Module) -> bool:
    """Whether the criterion refers to the model, one of its parts or a parameter."""
    brought = [v for v in closure_tensors_and_modules(criterion) if not isinstance(v, Wrapper)]
    own = {id(each) for each in (*model.modules(), *model.parameters())} if brought else set()
    each = (v.modules() if isinstance(v, nn.Module) else [v] for v in brought)
    return not own.isdisjoint(map(id, chain(*each)))


# --- texts ---


def _rows_depend_text(module: Any, number: int, error: float) -> str:
    """The warning if the outputs for some rows depend on the rows beside them."""
    size = f"by {error:.2g} of the largest entry" if math.isfinite(error) else "in shape"
    return (
        f"{type(module).__name__} gives other outputs for {number} rows than for two halves of "
        f"them: they differ {size}. So an output depends on the rows beside it; if the loss uses "
        f"it, micro-batches do not have the whole batch's gradient. Is batch_first=True forgotten, "
        f"or dim=? A tensor or list that has no rows is passed as Replicated(value), one with an "
        f"entry per row as Rows(list). A number that compares rows is computed in the criterion, "
        f"with whole_batch=True. If it is meant (a home-made batch normalisation), ignore this"
    )


def _module_state_text(module: Any) -> str:
    """The warning if a module reads what its earlier calls have left in objects."""
    return (
        f"{type(module).__name__} gives other outputs when it is called again with the same rows: "
        f"it keeps state (a hidden state, a list), which every sub-step changes on each replica "
        f"apart, and which your module does not get. Return it from forward, and pass it as an "
        f"input (docs/limits.md, State in modules)"
    )


def _criterion_state_text(request: Request) -> str:
    """The warning if a criterion reads what its earlier calls have left."""
    return (
        f"{_name_of(request)} gives another loss when it is called again with the same rows: it "
        f"keeps state, which the call of every micro-batch changes, where one pass over the whole "
        f"batch changes it once. Change that state once per step, outside of the criterion, or "
        f"pass whole_batch=True, which calls it once"
    )


def _replica_differs_text(request: Request, expected: float, found: float) -> str:
    """The error text if a replica's loss is not that of the user's own module."""
    on_replica = "an error" if math.isnan(found) else f"{found:.4g}"
    return (
        f"{_name_of(request)} leads to the module that is trained, and the loss of a few rows is "
        f"{expected:.4g} with your own module in plain torch, but {on_replica} on a replica: it "
        f"reads what the forward pass leaves on the module, such as an auxiliary loss, or asks "
        f"autograd for gradients by your own parameters, of which replicas have copies. {_RETURN}; "
        f"forward can compute gradients, too. No count=, reduction= or whole_batch= says that. "
        f"{_OFF}"
    )


def _refusal_text(request: Request, finding: Finding | None) -> str:
    """The error text: the difference, its size, what to pass. Empty if there is no finding."""
    if finding is None:
        return ""
    sizes = " + ".join(str(len(part)) for part in finding.parts)
    error = finding.relative_error
    percent = f"{100 * error:.2g}" if error < 1 else f"{100 * error:,.0f}"
    size = f"off by {percent} %" if math.isfinite(error) else "NaN or infinite"
    if math.isfinite(error) and not finding.of_losses and not 0.5 < finding.factor < 2:
        size += f" (a factor of {finding.factor:.2g})"
    rows = [*chain(*finding.parts)]
    listed = ", ".join(map(str, rows)) if len(rows) <= _FEW else f"{rows[0]}, {rows[1]}, …"
    return (
        f"{_name_of(request)}: your loss of {len(rows)} rows is not the "
        f"{'mean' if request.is_mean else 'sum'} of the losses of {sizes} rows, but the engine "
        f"assumes it is: the {'loss' if finding.of_losses else 'gradient'} would be {size}. "
        f"{finding.advice} (Rows {listed} of {request.rows}.) {_OFF}"
    )


def _unchecked_text(request: Request, error: Exception) -> str:
    """The warning for an inconclusive check, with the assumption and what to pass."""
    terms = "rows" if request.count is None else "what count= gives"
    return (
        f"could not check how {_name_of(request)} combines micro-batches ({str(error)[:120]}). The "
        f"engine assumes {f'a mean over {terms}' if request.is_mean else 'a sum'}. If it is a mean "
        f"over something else, such as labels that are not ignored, pass count=, for instance "
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
