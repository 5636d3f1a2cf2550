"""The sub-steps of a replica: run on tape, captured, replayed, proved.

A sub-step of one shape, on one replica, in the order of its calls::

    first            eager; tells which leaves get a gradient
    three runs       eager, on tape (``tape.py``); all tapes are equal
    capture          Python once more, on tape; its kernels become a graph
    replays          rows are copied to static tensors; the graph; loss and output are
                     copied from static tensors
    last of a step   eager, on tape, behind the replays

The first runs are sub-steps of the user's steps, so only the capture is one more.
"""

from __future__ import annotations

import contextvars
import gc
import random
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices import memory, streams
from scatterpar.devices.coalescing import copy_each
from scatterpar.devices.copies import to_numbers, write
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.virtual_devices import HOST
from scatterpar.log import logger
from scatterpar.objects.journal import Journal
from scatterpar.objects.walk import Walk
from scatterpar.options.graphs.captures import (
    CaptureLost,
    Graph,
    NotCaptured,
    ReplicaGraphs,
    is_function,
    separate,
)
from scatterpar.options.graphs.decision import Decision
from scatterpar.options.graphs.proofs import SharePlan
from scatterpar.options.graphs.tape import RepeatableTape, Tape, difference
from scatterpar.step.attempt import Attempt
from scatterpar.step.flat_gradients import FlatGradients
from scatterpar.step.loss import forward, require_trainable
from scatterpar.step.substeps import (
    Substeps,
    detached,
    detached_output,
    set_aside,
)
from scatterpar.step.task import ReplicaTask
from scatterpar.tables import shortened
from scatterpar.torch_private.compiler import compiled_calls
from scatterpar.torch_private.graphs import (
    capturing_on,
)

# Equal tapes before a capture. A value that alternates differs in the second run, one
# of three in the third.
_RUNS = 3


_LOGS = "has a criterion that returns numbers to log, which graphs do not keep"


_GRAD_OF_LEAF = attrgetter("grad")

_WITHOUT_VALUE = object()  # in the place of a context variable without a value


_COMPILED_FUNCTION = (
    "calls a function that torch.compile has compiled, and code runs either compiled "
    "or captured"
)


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


class GraphedSubsteps(Substeps):
    """The sub-steps of one replica in one step, replayed if they are captured."""

    def __init__(
        self,
        graphs: ReplicaGraphs,
        task: ReplicaTask,
        attempt: Attempt,
        plan: SharePlan,
        decision: Decision,
    ) -> None:
        super().__init__(task, attempt.request)
        self._graphs = graphs
        self._attempt = attempt
        self._plan = plan
        self._decision = decision
        self._has_begun = False
        # The static tensors that have all gradients so far, if no leaf refers to them.
        self._unassigned: Mapping[int, Tensor] | None = None

    def run(self, number: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """As ``Substeps.run``, but captures or replays a graph if possible."""
        key = self._plan.keys[number]
        if key is None:
            return self._run_eagerly(number, weight, rows)
        graph = self._graphs.find(key, self._plan.step.step)
        is_checked = number in self._plan.checked
        if self._decision.refusal:
            # The replays of this step, which came before the refusal, need a proof.
            if is_checked and graph is not None and graph.replay is not None:
                return self._checked_run(graph, number, weight)
            return self._run_eagerly(number, weight, rows)
        if graph is None:
            # What is checked in each step is never replayed.
            if is_checked or not self._graphs.make_room(self._plan.step.step):
                return self._run_eagerly(number, weight, rows)
            return self._first_run(key, number, weight)
        if graph.replay is None:
            if is_checked:
                return self._run_eagerly(number, weight, rows)
            if len(graph.tapes) < _RUNS:
                return self._run_on_tape(graph, number, weight)
            self._capture(graph, number)
            if graph.replay is None:
                return self._run_eagerly(number, weight, rows)
        if is_checked:
            return self._checked_run(graph, number, weight)
        return self._replayed(graph, number, weight)

    def _run_eagerly(
        self, number: int, weight: float, rows: Any = None
    ) -> tuple[Tensor, Any]:
        """Run a sub-step that has no graph."""
        self._assign_to_leaves()
        return super().run(number, weight, rows)

    # --- before the capture ---

    def _first_run(
        self, key: Hashable, number: int, weight: float
    ) -> tuple[Tensor, Any]:
        """Run a sub-step of a new shape, and see which leaves get a gradient."""
        self._assign_to_leaves()
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
        self._graphs.by_shape[key] = Graph(
            static, torch.empty_like(loss), has_output, step=self._plan.step.step
        )
        return loss, output

    def _run_on_tape(
        self, graph: Graph, number: int, weight: float
    ) -> tuple[Tensor, Any]:
        """Run a sub-step eagerly, and compare its tape with the last one's."""
        self._accumulate_in(graph.gradients)
        is_last = len(graph.tapes) == _RUNS - 1
        journal = None
        if is_last and not self._task.share.replica:  # whose Python all replicas share
            rows = self._task.loader.at_source(number).unwrapped()
            functions = filter(is_function, nested.atoms(rows))
            roots = [self._task.criterion, self._task.module, *functions]
            journal = Journal(Walk(roots), max_bytes=0)
        state = self._host_state()
        tape, loss, output = self._taped(number, weight, graph)
        if tape.obstacle:
            self._refuse(tape.obstacle)
        elif words := self._moved_on_host(state):
            self._refuse(f"or the criterion {words}")
        elif not all(replica.is_as_reset() for replica in self._task.replicas):
            self._refuse(
                "keeps something on the module that is no buffer written in place"
            )
        elif journal is not None and (moved := journal.moved()):
            self._refuse(
                f"or the criterion writes or takes from what a replay leaves as it is: "
                f"{shortened(moved)}"
            )
        elif graph.tapes and (where := difference(graph.tapes[-1], tape)):
            self._start_again(graph, where)
        graph.tapes.append(tape)
        graph.step = self._plan.step.step
        return loss, output

    def _start_again(self, graph: Graph, where: str) -> None:
        """Drop the tapes, of which two differ. Refuse if they are of one step."""
        graph.tapes.clear()
        # Between two steps the user may have changed something.
        if graph.step == self._plan.step.step:
            self._refuse(f"computes something else in each call: {where}")
        else:
            self._decision.changed(where)

    def _taped(
        self, number: int, weight: float, graph: Graph
    ) -> tuple[Tape, Tensor, Any]:
        """Run a sub-step eagerly. Returns its tape, loss, and returned output."""
        task = self._task
        device = task.share.device
        is_measured = graph.replay is None  # it takes some time
        num_bytes = memory.num_allocated_bytes(device) if is_measured else 0
        request = self._request
        task.restore_replicas()
        rows = separate(task.rows_of(number))
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
        self, graph: Graph, number: int, weight: float
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

    def _capture(self, graph: Graph, number: int) -> None:
        """Capture a sub-step; leave ``graph`` as it is if that is not possible.

        Restores all state.
        """
        self._assign_to_leaves()
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
                except CaptureLost:
                    tape = self.record(task, graph, number)
        except NotCaptured as why:
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

    def record(self, task: ReplicaTask, graph: Graph, number: int) -> Tape:
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
        graph: Graph,
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

    def _replayed(self, graph: Graph, number: int, weight: float) -> tuple[Tensor, Any]:
        """Launch a captured sub-step. Returns its loss, and its returned output."""
        loader = self._task.loader
        # Rows that are on the device are copied once, into the graph's tensors.
        if loader.ahead is None:
            rows = loader.at_source(number).unwrapped()
        else:
            rows = self._task.rows_of(number, holds_next=True)
        assert graph.factor is not None
        assert graph.replay is not None
        # Copies: the next rows arrive while the graph reads these.
        copy_each(nested.tensors(graph.rows), nested.tensors(rows))
        self._replay_into(graph.gradients)
        graph.factor.fill_(weight * self._request.scale)
        with self._task.span("replay", number):
            graph.replay()
        # After the launch: a device without work does not wait for it.
        loader.issue_next(number)
        self._plan.step.count_replay()
        # The next replay writes the static tensors.
        loss = graph.loss.clone()
        if not graph.has_output:
            return loss, None
        # The output, too, lies in memory that the next replay overwrites.
        output = nested.map_tensors(Tensor.clone, graph.output)
        return loss, detached_output(output, self._request.return_outputs)

    def _replay_into(self, static: Mapping[int, Tensor]) -> None:
        """Make static tensors the sums so far, to which a replay adds.

        A replay asks no leaf for its ``.grad``. So a replica whose sub-steps are all
        replayed does nothing per leaf.
        """
        if not self._has_begun:
            self._has_begun = True
            self._zero(static)
            self._unassigned = static
        elif self._unassigned is None or self._unassigned.keys() != static.keys():
            self._accumulate_in(static)

    def _assign_to_leaves(self) -> None:
        """Let leaves refer to the static tensors with their gradients, for a sub-step
        that Python runs.
        """
        self._has_begun = True
        if self._unassigned is not None:
            for position, gradient in self._unassigned.items():
                self._task.leaves[position].grad = gradient
            self._unassigned = None

    def _accumulate_in(self, static: Mapping[int, Tensor]) -> None:
        """Make static tensors the leaves' ``.grad``, with the gradients accumulated so
        far.
        """
        self._assign_to_leaves()
        leaves = self._task.leaves
        without_gradient: dict[int, Tensor] = {}
        for position, gradient in static.items():
            leaf = leaves[position]
            earlier = leaf.grad
            if earlier is gradient:
                continue
            if earlier is None:
                without_gradient[position] = gradient
            else:  # that of a sub-step without a graph
                write(gradient, earlier)
            leaf.grad = gradient
        self._zero(without_gradient)

    def _zero(self, static: Mapping[int, Tensor]) -> None:
        """Zero static tensors, in few kernels, not one per tensor."""
        flat = self._graphs.gradients
        if len(static) == len(flat.parts):
            for tensor in flat.flat.values():
                tensor.zero_()
        elif static:
            torch._foreach_zero_(list(static.values()))

    def finish(self) -> FlatGradients | None:
        """Take gradients out of the static tensors, which later steps write.

        Returns the static tensors if they have all gradients. Otherwise leaves get
        copies.
        """
        leaves = self._task.leaves
        static = self._graphs.gradients
        is_alone = len(self._task.replicas) == 1
        unassigned = self._unassigned or {}
        if is_alone and unassigned and unassigned.keys() == static.parts.keys():
            return static
        self._assign_to_leaves()
        parts = list(map(static.parts.get, range(len(leaves))))
        if is_alone and all(map(is_, map(_GRAD_OF_LEAF, leaves), parts)):
            for leaf in leaves:
                leaf.grad = None
            return static
        leaves_with_static: list[Tensor] = []
        static_gradients: list[Tensor] = []
        for position, gradient in static.parts.items():
            leaf = leaves[position]
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
        return None


def _has_room(device: torch.device, size: int) -> bool:
    """Whether a device has memory for the activations of a sub-step, which its graphs
    keep.
    """
    free = memory.num_free_bytes(device)
    return free is None or free >= size
