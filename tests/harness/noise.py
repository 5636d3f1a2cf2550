"""Models that draw random numbers, and write down which."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.models import CLASSES, FEATURES
from harness.oracle import build, randint, randn

ROWS = 24
BATCH = randn(ROWS, FEATURES), randint(CLASSES, ROWS)


class Masks(nn.Module):
    """Dropout that writes down which mask each row got, by a row number in the first feature.

    Drawn again under checkpointing, a row must get the mask that it got before.
    """

    drawn: dict[int, torch.Tensor] = {}  # noqa: RUF012
    lock = threading.Lock()
    replay = False

    def forward(self, rows, hidden):
        if Masks.replay:
            return hidden * torch.stack([Masks.drawn[row] for row in rows.tolist()])
        mask = torch.bernoulli(torch.full_like(hidden, 0.5)) * 2
        with Masks.lock:
            for row, its in zip(rows.tolist(), mask.detach().clone(), strict=True):
                Masks.drawn.setdefault(row, its)
        return hidden * mask


class Noisy(nn.Module):
    def __init__(self, use_reentrant=None):
        super().__init__()
        self.first = nn.Linear(FEATURES, 32)
        self.masks = Masks()
        self.head = nn.Linear(32, CLASSES)
        self.use_reentrant = use_reentrant

    def block(self, rows, hidden):
        hidden = self.masks(rows, self.first(hidden).tanh())
        return nn.functional.dropout(hidden, 0.0, self.training)

    def forward(self, numbered):
        rows, inputs = numbered[:, 0].long(), numbered[:, 1:]
        if self.use_reentrant is None:
            return self.head(self.block(rows, inputs))
        inputs = inputs.detach().requires_grad_()  # the reentrant variant needs one such input
        return self.head(checkpoint(self.block, rows, inputs, use_reentrant=self.use_reentrant))


NUMBERED = torch.cat([torch.arange(ROWS).double()[:, None], BATCH[0]], 1)
VARIANTS = {"plain": None, "reentrant": True, "not reentrant": False}


def dropout_model(seed=0):
    return build(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 32),
            nn.Dropout(0.5),
            nn.Tanh(),
            nn.Dropout(0.3),
            nn.Linear(32, CLASSES),
        ),
        seed,
    )


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
