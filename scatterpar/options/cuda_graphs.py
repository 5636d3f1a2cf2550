"""Captured sub-steps: a sub-step is launched as one, and each step proves it.

A sub-step of one shape, on one replica, in the order of its calls::

    first            eager; tells which leaves get a gradient
    three runs       eager, on tape (``tape.py``); all tapes are equal
    capture          Python once more, on tape; its kernels become a graph
    replays          rows are copied to static tensors; the graph; loss and output are
                     copied from static tensors
    last of a step   eager, on tape, behind the replays

The first runs are sub-steps of the user's steps, so only the capture is one more. Then
a step of 16 sub-steps is ::

    replica 0    replay 0 … replay 14    15 eagerly, on tape    tape equal  -> commit
    replica 1    replay 0 … replay 14    replay 15

If the tape is not the capture's, replays have computed something else than Python would
now. The step is undone, computed without graphs, and captured again, a few times.

Replicas share their Python, so each step proves one of them, in turn. All are proved in
the first step after a capture, and in steps 1, 2, 4, 8, …, because Python may read
values by device::

    step with graphs    1            2    3    4    5    6    7    8    9    10
    proves replica      1, captured  all  1    all  1    0    1    all  1    0

Gradients of all graphs of a replica are added in static tensors, and copied at the end
of the step. On the CPU a replay runs the operators of the tape again.
"""

from __future__ import annotations

import contextvars
import gc
import random
import threading
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices import memory, streams
from scatterpar.devices.coalescing import copy_each
from scatterpar.devices.copies import to_numbers, write
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.virtual_devices import HOST
from scatterpar.log import logger
from scatterpar.look_steps import is_look_step
from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk
from scatterpar.options.graph_decision import Decision, GraphStage, StepTimes
from scatterpar.options.tape import RepeatableTape, Tape, difference
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss import forward, require_trainable
from scatterpar.step.request import EngineOptions
from scatterpar.step.substeps import (
    Computed,
    Schedule,
    Substeps,
    detached,
    detached_output,
    set_aside,
)
from scatterpar.step.task import ReplicaTask
from scatterpar.step.turns import Scope
from scatterpar.tables import shown
from scatterpar.threads.process_settings import settings_of_torch
from scatterpar.torch_private.compiler import CompileFn, compiled_calls
from scatterpar.torch_private.graphs import (
    capturing_on,
    free_cublas_workspaces,
    give_up_capture,
)

# Equal tapes before a capture. A value that alternates differs in the second run, one
# of three in the third.
_RUNS = 3
# Graphs per replica. They share one pool of memory, so that each one costs its static
# tensors and what the driver keeps of its kernels.
_SHAPES = 64
# With ``graphs=None``: the fewest sub-steps per replica. One of them is proved.
_FEWEST_SUBSTEPS = 2

_REMEDIES = (
    "devices wait for the host here; what helps: fewer and larger sub-steps, "
    "compile=True, a Python without the GIL, or two processes with half of the devices "
    "each, or more (python -m scatterpar doctor says how many for a small network)"
)


_OUT_OF_MEMORY = "memory ran out with them"
_LOGS = "has a criterion that returns numbers to log, which graphs do not keep"
_WITHOUT_VALUE = object()  # in the place of a context variable without a value
_COMPILED_FUNCTION = (
    "calls a function that torch.compile has compiled, and code runs either compiled "
    "or captured"
)
_COMPILED = "a compiled module runs either compiled or captured"


class Outdated(Exception):
    """A captured sub-step is not what Python would compute now. Nobody else sees it."""


class _HostState(NamedTuple):
    """The state on the host that user code may move.

    Attributes:
        of_python: the state of Python's random generator.
        of_torch: that of the replica's generator on the host, if the replica has drawn
            from it and another generator is its device's.
        context: the context variables.
    """

    of_python: Any
    of_torch: Sequence[float] | None
    context: contextvars.Context


class _Refused(Exception):
    """The reason why a sub-step cannot be captured; the module's name
    comes before it.
    """


class _CaptureLost(_Refused):
    """A capture failed. Another thread may have waited for the device meanwhile."""


@dataclass
class _Graph:
    """A sub-step of one shape on one replica, before and after it is captured.

    Attributes:
        gradients: the static sums of those leaves that get a gradient, by position.
        tapes: of eager runs, all equal; of them, the capture keeps the last one.
        step: the step in which the last of ``tapes`` was made.
        last_use: the step that last had a sub-step of this shape.
        proof: the step that last proved it; 0 before.
        num_bytes: what a sub-step's activations take.
        reads_foreign_memory: whether it reads other memory than the replica's own.
        rows: the static inputs and targets.
        factor: the weight of the micro-batch's loss, times the scaler's factor.
        loss: the loss of the last replay; before, a tensor of its dtype and device.
        has_output: whether the output is kept.
        output: that of the last replay.
        replay: runs the sub-step; ``None`` until it is captured.
    """

    gradients: Mapping[int, Tensor]
    loss: Tensor
    has_output: bool
    tapes: list[Tape] = field(default_factory=list)
    step: int = 0
    last_use: int = 0
    proof: int = 0
    num_bytes: int = 0
    reads_foreign_memory: bool = False
    rows: Any = None
    factor: Tensor | None = None
    output: Any = None
    replay: Callable[[], None] | None = None

    def is_proved(self) -> bool:
        """Whether it is captured, and a step has proved it since."""
        return self.replay is not None and self.proof > self.step

    def is_proved_alone(self, step: int) -> bool:
        """Whether this step proves it, whichever other replica it proves."""
        if self.replay is None:
            return False
        if is_look_step(step) or not self.is_proved():
            return True
        # Other memory than the replica's own may be of its device alone.
        return self.reads_foreign_memory

    def compute(self, task: ReplicaTask, number: int, tape: Tape) -> None:
        """Run the sub-step on the static tensors, on tape."""
        assert self.factor is not None
        with tape:
            output, loss, _ = forward(task, self.rows, number)
        if self.has_output:
            tape.add_returned(output)
            self.output = detached_output(output, True)
        write(self.loss, loss.detach())
        if isinstance(tape, RepeatableTape):  # a replay writes these
            self.loss = loss.detach()
            self.output = nested.map_tensors(Tensor.detach, output)
        del output
        tape.add_place(self.factor)
        with tape:
            task.run_backward(number, [loss], [self.factor])


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
            if is_asked and not _captures(kind):
                raise ValueError(
                    f"graphs=True: {kind} captures no graphs; leave it out"
                )
        self._decision = Decision(is_asked=is_asked)
        self._by_replica = [_ReplicaGraphs(device) for device in devices]
        self._pause = ""  # why the next attempt runs without graphs
        self._has_given_up = False  # for the memory of the next attempt
        # Of the present attempt; ``None`` without graphs.
        self._sub_steps: _StepPlan | None = None
        # Of the latest attempt: its times are known when the next one begins.
        self._times: StepTimes | None = None
        self.why_eager = ""

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> Substeps:
        """The sub-steps of one replica in one step."""
        if self._sub_steps is None:
            return Substeps(task, attempt.request)
        graphs = self._by_replica[task.share.replica]
        plan = self._sub_steps.of(task.share.replica)
        return GraphedSubsteps(graphs, task, attempt, plan, self._decision)

    def run(self, attempt: Attempt, tasks: Sequence[ReplicaTask]) -> Computed:
        """Run all sub-steps, as the plain schedule does; graphs launch some of them."""
        self._learn()
        self._sub_steps = None
        why = self._why_eager(attempt)
        self.replayed = 0
        self.why_eager = why
        if why:
            computed = super().run(attempt, tasks)
            if not attempt.extent.is_trial and attempt.request.backward:
                self._times = _times_of(attempt, computed)
            if self._has_given_up:  # and there is enough memory without them
                self._has_given_up = False
                self._decision.refuse(_OUT_OF_MEMORY)
            return computed
        self._decision.steps += 1
        num_hooks = _num_hooks(attempt.replicas.of_model.root)
        for task in tasks:
            self._by_replica[task.share.replica].begin(task, num_hooks)
        self._sub_steps = sub_steps = _StepPlan(
            tasks, attempt, self._by_replica, self._decision.steps
        )
        computed = super().run(attempt, tasks)
        self._times = _times_of(attempt, computed)
        self._decision.confirm()
        self.replayed = sub_steps.replays
        if self._decision.refusal:
            self._end_graphs()
        return computed

    def _learn(self) -> None:
        """Let the decision see how long the latest attempt took."""
        times = self._times
        self._times = None
        if times is None:
            return
        if self._sub_steps is None:
            self._decision.see_eager(times)
        elif self._sub_steps.is_steady:
            self._decision.see_captured(times)

    def without_graphs(self, why: str) -> str:
        """The words of the report for a step of another schedule."""
        if self._decision.is_asked:
            self._decision.tell(why)
        return super().without_graphs(why)

    def recovers_from(self, error: Exception) -> bool:
        """Whether the attempt that raised ``error`` may run again, without graphs."""
        has_graphs = any(graphs.by_shape for graphs in self._by_replica)
        had_graphs = self._has_given_up
        self._has_given_up = False
        if isinstance(error, Outdated):
            self._pause = f"{error} since it was captured"
            self._decision.changed(str(error))
        elif is_out_of_memory(error) and has_graphs and not had_graphs:
            # Graphs are the first memory to give up.
            self._pause = _OUT_OF_MEMORY
            self._has_given_up = True
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
        pause = self._pause
        self._pause = ""
        if pause:
            return pause
        if self._decision.refusal:
            if any(graphs.by_shape for graphs in self._by_replica):
                self._forget()
            # Also of a step that has failed since.
            return self._told(self._decision.refusal)
        why = self._obstacle or self._obstacle_of_step(attempt)
        if why:
            is_of_interest = self._decision.is_asked or self._decision.devices_wait()
            return self._told(why) if is_of_interest else why
        if self._decision.stage is not GraphStage.WATCHING:
            return ""
        substeps = max(len(share.micro_batches) for share in attempt.plan.shares)
        if substeps < _FEWEST_SUBSTEPS:
            return f"fewer than {_FEWEST_SUBSTEPS} sub-steps per replica"
        if not self._decision.devices_wait():
            return "devices have not waited for the host in enough steps"
        self._decision.begin()
        return ""

    def _told(self, why: str) -> str:
        """Why there are no graphs, and what else helps if devices wait; told once."""
        if self._decision.devices_wait() and not self._decision.is_asked:
            why = f"{why}; {_REMEDIES}"
        self._decision.tell(why)
        return why

    def _obstacle_of_step(self, attempt: Attempt) -> str:
        """Why a step of this kind runs without graphs; empty if it may have them."""
        if attempt.replicas.has_compiled():  # in part, or by the module's own method
            return _COMPILED
        if attempt.replicas.exchange_statistics():
            return "nn.SyncBatchNorm layers exchange statistics in each sub-step"
        if attempt.threads.scope > Scope.CRITERION:
            return "replicas take turns in calling a function of yours"
        return ""


def schedule_of(options: EngineOptions, compile_fn: CompileFn | None) -> Schedule:
    """The schedule of steps without ``whole_batch``.

    Raises ``ValueError`` for options that ``graphs=True`` does not fit.
    """
    if options.graphs is False:
        return Schedule()
    kinds = {device.type for device in options.device_ids}
    if options.graphs is None and not all(map(_captures, kinds)):
        schedule = Schedule()
        schedule.why_eager = f"{', '.join(sorted(kinds))} captures nothing"
        return schedule
    return Captured(options, compile_fn)


def _captures(kind: str) -> bool:
    """Whether devices of this kind capture graphs."""
    return kind != "cpu" and hasattr(torch.get_device_module(kind), "CUDAGraph")


def _obstacle(options: EngineOptions, compile_fn: CompileFn | None) -> str:
    """The option beside which nothing is captured, in words; empty if there is none."""
    if compile_fn is not None:
        return _COMPILED
    if options.buffers == "batch":
        return 'buffers="batch" needs Python in every sub-step'
    return ""


def _num_hooks(module: nn.Module) -> int:
    """The number of hooks on a module and its parts."""
    number = 0
    for part in module.modules():
        number += len(part._forward_hooks) + len(part._forward_pre_hooks)
        number += len(part._backward_hooks) + len(part._backward_pre_hooks)
    return number


def _has_room(device: torch.device, size: int) -> bool:
    """Whether a device has memory for the activations of a sub-step, which its graphs
    keep.
    """
    free = memory.num_free_bytes(device)
    return free is None or free >= size


def _times_of(attempt: Attempt, computed: Computed) -> StepTimes:
    substeps = max(len(share.micro_batches) for share in attempt.plan.shares)
    return StepTimes(computed.clocks, attempt.plan.rows, substeps)


class _StepPlan:
    """Which sub-steps of a step run eagerly, as the last ones of their shape.

    Attributes:
        replays: the number of sub-steps that were replayed.
        is_steady: whether all is captured, and no more is proved than in most steps.
    """

    def __init__(
        self,
        tasks: Sequence[ReplicaTask],
        attempt: Attempt,
        graphs: Sequence[_ReplicaGraphs],
        step: int,
    ) -> None:
        self.replays = 0
        self.is_steady = not is_look_step(step)
        self._lock = threading.Lock()
        self.step = step
        self._keys = {
            task.share.replica: _keys_of(task, attempt.request.return_outputs)
            for task in tasks
        }
        self._checked: dict[int, set[int]] = {number: set() for number in self._keys}
        for key, last_sub_steps in self._last_sub_steps().items():
            present = {
                replica: graphs[replica].by_shape.get(key) for replica in last_sub_steps
            }
            if not all(graph and graph.is_proved() for graph in present.values()):
                self.is_steady = False
            for replica in _to_prove(present, step):
                self._checked[replica].add(last_sub_steps[replica])
        self._leave_out_unreplayed()

    def _last_sub_steps(self) -> dict[Hashable, dict[int, int]]:
        """For each shape, by replica, the last sub-step that has it."""
        last_sub_steps: dict[Hashable, dict[int, int]] = defaultdict(dict)
        for replica, keys in self._keys.items():
            for number, key in enumerate(keys):
                if key is not None:
                    last_sub_steps[key][replica] = number
        return last_sub_steps

    def _leave_out_unreplayed(self) -> None:
        """Drop the keys of shapes that no other sub-step has: nothing is proved by
        them.
        """
        replayed: set[Hashable] = set()
        for replica, keys in self._keys.items():
            checked = self._checked[replica]
            replayed |= {
                key for number, key in enumerate(keys) if number not in checked
            }
        for replica, keys in self._keys.items():
            for number in sorted(self._checked[replica]):
                if keys[number] not in replayed:
                    keys[number] = None
                    self._checked[replica].remove(number)

    def of(self, replica: int) -> _SharePlan:
        """The part of one replica."""
        return _SharePlan(self, self._keys[replica], self._checked[replica])

    def count_replay(self) -> None:
        """Count a replayed sub-step."""
        with self._lock:
            self.replays += 1


def _to_prove(graphs: Mapping[int, _Graph | None], step: int) -> list[int]:
    """The replicas whose graphs of one shape are proved in a step with this number.

    ``graphs`` are these graphs, by replica.
    """
    steps_of_proofs: dict[int, int] = {}
    replicas: list[int] = []
    for replica, graph in graphs.items():
        steps_of_proofs[replica] = 0 if graph is None else graph.proof
        if graph is not None and graph.is_proved_alone(step):
            replicas.append(replica)
    # The one whose last proof is the oldest; of several, replica t mod N in step t.
    numbers = list(graphs)
    first = step % len(numbers)
    in_turn = [*numbers[first:], *numbers[:first]]
    turn = min(in_turn, key=steps_of_proofs.__getitem__)
    if turn not in replicas:
        replicas.append(turn)
    return replicas


@dataclass(frozen=True)
class _SharePlan:
    """The sub-steps of one replica.

    Attributes:
        step: the plan of all replicas.
        keys: of the sub-steps' graphs; ``None`` for those without one.
        checked: the numbers of the sub-steps that run eagerly, on tape.
    """

    step: _StepPlan
    keys: Sequence[Hashable]
    checked: set[int]


class GraphedSubsteps(Substeps):
    """The sub-steps of one replica in one step, replayed if they are captured."""

    def __init__(
        self,
        graphs: _ReplicaGraphs,
        task: ReplicaTask,
        attempt: Attempt,
        plan: _SharePlan,
        decision: Decision,
    ) -> None:
        super().__init__(task, attempt.request)
        self._graphs = graphs
        self._attempt = attempt
        self._plan = plan
        self._decision = decision

    def run(self, number: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """As ``Substeps.run``, but captures or replays a graph if possible."""
        key = self._plan.keys[number]
        if key is None or self._decision.refusal:
            return super().run(number, weight, rows)
        graph = self._graphs.find(key, self._plan.step.step)
        is_checked = number in self._plan.checked
        if graph is None:
            # What is checked in each step is never replayed.
            if is_checked or not self._graphs.make_room(self._plan.step.step):
                return super().run(number, weight, rows)
            return self._first_run(key, number, weight)
        if graph.replay is None:
            if is_checked:
                return super().run(number, weight, rows)
            if len(graph.tapes) < _RUNS:
                return self._run_on_tape(graph, number, weight)
            self._capture(graph, number)
            if graph.replay is None:
                return super().run(number, weight, rows)
        if is_checked:
            return self._checked_run(graph, number, weight)
        return self._replayed(graph, number, weight)

    # --- before the capture ---

    def _first_run(
        self, key: Hashable, number: int, weight: float
    ) -> tuple[Tensor, Any]:
        """Run a sub-step of a new shape, and see which leaves get a gradient."""
        leaves = self._task.leaves
        earlier = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        self._without_gradient = leaves
        loss, output = super().run(number, weight)
        gradients = {
            position: leaf.grad
            for position, leaf in enumerate(leaves)
            if leaf.grad is not None
        }
        if any(grad.layout != torch.strided for grad in gradients.values()):
            self._refuse("has sparse gradients")
            for leaf, gradient in zip(leaves, earlier, strict=True):
                if gradient is not None:
                    leaf.grad = gradient if leaf.grad is None else gradient + leaf.grad
            return loss, output
        for leaf, gradient in zip(leaves, earlier, strict=True):
            leaf.grad = gradient
        static = self._graphs.static_like(gradients)
        self._accumulate_in(static)
        if static:
            targets = list(static.values())
            torch._foreach_add_(targets, list(gradients.values()))
        has_output = bool(self._request.return_outputs)
        self._graphs.by_shape[key] = _Graph(
            static, torch.empty_like(loss), has_output, step=self._plan.step.step
        )
        return loss, output

    def _run_on_tape(
        self, graph: _Graph, number: int, weight: float
    ) -> tuple[Tensor, Any]:
        """Run a sub-step eagerly, and compare its tape with the last one's."""
        self._accumulate_in(graph.gradients)
        is_last = len(graph.tapes) == _RUNS - 1
        journal = None
        if is_last and not self._task.share.replica:  # whose Python all replicas share
            rows = self._task.loader.at_source(number).unwrapped()
            functions = filter(_is_function, nested.atoms(rows))
            roots = [self._task.criterion, self._task.module, *functions]
            journal = Journal(Walk(roots), max_bytes=0)
        state = self._host_state()
        tape, loss, output = self._taped(number, weight, graph)
        if tape.obstacle:
            self._refuse(tape.obstacle)
        elif words := self._moved_on_host(state):
            self._refuse(f"or the criterion {words}")
        elif not all(replica.is_as_refreshed() for replica in self._task.replicas):
            self._refuse(
                "keeps something on the module that is no buffer written in place"
            )
        elif journal is not None and (moved := journal.moved()):
            self._refuse(
                f"or the criterion writes or takes from what a replay leaves as it is: "
                f"{shown(moved)}"
            )
        elif graph.tapes and (where := difference(graph.tapes[-1], tape)):
            self._start_again(graph, where)
        graph.tapes.append(tape)
        graph.step = self._plan.step.step
        return loss, output

    def _start_again(self, graph: _Graph, where: str) -> None:
        """The tapes of two runs before the capture differ."""
        graph.tapes.clear()
        # Between two steps the user may have changed something.
        if graph.step == self._plan.step.step:
            self._refuse(f"computes something else in each call: {where}")
        else:
            self._decision.changed(where)

    def _taped(
        self, number: int, weight: float, graph: _Graph
    ) -> tuple[Tape, Tensor, Any]:
        """Run a sub-step eagerly. Returns its tape, loss, and returned output."""
        task = self._task
        device = task.share.device
        is_measured = graph.replay is None  # it takes some time
        num_bytes = memory.num_allocated_bytes(device) if is_measured else 0
        request = self._request
        rows = _separate(task.rows_of(number))
        tape = Tape(device, nested.tensors(rows))
        with tape, compiled_calls.watched():
            output, loss, numbers = forward(task, rows, number)
        if is_measured:
            graph.num_bytes = memory.num_allocated_bytes(device) - num_bytes
        self._numbers.add(numbers)
        returned = None
        if request.return_outputs:
            tape.add_returned(output)
            returned = detached_output(output, request.return_outputs)
        del output
        if not loss.requires_grad:
            require_trainable(task.module)
        factor = torch.full_like(loss, weight * request.scale, requires_grad=False)
        tape.add_place(factor)
        with tape:
            task.run_backward(number, [loss], [factor])
        tape.end()
        if numbers:
            tape.obstacle = _LOGS
        if compiled_calls.were_made():
            tape.obstacle = _COMPILED_FUNCTION
        return tape, detached(loss), returned

    def _checked_run(
        self, graph: _Graph, number: int, weight: float
    ) -> tuple[Tensor, Any]:
        """Run a captured sub-step eagerly. Raises ``Outdated`` if it is another one."""
        self._accumulate_in(graph.gradients)
        state = self._host_state()
        tape, loss, output = self._taped(number, weight, graph)
        where = difference(graph.tapes[-1], tape) or tape.obstacle
        if not where and (moved := self._moved_on_host(state)):
            where = f"it {moved}"
        if where:
            raise Outdated(where)
        graph.proof = self._plan.step.step
        return loss, output

    def _refuse(self, why: str) -> None:
        self._decision.refuse(f"{type(self._task.module).__name__} {why}")

    def _host_state(self) -> _HostState:
        """The state on the host that calls of this replica may move, unseen by a tape.

        A replay runs no Python: it would repeat the numbers of the capture.
        """
        numbers = None
        if streams.is_async(self._task.share.device):
            generators = self._attempt.generators
            of_torch = generators.state_after_draws(self._task.share.replica, HOST)
            numbers = None if of_torch is None else to_numbers(of_torch)
        return _HostState(random.getstate(), numbers, contextvars.copy_context())

    def _moved_on_host(self, before: _HostState) -> str:
        """Describe the state on the host that calls have moved since ``before``."""
        now = self._host_state()
        if (before.of_python, before.of_torch) != (now.of_python, now.of_torch):
            return "draws random numbers on the host"
        for variable in {*before.context, *now.context}:
            value = before.context.get(variable, _WITHOUT_VALUE)
            if now.context.get(variable, _WITHOUT_VALUE) is not value:
                return f"sets the context variable {variable.name!r}"
        return ""

    # --- the capture ---

    def _capture(self, graph: _Graph, number: int) -> None:
        """Capture a sub-step; leave ``graph`` as it is if that is not possible.

        Restores all state.
        """
        task = replace(self._task, is_profiled=False)
        # Later graphs of a replica use the memory of the first.
        is_first = not self._graphs.num_captured()
        has_room = not is_first or _has_room(task.share.device, graph.num_bytes)
        if not has_room and not self._decision.is_asked:
            self._decision.refuse("too little device memory is free")
            return
        try:
            with (
                self._task.span("capture", number),
                # Gradients of earlier sub-steps of this step are in these leaves.
                set_aside(task.leaves),
                task.isolated(self._attempt.generators),
            ):
                try:
                    tape = self.record(task, graph, number)
                # Once more: another thread may have waited for the device in the first.
                except _CaptureLost:
                    tape = self.record(task, graph, number)
        except _Refused as why:
            self._refuse(str(why))
            return
        except Exception as error:
            if is_out_of_memory(error):
                self._graphs.forget()  # frees the memory of the graphs
            raise
        where = difference(graph.tapes[-1], tape)
        if where:
            graph.replay = None
            self._start_again(graph, where)
            return
        graph.tapes = [tape]
        graph.step = self._plan.step.step
        logger.info(
            "%s captured a sub-step, its graph number %d",
            task.share.device,
            self._graphs.num_captured(),
        )

    def record(self, task: ReplicaTask, graph: _Graph, number: int) -> Tape:
        """Capture the kernels of a sub-step, which do not run. Returns their tape."""
        # The sub-step that follows loads these rows again. These are clones, because a
        # ``collate`` may keep what it returns.
        rows = task.rows_of(number, retain=True)
        graph.rows = nested.map_tensors(Tensor.clone, rows)
        graph.factor = torch.ones_like(graph.loss)
        graph.loss = torch.empty_like(graph.loss)
        places = nested.tensors(graph.rows)
        device = task.share.device
        # One stream for all graphs. Autograd nodes refer to it, and a traceback may
        # keep them.
        stream = streams.stream_for("recording", device)
        if stream is None:
            return self._record_on_host(task, graph, number, places)
        tape = Tape(device, places, is_captured=True)
        for position, gradient in graph.gradients.items():
            task.leaves[position].grad = gradient
        current = torch.accelerator.current_stream(device)
        with memory.CAPTURE:
            # Once per attempt, because it takes long. Otherwise objects may be freed
            # during a capture, and wait for the device.
            if not self._attempt.garbage_is_collected:
                self._attempt.garbage_is_collected = True
                gc.collect()
            with capturing_on(stream, current):
                kernels = self._graphs.capture(
                    partial(graph.compute, task, number, tape)
                )
        graph.replay = kernels.replay
        self._graphs.note_memory(graph, tape, task)
        return tape

    def _record_on_host(
        self,
        task: ReplicaTask,
        graph: _Graph,
        number: int,
        places: Sequence[Tensor],
    ) -> Tape:
        """Run a sub-step in host memory, and keep its operators to run them again."""
        tape = RepeatableTape(task.share.device, places)
        static = list(graph.gradients.values())
        sums = list(map(Tensor.clone, static))
        for position, gradient in graph.gradients.items():
            task.leaves[position].grad = gradient
        graph.compute(task, number, tape)
        copy_each(static, sums)
        graph.replay = tape.replay
        self._graphs.note_memory(graph, tape, task)
        return tape

    # --- after the capture ---

    def _replayed(
        self, graph: _Graph, number: int, weight: float
    ) -> tuple[Tensor, Any]:
        """Launch a captured sub-step. Returns its loss, and its returned output."""
        loader = self._task.loader
        # Rows that are on the device are copied once, into the graph's tensors.
        if loader.ahead is None:
            rows = loader.at_source(number).unwrapped()
        else:
            rows = self._task.rows_of(number)
        assert graph.factor is not None
        assert graph.replay is not None
        # Copies: the next rows arrive while the graph reads these.
        copy_each(nested.tensors(graph.rows), nested.tensors(rows))
        self._accumulate_in(graph.gradients)
        graph.factor.fill_(weight * self._request.scale)
        with self._task.span("replay", number):
            graph.replay()
        self._plan.step.count_replay()
        # The next replay writes the static tensors.
        loss = graph.loss.clone()
        if not graph.has_output:
            return loss, None
        # The output, too, lies in memory that the next replay overwrites.
        output = nested.map_tensors(Tensor.clone, graph.output)
        return loss, detached_output(output, self._request.return_outputs)

    def _accumulate_in(self, static: Mapping[int, Tensor]) -> None:
        """Make static tensors the leaves' ``.grad``, with the gradients accumulated so
        far.
        """
        leaves = self._task.leaves
        without_gradient: list[Tensor] = []
        for position, gradient in static.items():
            leaf = leaves[position]
            earlier = leaf.grad
            if earlier is gradient:
                continue
            if earlier is None:
                without_gradient.append(gradient)
            else:  # that of a sub-step without a graph
                write(gradient, earlier)
            leaf.grad = gradient
        # One kernel, not one per tensor.
        if without_gradient:
            torch._foreach_zero_(without_gradient)

    def finish(self) -> None:
        """Copy gradients out of the static tensors, which later steps write."""
        leaves_with_static: list[Tensor] = []
        static_gradients: list[Tensor] = []
        for position, gradient in self._graphs.gradients.items():
            leaf = self._task.leaves[position]
            if leaf.grad is gradient:
                leaves_with_static.append(leaf)
                static_gradients.append(gradient)
        # Static tensors stay with the graphs: the sum over replicas is written in
        # place.
        # Memory of one step, while a graph's own tensors live as long as the graph.
        copies = [torch.empty_like(gradient) for gradient in static_gradients]
        copy_each(copies, static_gradients)
        for leaf, copy in zip(leaves_with_static, copies, strict=True):
            leaf.grad = copy


def _separate(rows: Any) -> Any:
    """The rows, without two tensors that begin at one address: a tape could not tell
    them apart.
    """
    addresses = Counter(tensor.data_ptr() for tensor in nested.tensors(rows))
    if len(addresses) == addresses.total():
        return rows
    return nested.map_tensors(Tensor.clone, rows)


def _keys_of(task: ReplicaTask, return_outputs: Any) -> list[Hashable]:
    """For each sub-step a key of its graph; ``None`` if it runs without one."""
    keys: list[Hashable] = []
    # Views of one batch with as many rows have one key. Markers may collate anything.
    has_markers = any(batch.markers for batch in task.loader.batches)
    is_single = len(task.loader.batches) == 1 and not has_markers
    by_rows: dict[int, Hashable] = {}
    for number, (start, stop) in enumerate(task.share.micro_batches):
        # What does not count runs no backward pass.
        if not task.weights[number]:
            keys.append(None)
            continue
        if not is_single or stop - start not in by_rows:
            source = task.loader.at_source(number).unwrapped()
            parts = source, bool(return_outputs), task.sums
            by_rows[stop - start] = _graph_key(parts)
        keys.append(by_rows[stop - start])
    return keys


def _graph_key(rows: Any) -> Hashable:
    """A key of the shapes that one graph accepts; ``None`` if no graph can."""
    for atom in nested.atoms(rows):
        is_dense = type(atom) is Tensor and atom.layout == torch.strided
        # An object may hold anything, and no tape knows a number among the rows.
        is_known = isinstance(atom, nested.PLAIN_CLASSES) or _is_function(atom)
        if not is_dense and not is_known:
            return None
    return repr(nested.map_atoms(_kind_of_atom, rows))


def _is_function(value: Any) -> bool:
    """Whether a value among the rows is code, such as the step function of a loop.

    A tape tells what it computes, as it does of the module.
    """
    return isinstance(value, (types.FunctionType, types.MethodType))


def _kind_of_atom(atom: Any) -> Any:
    if isinstance(atom, Tensor):
        return tuple(atom.shape), atom.stride(), atom.dtype
    if _is_function(atom):
        return "function", atom.__qualname__
    return atom


class _ReplicaGraphs:
    """The graphs of one replica, which share memory.

    Attributes:
        by_shape: the graphs by their keys; the one that was used last is the last.
        gradients: the static sums of the leaves, by position, for all graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state: list[Any] = []
        self.forget()

    def begin(self, task: ReplicaTask, num_hooks: int) -> None:
        """Before a step: drop the graphs if their memory has been exchanged, or hooks
        have come or gone, which may run no operator.
        """
        # The tape of one replica says nothing of the addresses of another one.
        state: list[Any] = [settings_of_torch(), num_hooks]
        # Gradients are known by the positions of their leaves.
        state += [leaf.data_ptr() for leaf in task.leaves]
        for replica in task.replicas:
            state += [tensor.data_ptr() for tensor in replica.tensors]
        if state != self._state:
            self.forget()
            self._state = state

    def forget(self) -> None:
        """Drop all graphs and static gradients; later graphs use a separate memory
        pool.
        """
        self.by_shape: dict[Hashable, _Graph] = {}
        self.gradients: dict[int, Tensor] = {}
        self._pool: Any = None

    def find(self, key: Hashable, step: int) -> _Graph | None:
        """The graph of this key, if there is one."""
        graph = self.by_shape.pop(key, None)
        if graph is not None:
            self.by_shape[key] = graph
            graph.last_use = step
        return graph

    def make_room(self, step: int) -> bool:
        """Whether there is room for another graph; drops the one unused for longest."""
        if len(self.by_shape) < _SHAPES:
            return True
        oldest = next(iter(self.by_shape))
        if self.by_shape[oldest].last_use == step:
            return False
        del self.by_shape[oldest]
        return True

    def num_captured(self) -> int:
        """The number of graphs that have been captured."""
        return sum(graph.replay is not None for graph in self.by_shape.values())

    def static_like(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Static tensors for the gradients of these leaves.

        One per leaf for all graphs of the replica: sub-steps of all shapes add to it.
        """
        for position, gradient in gradients.items():
            if position not in self.gradients:
                self.gradients[position] = torch.empty_like(gradient)
        return {position: self.gradients[position] for position in gradients}

    def note_memory(self, graph: _Graph, tape: Tape, task: ReplicaTask) -> None:
        """See whether a graph reads other memory than the replica's own."""
        addresses = {tensor.data_ptr() for tensor in self.gradients.values()}
        for replica in task.replicas:
            addresses |= {tensor.data_ptr() for tensor in replica.tensors}
        graph.reads_foreign_memory = not tape.addresses() <= addresses

    def capture(self, work: Callable[[], None]) -> Any:
        """Capture the kernels of ``work``, which must not synchronize with the device.

        Raises ``_CaptureLost``.
        """
        module = torch.get_device_module(self._device)
        # The allocator does not take a pool again whose last graph is gone.
        if self._pool is None or not self.num_captured():
            self._pool = module.graph_pool_handle()
            # A capture can neither use nor free memory in torch's cache, as that of
            # eager sub-steps. Once per pool: later graphs use the memory of the first.
            memory.empty_cache()
        kernels = module.CUDAGraph()
        # Thread-local: in the mode "global" an allocation of any other thread, such as
        # a data loader's, would end the capture.
        kernels.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        has_ended = False
        try:
            work()
            has_ended = True
            kernels.capture_end()
            return kernels
        except BaseException as error:
            give_up_capture(kernels, self._device, self._pool, has_ended=has_ended)
            self._pool = None  # it may have been freed
            if not isinstance(error, Exception) or is_out_of_memory(error):
                raise
            (line, *_) = [*str(error).strip().splitlines(), ""]
            raise _CaptureLost(
                "cannot be captured: it waits for the device, as with "
                "CUDA_LAUNCH_BLOCKING, or does what a graph cannot repeat, or another "
                f"thread waits for the device ({type(error).__name__}: {line})"
            ) from error
        finally:
            free_cublas_workspaces()
