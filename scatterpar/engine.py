"""ScatterOnceParallel: one step of a very large batch, scattered once and reduced once.

The path of one step. Comments in ``_step`` and ``_compute`` have the same
numbers::

    1 plan  2 scatter       3 replicate  4 compute              5 reduce  6 commit

    batch -+-- share 0 ----- replica 0 -- sub-step 0 ... 15 --+-- sum -- .grad, buffers,
           +-- share 1 ----- replica 1 -- sub-step 0 ... 15 --+          random state
           +-- share 2 ----- replica 2 -- sub-step 0 ... 15 --+
           +-- share 3 ----- replica 3 -- sub-step 0 ... 15 --+

If the step fails, also in 6, all user state that was written is restored. If memory
runs out in 2 to 5, ``accum="auto"`` starts again at 1, in calls without gradients too.
Ranks exchange their sums between 5 and 6. In 6, ``forward_backward`` adds to ``.grad``;
with ``loss`` the backward pass of the loss does that.

A call of the engine, ``engine(x)``, is not a step: with a graph it is ``Calls.call`` in
``calls/call.py``, without one ``map_rows``.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Self, Unpack, cast, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scatterpar.batch.batch import batch_of
from scatterpar.batch.joining import KnownTensors
from scatterpar.batch.markers import count_rows
from scatterpar.calls.call import CallOptions, Calls, require_grad
from scatterpar.devices.device_ids import DeviceLike, resolve
from scatterpar.devices.links import check_links
from scatterpar.devices.transfers import Transfers
from scatterpar.distributed.ranks import Ranks
from scatterpar.distributed.visible_accelerators import accelerators_of_rank
from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import register_wrapper
from scatterpar.options.assigned_options import fixed, option
from scatterpar.options.auto_accum import AutoAccum, Search
from scatterpar.options.call_arguments import (
    Arguments,
    explaining_keywords,
    read_arguments,
    same_arguments,
)
from scatterpar.options.graphs.schedule import schedule_of
from scatterpar.options.map_rows import Mapped, RowFunction, join_results, map_rows
from scatterpar.options.whole_batch import TwoPasses
from scatterpar.plan import Plan, make_plan
from scatterpar.replicas.compiled import compile_fn_from
from scatterpar.replicas.refused_modules import check_placement
from scatterpar.replicas.replicas import ReplicaOptions, Replicas, ReplicaSet
from scatterpar.report import StepReport
from scatterpar.step.attempt import Attempt, Extent
from scatterpar.step.call_state import journal_of_call
from scatterpar.step.commit import commit
from scatterpar.step.loss_weights import compute_loss_weights
from scatterpar.step.misfits import add_advice
from scatterpar.step.reduce import Outcome, reduce
from scatterpar.step.request import (
    Accum,
    Buffers,
    Call,
    CountFunction,
    Criterion,
    EngineOptions,
    Reduction,
    Request,
    StepOptions,
    check_module,
    check_synchronised,
    checked,
)
from scatterpar.step.returned_loss import LossWatch
from scatterpar.step.row_writes import KnownWrites
from scatterpar.step.scatter import (
    ShareLoader,
    micro_batches,
    scatter,
    start_arrival,
)
from scatterpar.step.step_report import make_report
from scatterpar.step.substeps import Schedule, user_state_guarded
from scatterpar.step.task import inputs_from_arguments, make_tasks
from scatterpar.step.tries import Tries, Try
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.compiler import never_compiled, unwrapped
from scatterpar.verify.gradient_check import (
    GradientCheck,
    PlainComparison,
    compare,
    in_double,
)
from scatterpar.verify.verifier import Verifier
from scatterpar.wrapper import ModuleT, Wrapper

_BELONGS_TO_STEPS = (
    'buffers="batch" and process_group= do not work with engine(x) and backward(); '
    "call forward_backward(inputs, targets, criterion), or call engine(x) under "
    "torch.no_grad()"
)

# per rank: rank r numbers its replicas from r * this, for their seeds
_MAX_REPLICAS = 2**16


class ScatterOnceParallel(Wrapper[ModuleT]):
    """Train on very large batches with all the devices of one machine, in one process.

    Computes ``criterion(module(inputs), targets).backward()`` for the whole batch, as
    one device with enough memory would. The rows are divided over replicas, copies of
    ``module``. Each replica computes its share in ``accum`` sub-steps. The batch is
    scattered once, parameters are sent once, and gradients are reduced once.

    Args:
        module: any ``nn.Module`` on ``device_ids[0]``. Optimizers and checkpoints use
            it as before.
        accum: sub-steps per replica, or ``"auto"``: start with one. If memory runs out,
            plan the same batch again with the fewest sub-steps that fit. Later steps
            use this number, too. For calls without gradients a number is found per
            function and number of rows.
        device_ids: one entry per replica: ints (ordinals of the accelerator), strings
            or ``torch.device``. Replicas with equal entries share one memory: ``["cpu"]
            * 4`` are four in host memory, ``["cpu:0", "cpu:1"]`` two virtual devices
            with separate memories. Default: every visible accelerator, or a single CPU
            replica if there is none. If several processes see the same accelerators
            (``torchrun --nproc-per-node 2``), each takes its part of them.
        micro_batch_size: maximal number of rows per sub-step, instead of ``accum``: one
            number, or one per replica for devices of unequal memory.
        dim: the dimension along which the batch is split into rows.
        buffers: ``"master"`` keeps the buffers of replica 0. ``"batch"`` updates
            running statistics of batch normalisation once per step, not in every
            sub-step, with the mean and unbiased variance over all rows.
        check_finite: raise ``FloatingPointError`` for a loss that is NaN or infinite.
        process_group: train together with other processes, one per machine. Each rank
            passes its own rows; loss and gradients are computed over the rows of all
            ranks. If a rank fails, every rank raises an error in that step. At
            construction all ranks get the parameters and buffers of rank 0. Inference
            is separate on each rank.
        shares: relative sizes of the replicas' shares, such as ``[3, 1]`` for a device
            that is three times as fast as the other. A larger share has more sub-steps,
            not larger ones.
        accumulate_dtype: add gradients of sub-steps, replicas and ranks in this
            floating-point dtype, such as ``torch.float32`` for parameters in bfloat16,
            unless their own dtype is wider. The sum is rounded once, to the dtype of
            ``.grad``. In a call with a graph this holds for all replicas except the
            first, whose gradients autograd adds to ``.grad``.
        compile: ``True`` or a dict of ``torch.compile``'s keywords: replicas run
            compiled, and the module itself is not changed. If the module was compiled,
            as a whole or in parts, replicas run compiled as well.
        verify: before steps 1, 2, 4, 8, … check a few rows: compute their loss and
            gradient in one piece, by your own module and criterion in plain torch, and
            in parts, as the step cuts the batch. If these differ by more than rounding,
            the step raises ``ValueError`` before anything changes, and says what would
            be right. Another criterion or structure of the batch starts the count
            again, and labels beyond the range so far cause one more check. The step
            warns once of an inconclusive check, of state that sub-steps change, and of
            outputs that depend on the other rows.
        graphs: capture a sub-step (forward, criterion and backward) as a CUDA graph,
            once per shape of micro-batch, and replay it. ``None``: if devices waited
            for the host in several steps, and the sub-step can be captured;
            ``last_step.graphs`` says why not. ``True``: from the first step; a sub-step
            that cannot be captured runs without a graph, with one warning. ``False``:
            never. In each step the last sub-step of each shape runs without a graph; if
            its operators differ from the capture's, the whole step is computed without
            graphs.

    Attributes:
        module: the user's module.
        shares: the relative sizes of the replicas' shares, one number per replica.
        last_step: a :class:`StepReport` of the last step; ``None`` before the first
            step.

    The options ``accum``, ``micro_batch_size``, ``dim``, ``shares``, ``check_finite``,
    ``verify`` and ``graphs`` may be set later. The value is checked as in the
    constructor, and holds from the next step on. Other options cannot be set.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of range, a parameter that is not on
            ``device_ids[0]``, modules that differ between ranks, or an
            ``nn.SyncBatchNorm`` that would exchange its statistics between processes.

    Example:
        >>> model = nn.Linear(4, 2)
        >>> engine = ScatterOnceParallel(model, accum=2, device_ids=["cpu"] * 2)
        >>> inputs, targets = torch.randn(10, 4), torch.randint(2, (10,))
        >>> loss = engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
        >>> model.weight.grad.shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        module: ModuleT,
        accum: Accum = 1,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        micro_batch_size: int | Sequence[int] | None = None,
        dim: int = 0,
        buffers: Buffers = "master",
        check_finite: bool = False,
        process_group: dist.ProcessGroup | None = None,
        shares: Sequence[float] | None = None,
        accumulate_dtype: torch.dtype | None = None,
        compile: bool | Mapping[str, Any] | None = None,
        verify: bool = True,
        graphs: bool | None = None,
    ) -> None:
        """The docstring of the class has the arguments and an example."""
        super().__init__()
        self.module, self._compile_fn = unwrapped(module)
        if compile is not None:
            self._compile_fn = compile_fn_from(compile) or self._compile_fn
        # Refused before anything is made: a failed constructor leaves no threads
        # behind.
        check_module(self.module)
        check_synchronised(self.module)
        device_ids = accelerators_of_rank(process_group, device_ids)
        self._options = EngineOptions(
            device_ids=resolve(device_ids),
            accum=accum,
            micro_batch_size=micro_batch_size,
            dim=dim,
            buffers=buffers,
            check_finite=check_finite,
            shares=shares,
            accumulate_dtype=accumulate_dtype,
            verify=verify,
            graphs=graphs,
        )
        check_placement(self.module, self.device_ids, lazy=True)
        # ``None`` before the first step. For type checkers it is always a report, as
        # for the program that reads it after a step.
        self.last_step: StepReport = cast("StepReport", None)
        # What copies of the engine keep, unlike all that ``_init_transient`` makes.
        self._auto_accum = AutoAccum()
        self._known_writes = KnownWrites()
        self._ranks: Ranks | None = None
        if process_group is not None:
            self._ranks = Ranks(
                process_group,
                self.module,
                self.device_ids,
                buffers,
                accumulate_dtype,
            )
        self._init_transient()

    accum: Accum = option("accum")
    micro_batch_size: int | Sequence[int] | None = option("micro_batch_size")
    dim: int = option("dim")
    shares: Sequence[float] = option("shares")
    check_finite: bool = option("check_finite")
    verify: bool = option("verify")
    graphs: bool | None = option("graphs")
    device_ids: Final[tuple[torch.device, ...]] = fixed("device_ids")
    buffer_policy: Final[Buffers] = fixed("buffers")
    accumulate_dtype: Final[torch.dtype | None] = fixed("accumulate_dtype")
    _one_pass: Schedule
    if (
        not TYPE_CHECKING
    ):  # for type checkers these are methods of nn.Module, or nothing
        # Reading raises ``AttributeError``, as ``EngineOptions`` has no such field.
        process_group = fixed("process_group")
        # An assignment would hide these methods.
        buffers = fixed("buffers", nn.Module.buffers.__get__)
        compile = fixed("compile", nn.Module.compile.__get__)

    def _assign(self, name: str, value: Any) -> None:
        """Set an option as the constructor would, or leave all as it was."""
        options = replace(self._options, **{name: value})
        one_pass = self._one_pass
        # A new one forgets its captured graphs.
        if name == "graphs":
            one_pass = self._made_schedule(options)
        # Nothing below raises: a refused value has changed nothing.
        self._options = options
        self._one_pass = one_pass
        if name == "accum":
            self._auto_accum = AutoAccum()
        elif name == "verify":
            self._init_verifier()

    _transient = (
        "_workers",
        "_replicas",
        "_calls",
        "_verifier",
        "_one_pass",
        "_loss_watch",
    )

    def _init_transient(self) -> None:
        self._workers = Workers(self.device_ids, "this engine")
        options = ReplicaOptions(
            self.accumulate_dtype,
            record_statistics=self.buffer_policy == "batch",
            compile_fn=self._compile_fn,
        )
        self._replicas = Replicas(self.device_ids, options)
        self._calls = Calls(
            self.module, self.device_ids, self._replicas.of_model, self._workers
        )
        self._init_verifier()
        self._one_pass = self._made_schedule(self._options)
        self._loss_watch = LossWatch(self.module)
        self._step_ended = math.inf  # the first step has not waited

    def _init_verifier(self) -> None:
        self._verifier = Verifier(self._ranks is not None) if self.verify else None

    def _made_schedule(self, options: EngineOptions) -> Schedule:
        """Returns the schedule of steps without ``whole_batch``.

        Raises ``ValueError`` for options that do not fit the devices or each other.
        """
        return schedule_of(options, self._compile_fn)

    @overload
    def forward_backward(
        self,
        inputs: Any,
        targets: Any = None,
        criterion: Criterion | None = None,
        *,
        return_outputs: Literal[False] = False,
        **options: Unpack[StepOptions],
    ) -> Tensor: ...

    @overload
    def forward_backward(
        self,
        inputs: Any,
        targets: Any = None,
        criterion: Criterion | None = None,
        *,
        return_outputs: Literal[True] | Callable[[Any], Any],
        **options: Unpack[StepOptions],
    ) -> tuple[Tensor, tuple[Any, ...]]: ...

    @overload
    def forward_backward(
        self,
        inputs: Any,
        targets: Any = None,
        criterion: Criterion | None = None,
        *,
        return_outputs: bool | Callable[[Any], Any],
        **options: Unpack[StepOptions],
    ) -> Tensor | tuple[Tensor, tuple[Any, ...]]: ...

    @never_compiled
    @explaining_keywords
    def forward_backward(
        self,
        inputs: Any,
        targets: Any = None,
        criterion: Criterion | None = None,
        *,
        reduction: Reduction | None = None,
        count: CountFunction | None = None,
        scaler: torch.amp.GradScaler | None = None,
        return_outputs: bool | Callable[[Any], Any] = False,
        whole_batch: bool = False,
    ) -> Tensor | tuple[Tensor, tuple[Any, ...]]:
        """One step: adds the gradient of the whole batch's loss to the parameters'
        ``.grad``.

        Args:
            inputs: a tensor or list (one positional argument of the module), a tuple
                (positional arguments) or a mapping (keyword arguments), nested at will.
                Tensors have the batch's rows along ``dim``; 0-dim tensors and
                everything else go to every replica. ``Replicated`` marks values without
                rows, ``Rows`` a list with one entry per row, ``Rows.from_batches``
                several batches.
            targets: the targets for the criterion, with the same rows.
            criterion: ``criterion(output, targets)`` returns a 0-dim loss, or ``(loss,
                numbers)`` with a dict of 0-dim tensors or numbers to log, which are
                combined as the loss is, and are then in ``last_step.logged``. With
                ``None`` the module's output is the loss, or has it as ``.loss`` or
                ``["loss"]``. Networks that it trains are children of an ``nn.Module``,
                or bound by ``functools.partial(criterion, net=net)``: replicas have
                copies of them.
            reduction: how the criterion combines its terms, ``"mean"`` or ``"sum"``; by
                default the criterion's attribute ``.reduction``, else ``"mean"``.
            count: ``count(inputs, targets)`` returns the number of terms that a mean
                loss of these inputs and targets averages over, as a number or 0-dim
                tensor. By default the number of rows. For ``nn.CrossEntropyLoss`` and
                ``nn.NLLLoss`` (or their functions, also as a ``functools.partial``) the
                default follows their ``ignore_index`` and ``weight``.
                ``scatterpar.count_labels`` returns such a function for labels of which
                some are ignored.
            scaler: its scale multiplies the gradients, for ``scaler.step(optimizer)``.
            return_outputs: ``True`` to return the module's outputs too, or a function
                that is applied to the detached output of each micro-batch, to return
                its results.
            whole_batch: the criterion sees the outputs and targets of all rows,
                joined in row order on the first device, for losses that compare rows
                with each other. It is called once, in the caller's thread. Every
                micro-batch except a replica's last one is computed twice, with the same
                random numbers and from the same state.

        Returns:
            The loss of the whole batch, 0-dim, detached, on the first device. With
            ``return_outputs`` a pair of the loss and the outputs: a tuple with one
            entry per replica used, detached, each on its replica's device.

        Raises:
            ValueError: an empty batch, tensors with different numbers of rows or that
                require grad, outputs that cannot be joined, a loss that is not 0-dim,
                ``reduction="none"``; with ``whole_batch`` no criterion, or
                ``reduction=`` or ``count=``; a gradient that arrives at a network that
                no replica has; with ``verify``, losses that do not combine as
                ``reduction`` and ``count`` say.
            RuntimeError: a step inside a step, after ``close()``, or in a forked child;
                with ``whole_batch``, a module whose second pass gives other outputs.
            FloatingPointError: with ``check_finite``, a loss that is not finite.

        Exceptions of the module or the criterion are raised unchanged, with a note that
        names the replica and sub-step. After any exception, nothing has changed.
        """
        call = Call(
            inputs,
            targets,
            criterion,
            reduction,
            count,
            scaler,
            return_outputs,
            whole_batch,
        )
        return self._step(call, deferred=False)

    @never_compiled
    @same_arguments(forward_backward)
    def loss(
        self, inputs: Any, targets: Any = None, criterion: Any = None, **options: Any
    ) -> Any:
        """One step whose gradients wait for the backward pass of the returned loss.

        For loops that call ``loss.backward()`` themselves. The call computes what
        ``forward_backward`` computes, sets ``last_step``, and updates buffers and
        random state. The backward pass adds the gradient of the whole batch to
        ``.grad``, times the factor that arrives at the loss; hooks on parameters run in
        it. So the loss can be scaled, added to other losses, dropped, or passed to
        ``torch.autograd.grad``. With a ``scaler``, call
        ``scaler.scale(loss).backward()``: its scale is applied in the call already, so
        that small gradients in half precision do not vanish, but not to the loss.

        Returns:
            The loss of the whole batch, 0-dim, on the first device, for one backward
            pass; with ``return_outputs`` a pair of the loss and the outputs. Under
            ``torch.no_grad()`` only forward passes run, and the loss has no graph.

        Raises:
            RuntimeError: in a second backward pass, even with ``retain_graph=True``; in
                a backward pass with ``create_graph=True``. The call raises the errors
                of ``forward_backward``.

        Example:
            >>> model = nn.Linear(4, 2)
            >>> engine = ScatterOnceParallel(model, accum=2, device_ids=["cpu"] * 2)
            >>> loss = engine.loss(torch.randn(10, 4), torch.randn(10, 2), nn.MSELoss())
            >>> (loss + 0.1 * model.weight.square().sum()).backward()
            >>> model.weight.grad.shape
            torch.Size([2, 4])
        """
        call = Call(inputs, targets, criterion, **options)
        return self._step(call, deferred=True)

    def _step(
        self, call: Call, *, deferred: bool
    ) -> Tensor | tuple[Tensor, tuple[Any, ...]]:
        """The step; ``forward_backward`` and ``loss`` differ only in the commit."""
        backward = not deferred or torch.is_grad_enabled()
        failing_together: contextlib.AbstractContextManager[None]
        failing_together = contextlib.nullcontext()
        if self._ranks is not None:
            failing_together = self._ranks.failing_together()
        with self._workers.exclusive(self.module), self._timed() as waited:
            with failing_together:  # what one rank raises in it, every rank raises
                schedule = self._schedule(call)
                request = checked(
                    call, self.dim, self.device_ids[0], self.check_finite, backward
                )
                tries: Tries[Outcome] = self._tries(request, schedule)  # 1
                while tries.result is None:
                    with tries:
                        tries.result = self._compute(schedule, tries.present)  # 2 to 5
                outcome = tries.result
                tries.keep(outcome.attempt)
                undo = outcome.attempt.undo
                with undo:
                    # Later interrupts wait until every rank has committed.
                    self._workers.interrupts.deliver()
                    if self._ranks is not None:
                        outcome = self._ranks.sum_of_all(outcome)
            # A hook that raises undoes the step.
            with undo, outcome.attempt.span("commit"):
                # Late, so that a refused step says its error alone; but before anything
                # is written, since a program may make warnings errors.
                if self._verifier is not None:
                    self._verifier.tell()
                outcome.attempt.writes.tell(request.batches[0].inputs)
                loss = commit(outcome, deferred=deferred)  # 6
            if deferred:
                self._loss_watch.begin(loss)
            self.last_step = make_report(outcome, waited, schedule)
        return (loss, outcome.outputs) if call.return_outputs else loss

    @contextlib.contextmanager
    def _timed(self) -> Iterator[float]:
        """The body is a step. Yields how many seconds the engine has waited before."""
        # Also after a step that failed: the caller's time is not the engine's.
        waited = max(0.0, time.perf_counter() - self._step_ended)
        try:
            yield waited
        finally:
            self._step_ended = time.perf_counter()

    def _schedule(self, call: Call) -> Schedule:
        """Choose the schedule of a step."""
        if not call.whole_batch:
            return self._one_pass
        schedule = TwoPasses(call, self._ranks)
        schedule.why_eager = self._one_pass.without_graphs(
            "whole_batch=True has one loss, after all sub-steps"
        )
        return schedule

    def _tries(
        self, request: Request, work: Schedule | RowFunction, function: Any = None
    ) -> Tries[Any]:
        """By the plan, or a search for the fewest sub-steps that fit into memory.

        ``function`` is what ``map`` calls.
        """
        if self.accum != "auto":
            schedule = work if isinstance(work, Schedule) else None
            first = Try(request, self.plan(request.sizes))
            return Tries(first, schedule, self._workers)
        plan_of = partial(
            make_plan,
            request.sizes,
            self.device_ids,
            shares=self.shares,
        )
        num_replicas = len(self.device_ids)
        return Search(
            self._auto_accum,
            request,
            work,
            plan_of,
            num_replicas,
            self._workers,
            self._journal(request, function),
        )

    def _compute(self, schedule: Schedule, this: Try) -> Outcome:
        """Parts 2 to 5 of the step: all except the plan and the commit."""
        request = this.request
        with self._attempt(this) as attempt:
            transfers = attempt.transfers
            with attempt.phase("scatter"):  # 2
                loaders = self._scattered(attempt)
                # In other steps launches take longer than the copy, and a look would
                # have these rows in memory beside its own.
                replays = schedule.replays()
                if replays:
                    start_arrival(loaders)
            with attempt.phase("replicate"):  # 3
                number = schedule.replicas_of_criterion
                # In a call the replicas' parameters depend on the user's.
                self._calls.gradients.disconnect(self._replicas.of_model)
                self._replicas.refresh(
                    self.module,
                    request.criterion,
                    transfers,
                    number,
                    lazily=replays,
                )
            with attempt.phase("compute"), user_state_guarded(attempt):  # 4
                tasks = make_tasks(attempt, loaders)
                if self._verifier is not None and not attempt.extent.is_trial:
                    start = time.perf_counter()
                    # Raises if the losses do not combine: ``verify/__init__.py``.
                    scope = self._verifier.look_if_due(attempt, tasks[0])
                    attempt.check_seconds = time.perf_counter() - start
                    attempt.threads.widen(scope)
                computed = schedule.run(attempt, tasks)
            with attempt.phase("reduce"):  # 5
                return reduce(attempt, computed)

    def _scattered(self, attempt: Attempt) -> list[ShareLoader]:
        """A loader per share; the weights of the losses are known afterwards."""
        plan = attempt.plan
        request = attempt.request
        batches = request.batches
        if request.whole_batch:  # one loss, for which the master alone needs targets
            batches = [batch.without_targets() for batch in batches]
        pieces = None if request.whole_batch else micro_batches(batches, plan)
        # First: it may read labels from a device, and would wait for copies in the
        # queue.
        attempt.weights = compute_loss_weights(
            request, plan, pieces, is_of_rank=self._ranks is not None
        )
        return scatter(batches, plan, attempt.transfers)

    @contextlib.contextmanager
    def _attempt(self, this: Try) -> Iterator[Attempt]:
        """One try at a step, undone if the body raises.

        Raises ``RuntimeError`` if copies between devices arrive corrupted.
        """
        check_links(self.device_ids)
        request = this.request
        attempt = Attempt(
            request,
            this.plan,
            self._replicas,
            self._workers,
            extent=this.extent,
            known_writes=self._known_writes,
            replica_offset=self._ranks.rank * _MAX_REPLICAS if self._ranks else None,
        )
        try:
            with attempt.undo:
                yield attempt
        except Exception as error:
            add_advice(error, request)
            raise
        finally:
            # A thread that did not end in time may still write its replica: others are
            # made.
            if self._workers.abandoned:
                self._workers.abandoned = False
                self._replicas.discard()
            else:
                attempt.clear_replicas()

    def plan(self, rows: int | Sequence[int]) -> Plan:
        """The shares and micro-batches for a batch of ``rows``; ``print`` shows a
        table.

        For several batches pass a list of row counts. With ``accum="auto"`` the number
        of sub-steps is that of training.
        """
        accum = self.accum
        if accum == "auto":
            # A plan is for training: without gradients each function has a number of
            # its own.
            accum = self._auto_accum.training.accum
        return make_plan(
            rows,
            self.device_ids,
            accum,
            self.micro_batch_size,
            self.shares,
        )

    @never_compiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module with the rows divided over the replicas, as
        ``nn.DataParallel`` does.

        If grad mode is on, and a parameter, an input, or a buffer or attribute of the
        module requires grad, the output has a graph: each replica runs its rows in one
        pass, and ``backward()`` adds the gradients of all replicas to the parameters,
        unless it runs inside of ``no_sync()``. In training mode under
        ``torch.no_grad()`` rows are divided and random numbers drawn in the same way,
        and so in a module with forward hooks.
        Otherwise, without a graph in evaluation mode, with
        ``buffers="batch"`` or with a ``process_group``, rows run in micro-batches. With
        ``accum="auto"`` such a call starts again with more sub-steps if it runs out of
        memory.

        Args:
            inputs: positional arguments of the module, with rows along ``dim``. A
                single dict has keyword arguments, and a single tuple positional ones,
                as in ``forward_backward``; ``(value,)`` is one argument.
            kwargs: keyword arguments of the module.

        Returns:
            The module's output for the whole batch, in the same nested types, on the
            first device, in row order. 0-dim tensors are combined as a few rows show:
            as means over rows or over labels that are not -100, or as sums. A tensor
            without rows that is the same in all parts is returned once. If the inputs
            have ``Rows`` or another marker with rows, lists with one entry per row are
            concatenated.

        Raises:
            ValueError: outputs that cannot be joined, or several batches; with a graph,
                a 0-dim tensor with a gradient that cannot be combined,
                ``buffers="batch"``, a ``process_group``, or an ``nn.SyncBatchNorm`` in
                training mode.

        Example:
            >>> model = nn.Linear(4, 2)
            >>> engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2)
            >>> loss = engine(torch.randn(5, 4)).square().mean()
            >>> loss.backward()
            >>> model.weight.grad.shape
            torch.Size([2, 4])
        """
        arguments = read_arguments(inputs, kwargs)
        is_of_ranks = self._ranks is not None or self.buffer_policy == "batch"
        if self._has_graph(arguments):
            if is_of_ranks:
                raise ValueError(_BELONGS_TO_STEPS)
            return self.call_part(self.module, *arguments)
        if not is_of_ranks and self._calls.is_one_pass():
            return self.call_part(self.module, *arguments)
        return self._map(self.module, inputs, kwargs)

    def _has_graph(self, arguments: Arguments) -> bool:
        """Whether torch would give the output of a call a graph."""
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return False
        if any(parameter.requires_grad for parameter in self.module.parameters()):
            return True
        if require_grad(arguments):
            return True
        # Replicas have what else is trained, such as a buffer or a tensor in a list.
        with self.replicas_for_update() as copies:
            return bool(copies.slots.trained)

    def call_part(
        self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the module, or a part of it, by all replicas: for integrations.

        A part whose rows or outputs cannot be divided is computed on the first device,
        with one warning.
        """
        output = self._calls.call(part, (args, kwargs), self._call_options())
        if self._calls.last_report is not None:
            self.last_step = self._calls.last_report
        return output

    def _call_options(self) -> CallOptions:
        return CallOptions(
            dim=self.dim,
            shares=self.shares,
            verify=self.verify,
            check_finite=self.check_finite,
            tells_state=self.verify,
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In the body, backward passes of calls leave gradients at their replicas.

        Use it to accumulate: for all backward passes except the last one before an
        optimizer's step. The first pass outside adds all gradients that wait.
        ``zero_grad`` drops them. Any other change of ``.grad`` before that pass, such
        as clipping, raises ``RuntimeError``.

        Example:
            >>> model = nn.Linear(4, 2)
            >>> engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2)
            >>> with engine.no_sync():
            ...     engine(torch.randn(5, 4)).mean().backward()
            >>> engine(torch.randn(5, 4)).mean().backward()
        """
        with self._calls.gradients.no_sync():
            yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, those that wait at the replicas, too."""
        self._calls.gradients.drop_waiting()
        super().zero_grad(set_to_none)

    @never_compiled
    def map(
        self,
        function: Callable[..., Any],
        *inputs: Any,
        pad: float | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call ``function`` for all rows on all replicas, in micro-batches without a
        graph.

        For work besides the forward pass, such as ``generate`` or ``encode``. Modules
        stay in training or evaluation mode. Random numbers depend on the number of
        replicas and micro-batches, as those of dropout do. With a process group each
        rank has its own rows. With ``accum="auto"`` a call that runs out of memory
        starts again with more sub-steps; what the function itself has kept by then,
        such as entries of a list, stays.

        Args:
            function: a method of the module or of a part of it, such as
                ``model.generate``: each replica calls its own as ``function(*inputs,
                **kwargs)``. Any other function is called as ``function(replica,
                *inputs, **kwargs)``. It runs in the replicas' threads. A
                ``functools.partial`` of either binds arguments without rows.
            inputs: positional arguments of the function, with rows along ``dim``. A
                single dict or tuple is read as by ``engine(...)``.
            pad: pads tensors at the end with this value, if micro-batches give
                different sizes.
            kwargs: keyword arguments of the function, with rows or without.

        Returns:
            The results for the whole batch, on the first device, in row order and in
            the same nested types. Tensors with rows are joined along ``dim``, 0-dim
            tensors averaged over the rows, lists with one entry per row concatenated.
            Equal plain values are returned once. Anything else becomes a list with one
            entry per micro-batch, unless there is only one micro-batch.

        Raises:
            ValueError: a function that refers to the module itself, tensors that cannot
                be joined, or several batches.
            TypeError: a ``function`` that is none.

        Example:
            >>> model = nn.Linear(4, 2).eval()
            >>> engine = ScatterOnceParallel(model, device_ids=["cpu"] * 2)
            >>> inputs = torch.randn(5, 4)
            >>> engine.map(lambda replica, x: replica(x).argmax(1), inputs).shape
            torch.Size([5])
        """
        if not callable(function):
            raise TypeError(
                f"function must be callable, got {type(function).__name__}; call "
                f"engine.map(function, inputs), whose function is called as "
                f"function(replica, inputs)"
            )
        return self._map(function, inputs, kwargs, pad)

    def _map(self, function: Any, inputs: Any, kwargs: Any, pad: Any = None) -> Any:
        inputs, kwargs = read_arguments(inputs, kwargs)
        with self._workers.exclusive():
            rows = count_rows({"inputs": inputs, "keyword inputs": kwargs}, self.dim)
            batch = batch_of(
                inputs_from_arguments(inputs, kwargs), None, rows, self.dim
            )
            request = Request([batch], self.dim, backward=False)
            work = RowFunction(function, (inputs, kwargs), pad)
            tries: Tries[Mapped] = self._tries(request, work, function)
            while tries.result is None:
                with tries:
                    tries.result = self._mapped(work, tries.present)
            mapped = tries.result
            tries.keep(mapped.attempt)
            with mapped.attempt.undo:
                mapped.attempt.writes.tell()
                self._calls.tell()
                mapped.commit()
            return mapped.output

    def _journal(self, request: Request, function: Any = None) -> Journal:
        """The state that tries which run out of memory may move."""
        return journal_of_call(self.module, request, self.device_ids, function)

    def _mapped(self, work: RowFunction, this: Try) -> Mapped:
        """Call a function for all rows: all except the plan and the commit."""
        with self._attempt(this) as attempt:
            outputs = map_rows(attempt, self.module, work)
            if attempt.extent.is_trial:
                return Mapped(attempt)
            known = KnownTensors()
            # A function of the user's may keep what it is called with.
            if work.function is self.module:
                known = self._calls.known_without_graph(
                    work.arguments,
                    this.plan.by_rows(outputs),
                    this.plan,
                    self._call_options(),
                )
            return join_results(attempt, self.module, work, outputs, known)

    @never_compiled
    @explaining_keywords
    def check(
        self,
        inputs: Any,
        targets: Any = None,
        criterion: Criterion | None = None,
        *,
        reduction: Reduction | None = None,
        count: CountFunction | None = None,
        whole_batch: bool = False,
    ) -> GradientCheck:
        """Compare the gradient of one batch with plain torch's on the first device.

        Takes the arguments of ``forward_backward``. The batch must fit on the first
        device; a small batch is sufficient. Nothing is changed: parameters, ``.grad``,
        buffers, random state and ``last_step`` stay the same, and no hook on a
        parameter runs. With a process group each rank compares its own rows.

        Returns:
            A report with ``.worst``, the largest relative difference of a parameter,
            ``.parameter``, its name, and ``.passed``, whether the difference is only
            rounding. It prints as a sentence, which names possible reasons of a
            difference.

        Raises:
            ValueError: as ``forward_backward``, or several batches.

        Example:
            >>> engine = ScatterOnceParallel(nn.Linear(4, 2), 2, ["cpu"] * 2)
            >>> inputs, targets = torch.randn(9, 4), torch.randn(9, 2)
            >>> report = engine.check(inputs, targets, nn.MSELoss())
            >>> report.passed
            True
        """
        call = Call(
            inputs, targets, criterion, reduction, count, whole_batch=whole_batch
        )
        with self._workers.exclusive(self.module):
            schedule = self._schedule(call)
            master = self.device_ids[0]
            request = checked(call, self.dim, master, self.check_finite)
            if len(request.sizes) > 1:
                raise ValueError(
                    f"check takes one batch, got {len(request.sizes)}; pass one"
                )
            comparison = self._compared(schedule, request)
            if comparison.may_be_rounding:
                # User code may need the step's formats, or memory may run out.
                with (
                    contextlib.suppress(Exception),
                    in_double(self.module, request) as wider,
                ):
                    return comparison.beside(self._compared(schedule, wider))
            return comparison.report

    def _compared(self, schedule: Schedule, request: Request) -> PlainComparison:
        """A step that is not committed, beside a plain backward pass on the master."""
        master = self.device_ids[0]
        plan = self.plan(request.sizes)
        # With weights, because a forward pass may write these, as one that clips does.
        state = journal_of_call(self.module, request, [master], saves_weights=True)
        with state.restored():
            # A trial is of this rank only.
            this = Try(request, plan, Extent(is_trial=True))
            outcome = self._compute(schedule, this)
            return compare(self.module, outcome, master, state)

    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """The replica modules, updated to match the module; for inspection."""
        with self.replicas_for_update() as copies:
            return tuple(replica.root for replica in copies.replicas)

    @contextlib.contextmanager
    def replicas_for_update(self) -> Iterator[ReplicaSet]:
        """Yields the replicas, updated to match the module, for code that writes their
        parameters.

        ``broadcast.send_owned`` copies the new values to all other memories, also to
        the master's. If the body fails, the next refresh sends the master's values
        again.
        """
        with self._workers.exclusive():
            self._replicas.refresh(self.module, None, Transfers())
            try:
                yield self._replicas.of_model
            except BaseException:
                self._replicas.of_model.guard.invalidate()
                raise

    def extra_repr(self) -> str:
        """The devices, and options that are not the defaults, for ``repr(engine)``."""
        devices = ", ".join(map(str, self.device_ids))
        words = [f"device_ids=[{devices}]"]
        for name, default in vars(EngineOptions(self.device_ids)).items():
            value = getattr(self._options, name)
            if value != default:
                words.append(f"{name}={value!r}")
        return ", ".join(words)

    def close(self) -> None:
        """Stop the workers and drop the process group. A later step is a
        ``RuntimeError``.

        Calling it is optional: workers also stop when the engine is collected.
        """
        self._workers.close()
        self._ranks = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


register_wrapper(ScatterOnceParallel)
