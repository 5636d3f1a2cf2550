"""graphs=True: a sub-step is captured once and replayed for every micro-batch::

    rows, and the weight of their loss      copied to static tensors
    forward, criterion, backward            the graph
    loss, output                            copied from static tensors
    gradients                               added to static tensors; copied out after the last

Python runs only while a sub-step is captured, so a launch costs the same for any size of the model.
A graph is of one replica and one shape of micro-batch, and valid until module, criterion, autocast
or the memory of parameters changes. If a sub-step cannot be captured, its replica runs without
graphs from then on, and one warning says so. On the CPU the same code is called again, on the same
tensors.
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar import torch_private
from scatterpar.batch import nested
from scatterpar.devices import runtime
from scatterpar.devices.coalescing import copy_each
from scatterpar.devices.runtime import is_out_of_memory
from scatterpar.devices.transfers import to_numbers, write
from scatterpar.replicas.module_copy import contents
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.report import warn
from scatterpar.step.attempt import Attempt
from scatterpar.step.schedule import Schedule
from scatterpar.step.substeps import ReplicaTask, Substeps, detached_output, forward
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.workers import restored

_SHAPES = 8  # maximal number of graphs per replica; other shapes run without graphs
_CAPTURES = 32  # maximal number per replica; more show that something changes at every step
_WARM_UPS = 2  # the second one accumulates gradients, as a graph does
_PLAIN = (bool, int, float, str, type(None))
_PRECISIONS = (  # ``allow_tf32`` and ``set_float32_matmul_precision`` change these, too
    torch.backends.cuda.matmul,
    *(getattr(torch.backends.cudnn, kind) for kind in ("conv", "rnn")),
    torch.backends,
)

_RECORDING: dict[torch.device, threading.Lock] = defaultdict(threading.Lock)  # of all engines


class _Refused(Exception):
    """The reason why a sub-step cannot be captured."""


def check_graphs(
    graphs: Any,
    devices: Sequence[torch.device],
    buffers: str,
    compile_fn: torch_private.CompileFn | None,
    micro_batch_cost: float | None,
) -> None:
    """Refuse ``graphs=True`` with options or devices that do not support it."""
    if not isinstance(graphs, bool):
        raise TypeError(f"graphs must be True or False, got {graphs!r}")
    for other, is_on in (
        ("a compiled module: a sub-step runs either compiled or captured", compile_fn is not None),
        (
            'buffers="batch": Python notes what batch normalisations see, and a replay runs none',
            buffers == "batch",
        ),
        (
            "micro_batch_cost: a graph has one shape of micro-batch, and cuts by cost change it",
            micro_batch_cost is not None,
        ),
    ):
        if is_on:
            raise ValueError(f"graphs=True and {other}; pass one of them")
    for device in devices:
        if device.type != "cpu" and not hasattr(torch.get_device_module(device.type), "CUDAGraph"):
            raise ValueError(f"graphs=True: {device} captures no graphs; leave it out")


@dataclass
class _Graph:
    """A sub-step of one shape: its static tensors, and the function that replays it."""

    rows: Any
    factor: Tensor
    loss: Tensor
    gradients: dict[int, Tensor]  # by position among the replica's leaves
    output: Any = None
    replay: Callable[..., None] = lambda *_: None  # until it is captured

    def compute(self, task: ReplicaTask, return_output: bool, number: int = 0) -> None:
        """Run the sub-step on the static tensors; on the CPU every replay calls this."""
        output, loss = forward(task, self.rows, number)
        self.output = detached_output(output, True) if return_output else None
        del output
        write(self.loss, loss.detach())
        task.run_backward(number, [loss], [self.factor], autocast_types())


@dataclass
class _ReplicaGraphs:
    """The graphs of one replica, and the state that they depend on."""

    recorder: Recorder
    warning_lock: threading.Lock  # shared by all replicas; the first to warn never releases it
    state: list[Any] = field(default_factory=list)
    graphs: dict[Hashable, _Graph] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    captures: int = 0
    is_refused: bool = False

    def forget(self) -> None:
        """Drop all graphs and static gradients."""
        self.state, self.graphs, self.gradients = [], {}, {}
        self.recorder.forget()

    def refuse(self, why: str) -> None:
        """Capture nothing from now on, and warn once."""
        self.is_refused = True
        self.forget()
        if self.warning_lock.acquire(blocking=False):
            warn(f"graphs=True: sub-steps run as without graphs, because {why}")

    def may_capture(self) -> bool:
        """Whether another sub-step may be captured; counts the captures, and refuses too many."""
        if self.is_refused or len(self.graphs) >= _SHAPES:
            return False
        self.captures += 1
        if self.captures > _CAPTURES:
            self.refuse(
                f"sub-steps were captured {_CAPTURES} times, since something changes from step to "
                f"step: the criterion (make it once, before the loop), a number that is an "
                f"attribute of the module (make it a tensor), or the shapes of batches"
            )
        return not self.is_refused


class Captured(Schedule):
    """One pass, whose sub-steps are captured; keeps the graphs of an engine's replicas."""

    def __init__(self) -> None:
        self._by_replica: dict[int, _ReplicaGraphs] = {}
        self._warning_lock = threading.Lock()

    def substeps(self, attempt: Attempt, task: ReplicaTask) -> Substeps:
        """The sub-steps of one replica in one step; drops graphs that are no longer valid."""
        if attempt.max_substeps is not None or not attempt.request.backward:
            return super().substeps(attempt, task)
        number, state = task.share.replica, _state_of(task, attempt.replicas.replica_sets)
        if number not in self._by_replica:
            recorder = Recorder(task.share.device)
            self._by_replica[number] = _ReplicaGraphs(recorder, self._warning_lock)
        replica_graphs = self._by_replica[number]
        if replica_graphs.state != state:
            replica_graphs.forget()
            replica_graphs.state = state
        return GraphedSubsteps(replica_graphs, task, attempt)


class GraphedSubsteps(Substeps):
    """The sub-steps of one replica in one step, replayed if they can be captured."""

    def __init__(self, replica_graphs: _ReplicaGraphs, task: ReplicaTask, attempt: Attempt) -> None:
        super().__init__(task, attempt.request)
        self._replica_graphs, self._attempt = replica_graphs, attempt

    def run(self, number: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """As ``Substeps.run``, but captures or replays a graph if possible."""
        task, graphs = self._task, self._replica_graphs
        source = task.loader.rows_at_source(number)
        key = _shape_of(source) if weight else None
        graph = graphs.graphs.get(key)
        if graph is not None:  # the next rows arrive while the graph reads these
            rows_now = source if task.loader.is_local else task.rows_of(number)
            copy_each(nested.tensors(graph.rows), nested.tensors(rows_now))
        elif key is not None and graphs.may_capture():
            rows = task.rows_of(number)
            try:
                graph = self._capture(nested.map_tensors(Tensor.clone, rows), number)
                graphs.graphs[key] = graph
            except _Refused as error:
                graphs.refuse(str(error))
        if graph is None:
            return super().run(number, weight, rows)
        self._accumulate_in(graph.gradients)
        graph.factor.fill_(weight * self._request.scale)
        with task.span("replay", number):
            graph.replay(task, bool(self._return_outputs), number)
        output = None
        if self._return_outputs:
            output = nested.map_tensors(Tensor.clone, graph.output)
            output = detached_output(output, self._return_outputs)
        return graph.loss.clone(), output

    def _accumulate_in(self, static: dict[int, Tensor]) -> None:
        """Make static tensors the leaves' ``.grad``, with the gradients accumulated so far."""
        leaves = self._task.leaves
        new = {i: gradient for i, gradient in static.items() if leaves[i].grad is not gradient}
        if fresh := [gradient for i, gradient in new.items() if leaves[i].grad is None]:
            torch._foreach_zero_(fresh)
        for i, gradient in new.items():
            if (earlier := leaves[i].grad) is not None:  # that of a sub-step without a graph
                write(gradient, earlier)
            leaves[i].grad = gradient

    def finish(self) -> None:
        """Copy gradients out of the static tensors, which later steps write."""
        leaves, static = self._task.leaves, self._replica_graphs.gradients
        used = {i: gradient for i, gradient in static.items() if leaves[i].grad is gradient}
        copies = list(map(torch.empty_like, used.values()))
        copy_each(copies, list(used.values()))
        for i, gradient in zip(used, copies, strict=True):
            leaves[i].grad = gradient

    def _capture(self, rows: Any, number: int) -> _Graph:
        """Capture a graph of the static ``rows``; restore all state. Raises ``_Refused``."""
        task, recorder = replace(self._task, clock=None), self._replica_graphs.recorder
        gradients = [leaf.grad for leaf in task.leaves]
        try:
            span = self._task.span("capture", number)
            with span, recorder.session(), self._attempt.isolated(task):
                with recorder.warming_up():
                    graph = self._warm_up(task, rows)
                for i, gradient in graph.gradients.items():
                    task.leaves[i].grad = gradient
                try:
                    graph.replay = recorder.record(graph.compute, task, bool(self._return_outputs))
                except Exception as error:
                    if is_out_of_memory(error):
                        raise
                    lines = str(error).strip().splitlines() or [""]
                    raise _Refused(
                        f"a sub-step of {type(task.module).__name__} cannot be captured: it waits "
                        f"for the device, as with CUDA_LAUNCH_BLOCKING, or does what a graph "
                        f"cannot repeat ({type(error).__name__}: {lines[0]})"
                    ) from error
        except Exception as error:
            if is_out_of_memory(error):
                self._replica_graphs.forget()  # frees the memory of the graphs
            raise
        finally:
            for leaf, earlier in zip(task.leaves, gradients, strict=True):
                leaf.grad = earlier
        return graph

    def _warm_up(self, task: ReplicaTask, rows: Any) -> _Graph:
        """Run sub-steps to allocate the static tensors and choose kernels. Raises ``_Refused``."""
        leaves, name = task.leaves, type(task.module).__name__
        for leaf in leaves:
            leaf.grad = None
        substeps = Substeps(task, replace(self._request, return_outputs=False))
        host_states: list[tuple[Any, ...]] = []
        for _ in range(_WARM_UPS):
            loss, _ = substeps.run(0, 1.0, nested.map_tensors(Tensor.clone, rows))
            state = self._attempt.generators.get_state(task.share.replica).get(runtime.HOST)
            host_states.append((random.getstate(), None if state is None else to_numbers(state)))
        if not all(replica.is_as_refreshed() for replica in task.replicas):
            raise _Refused(
                f"the forward pass of {name} keeps something on the module that is no buffer "
                f"written in place"
            )
        if runtime.is_async(task.share.device) and host_states[-1] != host_states[-2]:
            raise _Refused(f"{name} or the criterion draws random numbers on the host")
        gradients = {i: leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
        if any(gradient.layout != torch.strided for gradient in gradients.values()):
            raise _Refused(f"{name} has sparse gradients")
        static = self._replica_graphs.gradients
        gradients = {i: static.setdefault(i, torch.zeros_like(g)) for i, g in gradients.items()}
        return _Graph(rows, torch.ones_like(loss), torch.empty_like(loss), gradients)


def _state_of(task: ReplicaTask, replica_sets: Sequence[ReplicaSet]) -> list[Any]:
    """The state on which a replica's graphs depend; its objects are compared by identity."""
    cells = getattr(task.criterion, "__closure__", None) or ()
    settings = getattr(task.criterion, "__dict__", {}).values()  # such as ``label_smoothing``
    objects: list[Any] = [task.module, *task.replicas, *map(contents, cells), *settings]
    return [
        task.criterion,
        [each.changes for each in replica_sets],
        [value if isinstance(value, _PLAIN) else (id(value), value) for value in objects],
        [tensor.data_ptr() for replica in task.replicas for tensor in replica.tensors],
        [(kind, torch.get_autocast_dtype(kind)) for kind in autocast_types()],
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        [getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")],
        [each.fp32_precision for each in _PRECISIONS],
    ]


def _shape_of(rows: Any) -> Hashable:
    """A key of the shapes that one graph accepts; ``None`` if no graph can."""
    try:
        return repr(nested.map_leaves(_leaf_shape, rows))
    except _Refused:
        return None


def _leaf_shape(leaf: Any) -> Hashable:
    if type(leaf) is Tensor and leaf.layout == torch.strided:
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    if isinstance(leaf, _PLAIN):
        return leaf
    raise _Refused


class Recorder:
    """Captures work on one device, as graphs that share memory: they must not run at the same time.

    On the CPU nothing is captured; a replay calls the work itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # One stream for all graphs. Autograd nodes refer to it, and a traceback may keep them.
        self._stream = runtime.stream_for("recording", device)
        self._pool: Any = None
        self._session = contextlib.ExitStack()

    def forget(self) -> None:
        """Let later graphs use a separate memory pool."""
        self._pool = None

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """In the body, work runs on the capturing stream, in order with the current stream's work.

        One recorder at a time per device with streams.
        """
        stream = self._stream
        if stream is None:
            yield
            return
        self._pool = self._pool or torch.get_device_module(self._device).graph_pool_handle()
        with _RECORDING[self._device], runtime.recording(), contextlib.ExitStack() as self._session:
            current = torch.accelerator.current_stream(self._device)
            stream.wait_stream(current)
            try:
                with restored(partial(current.wait_stream, stream)), stream:
                    yield
            except BaseException:
                self.forget()  # the pool may have been freed
                raise

    @contextlib.contextmanager
    def warming_up(self) -> Iterator[None]:
        """In the body, memory comes from the pool of the graphs.

        A capture cannot use memory that torch has cached for other streams, so the memory of
        activations would be reserved twice.
        """
        if self._stream is None:
            yield
            return
        with torch_private.allocating(self._stream, self._pool) as release:
            self._session.callback(release)
            yield

    def record(self, work: Callable[..., None], *args: Any) -> Callable[..., None]:
        """Capture the kernels that ``work(*args)`` launches, without running them.

        Returns a function that replays the kernels, whatever its arguments; on the CPU that is
        ``work`` itself. ``work`` must not synchronize with the device.
        """
        if self._stream is None:
            return work
        gc.collect()  # else objects may be freed during the capture, and wait for the device
        graph = torch.get_device_module(self._device).CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            work(*args)
        except BaseException:
            torch_private.give_up_capture(graph, self._device, self._pool)
            raise
        graph.capture_end()
        return lambda *_: graph.replay()
