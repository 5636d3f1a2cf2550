"""graphs=True: a sub-step is captured once, and given to the device as one for each micro-batch::

    rows, and the weight of their loss      copied into tensors that stay
    forward, criterion, backward            the graph
    loss, output                            copied out of tensors that stay
    gradients                               add up in tensors that stay; copied out after the last

Python runs while a sub-step is captured, and not again: launching costs the same whatever the size
of the model. A graph belongs to one replica and one shape of micro-batch, and holds as long as
module, criterion and autocast stay as they are, and parameters where they are. What cannot be
captured runs as it does without graphs, and that is told once. On the CPU nothing is captured: the
same code is called again, on the same tensors.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from scatterpar.devices import verbs
from scatterpar.devices.chunks import copy_each
from scatterpar.replicas.replicas import Replica, Replicas, is_state
from scatterpar.report import warn
from scatterpar.step import nested
from scatterpar.step.fitting import is_out_of_memory
from scatterpar.step.markers import opened
from scatterpar.step.request import Request
from scatterpar.step.substeps import Launched, Task, forward, kept, pull
from scatterpar.threads.context import autocast_types
from scatterpar.threads.generators import Generators

__all__ = ["Graphs"]

_SHAPES = 8  # graphs of one replica; micro-batches of further shapes run without
_CAPTURES = 32  # of one replica in all: more, and something changes from step to step
_WARM_UPS = 2  # the second one adds to gradients, as a graph does


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

    def compute(self, task: Task, keep: bool) -> None:
        """The sub-step itself: what is captured, or on the CPU called again."""
        output, loss = forward(task, self.rows)
        self.output = kept(output, keep=True) if keep else None
        del output
        self.loss.copy_(loss.detach())
        pull([loss], [self.factor], autocast_types())


@dataclass
class _Kept:
    """The graphs of one replica, and what they depend on."""

    state: list[Any]
    alive: list[Any]  # what ``state`` names by its id
    graphs: dict[Hashable, tuple[_Graph, Callable[..., None]]] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)
    pool: Any = None


class Graphs:
    """The captured sub-steps of an engine's replicas."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._captures: dict[int, int] = {}
        # One for all of a replica's: nodes of autograd, which a traceback may hold, remember it.
        self._streams: dict[int, torch.Stream | None] = {}
        self._refused: set[int] = set()
        self._telling = threading.Lock()
        self._told = False

    def of(
        self, task: Task, request: Request, parts: Sequence[Replicas], generators: Generators
    ) -> Graphed:
        """What computes the sub-steps of one replica in one step."""
        number = task.share.replica
        replicas = [part.replicas[number] for part in parts]
        state, alive = _state_of(task, parts, replicas)
        before = self._kept.get(number)
        if before is None or before.state != state:
            before = self._kept[number] = _Kept(state, alive)
        if number not in self._streams:
            self._streams[number] = verbs.another_stream(task.share.device)
        stream = self._streams[number]
        return Graphed(self, before, task, request, replicas, generators, stream)

    def may_capture(self, number: int) -> bool:
        """Whether replica ``number`` goes on capturing, after one capture more."""
        count = self._captures[number] = self._captures.get(number, 0) + 1
        if count > _CAPTURES:
            self.refuse(
                number,
                f"sub-steps were captured {_CAPTURES} times, since something changes from step to "
                f"step: the criterion (make it once, before the loop), a number that is an "
                f"attribute of the module (make it a tensor), or the shapes of batches",
            )
        return not self.refuses(number)

    def refuses(self, number: int) -> bool:
        """Whether replica ``number`` captures nothing any more."""
        return number in self._refused

    def refuse(self, number: int, why: str) -> None:
        """From now on replica ``number`` captures nothing; it is told once for all of them."""
        self._refused.add(number)
        self._kept.pop(number, None)
        with self._telling:
            told, self._told = self._told, True
        if not told:
            warn(f"graphs=True: sub-steps run as without graphs, because {why}")


class Graphed(Launched):
    """Sub-steps of one replica in one step, by its graphs where there are any.

    Args:
        graphs: of the engine.
        kept: those of the replica.
        task: the replica, its rows and their weights.
        request: which outputs to keep.
        replicas: the replica of the model, and that of the criterion.
        generators: of what is drawn.
        stream: where sub-steps are warmed up and captured.
    """

    def __init__(
        self,
        graphs: Graphs,
        kept: _Kept,
        task: Task,
        request: Request,
        replicas: Sequence[Replica],
        generators: Generators,
        stream: torch.Stream | None,
    ) -> None:
        super().__init__(task, request)
        self._graphs, self._kept, self._replicas, self._generators = (
            graphs,
            kept,
            replicas,
            generators,
        )
        self._stream = stream
        self._in_place: dict[int, Tensor] = {}  # leaves whose gradients are those that stay

    def run(self, number: int, weight: float, rows: Any = None) -> tuple[Tensor, Any]:
        """The loss of a micro-batch, and what is kept of its output; gradients are added."""
        task, graphs = self._task, self._kept.graphs
        key = _shape_of(opened(task.arrival.at_source(number))) if weight else None
        if key in graphs:
            rows = task.arrival.rows_of(number)
            pairs = zip(nested.tensors(graphs[key][0].rows), nested.tensors(rows), strict=True)
            for target, source in pairs:
                target.copy_(source)
        elif key is not None and self._may_capture():
            rows = task.arrival.rows_of(number)
            try:
                graphs[key] = self._captured(_copied(rows))
            except _Refused as error:
                self._graphs.refuse(task.share.replica, str(error))
        if key not in graphs:
            return super().run(number, weight, rows)
        graph, replay = graphs[key]
        self._put_in_place(graph.gradients)
        graph.factor.fill_(weight * self._request.scale)
        replay(task, bool(self._keep))
        output = kept(_copied(graph.output), self._keep) if self._keep else None
        return graph.loss.clone(), output

    def finish(self) -> None:
        """Gradients leave the tensors that stay, which later steps write."""
        leaves = [self._task.leaves[i] for i in self._in_place]
        copies = [torch.empty_like(gradient) for gradient in self._in_place.values()]
        copy_each(copies, list(self._in_place.values()))
        for leaf, gradient in zip(leaves, copies, strict=True):
            leaf.grad = gradient

    def _may_capture(self) -> bool:
        number = self._task.share.replica
        if self._graphs.refuses(number) or len(self._kept.graphs) >= _SHAPES:
            return False
        return self._graphs.may_capture(number)

    def _put_in_place(self, gradients: dict[int, Tensor]) -> None:
        """From here on these leaves' gradients add up where the graph adds to them."""
        new = {i: g for i, g in gradients.items() if i not in self._in_place}
        if not new:
            return
        leaves = self._task.leaves
        fresh = [g for i, g in new.items() if leaves[i].grad is None]
        if fresh:
            torch._foreach_zero_(fresh)
        for i, gradient in new.items():
            came = leaves[i].grad
            if came is not None:  # by a sub-step without a graph
                gradient.copy_(came)
            leaves[i].grad = gradient
        self._in_place |= new

    def _captured(self, rows: Any) -> tuple[_Graph, Callable[..., None]]:
        """A graph for micro-batches like ``rows``, which it keeps. Leaves no trace.

        Raises:
            _Refused: it cannot be had.
        """
        task, leaves = self._task, self._task.leaves
        if task.stash is None or task.stash.gave_beyond(task.share.replica):
            raise _Refused("the criterion reaches parameters beside those of the module")
        came = [leaf.grad for leaf in leaves]
        states = [t for one in self._replicas for t in one.tensors if is_state(t)]
        before = [torch.empty_like(t) for t in states]
        copy_each(before, states)
        position = self._generators.get_state(task.share.replica)
        try:
            with verbs.beside(self._stream):
                graph = self._warmed_up(rows)
            for i, gradient in graph.gradients.items():
                leaves[i].grad = gradient
            replay, self._kept.pool = self._recorded(graph)
            return graph, replay
        except Exception as error:
            if is_out_of_memory(error):
                self._kept.graphs.clear()  # their memory may be what is missing
            raise
        finally:
            for leaf, own in zip(leaves, came, strict=True):
                leaf.grad = own
            with torch.no_grad():
                for replica in self._replicas:
                    replica.refresh()
                copy_each(states, before)
            self._generators.set_state(task.share.replica, position)

    def _warmed_up(self, rows: Any) -> _Graph:
        """What stays, after sub-steps that allocate and choose what later ones find."""
        task, leaves, number = self._task, self._task.leaves, self._task.share.replica
        for leaf in leaves:
            leaf.grad = None
        stash, nothing_kept = task.stash, replace(self._request, return_outputs=False)
        assert stash is not None
        host: list[tuple[Any, ...]] = [()]
        for _ in range(_WARM_UPS):
            launched = Launched(task, nothing_kept)
            loss, _ = launched.run(0, 1.0, _copied(rows))
            now = self._generators.get_state(number).get(torch.device("cpu"))
            host.append((random.getstate(), None if now is None else now.tolist()))
            if stash.gave_beyond(number):
                stash.forget_beyond(number)
                raise _Refused("the criterion reaches parameters beside those of the module")
        if any(not one.is_as_refreshed() for one in self._replicas):
            raise _Refused(
                f"the forward pass of {_name(task)} keeps something on the module that is no "
                f"buffer written in place"
            )
        if verbs.launches(task.share.device) and host[-1] != host[-2]:
            raise _Refused(f"{_name(task)} or the criterion draws random numbers on the host")
        found = {i: leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
        if any(g.layout != torch.strided for g in found.values()):
            raise _Refused(f"{_name(task)} has sparse gradients")
        for i, gradient in found.items():
            self._kept.gradients.setdefault(i, torch.zeros_like(gradient))
        stays = {i: self._kept.gradients[i] for i in found}
        return _Graph(rows, torch.ones_like(loss), torch.empty_like(loss), stays)

    def _recorded(self, graph: _Graph) -> tuple[Callable[..., None], Any]:
        task = self._task
        try:
            return verbs.capture(
                self._stream, graph.compute, task, bool(self._keep), pool=self._kept.pool
            )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            what = str(error).strip().partition("\n")[0]
            raise _Refused(
                f"a sub-step of {_name(task)} cannot be captured: it waits for the device, or does "
                f"what a graph cannot repeat ({type(error).__name__}: {what})"
            ) from error


def _name(task: Task) -> str:
    return type(task.module).__name__


_PLAIN = (bool, int, float, str, type(None))


def _state_of(
    task: Task, parts: Sequence[Replicas], replicas: Sequence[Replica]
) -> tuple[list[Any], list[Any]]:
    """What the graphs of a replica depend on, and what is named by its id in it."""
    alive: list[Any] = [task.module, *replicas]
    for cell in getattr(task.criterion, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # it is empty
            alive.append(cell.cell_contents)
    return [
        task.criterion,
        [part.changes for part in parts],
        [value if isinstance(value, _PLAIN) else id(value) for value in alive],
        [tensor.data_ptr() for replica in replicas for tensor in replica.tensors],
        [(kind, torch.get_autocast_dtype(kind)) for kind in autocast_types()],
        torch.is_grad_enabled(),
    ], alive


def _shape_of(rows: Any) -> Hashable:
    """What micro-batches have alike that one graph takes; ``None`` for what none takes."""
    try:
        return repr(nested.transform(_outline, rows))
    except _Refused:
        return None


def _outline(leaf: Any) -> Hashable:
    if type(leaf) is Tensor and leaf.layout == torch.strided:
        return tuple(leaf.shape), leaf.stride(), leaf.dtype
    if isinstance(leaf, _PLAIN):
        return leaf
    raise _Refused


def _copied(value: Any) -> Any:
    return nested.transform(_clone, value)


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
