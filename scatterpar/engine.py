"""ScatterOnceParallel: one step of a very large batch, scattered once and reduced once.

The path of one step, as ``forward_backward`` and ``_compute`` walk it::

    batch - plan - scatter -+- share 0 - replica 0: sub-step 0 ... 15 -+- reduce - commit
                            +- share 1 - replica 1: sub-step 0 ... 15 -+
                            +- share 3 - replica 3: sub-step 0 ... 15 -+
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from scatterpar.devices.ledger import Clock, Ledger
from scatterpar.devices.memory_search import smallest_that_fits
from scatterpar.devices.readout import Readout
from scatterpar.devices.verbs import DeviceLike, physical, resolve
from scatterpar.machines.ranks import Ranks
from scatterpar.plan import Plan, make_plan
from scatterpar.replicas.compiled import checked_how, unwrapped
from scatterpar.replicas.guard import guarded
from scatterpar.replicas.replicas import Replicas, check_placement
from scatterpar.replicas.wrapper import Wrapper
from scatterpar.replicas.writes import once_known
from scatterpar.report import GradientNoise, StepReport, warn
from scatterpar.step.commit import commit, commit_buffers, write_parameters
from scatterpar.step.markers import has_entries
from scatterpar.step.merge import merge_writes
from scatterpar.step.noise import Spread, estimate, measure
from scatterpar.step.outcome import Outcome
from scatterpar.step.pace import Pace
from scatterpar.step.reduce import collect, reduce_buffers, reduce_gradients
from scatterpar.step.rehearsal import rehearse
from scatterpar.step.request import Request, check_accumulate_dtype, check_options
from scatterpar.step.rows import batch_sizes, count_rows, micro_batches
from scatterpar.step.scatter import hand_out, scatter
from scatterpar.step.substeps import Result, infer, prepare_autograd, train
from scatterpar.step.two_passes import train_whole
from scatterpar.step.weights import Count, weigh
from scatterpar.threads.crew import Crew, Task, run_shares, set_aside
from scatterpar.threads.interrupts import Interrupts
from scatterpar.threads.randomness import RandomStreams
from scatterpar.verify.check import GradientCheck, compare
from scatterpar.verify.verifier import Look, Verifier

__all__ = ["ScatterOnceParallel"]


class ScatterOnceParallel(Wrapper):
    """Train on very large batches with all the devices of one machine, in one process.

    Computes, for a batch of rows ``0 … n``, what this program computes, on one device with
    enough memory::

        loss = criterion(module(inputs), targets)
        loss.backward()

    but with the rows divided over replicas of ``module``, each of which works through its
    share in ``accum`` sub-steps of its own. The batch is scattered once, parameters go out
    once, gradients come back once.

    Args:
        module: any ``nn.Module`` on ``device_ids[0]``. It stays the user's: optimizers,
            schedulers and checkpoints see it alone.
        accum: sub-steps per replica, or ``"auto"``: start with one and, when memory runs out,
            plan the same batch anew with the fewest sub-steps that fit; remembered for
            later steps. What ran out of memory leaves no trace in the result.
        device_ids: one entry per replica: ints (ordinals of the accelerator), strings or
            ``torch.device``; entries may repeat, and replicas with equal entries share one
            memory. ``["cpu"] * 4`` are four replicas in the host's memory, ``["cpu:0",
            "cpu:1"]`` are two virtual devices with memories of their own. Default: every
            visible accelerator, or a single CPU replica without any.
        micro_batch_size: most rows per sub-step, instead of ``accum``.
        dim: the dimension that holds the rows.
        buffers: ``"master"`` keeps replica 0's buffers, ``"mean"`` averages floating-point
            buffers over the replicas, weighted by rows.
        check_finite: raise ``FloatingPointError`` for a loss that is NaN or infinite.
        process_group: train together with other processes, one a machine. Each rank passes
            its own rows; loss and gradients are those of all ranks' batches together, and a
            rank that fails makes every rank raise in that step. Rank 0's parameters and
            buffers win at construction. Inference stays each rank's own.
        shares: relative sizes of the replicas' shares, such as ``[3, 1]`` for a card that is
            three times as fast as the other, or ``"auto"``: learned from the pace of each
            device in the steps so far. A larger share is more sub-steps, not larger ones.
            Loss and gradient are exact whatever the shares are; what is learned differs from
            run to run, and with it the rounding. Each rank learns its own.
        accumulate_dtype: sub-steps, replicas and ranks add up in this floating-point dtype, such
            as ``torch.float32`` for parameters in bfloat16, whose sums lose half their digits
            otherwise. The sum is rounded once, into ``.grad``'s own dtype. Gradients that are
            wider already keep their dtype.
        measure_noise: compare the replicas' gradients: ``last_step.noise`` tells how large a
            batch is worth it (:class:`GradientNoise`).
        compile: ``True`` or a dict of ``torch.compile``'s keywords: replicas run compiled, and the
            module itself stays as it is. A module made by ``torch.compile``, or one that was
            compiled by ``.compile()``, as a whole or in parts, means the same without it.
        verify: the first time that a kind of criterion and batch is met, check on two
            micro-batches that their losses combine as ``reduction`` and ``count`` say; a
            ``ValueError`` before anything changes where they do not. It takes three
            evaluations of the criterion, or, where the module computes the loss, a forward
            pass of the two; later steps do not pay.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an argument out of range, a parameter that is not on ``device_ids[0]``,
            or modules that differ between ranks.

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
        module: nn.Module,
        accum: int | Literal["auto"] = 1,
        device_ids: Sequence[DeviceLike] | None = None,
        *,
        micro_batch_size: int | None = None,
        dim: int = 0,
        buffers: str = "master",
        check_finite: bool = False,
        process_group: dist.ProcessGroup | None = None,
        shares: Sequence[float] | Literal["auto"] | None = None,
        accumulate_dtype: torch.dtype | None = None,
        measure_noise: bool = False,
        compile: bool | Mapping[str, Any] | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__()
        module, compiled_how = unwrapped(module)
        check_options(module, accum, micro_batch_size, dim, buffers)
        check_accumulate_dtype(accumulate_dtype)
        self.module = module
        self.accum: Any = accum
        self._fitting = 1
        self.device_ids = resolve(device_ids)
        self._pace = Pace(shares, self.device_ids)
        self.micro_batch_size = micro_batch_size
        self.dim = dim
        self.buffers_from = buffers
        self.check_finite = check_finite
        self.accumulate_dtype = accumulate_dtype
        self.measure_noise = measure_noise
        self._compile_how = checked_how(compile) or compiled_how
        self.verify = verify
        self.last_step: StepReport | None = None
        check_placement((module,), self.device_ids[0], lazy=True)
        self._ranks: Ranks | None = None
        if process_group is not None:
            mean = buffers == "mean"
            self._ranks = Ranks(process_group, module, self.device_ids[0], mean, accumulate_dtype)
        if measure_noise and len(self.device_ids) * (self._ranks.size if self._ranks else 1) < 2:
            only = str(self.device_ids[0])
            raise ValueError(
                "measure_noise=True compares the gradients of replicas, and there is one; name its "
                f"device twice: device_ids={[only] * 2}"
            )
        self._hire()

    def __getstate__(self) -> dict[str, Any]:
        if self._ranks is not None:
            raise TypeError(
                "an engine with a process_group cannot be copied or pickled, since the group "
                "belongs to this process; copy engine.module, or save engine.state_dict()"
            )
        return super().__getstate__()

    def _hire(self) -> None:
        self._crew = Crew(self.device_ids, self.accumulate_dtype, self._compile_how)
        self._verifier = Verifier(self.verify)

    def plan(self, rows: int | Sequence[int]) -> Plan:
        """The shares and micro-batches for a batch of ``rows``; ``print`` shows a table.

        A tuple or list of rows is a batch made of several, as by ``Rows.from_batches``.
        """
        return self._plan(rows, self._fitting if self.accum == "auto" else self.accum)

    def _plan(self, rows: int | Sequence[int], accum: int) -> Plan:
        return make_plan(rows, self.device_ids, accum, self.micro_batch_size, self.shares)

    def forward_backward(
        self,
        inputs: Any,
        targets: Any = None,
        criterion: Callable[[Any, Any], Any] | None = None,
        *,
        reduction: str | None = None,
        count: Count | None = None,
        scaler: torch.amp.GradScaler | None = None,
        return_outputs: bool | Callable[[Any], Any] = False,
        whole_batch: bool = False,
    ) -> Any:
        """One step: adds the gradient of the whole batch's loss to the parameters' ``.grad``.

        Args:
            inputs: a tensor or list (one positional argument of the module), a tuple
                (positional arguments) or a mapping (keyword arguments), nested at will.
                Tensors have the batch's rows along ``dim``; 0-dim tensors and everything
                else go to every replica as they are. ``Replicated`` marks what has no rows,
                ``Rows`` a list with one entry per row, ``Rows.from_batches`` several batches.
            targets: what the criterion takes, with the same rows.
            criterion: ``criterion(output, targets)`` gives a 0-dim loss. ``None``: the
                module's output is the loss, or has it as ``.loss`` or ``["loss"]``.
            reduction: how the criterion combines its terms, ``"mean"`` or ``"sum"``; by
                default its own ``.reduction``, else ``"mean"``.
            count: ``count(inputs, targets)`` gives the number of terms, as a number or
                0-dim tensor, that a mean loss averages over in what it is given. By
                default the rows, and for ``nn.CrossEntropyLoss`` and ``nn.NLLLoss`` (or
                their functions, also as a ``functools.partial``) what their ``ignore_index``
                and ``weight`` make of the targets. ``scatterpar.count_labels`` makes one for
                labels of which some are ignored.
            scaler: its scale multiplies the gradients, for ``scaler.step(optimizer)``.
            return_outputs: return the module's outputs too; or a function, for what it makes
                of each micro-batch's output, detached, at once.
            whole_batch: the criterion sees the outputs and targets of all rows at once, joined
                in row order on the master, for losses that compare rows with each other. It is
                called once, where this is called. Every micro-batch but a replica's last one is
                computed twice, with the same random numbers and from the same state.

        Returns:
            The whole batch's loss, 0-dim, detached, on the master; with
            ``return_outputs`` a pair of it and the outputs, a tuple with one entry per
            replica used, detached, each on its replica's device.

        Raises:
            ValueError: an empty batch, tensors that disagree in their rows or require
                grad, outputs that cannot be joined, a loss that is not 0-dim, ``reduction="none"``;
                with ``whole_batch`` no criterion, or ``reduction=`` or ``count=``; with
                ``verify``, losses that do not combine as these say.
            RuntimeError: a step inside a step, after ``close()``, or in a forked child; with
                ``whole_batch``, a module that computes something else the second time.
            FloatingPointError: with ``check_finite``, a loss that is not finite.

            What the module or the criterion raises arrives as it is, with a note of the
            replica and sub-step. Then nothing has changed.
        """
        request = Request(
            inputs, targets, criterion, reduction, count, scaler, return_outputs, whole_batch
        )
        with self._crew.workers.exclusive() as interrupts:
            if self._ranks is None:
                outcome, retries = self._fit(request.checked(self.dim))
                noise = self._noise(outcome)
                commit(outcome, settle=interrupts.deliver)
            else:
                outcome, retries = self._with_the_others(request, interrupts)
                noise = self._noise(outcome)
                commit(outcome)  # the other ranks do so too: there is no way back
            self._pace.observe(outcome.plan, outcome.clock.passes)
            self.last_step = StepReport(
                outcome.plan,
                outcome.loss,
                outcome.clock.seconds,
                outcome.ledger.bytes,
                outcome.ledger.messages,
                retries,
                noise,
            )
            device = physical(self.device_ids[0])
            # Filled in, not copied: the host waits for a copy.
            loss = torch.full((), outcome.loss, dtype=outcome.dtype, device=device)
        return (loss, outcome.outputs) if return_outputs else loss

    def _with_the_others(self, request: Request, interrupts: Interrupts) -> tuple[Outcome, int]:
        """The outcome of all ranks together; whoever fails before, tells them."""
        assert self._ranks is not None
        outcome = None
        try:
            outcome, retries = self._fit(request.checked(self.dim))
            interrupts.deliver()
            self._ranks.check(outcome)
        except BaseException as error:
            if outcome is not None:
                outcome.streams.rollback()
            self._ranks.report_failure(error)
            raise
        return self._ranks.exchange(outcome), retries

    def _fit(self, request: Request) -> tuple[Outcome, int]:
        """The outcome with as many sub-steps as the memory asks for, and the tries it took."""
        rows = request.rows
        if self.accum != "auto":
            return self._compute(request, self.plan(request.sizes)), 0
        start = self._fitting
        self._fitting, outcome, retries = smallest_that_fits(
            start,
            -(-max(request.sizes) // len(self.device_ids)),
            attempt=lambda accum: self._compute(request, self._plan(request.sizes, accum)),
            trial=lambda accum: self._try(request, self._plan(request.sizes, accum)),
        )
        if retries:
            try:
                warn(
                    f'accum="auto": {rows} rows with accum={start} ran out of memory; '
                    f"accum={self._fitting} is the smallest that fits, and is kept"
                )
            except Warning:  # the user makes errors of warnings
                outcome.streams.rollback()
                raise
        return outcome, retries

    def _noise(self, outcome: Outcome) -> GradientNoise | None:
        if not self.measure_noise:
            return None
        gradients = [gradient for _, gradient in outcome.gradients if gradient is not None]
        factor = outcome.scale * (1.0 if outcome.is_mean else outcome.spread.terms)
        try:
            return estimate(outcome.spread, gradients, factor)
        except BaseException:
            outcome.streams.rollback()
            raise

    def _try(self, request: Request, plan: Plan) -> None:
        """Take the memory of a step, in its first sub-steps, without a trace."""
        request = replace(request, return_outputs=False)
        self._compute(request, plan, most=2).streams.rollback()

    def _compute(
        self, request: Request, plan: Plan, most: int | None = None, *, verify: bool = True
    ) -> Outcome:
        """Scatter, replicate, sub-steps, reduce: all of the step but the commit."""
        once = partial(self._compute_once, request, plan, most, verify and not most)
        return once_known(once) if self._ranks is None else self._ranks.refusing_writes(once)

    def _compute_once(
        self, request: Request, plan: Plan, most: int | None, verify: bool
    ) -> Outcome:
        ledger, clock, streams = Ledger(), Clock(), self._streams(plan)
        scale = self._scale(request.scaler)
        self._crew.check_links()
        try:
            with clock.phase("scatter"):
                readout = Readout()
                glimpse = self._verifier.glimpse(request, plan, readout) if verify else None
                weights, terms = weigh(
                    plan,
                    request.reduction,
                    request.criterion,
                    request.targets,
                    self.dim,
                    request.count,
                    micro_batches(request.batch, plan, self.dim),
                    readout,
                )
                scattered = scatter(request.batch, plan, self.dim, ledger)
                look = glimpse.look(weights, self.dim) if glimpse else None
            with clock.phase("replicate"):
                parts, criteria = self._crew.refresh(
                    self.module, request.criterion, ledger, criterion_at_home=request.whole_batch
                )
            with set_aside(parts):
                with clock.phase("compute"):
                    theirs = None if request.whole_batch else criteria  # else it is one alone
                    tasks = hand_out(request.batch, plan, parts, scattered, theirs, weights)
                    how = {
                        "dim": self.dim,
                        "scale": scale,
                        "check_finite": self.check_finite,
                        "keep_outputs": request.return_outputs,
                        "most": most,
                    }
                    results = self._substeps(
                        request, tasks, parts, criteria, streams, ledger, clock, look, how
                    )
                    ledger.settle()
                with clock.phase("reduce"):
                    spread = Spread()
                    if self.measure_noise and not request.whole_batch:  # replicas share one loss
                        of = terms if request.is_mean else None
                        spread = measure(parts, plan, weights, of, scale)
                    gradients = reduce_gradients(parts, len(results), ledger)
                    buffers = reduce_buffers(parts, plan.shares, self.buffers_from, ledger)
                    parameters = merge_writes(parts, len(results), ledger)
            return Outcome(
                plan=plan,
                loss=sum(result.loss for result in results),
                dtype=results[0].dtype,
                is_mean=request.is_mean,
                terms=terms,
                scale=scale,
                spread=spread,
                outputs=tuple(result.outputs for result in results),
                gradients=gradients,
                buffers=buffers,
                parameters=parameters,
                streams=streams,
                ledger=ledger,
                clock=clock,
            )
        except BaseException:
            streams.rollback()
            with contextlib.suppress(Exception):  # the first error is the one to tell
                ledger.settle()
            raise
        finally:
            self._crew.clear()

    def _substeps(
        self,
        request: Request,
        tasks: Sequence[Task],
        parts: Sequence[Replicas],
        criteria: Sequence[Any],
        streams: RandomStreams,
        ledger: Ledger,
        clock: Clock,
        look: Look | None,
        how: dict[str, Any],
    ) -> list[Result]:
        """Every replica's sub-steps, each by its worker: gradients are then in the replicas."""
        workers = self._crew.workers
        prepare_autograd()
        with guarded(parts):
            if request.whole_batch:
                rehearse(workers, streams, tasks, parts, dim=self.dim, end="outputs")
                peers = None if how["most"] else self._ranks  # a try is this process's own
                on_master = criteria[0], request.targets, peers, ledger
                return train_whole(workers, streams, tasks, clock, parts, *on_master, **how)
            rehearse(workers, streams, tasks, parts, dim=self.dim, end="loss")
            work = partial(train, **how, see=look.see if look else None)
            results = run_shares(workers, streams, work, tasks, clock)
            if look:
                look.judge(tasks, results, streams, workers)
            return results

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Inference: scatter once, run in micro-batches without a graph, gather to the master.

        Args:
            inputs: positional arguments of the module, with rows along ``dim``.
            kwargs: its keyword arguments.

        Returns:
            The module's output for the whole batch, in the same nested types, on the
            master, rows in order. 0-dim tensors in it are averaged over the rows. Where the
            inputs have ``Rows``, an output that is a list with one entry per row stays one.

        Raises:
            ValueError: outputs that cannot be joined, several batches.
            RuntimeError: in training mode with grad enabled, where ``forward_backward`` is
                what is wanted.

        Example:
            >>> engine = ScatterOnceParallel(nn.Linear(4, 2), device_ids=["cpu"] * 2).eval()
            >>> engine(torch.randn(5, 4)).shape
            torch.Size([5, 2])
        """
        if self.module.training and torch.is_grad_enabled():
            raise RuntimeError(
                "calling the engine computes no gradients: to train, use "
                "engine.forward_backward(inputs, targets, criterion); for inference, call "
                "engine.eval() first or use torch.no_grad()"
            )
        with self._crew.workers.exclusive():
            return once_known(lambda: self._infer(inputs, kwargs))

    def _infer(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = ((inputs, kwargs), None)
        with Ledger() as ledger:
            plan = self.plan(self._rows_of_one_batch(inputs, kwargs))
            self._crew.check_links()
            streams = self._streams(plan)
            try:
                scattered = scatter(batch, plan, self.dim, ledger)
                parts, _ = self._crew.refresh(self.module, None, ledger)
                tasks = hand_out(batch, plan, parts, scattered)
                workers = self._crew.workers
                with guarded(parts):
                    rehearse(workers, streams, tasks, parts, dim=self.dim, end="inference")
                    work = partial(infer, dim=self.dim)
                    outputs = run_shares(workers, streams, work, tasks, Clock())
                output = collect(outputs, plan, self.dim, ledger, lists=has_entries(batch))
                parameters = merge_writes(parts, len(outputs), ledger)
            except BaseException:
                streams.rollback()
                raise
            write_parameters(parameters)
            if self.module.training:
                commit_buffers(reduce_buffers(parts, plan.shares, self.buffers_from, ledger))
            streams.commit()
        return output

    def _rows_of_one_batch(self, inputs: Any, kwargs: Any) -> int:
        named = {"inputs": inputs, "keyword inputs": kwargs}
        rows = count_rows(named, self.dim)
        if batch_sizes(named, self.dim, rows) != (rows,):
            raise ValueError(
                "Rows.from_batches is for forward_backward; for inference, call the engine for "
                "each of the batches"
            )
        return rows

    @property
    def shares(self) -> tuple[float, ...]:
        """The relative sizes of the replicas' shares, one number each.

        With ``shares="auto"`` what was learned so far; the same numbers, passed as ``shares=``
        to another engine, make the same plans.
        """
        return self._pace.shares

    def check(
        self,
        inputs: Any,
        targets: Any = None,
        criterion: Callable[[Any, Any], Any] | None = None,
        *,
        reduction: str | None = None,
        count: Count | None = None,
    ) -> GradientCheck:
        """The gradient of one batch beside that of a plain whole-batch backward on the master.

        The batch must fit there; a small one tells as much. Leaves no trace: parameters,
        ``.grad``, buffers, random state and ``last_step`` stay as they are, and no hook on a
        parameter runs. With a process group each rank compares its own rows.

        Args:
            inputs: as in ``forward_backward``, and so are the others.
            targets: what the criterion takes.
            criterion: the loss.
            reduction: how the criterion combines its terms.
            count: what a mean loss averages over.

        Returns:
            A report with ``.worst``, the largest relative difference of a parameter,
            ``.parameter``, its name, and ``.passed``, whether that is only rounding. It prints
            as a sentence, which says what a difference may come from.

        Raises:
            ValueError: as ``forward_backward``; several batches in one.

        Example:
            >>> engine = ScatterOnceParallel(nn.Linear(4, 2), 2, ["cpu"] * 2)
            >>> report = engine.check(torch.randn(9, 4), torch.randn(9, 2), nn.MSELoss())
            >>> report.passed
            True
        """
        request = Request(inputs, targets, criterion, reduction, count, None, False)
        with self._crew.workers.exclusive():
            request = request.checked(self.dim)
            plan = self.plan(request.sizes)
            attempt = partial(self._compute, request, plan, verify=False)
            master = self.device_ids[0]
            return compare(self.module, request, master, self._crew.workers, attempt)

    @property
    def replicas(self) -> tuple[nn.Module, ...]:
        """The replica modules, equal to the master's as of now; for inspection."""
        with self._crew.workers.exclusive():
            (part, *_), _ = self._crew.refresh(self.module, None, Ledger())
            return tuple(part.modules)

    def close(self) -> None:
        """Stop the workers, let go of the process group. Forgetting to is fine.

        A step after it is a ``RuntimeError``.
        """
        self._crew.workers.close()
        self._ranks = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _streams(self, plan: Plan) -> RandomStreams:
        before = 0 if self._ranks is None else self._ranks.rank * len(self.device_ids)
        return RandomStreams([share.device for share in plan.shares], before)

    def _scale(self, scaler: torch.amp.GradScaler | None) -> float:
        """The scaler's factor, from the scaler itself, which so gets to know the master."""
        if scaler is None:
            return 1.0
        return float(scaler.scale(torch.ones((), device=physical(self.device_ids[0]))))
