"""Criteria that see the outputs of all rows at once, and models of every
kind for them.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from harness.agree import Case
from harness.contrastive import FEATURES
from harness.models import Of, linear
from harness.module_cases import with_buffers
from harness.oracle import build, randn
from scatterpar import Replicated, Rows


def pairs(outputs, _):
    """A loss of all pairs of rows: no micro-batch's is any part of it."""
    z = normalize(outputs, dim=1)
    return (z @ z.T).exp().mean().log() + outputs.square().mean()


def counted():
    """Computes otherwise in every second call: a plain counter, and one in a buffer."""

    def forward(m, inputs):
        m.calls += 1
        m.seen = m.seen + len(inputs)  # rebound, not written
        return m.linear(inputs) * (1 + m.calls % 2) + m.seen

    model = Of(forward, calls=0, linear=nn.Linear(FEATURES, 4))
    return with_buffers(model, seen=torch.zeros((), dtype=torch.long))


def normed():
    return nn.Sequential(
        nn.Linear(FEATURES, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()
    )


def frozen_views():
    """Two entries per row, and statistics that the backward pass reads: to look at the
    order of the entries once wrote these, and the step was refused.
    """
    norm = nn.BatchNorm1d(FEATURES).eval().requires_grad_(False)

    def forward(m, inputs):
        z = m.linear(inputs)
        return torch.stack([m.norm(z), m.norm(-z)], 1).flatten(0, 1)

    return Of(
        forward,
        linear=nn.Linear(FEATURES, FEATURES),
        norm=norm,
    )


class Tempered(nn.Module):
    """A criterion with a parameter, a projection head and a queue of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(4, 4)
        self.register_buffer("queue", torch.ones(2, 4))

    def forward(self, outputs, labels):
        z = self.head(outputs)
        logits = self.scale.exp() * z @ torch.cat([outputs, self.queue]).T
        self.queue.copy_(z.detach()[:2])  # the next loss depends on it
        return cross_entropy(logits, torch.arange(len(outputs)))


def everything():
    """Outputs of all kinds, some of them unused, some in place."""

    def forward(m, inputs):
        z = m.linear(inputs).mul_(2).tanh_()
        return {
            "z": z,
            "again": z,
            "nested": (z.square(), [z.argmax(1), "text", None]),
            "scale": m.log_scale.exp(),
            "itself": m.log_scale,
            "unused": z * 3,
            "doubled": torch.stack([z, -z], 1).flatten(0, 1),
            "constant": torch.ones(len(inputs), 2),
        }

    return Of(
        forward,
        linear=nn.Linear(FEATURES, 4),
        log_scale=nn.Parameter(torch.tensor(0.2)),
    )


def of_everything(outputs, _):
    square, (classes, text, nothing) = outputs["nested"]
    assert (text, nothing) == ("text", None)
    assert classes.dtype == torch.long
    assert outputs["doubled"].shape[0] == 2 * len(classes)
    total = pairs(outputs["z"] + outputs["again"], None) * outputs["scale"]
    total = total + (square * classes[:, None]).mean() * outputs["itself"]
    total = total + (outputs["doubled"] @ outputs["doubled"].T).sin().mean()
    return total + outputs["constant"].sum()


class Versions:
    """As timm's JsdCrossEntropy: rows are three versions of pictures, one after
    another.
    """

    num_splits = 3

    def __call__(self, output, targets):
        clean, *others = output.chunk(self.num_splits)
        far = sum(
            (other.softmax(1) - clean.softmax(1)).square().mean() for other in others
        )
        return cross_entropy(clean, targets[: len(clean)]) + far


ROWS = randn(19, FEATURES), None


def in_place(outputs, labels):
    """Writes to its arguments."""
    labels += 1
    outputs.mul_(2).sub_(outputs.mean(0, keepdim=True).detach())
    return cross_entropy(outputs @ outputs.T, labels)


def in_row_order(outputs, targets):
    """Entries of batches of one size were once joined with each other, first with
    first.
    """
    rows, (factor,) = targets
    assert [*map(len, rows)] == [*range(1, 12)]
    return (outputs.sum(1) * torch.stack([row.sum() for row in rows]) * factor).sum()


ENTRIES, FACTOR = [randn(length + 1) for length in range(11)], torch.tensor(2.0)
PARTS = [
    (Rows(few), [Replicated(FACTOR)])
    for few in (ENTRIES[:4], ENTRIES[4:8], ENTRIES[8:])
]


def of_pairs(make, **more):
    return Case(make, ROWS, lambda _: pairs, **more)


WHOLE = {
    "outputs of all kinds": Case(everything, ROWS, lambda _: of_everything),
    "two entries per row, frozen statistics": of_pairs(frozen_views),
    "a criterion that writes": Case(
        linear, (ROWS[0], torch.arange(19) - 1), lambda _: in_place
    ),
    "a closure": Case(
        linear,
        ROWS,
        lambda model: lambda outputs, _: pairs(outputs * model.bias.exp(), None),
    ),
    "a criterion with parameters and a queue": Case(
        linear, ROWS, lambda _: build(Tempered), accum=3
    ),
    "several batches in row order": Case(
        linear,
        (Rows.from_batches(ROWS[0][:11].split(4)), Rows.from_batches(PARTS)),
        lambda _: in_row_order,
        plain=(ROWS[0][:11], (ENTRIES, [FACTOR])),
    ),
}
for accum in (1, 3):
    WHOLE |= {
        f"statistics of a whole batch, {accum}": of_pairs(
            normed, by_share=True, accum=accum
        ),
        f"counters, {accum}": of_pairs(counted, by_share=True, accum=accum),
    }
CASES = {name: replace(case, only=("whole batch",)) for name, case in WHOLE.items()}
