"""graphs=True: a sub-step is captured once and replayed for every micro-batch::

    rows, and the weight of their loss      copied to static tensors
    forward, criterion, backward            the graph
    loss, output                            copied from static tensors
    gradients                               added to static tensors; copied at the end

Python runs only while a sub-step is captured, so a launch costs the same for any size
of the model. A graph is of one replica and one shape of micro-batch, and valid until
module, criterion, autocast or the memory of parameters changes. If a sub-step cannot be
captured, its replica runs without graphs from then on, and one warning says so. On the
CPU the same code is called again, on the same tensors.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar import torch_private
from scatterpar.batch import nested
from scatterpar.devices import memory, streams
from scatterpar.devices.coalescing import copy_each
from scatterpar.devices.device_ids import HOST
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.devices.transfers import to_numbers, write
from scatterpar.errors import Told, restored, warn
from scatterpar.log import logger
from scatterpar.look_steps import is_look_step
from scatterpar.options.replay_look import difference_of_replay
from scatterpar.replicas.references import parts_of
from scatterpar.replicas.replicas import ReplicaSet, parameter_writes_refused
from scatterpar.state.reports import changed_names, plain_values
from scatterpar.state.walk import Walk
from scatterpar.step.attempt import Attempt
from scatterpar.step.loss import forward
from scatterpar.step.request import EngineOptions
from scatterpar.step.substeps import (
    Schedule,
    Substeps,
    detached_output,
    set_aside,
)
from scatterpar.step.task import ReplicaTask
from scatterpar.tables import shown
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.process_settings import settings_of_torch

_SHAPES = 8  # maximal number of graphs per replica; other shapes run without graphs
# maximal number per replica; more show that something changes at every step
_CAPTURES = 32


class _Refused(Exception):
    """The reason why a sub-step cannot be captured; the module's name
    comes before it.
    """


class _CaptureLost(_Refused):
    """A capture failed. Another thread may have waited for the device meanwhile."""


@dataclass
class _Graph:
    """A sub-step of one shape: its static tensors, and the function that replays it.

    Attributes:
        rows: the static inputs and targets.
        factor: the weight of the micro-batch's loss, times the scaler's factor.
        loss: the loss of the last replay.
        gradients: the sums so far, by position among the replica's leaves.
        has_output: whether the output is kept.
        output: that of the last replay.
        replay: runs the sub-step; does nothing until it is captured.
        steps: the number of steps that found this graph at their beginning.
        values: what the capture has frozen, by name (``plain_values``).
    """

    rows: Any
    factor: Tensor
    loss: Tensor
    gradients: dict[int, Tensor]
    has_output: bool
    output: Any = None
    replay: Callable[..., None] = lambda *_: None
    steps: int = 0
    values: Mapping[str, Any] = field(default_factory=dict)

    def compute(self, task: ReplicaTask, number: int) -> None:
        """Run the sub-step on the static tensors. On the CPU each replay calls this."""
        output, loss = forward(task, self.rows, number)
        self.output = detached_output(output, True) if self.has_output else None
        del output
        write(self.loss, loss.detach())
        task.run_backward(number, [loss], [self.factor])


class Captured(Schedule):
    """One pass, whose sub-steps are captured once and replayed; keeps the graphs."""

    uses_graphs = True

    def __init__(
        self,
        options: EngineOptions,
        compile_fn: torch_private.CompileFn | None,
    ) -> None:
        """Raises ``ValueError`` for options and devices that do not support
        ``graphs=True``.
        """
        devices = options.device_ids
        has_python = options.buffers == "batch"
        conflicts = {
            "a compiled module, which runs either compiled or captured": compile_fn,
            'buffers="batch", which needs Python in every sub-step': has_python,
        }
        for option, is_on in conflicts.items():
            if is_on:
                raise ValueError(f"graphs=True and {option}; pass one of them")
        # The CPU captures nothing, and calls the same code again.
        for kind in {device.type for device in devices} - {"cpu"}:
            if not hasattr(torch.get_device_module(kind), "CUDAGraph"):
                raise ValueError(
                    f"graphs=True: {kind} captures no graphs; leave it out"
                )
        # One warning for all replicas.
        told = Told()
        self._by_replica = [_ReplicaGraphs(device, told) for device in devices]

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> Substeps:
        """The sub-steps of one replica in one step; drops graphs that are no longer
        valid.
        """
        if attempt.extent.is_trial or not attempt.request.backward:
            # A trial asks for a step's peak of memory, which static tensors would
            # change.
            return super().substeps(attempt, task)
        graphs = self._by_replica[task.share.replica]
        # A graph reads addresses: what it depends on is compared in each step.
        if graphs.state != (state := _state_of(task, attempt.replicas.replica_sets)):
            graphs.forget(state)
        return GraphedSubsteps(graphs, task, attempt)

    def look(self, attempt: Attempt, task: ReplicaTask) -> None:
        """Compare a replay of the first micro-batch with the same run eagerly.

        In steps 1, 2, 4, 8, … that begin with a graph for it. If more than rounding
        differs, sub-steps run without graphs from this step on, with one warning.
        """
        substeps = self.substeps(attempt, task)
        if isinstance(substeps, GraphedSubsteps) and (why := substeps.look()):
            # All replicas': their graphs have frozen the same values.
            for graphs in self._by_replica:
                graphs.refuse(why)


class GraphedSubsteps(Substeps):
    """The sub-steps of one replica in one step, replayed if they can be captured."""

    def __init__(
        self,
        graphs: _ReplicaGraphs,
        task: ReplicaTask,
        attempt: Attempt,
    ) -> None:
        super().__init__(task, attempt.request)
        self._graphs = graphs
        self._attempt = attempt

    def run(self, number: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """As ``Substeps.run``, but captures or replays a graph if possible."""
        key = self._key_of(number, weight)
        graph = self._graphs.by_shape.get(key)
        if graph is None and key is not None and self._graphs.may_capture():
            graph = self._captured(number)
            if graph is not None:
                self._graphs.by_shape[key] = graph
        if graph is None:
            return super().run(number, weight, rows)
        loader = self._task.loader
        # Rows that are on the device are copied once, into the graph's tensors.
        if loader.ahead is None:
            rows = loader.at_source(number).unwrapped()
        else:
            rows = self._task.rows_of(number)
        # The next replay writes the static tensors.
        loss = self._replay(graph, rows, weight, self._task, number).clone()
        if not graph.has_output:
            return loss, None
        # The output, too, lies in memory that the next replay overwrites.
        output = nested.map_tensors(Tensor.clone, graph.output)
        return loss, detached_output(output, self._request.return_outputs)

    def _replay(
        self,
        graph: _Graph,
        rows: Any,
        weight: float,
        task: ReplicaTask,
        number: int = 0,
    ) -> Tensor:
        """Replay a sub-step with these rows. Returns its loss, a static tensor."""
        # Copies: the next rows arrive while the graph reads these.
        copy_each(nested.tensors(graph.rows), nested.tensors(rows))
        self._accumulate_in(graph.gradients)
        graph.factor.fill_(weight * self._request.scale)
        with task.span("replay", number):
            graph.replay(task, number)
        return graph.loss

    def look(self) -> str:
        """Compare a replay of the first micro-batch with the same run eagerly.

        Returns why they differ by more than rounding; empty if they do not, or if it is
        no step of a look.
        """
        task = self._task
        graph = self._graphs.by_shape.get(self._key_of(0, task.weights[0]))
        if graph is None:
            return ""
        graph.steps += 1
        if not is_look_step(graph.steps):
            return ""
        with (
            self._attempt.span("verify"),
            parameter_writes_refused(self._attempt.replicas.replica_sets),
            self._attempt.generators.of(task.share.replica),
        ):
            difference = self._attempt.threads.call(
                task.share.device, partial(self._difference, graph)
            )
        if not difference:
            return ""
        now = plain_values(Walk([task.criterion, task.module]))
        names = shown(", ".join(changed_names(graph.values, now)))
        return (
            f"{names or 'something that a sub-step reads'} changed after sub-steps "
            f"of {type(task.module).__name__} had been captured, and replays gave "
            f"another loss or gradients than the sub-step itself (they differ by "
            f"{difference:.1e}).\nMake it a tensor that is written in "
            "place, or a part of the batch.\n\nSteps since the last look computed "
            "with the former value: looks come in steps 1, 2, 4, 8, … of the graphs"
        )

    def _difference(self, graph: _Graph) -> float:
        """By how much a replay of the first sub-step differs; 0 if memory runs out."""
        try:
            rows = self._task.rows_of(0, retain=True)
            replay = partial(self._replay, graph, rows, 1.0)
            return difference_of_replay(self._attempt, self._task, rows, replay)
        except Exception as error:
            if is_out_of_memory(error):
                return 0.0
            raise

    def _key_of(self, number: int, weight: float) -> Hashable:
        """A key of the graph for a sub-step; ``None`` if it runs without one."""
        # What does not count runs no backward pass, and sums have another criterion.
        if not weight or self._task.sums:
            return None
        source = self._task.loader.at_source(number).unwrapped()
        return _graph_key((source, bool(self._request.return_outputs)))

    def _accumulate_in(self, static: dict[int, Tensor]) -> None:
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

    def _captured(self, number: int) -> _Graph | None:
        """A graph for the shape of a sub-step; ``None`` if it cannot be captured.

        Restores all state.
        """
        try:
            try:
                return self._isolated_capture(number)
            # Once more: another thread may have waited for the device in the first.
            except _CaptureLost:
                return self._isolated_capture(number)
        except _Refused as why:
            self._graphs.refuse(f"{type(self._task.module).__name__} {why}")
            return None

    def _isolated_capture(self, number: int) -> _Graph:
        """A graph of a sub-step. Raises ``_Refused``; restores all state."""
        task = replace(self._task, is_profiled=False)
        try:
            with (
                self._task.span("capture", number),
                # Gradients of earlier sub-steps of this step are in these leaves.
                set_aside(task.leaves),
                task.isolated(self._attempt.generators),
            ):
                graph = self.record(task, number)
                if not task.share.replica:  # the one that is looked at
                    graph.values = plain_values(Walk([task.criterion, task.module]))
                return graph
        except Exception as error:
            if is_out_of_memory(error):
                self._graphs.forget()  # frees the memory of the graphs
            raise

    def record(self, task: ReplicaTask, number: int) -> _Graph:
        """A graph of a sub-step with its kernels captured, which do not run.

        All work runs on the capturing stream, in order with the current stream's, for
        one replica at a time.
        """
        # The sub-step that follows loads these rows again. These are clones, because a
        # ``collate`` may keep what it returns.
        rows = nested.map_tensors(Tensor.clone, task.rows_of(number, retain=True))
        device = task.share.device
        # One stream for all graphs. Autograd nodes refer to it, and a traceback may
        # keep them.
        stream = streams.stream_for("recording", device)
        if stream is None:
            graph = self._warm_up(task, rows, number)
            graph.replay = graph.compute
            return graph
        current = torch.accelerator.current_stream(device)
        with memory.CAPTURE:
            # Once per attempt, because it takes long. Otherwise objects may be freed
            # during a capture, and wait for the device.
            if not self._attempt.garbage_is_collected:
                self._attempt.garbage_is_collected = True
                gc.collect()
            stream.wait_stream(current)
            with restored(partial(current.wait_stream, stream)), stream:
                graph = self._warm_up(task, rows, number)
                kernels = self._graphs.capture(partial(graph.compute, task, number))
        graph.replay = lambda *_: kernels.replay()
        logger.info(
            "%s captured a sub-step, its graph number %d",
            device,
            len(self._graphs.by_shape) + 1,
        )
        return graph

    def _warm_up(self, task: ReplicaTask, rows: Any, number: int) -> _Graph:
        """Run sub-steps to allocate the static tensors and choose kernels.

        Returns a graph of the static ``rows``. Raises ``_Refused``.
        """
        substeps = Substeps(task, replace(self._request, return_outputs=False))
        host_states: list[tuple[Any, ...]] = []
        for _ in range(2):  # the second one accumulates gradients, as a graph does
            copied = nested.map_tensors(Tensor.clone, rows)
            # By its own number: in turns, that of another sub-step may be over.
            loss, _ = substeps.run(number, 1.0, copied)
            host_states.append(self._host_state())
        if not all(replica.is_as_refreshed() for replica in task.replicas):
            raise _Refused(
                "keeps something on the module that is no buffer written in place"
            )
        # A replay runs no Python: it would repeat the numbers of the capture.
        draws_on_host = host_states[0] != host_states[1]
        if draws_on_host and streams.is_async(task.share.device):
            raise _Refused("or the criterion draws random numbers on the host")
        return _Graph(
            rows,
            factor=torch.ones_like(loss),
            loss=torch.empty_like(loss),
            gradients=self._static_gradients(task.leaves),
            has_output=bool(self._request.return_outputs),
        )

    def _host_state(self) -> tuple[Any, ...]:
        """The state of the generators on the host from which this replica draws."""
        states = self._attempt.generators.get_state(self._task.share.replica)
        of_torch = states.get(HOST)
        numbers = None if of_torch is None else to_numbers(of_torch)
        return random.getstate(), numbers

    def _static_gradients(self, leaves: Sequence[Tensor]) -> dict[int, Tensor]:
        """Make static tensors, shared by all graphs, the gradients of leaves with one.

        Raises ``_Refused`` for sparse gradients.
        """
        static: dict[int, Tensor] = {}
        for position, leaf in enumerate(leaves):
            gradient = leaf.grad
            if gradient is None:
                continue
            if gradient.layout != torch.strided:
                raise _Refused("has sparse gradients")
            # One for all graphs of the replica: sub-steps of all shapes add to it.
            if position not in self._graphs.gradients:
                self._graphs.gradients[position] = torch.zeros_like(gradient)
            leaf.grad = static[position] = self._graphs.gradients[position]
        return static


def _state_of(task: ReplicaTask, replica_sets: Sequence[ReplicaSet]) -> list[Any]:
    """The state on which a replica's graphs depend; its objects are compared by
    identity.
    """
    changes = [replica_set.changes for replica_set in replica_sets]
    addresses: list[int] = []
    for replica in task.replicas:
        # A forward pass or the user may exchange memory without another tensor.
        addresses += [tensor.data_ptr() for tensor in replica.tensors]
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in autocast_types()]
    return [
        task.criterion,
        changes,
        _values_of(task),
        addresses,
        autocast,
        torch.is_grad_enabled(),
        settings_of_torch(),
    ]


def _values_of(task: ReplicaTask) -> list[Any]:
    """Plain values and the identities of objects that a sub-step reads directly."""
    parts = parts_of(task.criterion)
    if parts.called is not None:
        parts = parts_of(parts.called)
    objects: list[Any] = [task.module, *task.replicas]
    objects += parts.closure.values()
    objects += parts.attributes.values()  # such as ``label_smoothing``
    values: list[Any] = []
    for value in objects:
        if isinstance(value, nested.PLAIN_CLASSES):
            values.append(value)
        else:
            # The object itself is kept: another one could get the same id.
            values.append((id(value), value))
    return values


def _graph_key(rows: Any) -> Hashable:
    """A key of the shapes that one graph accepts; ``None`` if no graph can."""
    for atom in nested.atoms(rows):
        is_dense = type(atom) is Tensor and atom.layout == torch.strided
        # An object may hold anything: a graph would freeze it.
        if not is_dense and not isinstance(atom, nested.PLAIN_CLASSES):
            return None
    return repr(
        nested.map_tensors(lambda t: (tuple(t.shape), t.stride(), t.dtype), rows)
    )


class _ReplicaGraphs:
    """The graphs of one replica, which share memory, and the state that
    they depend on.
    """

    def __init__(self, device: torch.device, told: Told) -> None:
        """``told``: the warnings of all replicas."""
        self._device = device
        self._told = told
        self._captures = 0
        self._is_refused = False
        self.forget()

    def forget(self, state: Sequence[Any] = ()) -> None:
        """Drop all graphs and static gradients; later graphs use a separate memory
        pool.
        """
        self.state = state
        self.by_shape: dict[Hashable, _Graph] = {}
        self.gradients: dict[int, Tensor] = {}
        self._pool: Any = None

    def refuse(self, why: str) -> None:
        """Capture nothing from now on, and warn once."""
        self._is_refused = True
        self.forget()
        if self._told.mark("refused"):
            warn(f"graphs=True: sub-steps run as without graphs, because {why}")

    def may_capture(self) -> bool:
        """Whether another sub-step may be captured; counts the captures, and refuses
        too many.
        """
        if self._is_refused or len(self.by_shape) >= _SHAPES:
            return False
        self._captures += 1
        if self._captures > _CAPTURES:
            self.refuse(
                f"sub-steps were captured {_CAPTURES} times, since something changes "
                "from step to step: the criterion (make it once, before the loop), a "
                "number that is an attribute of the module (make it a tensor), or the "
                "shapes of batches"
            )
        return not self._is_refused

    def capture(self, work: Callable[[], None]) -> Any:
        """Capture the kernels of ``work``, which must not synchronize with the device.

        Raises ``_CaptureLost``.
        """
        module = torch.get_device_module(self._device)
        self._pool = self._pool or module.graph_pool_handle()
        kernels = module.CUDAGraph()
        # A capture can neither use nor free memory in torch's cache, as that of the
        # warm-up.
        memory.empty_cache()
        # After emptying the cache: another thread may be about to launch a kernel that
        # uses its workspace, which must stay mapped.
        #
        # Thread-local: in the mode "global" an allocation of any other thread, such as
        # a data loader's, would end the capture.
        torch_private.free_cublas_workspaces()
        kernels.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        has_ended = False
        try:
            work()
            has_ended = True
            kernels.capture_end()
            return kernels
        except BaseException as error:
            torch_private.give_up_capture(
                kernels, self._device, self._pool, has_ended=has_ended
            )
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
            torch_private.free_cublas_workspaces()
