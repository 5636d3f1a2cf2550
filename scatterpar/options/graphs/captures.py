"""The graphs of replicas: what is captured, in which memory, for which shapes.

A replica has one graph per shape of its micro-batches. All add gradients to the same
static tensors, and share one pool of memory.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices import memory
from scatterpar.devices.copies import write
from scatterpar.devices.memory import is_out_of_memory
from scatterpar.look_steps import is_look_step
from scatterpar.options.graphs.tape import RepeatableTape, Tape
from scatterpar.step.flat_gradients import FlatGradients
from scatterpar.step.loss import forward
from scatterpar.step.substeps import (
    detached_output,
)
from scatterpar.step.task import ReplicaTask
from scatterpar.torch_private.graphs import (
    free_cublas_workspaces,
    give_up_capture,
)

# Graphs per replica. They share one pool of memory, so that each one costs its static
# tensors and what the driver keeps of its kernels.
_SHAPES = 64


class NotCaptured(Exception):
    """The reason why a sub-step cannot be captured; the module's name
    comes before it.
    """


class CaptureLost(NotCaptured):
    """A capture failed. Another thread may have waited for the device meanwhile."""


@dataclass
class Graph:
    """A sub-step of one shape on one replica, before and after it is captured.

    Attributes:
        gradients: the static sums of those leaves that get a gradient, by position.
        tapes: of eager runs, all equal; of them, the capture keeps the last one.
        step: the step in which the last of ``tapes`` was made.
        last_use: the step that last had a sub-step of this shape.
        proof: the step that last proved it; 0 before.
        num_bytes: what a sub-step's activations take.
        reads_foreign_memory: whether it reads other memory than the replica's own;
            known from the capture on.
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


def separate(rows: Any) -> Any:
    """The rows, without two tensors that begin at one address: a tape could not tell
    them apart.
    """
    addresses = Counter(tensor.data_ptr() for tensor in nested.tensors(rows))
    if len(addresses) == addresses.total():
        return rows
    return nested.map_tensors(Tensor.clone, rows)


def graph_key(rows: Any) -> Hashable:
    """A key of the shapes that one graph accepts; ``None`` if no graph can."""
    for atom in nested.atoms(rows):
        is_dense = type(atom) is Tensor and atom.layout == torch.strided
        # An object may hold anything, and no tape knows a number among the rows.
        is_known = isinstance(atom, nested.PLAIN_CLASSES) or is_function(atom)
        if not is_dense and not is_known:
            return None
    return repr(nested.map_atoms(_kind_of_atom, rows))


def is_function(value: Any) -> bool:
    """Whether a value among the rows is code, such as the step function of a loop.

    A tape tells what it computes, as it does of the module.
    """
    return isinstance(value, (types.FunctionType, types.MethodType))


def _kind_of_atom(atom: Any) -> Any:
    if isinstance(atom, Tensor):
        return tuple(atom.shape), atom.stride(), atom.dtype
    if is_function(atom):
        return "function", atom.__qualname__
    return atom


class ReplicaGraphs:
    """The graphs of one replica, which share memory.

    Attributes:
        by_shape: the graphs by their keys; the one that was used last is the last.
        gradients: the static sums of the leaves' gradients, for all graphs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state: list[Any] = []
        self.forget()

    def begin(self, task: ReplicaTask, facts: Sequence[Any]) -> None:
        """Drop the graphs, before a step, if their memory has been exchanged, or one of
        the ``facts`` of all replicas is another.
        """
        # The tape of one replica says nothing of the addresses of another one.
        state = list(facts)
        # Gradients are known by the positions of their leaves, which are among the
        # tensors whose addresses follow.
        state += map(id, task.leaves)
        for replica in task.replicas:
            state += replica.addresses()
        if state != self._state:
            self.forget()
            self._state = state

    def forget(self) -> None:
        """Drop all graphs and static gradients; later graphs use a separate memory
        pool.
        """
        self.by_shape: dict[Hashable, Graph] = {}
        self.gradients = FlatGradients()
        self._pool: Any = None

    def find(self, key: Hashable, step: int) -> Graph | None:
        """Find the graph of this key, if there is one. It is used in ``step``."""
        graph = self.by_shape.pop(key, None)
        if graph is not None:
            self.by_shape[key] = graph
            graph.last_use = step
        return graph

    def make_room(self, step: int) -> bool:
        """Make room for one more graph, by dropping the one unused for longest.

        Returns ``False`` if this step uses all of them.
        """
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
        """Make static tensors for the gradients of these leaves, unless they exist.

        One per leaf for all graphs of the replica: sub-steps of all shapes add to it.
        """
        self.gradients.add_like(gradients, self._device)
        return {position: self.gradients.parts[position] for position in gradients}

    def note_memory(self, graph: Graph, tape: Tape, task: ReplicaTask) -> None:
        """See whether a graph reads other memory than the replica's own."""
        addresses = {tensor.data_ptr() for tensor in self.gradients.parts.values()}
        for replica in task.replicas:
            addresses |= {tensor.data_ptr() for tensor in replica.tensors}
        graph.reads_foreign_memory = not tape.addresses() <= addresses

    def capture(self, work: Callable[[], None]) -> Any:
        """Capture the kernels of ``work``, which must not synchronize with the device.

        Raises ``CaptureLost``.
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
            raise CaptureLost(
                "cannot be captured: it waits for the device, as with "
                "CUDA_LAUNCH_BLOCKING, or does what a graph cannot repeat, or another "
                f"thread waits for the device ({type(error).__name__}: {line})"
            ) from error
        finally:
            free_cublas_workspaces()
