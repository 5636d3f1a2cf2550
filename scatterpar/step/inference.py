"""Inference: scatter once, run in micro-batches without a graph, gather to the master."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from scatterpar.replicas.buffers import running
from scatterpar.replicas.copies import Copies
from scatterpar.replicas.replicas import guarded
from scatterpar.step import nested
from scatterpar.step.commit import commit_buffers
from scatterpar.step.compute import warm_up
from scatterpar.step.markers import has_entries
from scatterpar.step.nested import join_rows
from scatterpar.step.reduce import collect, reduce_buffers, reduce_moments
from scatterpar.step.request import Request
from scatterpar.step.scatter import scatter
from scatterpar.step.substeps import Task, hand_out, noted
from scatterpar.threads.attempt import Attempt


def infer(
    attempt: Attempt, copies: Copies, module: nn.Module, request: Request, buffers_from: str
) -> Any:
    """The module's output for the whole batch, on the master.

    Raises:
        ValueError: a forward pass wrote parameters.
    """
    plan, ledger = attempt.plan, attempt.ledger
    arrivals = scatter(request.batch, plan, request.dim, ledger)
    copies.refresh(module, None, ledger)
    tasks, parts = hand_out(request, plan, copies, arrivals), copies.parts
    with guarded(parts):
        warm_up(attempt, tasks, parts, _predicted)
        lists = has_entries(request.batch)
        outputs = attempt.run(partial(_infer_share, lists=lists), tasks)
    output = collect(outputs, plan, request.dim, ledger, lists=lists)
    ledger.settle()
    if module.training:
        buffers = reduce_buffers(parts, plan.shares, buffers_from, ledger)
        for layer in reduce_moments(parts, len(outputs), ledger):
            buffers += running(layer)
        commit_buffers(buffers)
    attempt.generators.commit()
    return output


def _infer_share(task: Task, *, lists: bool, proceed: Callable[[], None]) -> Any:
    """The module's outputs on its share, computed in micro-batches and joined."""
    outputs = []
    rows = [stop - start for start, stop in task.share.micro_batches]
    for number in range(len(rows)):
        if number:
            proceed()
        with noted(task.share, number):
            outputs.append(_predicted(task, number))
    with noted(task.share):
        return join_rows(outputs, task.dim, rows, rows, lists=lists)


def _predicted(task: Task, number: int) -> Any:
    """The module's output for one micro-batch of inference."""
    with torch.no_grad():
        (args, kwargs), _ = task.arrival.rows_of(number)
        output = task.module(*args, **kwargs)
        nested.refuse_generators(output)
        return output
