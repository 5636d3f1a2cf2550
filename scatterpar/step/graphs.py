"""graphs=True: a sub-step is captured once, and replayed as one launch for each micro-batch::

    rows, and the weight of their loss      copied into tensors that stay
    forward, criterion, backward            the graph
    loss, output                            copied out of tensors that stay
    gradients                               add up in tensors that stay; copied out after the last

Python runs while a sub-step is captured, and not again: launching costs the same whatever the size
of the model. A graph belongs to one replica and one shape of micro-batch. It is valid as long as
module, criterion and autocast do not change and parameters keep their memory. What cannot be
captured runs without graphs, and a warning says so once. On the CPU nothing is captured: the same
code is called again, on the same tensors.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices import runtime
from scatterpar.devices.coalescing import copy_each
from scatterpar.devices.recorder import Recorder
from scatterpar.replicas.module_copy import contents
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.report import warn
from scatterpar.step import nested
from scatterpar.step.auto_accum import is_out_of_memory
from scatterpar.step.markers import unwrap_markers
from scatterpar.step.request import Request
from scatterpar.step.substeps import EagerSubsteps, ReplicaTask, detached_output, forward
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.clock import SILENT
from scatterpar.threads.workers import Attempt

_SHAPES = 8  # graphs of one replica; micro-batches of further shapes run without
_CAPTURES = 32  # of one replica in all: more, and something changes from step to step
_WARM_UPS = 2  # the second one adds to gradients, as a graph does
_BEYOND = "the criterion reaches parameters beside those of the module"
_PLAIN = (bool, int, float, str, type(None))
_PRECISIONS = (  # also where ``allow_tf32`` or ``set_float32_matmul_precision`` was set
    torch.backends.cuda.matmul,
    *(getattr(torch.backends.cudnn, kind) for kind in ("conv", "rnn")),
    torch.backends,
)


class _Refused(Exception):
    """Why a sub-step cannot be captured."""


@dataclass
class _Graph:
    """A sub-step of one shape: the tensors that stay, and what computes with them."""

    rows: Any
    factor: Tensor
    loss: Tensor
    gradients: dict[int, Tensor]  # by position among the replica's leaves
    output: Any = None
    replay: Callable[..., None] | None = None

    def compute(self, task: ReplicaTask, keep: bool, number: int = 0) -> None:
        """The sub-step itself: what is captured, or on the CPU called again."""
        output, loss = forward(task, self.rows, number)
        self.output = detached_output(output, keep=True) if keep else None
        del output
        self.loss.copy_(loss.detach())
        task.run_backward(loss, self.factor, autocast_types(), number)


@dataclass
class _Kept:
    """The graphs of one replica, and what they depend on."""

    recorder: Recorder
    untold: threading.Lock  # shared by all replicas; the one that warns of a refusal keeps it
    state: list[Any] = field(default_factory=list)
    graphs: dict[Hashable, _Graph] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    captures: int = 0
    is_refused: bool = False

    def forget(self) -> None:
        """Drop everything that was captured."""
        self.state, self.graphs, self.gradients = [], {}, {}
        self.recorder.forget()

    def refuse(self, why: str) -> None:
        """Capture nothing from now on, and warn once."""
        self.is_refused = True
        self.forget()
        if self.untold.acquire(blocking=False):
            warn(f"graphs=True: sub-steps run as without graphs, because {why}")

    def may_capture(self) -> bool:
        """Whether to capture another one, which counts it."""
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


class Graphs:
    """The captured sub-steps of an engine's replicas."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._untold = threading.Lock()

    def of(
        self, task: ReplicaTask, request: Request, parts: Sequence[ReplicaSet], attempt: Attempt
    ) -> GraphedSubsteps:
        """What computes the sub-steps of one replica in one step."""
        number, state = task.share.replica, _state_of(task, parts)
        if number not in self._kept:
            self._kept[number] = _Kept(Recorder(task.share.device), self._untold)
        own = self._kept[number]
        if own.state != state:
            own.forget()
            own.state = state
        return GraphedSubsteps(own, task, request, attempt)


class GraphedSubsteps(EagerSubsteps):
    """Sub-steps of one replica in one step, by its ``own`` graphs where there are any."""

    def __init__(self, own: _Kept, task: ReplicaTask, request: Request, attempt: Attempt) -> None:
        super().__init__(task, request)
        self._own, self._attempt = own, attempt
        self._in_place: dict[int, Tensor] = {}  # leaves whose gradients are those that stay

    def run(self, number: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """The loss of a micro-batch, and what is kept of its output; gradients are added."""
        task, own = self._task, self._own
        source = task.loader.source_rows(number)
        key = _shape_of(source) if weight else None
        graph = own.graphs.get(key)
        if graph is not None:  # rows from elsewhere arrive while the graph reads those before
            came = source if task.loader.is_local else task.rows_of(number)
            copy_each([*nested.tensors(graph.rows)], [*nested.tensors(came)])
        elif key is not None and own.may_capture():
            rows = task.rows_of(number)
            try:
                graph = own.graphs[key] = self._captured(unwrap_markers(rows, copy=True), number)
            except _Refused as error:
                own.refuse(str(error))
        if graph is None or graph.replay is None:
            return super().run(number, weight, rows)
        self._put_in_place(graph.gradients)
        graph.factor.fill_(weight * self._request.scale)
        with task.span("replay", number):
            graph.replay(task, bool(self._keep), number)
        output = (
            detached_output(unwrap_markers(graph.output, copy=True), self._keep)
            if self._keep
            else None
        )
        return graph.loss.clone(), output

    def finish(self) -> None:
        """Gradients leave the tensors that stay, which later steps write."""
        copies = [torch.empty_like(gradient) for gradient in self._in_place.values()]
        copy_each(copies, list(self._in_place.values()))
        for i, gradient in zip(self._in_place, copies, strict=True):
            self._task.leaves[i].grad = gradient

    def _put_in_place(self, gradients: dict[int, Tensor]) -> None:
        """From here on these leaves' gradients add up where the graph adds to them."""
        leaves = self._task.leaves
        new = {i: gradient for i, gradient in gradients.items() if i not in self._in_place}
        if fresh := [gradient for i, gradient in new.items() if leaves[i].grad is None]:
            torch._foreach_zero_(fresh)
        for i, gradient in new.items():
            came = leaves[i].grad
            if came is not None:  # of a sub-step without a graph
                gradient.copy_(came)
            leaves[i].grad = self._in_place[i] = gradient

    def _captured(self, rows: Any, number: int) -> _Graph:
        """Capture a graph for micro-batches like ``rows``, which it keeps; restore all state.

        Raises:
            _Refused: the sub-step cannot be captured.
        """
        task, own = replace(self._task, clock=SILENT), self._own
        came = [leaf.grad for leaf in task.leaves]
        try:
            span = self._task.span("capture", number)
            with span, own.recorder.session(), self._attempt.isolated(task):
                with own.recorder.warming_up():
                    graph = self._warmed_up(task, rows)
                for i, gradient in graph.gradients.items():
                    task.leaves[i].grad = gradient
                self._capture(task, graph)
        except Exception as error:
            if is_out_of_memory(error):
                own.forget()  # their memory may be what is missing
            raise
        finally:
            for leaf, earlier in zip(task.leaves, came, strict=True):
                leaf.grad = earlier
        return graph

    def _capture(self, task: ReplicaTask, graph: _Graph) -> None:
        keep = bool(self._keep)
        try:
            graph.replay = self._own.recorder.record(graph.compute, task, keep)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            what = str(error).strip().partition("\n")[0]
            why = "it waits for the device, or does what a graph cannot repeat"
            if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
                why = "with CUDA_LAUNCH_BLOCKING set, every kernel waits for the device"
            raise _Refused(
                f"a sub-step of {type(task.module).__name__} cannot be captured: {why} "
                f"({type(error).__name__}: {what})"
            ) from error

    def _warmed_up(self, task: ReplicaTask, rows: Any) -> _Graph:
        """What stays, after sub-steps that allocate and choose what later ones find."""
        leaves, number = task.leaves, task.share.replica
        name, stash = type(task.module).__name__, task.stash
        assert stash is not None
        for leaf in leaves:
            leaf.grad = None
        launched = replace(self._request, return_outputs=False)
        host: list[tuple[Any, ...]] = [()]
        if stash.has_external_gradients(number):  # in sub-steps before
            raise _Refused(_BEYOND)
        for _ in range(_WARM_UPS):
            loss, _ = EagerSubsteps(task, launched).run(0, 1.0, unwrap_markers(rows, copy=True))
            now = self._attempt.generators.get_state(number).get(torch.device("cpu"))
            host.append((random.getstate(), None if now is None else now.tolist()))
        if stash.has_external_gradients(number):
            stash.drop_external_gradients(number)
            raise _Refused(_BEYOND)
        if any(not one.is_as_refreshed() for one in task.replicas):
            raise _Refused(
                f"the forward pass of {name} keeps something on the module that is no "
                f"buffer written in place"
            )
        if runtime.is_async(task.share.device) and host[-1] != host[-2]:
            raise _Refused(f"{name} or the criterion draws random numbers on the host")
        found = {i: leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
        if any(g.layout != torch.strided for g in found.values()):
            raise _Refused(f"{name} has sparse gradients")
        stay = self._own.gradients
        stays = {i: stay.setdefault(i, torch.zeros_like(g)) for i, g in found.items()}
        return _Graph(rows, torch.ones_like(loss), torch.empty_like(loss), stays)


def _state_of(task: ReplicaTask, parts: Sequence[ReplicaSet]) -> list[Any]:
    """What the graphs of a replica depend on; objects by their identity, and kept."""
    cells = getattr(task.criterion, "__closure__", None) or ()
    found: list[Any] = [task.module, *task.replicas, *map(contents, cells)]
    return [
        task.criterion,
        [part.changes for part in parts],
        [value if isinstance(value, _PLAIN) else (id(value), value) for value in found],
        [tensor.data_ptr() for replica in task.replicas for tensor in replica.tensors],
        [(kind, torch.get_autocast_dtype(kind)) for kind in autocast_types()],
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark],
        torch.backends.cudnn.deterministic,
        [part.fp32_precision for part in _PRECISIONS],
    ]


def _shape_of(rows: Any) -> Hashable:
    """What micro-batches have alike that one graph takes; ``None`` for what none takes."""
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
