"""Measure what the module and criterion of one replica do with a few rows.

Beside loss and gradients, which ``Runs`` compute: outputs, losses of cut outputs, state
that calls move, memory. Each measurement begins in the state of the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.copies import to_numbers, write
from scatterpar.spans import Part
from scatterpar.step.loss import loss_of
from scatterpar.verify.moved_state import moved_between, new_in, state_of
from scatterpar.verify.output_differences import cut_by_parts
from scatterpar.verify.results import Result
from scatterpar.verify.rows import Parts
from scatterpar.verify.runs import Runs, copy_of_leaf

_OTHER_WEIGHTS = 0.1  # how much other they are, relatively


def outputs_of(runs: Runs, parts: Parts) -> list[Any]:
    """Compute the replica's output for each part, without its graph, from one state."""
    task = runs.replica_task
    outputs = []
    for rows in parts:
        with runs.surroundings(task):
            output = task.output_of(runs.inputs_of(rows))
            outputs.append(nested.map_tensors(_as_output_leaf, output))
            del output  # with its graph
    return outputs


def losses_of_parts(runs: Runs, output: Any, parts: Parts) -> list[Result]:
    """The criterion's loss of each part of one output, and its gradients.

    ``output`` has the rows of all parts, in their order. The module is not called:
    gradients are those of the output's tensors.
    """
    task = runs.replica_task
    tensors = [tensor for tensor in nested.tensors(output) if tensor.requires_grad]
    results = []
    with runs.surroundings(task):
        cuts = cut_by_parts(output, parts, runs.request.dim)
        for cut, rows in zip(cuts, parts, strict=True):
            # The criterion may write into what it is given.
            copied = nested.map_tensors(copy_of_leaf, cut)
            loss = loss_of(copied, runs.targets_of(rows), task.criterion)
            runs.rounding.watch(loss)
            results.append(Result(to_numbers(loss), _gradients_of(loss, tensors)))
    return results


def attributes_that_calls_move(runs: Runs, rows: Part) -> list[str]:
    """The names of attributes that a second call of module and criterion moves again.

    After the step they stay on the replica, even if it makes one call.
    """
    task = runs.replica_task
    with runs.surroundings(task):
        states = [state_of(task.replicas, has_same_rows=True)]
        for _ in range(2):
            runs.user_code.require_time()
            output = task.output_of(runs.inputs_of(rows))
            if task.criterion is not None:
                loss_of(output, runs.targets_of(rows), task.criterion)
            states.append(state_of(task.replicas, has_same_rows=True))
            before, after = states[-2:]
            names = moved_between([before, after])
            # The first call may only create an attribute, which is no state yet.
            if before.keys() == after.keys() and not names:
                return []
    return names


def state_that_begins(runs: Runs, rows: Part) -> list[str]:
    """The names of attributes that the first call makes and later ones read.

    A replica begins each step with the user's attributes, so such state is lost.

    ::

        call 1    the state of the step    makes an attribute, or fills one
        call 2    other weights            with what call 1 has left
        call 3    other weights            the state of the step

    If calls 2 and 3 give the same loss, the attribute is no state: it is not read, or
    computed again, or the same for all weights. Buffers are the state of the step in
    all three, because the engine commits them.
    """
    task = runs.replica_task

    def loss_of_rows() -> float:
        runs.user_code.require_time()
        output = task.output_of(runs.inputs_of(rows))
        loss = loss_of(output, runs.targets_of(rows), task.criterion)
        return float(to_numbers(loss))

    with runs.surroundings(task):
        buffers: list[tuple[nn.Module, str, Tensor, Tensor]] = []
        for replica in task.replicas:
            if isinstance(replica.root, nn.Module):
                for module in replica.root.modules():
                    for name, buffer in module.named_buffers(recurse=False):
                        buffers.append((module, name, buffer, buffer.clone()))
        before = state_of(task.replicas, has_same_rows=True)
        loss_of_rows()
        names = new_in(before, state_of(task.replicas, has_same_rows=True))
        if not names:
            return []
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                write(buffer, value)
        runs.nudge(0, _OTHER_WEIGHTS)
        with_state = loss_of_rows()
    with runs.surroundings(task):
        runs.nudge(0, _OTHER_WEIGHTS)
        without_state = loss_of_rows()
    if not (math.isfinite(with_state) or math.isfinite(without_state)):
        return []  # of other weights the loss says nothing
    difference = Result(with_state, ()).difference_from(Result(without_state, ()))
    return [] if difference <= runs.rounding.limit else names


def bytes_per_row(runs: Runs, rows: Part) -> float:
    """The memory that the graph of a row's loss keeps; infinite if unknown."""
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # By address, because a graph saves several views of one tensor.
        storages[storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: its node, which saves it, would never be freed.
        return tensor.detach()

    task = runs.replica_task
    saved_tensors = torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved)
    try:
        with runs.surroundings(task), saved_tensors:
            output = task.output_of(runs.inputs_of(rows))
            if not runs.request.whole_batch:
                loss_of(output, runs.targets_of(rows), task.criterion)
    except Exception:  # the look finds out
        return math.inf
    for leaf in runs.leaves.all():  # the parameters are there anyway
        storages.pop(leaf.untyped_storage().data_ptr(), None)
    return sum(storages.values()) / len(rows)


def _as_output_leaf(tensor: Tensor) -> Tensor:
    """The tensor without its graph. A criterion may ask for a gradient of it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _gradients_of(loss: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss; zeros for tensors that it does not depend on."""
    if not (loss.requires_grad and tensors):
        return [torch.zeros_like(tensor) for tensor in tensors]
    gradients = torch.autograd.grad(loss, tensors, materialize_grads=True)
    return [gradient.to_dense() for gradient in gradients]
