"""Compute one sub-step of a step alone, with the user's own module, in plain torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar import torch_private
from scatterpar.devices.transfers import Transfers
from scatterpar.plan import Plan, Share
from scatterpar.step.criterion_closure import closure_tensors_and_modules, training_buffers
from scatterpar.step.loss_weights import compute_loss_weights
from scatterpar.step.request import Request, check_int
from scatterpar.step.scatter import micro_batches, scatter
from scatterpar.step.substeps import (
    ReplicaTask,
    detached_output,
    forward,
    require_trainable,
)
from scatterpar.step.whole_batch import output_at
from scatterpar.threads.caller_context import autocast_types
from scatterpar.threads.generators import Generators, put_all
from scatterpar.threads.workers import Workers, add_note
from scatterpar.verify.user_state import preserve_user_state


def replay(
    module: nn.Module,
    request: Request,
    plan: Plan,
    place: tuple[int, int],
    generators: Generators,
    workers: Workers,
) -> tuple[Tensor | None, Any]:
    """Compute the sub-step at ``place``: the numbers of a replica and a sub-step.

    ``generators`` are those of the last step, or new ones if it does not apply. Earlier sub-steps
    run first if this one depends on them. Returns the loss and the output, and restores the state
    of modules, tensors and generators.
    """
    share = _share_at(plan, *place)
    replica, last = place
    device = plan.shares[0].device
    roots = [module, *closure_tensors_and_modules(request.criterion)]
    request = request.in_order(plan.order)
    on_master = replace(plan, shares=(replace(share, device=device),))
    # If forward passes write buffers, these are right only after the earlier sub-steps have run.
    first, state = generators.to_draw_again(replica, 0 if training_buffers(roots) else last)

    def run() -> tuple[Tensor | None, Any]:
        with _unobserved():  # the user's count= runs here, and collate for it
            weights = compute_loss_weights(
                request, plan, micro_batches(request.batch, plan, request.dim)
            )
        with Transfers() as transfers:
            (loader,) = scatter(request.batch, on_master, request.dim, transfers)
            task = ReplicaTask(share, module, loader, request.criterion, weights.by_share[replica])
            put_all(state)
            for number in range(first, last):
                try:
                    with _unobserved():
                        _sub_step(task, request, number)
                except BaseException as error:
                    add_note(error, f"in sub-step {number}, which runs before sub-step {last}")
                    raise
            return _sub_step(task, request, last)

    threads = torch.get_num_threads()
    with _state_restored(roots, device), torch_private.uncompiled():
        try:
            if len(plan.shares) > 1:  # the number of threads changes the order of sums in kernels
                torch.set_num_threads(max(1, threads // workers.count))
            result: tuple[Tensor | None, Any]
            (result,) = workers.parallel_apply([run], [()], devices=[device])
            return result
        finally:
            torch.set_num_threads(threads)


def _sub_step(task: ReplicaTask, request: Request, number: int) -> tuple[Tensor | None, Any]:
    """Run forward, loss and backward. With ``whole_batch`` forward only; the loss is ``None``."""
    rows, return_outputs = task.loader.load(number), request.return_outputs or True
    if request.whole_batch:
        return None, detached_output(output_at(task, rows), return_outputs)
    output, loss = forward(task, rows)
    output = detached_output(output, return_outputs)
    factor = task.weights[number] * request.scale
    if factor and request.backward:
        if not loss.requires_grad:
            require_trainable(task.module)
        with contextlib.ExitStack() as stack:
            for kind in autocast_types():
                stack.enter_context(torch.autocast(kind, enabled=False))
            gradient = torch.full_like(loss, factor, requires_grad=False)
            # The graph is retained: the module may keep parts of it, which are the user's.
            torch.autograd.backward([loss], [gradient], retain_graph=True)
    return loss.detach(), output


@contextlib.contextmanager
def _state_restored(roots: Sequence[Any], device: torch.device) -> Iterator[None]:
    """Restore random state, modules and tensors after the body.

    In it, leaves have no ``.grad`` and no hooks.
    """
    with preserve_user_state(roots, [device], parameters=True, modules_only=True) as state:
        leaves = [tensor for tensor in state.tensors if tensor.requires_grad and tensor.is_leaf]
        gradients = [leaf.grad for leaf in leaves]
        with torch_private.hooks_taken_off(leaves):
            try:
                for leaf in leaves:
                    leaf.grad = None
                yield
            finally:
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    leaf.grad = gradient


def _share_at(plan: Plan, replica: int, sub_step: int) -> Share:
    check_int("replica", replica)
    check_int("sub_step", sub_step)
    if not 0 <= replica < len(plan.shares):
        raise ValueError(
            f"replica={replica}: {plan.rows} rows are those of replicas 0 to "
            f"{len(plan.shares) - 1}; print engine.last_step.plan or engine.plan(...)"
        )
    number = len(plan.shares[replica].micro_batches)
    if not 0 <= sub_step < number:
        raise ValueError(
            f"sub_step={sub_step}: of {plan.rows} rows, replica {replica} has the sub-steps 0 to "
            f"{number - 1}; print engine.last_step.plan or engine.plan(...)"
        )
    return plan.shares[replica]


@contextlib.contextmanager
def _unobserved() -> Iterator[None]:
    """In the body ``breakpoint()`` does nothing, and debuggers by ``sys.settrace`` do not stop."""
    hook, trace = sys.breakpointhook, sys.gettrace()
    sys.breakpointhook = lambda *_, **__: None
    sys.settrace(None)
    try:
        yield
    finally:
        sys.breakpointhook = hook
        sys.settrace(trace)
