"""Captured sub-steps: a sub-step is launched as one, and each step proves it.

A step of 16 sub-steps is, once they are captured (``replay.py``)::

    replica 0    replay 0 … replay 14    15 eagerly, on tape    tape equal  -> commit
    replica 1    replay 0 … replay 14    replay 15

If the tape is not the capture's, replays have computed something else than Python would
now. The step is undone, computed without graphs, and captured again, a few times.

Gradients of all graphs of a replica are added in static tensors, and copied at the end
of the step. On the CPU a replay runs the operators of the tape again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scatterpar.devices.memory import is_half_full, is_out_of_memory
from scatterpar.hints import remedies_of_launching
from scatterpar.options.graphs.captures import ReplicaGraphs
from scatterpar.options.graphs.decision import Decision, GraphStage, StepTimes
from scatterpar.options.graphs.proofs import StepPlan
from scatterpar.options.graphs.replay import GraphedSubsteps, Outdated
from scatterpar.step.attempt import Attempt
from scatterpar.step.request import EngineOptions
from scatterpar.step.substeps import (
    Computed,
    Schedule,
    Substeps,
)
from scatterpar.step.task import ReplicaTask
from scatterpar.threads.process_settings import settings_of_torch
from scatterpar.torch_private.compiler import CompileFn

# With ``graphs=None``: the fewest sub-steps per replica. One of them is proved.
_FEWEST_SUBSTEPS = 2


_NO_MEMORY_FOR_GRAPHS = "memory ran out with them"


_COMPILED = "a compiled module runs either compiled or captured"


class Captured(Schedule):
    """One pass, whose sub-steps are captured once and replayed; keeps the graphs."""

    def __init__(
        self,
        options: EngineOptions,
        compile_fn: CompileFn | None,
    ) -> None:
        """Raises ``ValueError`` for options and devices that do not support
        ``graphs=True``.
        """
        devices = options.device_ids
        is_asked = options.graphs is True
        self._obstacle = _obstacle(options, compile_fn)
        if is_asked and self._obstacle:
            raise ValueError(f"graphs=True: {self._obstacle}; leave one of them out")
        # The CPU runs the operators of a tape again, for tests of this path.
        for kind in {device.type for device in devices} - {"cpu"}:
            if is_asked and not captures_graphs(kind):
                raise ValueError(
                    f"graphs=True: {kind} captures no graphs; leave it out"
                )
        self.graphs_are_off = False
        self._decision = Decision(is_asked=is_asked)
        self._by_replica = [ReplicaGraphs(device) for device in devices]
        # Why the next attempt runs without graphs, in any stage. Set when an attempt
        # has failed because of its graphs; empty again when the next one begins.
        self._why_retry_is_eager = ""
        # Of the present attempt, from its beginning until the next one begins. ``None``
        # if it has no graphs.
        self._plan_of_attempt: StepPlan | None = None
        # From the end of an attempt, until the next one begins: only then are its
        # times known.
        self._times: StepTimes | None = None
        self.why_eager = ""

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> Substeps:
        """The sub-steps of one replica in one step."""
        if self._plan_of_attempt is None:
            return Substeps(task, attempt.request)
        graphs = self._by_replica[task.share.replica]
        plan = self._plan_of_attempt.of(task.share.replica)
        return GraphedSubsteps(graphs, task, attempt, plan, self._decision)

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run all sub-steps, as the plain schedule does; graphs launch some of them."""
        self._learn()
        self._plan_of_attempt = None
        self.may_still_capture = False
        why = self._why_eager(attempt)
        self.replayed = 0
        self.why_eager = why
        if why:
            computed = super().run(attempt, tasks)
            if not attempt.extent.is_trial and attempt.request.backward:
                self._times = _times_of(attempt, computed)
            if why == _NO_MEMORY_FOR_GRAPHS:  # without them there was enough
                self._decision.refuse(why)
            return computed
        self.may_still_capture = True
        self._decision.steps += 1
        # Hooks may run no operator, so no tape has them.
        num_hooks = attempt.replicas.of_model.num_hooks
        facts = [settings_of_torch(), num_hooks]
        for task in tasks:
            self._by_replica[task.share.replica].begin(task, facts)
        plan = StepPlan(tasks, attempt, self._by_replica, self._decision.steps)
        self._plan_of_attempt = plan
        computed = super().run(attempt, tasks)
        self._times = _times_of(attempt, computed)
        self._decision.confirm()
        self.replayed = plan.replays
        if self._decision.refusal:
            self._end_graphs()
        return computed

    def _learn(self) -> None:
        """Let the decision see how long the latest attempt took."""
        times = self._times
        self._times = None
        if times is None:
            return
        if self._plan_of_attempt is None:
            self._decision.see_eager(times)
        elif self._plan_of_attempt.is_steady:
            self._decision.see_captured(times)

    def replays(self) -> bool:
        """Whether sub-steps may be replayed, for which no replica is called."""
        return any(graphs.num_captured() for graphs in self._by_replica)

    def without_graphs(self, why: str) -> str:
        """As ``Schedule.without_graphs``: the words are for the report."""
        if self._decision.is_asked:
            self._decision.tell(why)
        return super().without_graphs(why)

    def drop_graphs_after(self, error: Exception) -> bool:
        """Free the graphs if that helps against ``error``, which an attempt has raised.

        Returns whether it may run again, without graphs.
        """
        # An attempt without graphs has none to free: the one before has dropped all.
        has_graphs = any(graphs.by_shape for graphs in self._by_replica)
        if isinstance(error, Outdated):
            self._why_retry_is_eager = f"{error} since it was captured"
            self._decision.changed(str(error))
        elif is_out_of_memory(error) and has_graphs:
            # Graphs are the first memory to give up.
            self._why_retry_is_eager = _NO_MEMORY_FOR_GRAPHS
        else:
            return False
        self._forget()
        return True

    def _end_graphs(self) -> None:
        """Free all graphs, for which there is a reason, and say it."""
        self._forget()
        self.why_eager = self._decision.refusal
        # In the caller's thread: a warning names the line of the user's.
        self._decision.tell(self._decision.refusal)

    def _forget(self) -> None:
        for graphs in self._by_replica:
            graphs.forget()

    def _why_eager(self, attempt: Attempt) -> str:
        """Why the present attempt runs without graphs; empty if it has them."""
        if attempt.extent.is_trial:
            # A trial asks for a step's peak of memory, which static tensors would
            # change.
            return "a trial"
        if not attempt.request.backward:
            return "no gradient is computed"
        why = self._why_retry_is_eager
        self._why_retry_is_eager = ""
        if why:
            return why
        if self._decision.refusal:
            if any(graphs.by_shape for graphs in self._by_replica):
                self._forget()
            # Also of a step that has failed since.
            return self._told(self._decision.refusal, attempt)
        why = self._obstacle or self._obstacle_of_step(attempt)
        if why:
            is_of_interest = self._decision.is_asked or self._decision.devices_wait()
            return self._told(why, attempt) if is_of_interest else why
        if self._decision.stage is not GraphStage.WATCHING:
            return ""
        if _num_substeps(attempt) < _FEWEST_SUBSTEPS:
            return f"fewer than {_FEWEST_SUBSTEPS} sub-steps per replica"
        if not self._decision.devices_wait():
            self.may_still_capture = True
            why = "devices have not waited for the host in enough steps"
            return f"{why}: {self._decision.wait}" if self._decision.wait else why
        self._decision.begin()
        return ""

    def _told(self, why: str, attempt: Attempt) -> str:
        """Why there are no graphs; warns once, with what helps if devices wait.

        Of each step the report's hint says what helps.
        """
        words = why
        if self._decision.devices_wait() and not self._decision.is_asked:
            devices = {share.device for share in attempt.plan.shares}
            remedies = remedies_of_launching(
                len(devices),
                num_substeps=_num_substeps(attempt),
                is_compiled=attempt.replicas.has_compiled(),
                has_room=not any(map(is_half_full, devices)),
            )
            if remedies:
                words += f"; devices wait for the host here, what helps: {remedies}"
        self._decision.tell(words)
        return why

    def _obstacle_of_step(self, attempt: Attempt) -> str:
        """Why a step of this kind runs without graphs; empty if it may have them."""
        if attempt.replicas.has_compiled():  # in part, or by the module's own method
            return _COMPILED
        if attempt.replicas.exchange_statistics():
            return "nn.SyncBatchNorm layers exchange statistics in each sub-step"
        if attempt.threads.scope.is_ordered:
            return "replicas take turns in calling a function of yours"
        return ""


def schedule_of(options: EngineOptions, compile_fn: CompileFn | None) -> Schedule:
    """The schedule of steps without ``whole_batch``.

    Raises ``ValueError`` for options that ``graphs=True`` does not fit.
    """
    if options.graphs is False:
        return Schedule()
    kinds = {device.type for device in options.device_ids}
    if options.graphs is None and not all(map(captures_graphs, kinds)):
        schedule = Schedule()
        schedule.graphs_are_off = False
        schedule.why_eager = f"{', '.join(sorted(kinds))} captures nothing"
        return schedule
    return Captured(options, compile_fn)


def captures_graphs(kind: str) -> bool:
    """Whether devices of this kind capture graphs."""
    return kind != "cpu" and hasattr(torch.get_device_module(kind), "CUDAGraph")


def _obstacle(options: EngineOptions, compile_fn: CompileFn | None) -> str:
    """The option beside which nothing is captured, in words; empty if there is none."""
    if compile_fn is not None:
        return _COMPILED
    if options.buffers == "batch":
        return 'buffers="batch" needs Python in every sub-step'
    return ""


def _times_of(attempt: Attempt, computed: Computed) -> StepTimes:
    return StepTimes(computed.clocks, attempt.plan.rows, _num_substeps(attempt))


def _num_substeps(attempt: Attempt) -> int:
    """The largest number of sub-steps of a replica."""
    return max(len(share.micro_batches) for share in attempt.plan.shares)
