"""State that begins in the first call of a module or criterion.

A replica begins each step with the user's attributes, so such state is lost.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from scatterpar.devices.copies import to_numbers, write
from scatterpar.spans import Part
from scatterpar.step.loss import loss_of
from scatterpar.verify.moved_state import new_in, state_of
from scatterpar.verify.results import Result
from scatterpar.verify.runs import Runs

_OTHER_WEIGHTS = 0.1  # how much other they are, relatively


def state_that_begins(runs: Runs, rows: Part) -> list[str]:
    """The names of attributes that the first call makes and later ones read.

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
