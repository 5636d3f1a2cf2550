"""The contenders that run in this process.

Each computes the gradient of one optimizer step of a case::

    engine          engine.forward_backward(images, labels, criterion)
    loop            for each micro-batch: (criterion(module(x), y) / pieces).backward()
    data_parallel   the loop, with nn.DataParallel(module)
    per_call        the loop, with the schedule of nn.DataParallel on CPU replicas
    call            the loop, with calls of the engine, inside of no_sync() but the last
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Case
from benchmarks.per_call import PerCall
from benchmarks.timing import timed
from scatterpar import ScatterOnceParallel
from scatterpar.devices.device_ids import resolve

criterion = nn.CrossEntropyLoss()


class Peer:
    """A contender: its module, and a function that adds the batch's gradient to it."""

    def __init__(self, module: nn.Module, run: Callable[[], Any]) -> None:
        self.module = module
        self.run = run

    def step(self) -> float:
        """The seconds that one step takes, from no gradients to all of them."""
        self.module.zero_grad()
        return timed(self.run)

    def gradient(self) -> Tensor:
        """The gradient of a step in eval mode, as one vector.

        Batch normalisation is at rest there, so the gradient is the same for all
        contenders, whatever the sizes of their micro-batches.
        """
        self.module.eval()
        self.step()
        self.module.train()
        return joined_gradient(self.module)


def joined_gradient(module: nn.Module) -> Tensor:
    """The gradients of all parameters as one vector."""
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def engine(case: Case, device_ids: Sequence[str]) -> Peer:
    """ScatterOnceParallel."""
    module = case.module()
    images, labels = case.data()
    parallel = ScatterOnceParallel(module, accum=case.accum, device_ids=device_ids)
    return Peer(module, lambda: parallel.forward_backward(images, labels, criterion))


def loop(case: Case, pieces: int) -> Peer:
    """A loop written by hand over ``pieces`` micro-batches, on all cores."""
    module = case.module()
    return Peer(module, _accumulation(module, case, pieces))


def data_parallel(case: Case) -> Peer:
    """``nn.DataParallel`` itself, called once per sub-step."""
    module = case.module()
    return Peer(module, _accumulation(nn.DataParallel(module), case, case.accum))


def per_call(case: Case, device_ids: Sequence[str]) -> Peer:
    """The schedule of ``nn.DataParallel`` on CPU replicas, called once per sub-step."""
    module = case.module()
    parallel = PerCall(module, resolve(device_ids))
    return Peer(module, _accumulation(parallel, case, case.accum))


def call(case: Case, device_ids: Sequence[str]) -> Peer:
    """``ScatterOnceParallel`` in the place of ``nn.DataParallel``, called once per
    sub-step.
    """
    module = case.module()
    parallel = ScatterOnceParallel(module, device_ids=device_ids)
    run = _accumulation(parallel, case, case.accum, parallel.no_sync)
    return Peer(module, run)


def _accumulation(
    module: Callable[..., Any],
    case: Case,
    pieces: int,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Callable[[], None]:
    """A function that accumulates the gradient of the case's batch in ``pieces``, all
    but the last inside of ``no_sync``.
    """
    images, labels = case.data()
    micro_batches = list(zip(images.chunk(pieces), labels.chunk(pieces), strict=True))

    def run() -> None:
        for number, (micro_images, micro_labels) in enumerate(micro_batches, 1):
            with nullcontext() if number == len(micro_batches) else no_sync():
                loss = criterion(module(micro_images), micro_labels)
                (loss / len(micro_batches)).backward()

    return run
