"""The model of the random walk, the fuse that makes it fail, and the plain loop beside it."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES = 4, 3


class Fuse:
    """Fails the ``after``-th visit of ``place``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.place, self.after, self.action = "", 0, lambda: None

    def light(self, place: str, after: int, action: Any) -> None:
        self.place, self.after, self.action = place, after, action

    def at(self, place: str) -> None:
        with self._lock:
            burns = place == self.place and self.after == 0
            if place == self.place:
                self.after -= 1
        if burns:
            self.action()


fuse = Fuse()


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        fuse.at("backward")
        return gradient


class Walker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 5)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5)])
        self.leave = nn.Linear(5, CLASSES)
        self.slope = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        fuse.at("forward")
        hidden = Backward.apply(self.norm(self.enter(inputs)))
        for block in self.blocks:
            hidden = torch.tanh(self.slope * block(hidden))
        return self.leave(hidden)


def criterion(output: Tensor, targets: Tensor) -> Tensor:
    fuse.at("criterion")
    return nn.functional.cross_entropy(output, targets)


def count(inputs: Tensor, targets: Tensor) -> int:
    fuse.at("count")
    return len(targets)


def plain_step(model: nn.Module, plan: Any, inputs: Tensor, targets: Tensor) -> None:
    """The whole batch, one micro-batch after the other; buffers as replica 0 leaves them."""
    kept = None
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for share in plan.shares:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
        for start, stop in share.micro_batches:
            loss = nn.functional.cross_entropy(model(inputs[start:stop]), targets[start:stop])
            if loss.requires_grad:
                (loss * ((stop - start) / plan.rows)).backward()
        kept = kept or {name: buffer.clone() for name, buffer in model.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.copy_(kept[name])
