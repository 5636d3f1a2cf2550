"""The model that faults are injected into."""

from __future__ import annotations

from typing import Any

import torch
from harness.oracle import build
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from faults.trap import trap

FEATURES = 4
CLASSES = 3


class Steps(torch.autograd.Function):
    """The identity, with a backward that is a place."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        trap.at("backward of a Function")
        return gradient


class Subject(nn.Module):
    """Draws random numbers, moves buffers, rebinds attributes: a half-done step would
    show.
    """

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.middle = nn.Linear(6, 6)
        self.leave = nn.Linear(6, CLASSES)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls = 0
        self.log: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        trap.enter(inputs)
        self.calls += 1
        self.log.append(len(inputs))
        self.seen = self.seen + len(inputs)
        trap.at("forward, first line")
        hidden = self.dropout(self.norm(self.enter(inputs)))
        hidden.register_hook(lambda gradient: trap.at("hook on a tensor"))
        hidden = checkpoint(self._recomputed, hidden, use_reentrant=False)
        output = self.leave(Steps.apply(self.middle(hidden).tanh()))
        trap.follow(output)
        trap.at("forward, last line")
        return output

    def _recomputed(self, hidden: Tensor) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            trap.at("recomputation under checkpoint")
        return self.dropout(hidden.sin())


def build_subject() -> Subject:
    return build(Subject)


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs whose first column numbers the rows, and targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, FEATURES, generator=generator, dtype=torch.float64)
    inputs[:, 0] = torch.arange(rows)
    return inputs, torch.randint(CLASSES, (rows,), generator=generator)
