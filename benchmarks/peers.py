"""The contenders that run in this process. Each is one optimizer step's gradient of a
case.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import Case
from benchmarks.per_call import PerCall
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
        start = time.perf_counter()
        self.run()
        return time.perf_counter() - start

    def gradient(self) -> Tensor:
        """The gradient with batch normalisation at rest: the same for all, however they
        cut.
        """
        self.module.eval()
        self.step()
        self.module.train()
        return torch.cat(
            [parameter.grad.flatten() for parameter in self.module.parameters()]
        )


def engine(case: Case, device_ids: Sequence[str]) -> Peer:
    """ScatterOnceParallel."""
    module = case.module()
    images, labels = case.data()
    parallel = ScatterOnceParallel(module, accum=case.accum, device_ids=device_ids)
    return Peer(module, lambda: parallel.forward_backward(images, labels, criterion))


def loop(case: Case, pieces: int) -> Peer:
    """What one writes by hand: forward and backward over ``pieces`` micro-batches, all
    cores.
    """
    module = case.module()
    return Peer(module, _accumulation(module, case, pieces))


def data_parallel(case: Case) -> Peer:
    """``nn.DataParallel`` itself, called once a sub-step."""
    module = case.module()
    return Peer(module, _accumulation(nn.DataParallel(module), case, case.accum))


def per_call(case: Case, device_ids: Sequence[str]) -> Peer:
    """The schedule of ``nn.DataParallel`` on CPU replicas, called once a sub-step."""
    module = case.module()
    parallel = PerCall(module, resolve(device_ids))
    return Peer(module, _accumulation(parallel, case, case.accum))


def _accumulation(
    module: Callable[..., Any], case: Case, pieces: int
) -> Callable[[], None]:
    images, labels = case.data()
    batch = list(zip(images.chunk(pieces), labels.chunk(pieces), strict=True))

    def run() -> None:
        for micro_images, micro_labels in batch:
            (criterion(module(micro_images), micro_labels) / len(batch)).backward()

    return run
