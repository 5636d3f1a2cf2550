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
    rows = normalize(outputs, dim=1)
    similarity = rows @ rows.T
    spread = similarity.exp().mean().log()
    return spread + outputs.square().mean()


def counted():
    """Computes otherwise in every second call: a plain counter, and one in a buffer."""

    def forward(model, inputs):
        model.calls += 1
        model.seen = model.seen + len(inputs)  # rebound, not written
        factor = 1 + model.calls % 2
        return model.linear(inputs) * factor + model.seen

    model = Of(forward, calls=0, linear=nn.Linear(FEATURES, 4))
    seen = torch.zeros((), dtype=torch.long)
    return with_buffers(model, seen=seen)


def normed():
    linear = nn.Linear(FEATURES, 6, bias=False)
    return nn.Sequential(linear, nn.BatchNorm1d(6), nn.Tanh())


def frozen_views():
    """Two entries per row, and statistics that the backward pass reads."""

    def forward(model, inputs):
        rows = model.linear(inputs)
        return torch.stack([model.norm(rows), model.norm(-rows)], 1)

    norm = nn.BatchNorm1d(FEATURES)
    norm.eval().requires_grad_(False)
    return Of(forward, linear=nn.Linear(FEATURES, FEATURES), norm=norm)


class Tempered(nn.Module):
    """A criterion with a parameter, a projection head and a queue of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(4, 4)
        self.register_buffer("queue", torch.ones(2, 4))

    def forward(self, outputs, labels):
        projected = self.head(outputs)
        keys = torch.cat([outputs, self.queue])
        logits = self.scale.exp() * projected @ keys.T
        self.queue.copy_(projected.detach()[:2])  # the next loss depends on it
        return cross_entropy(logits, torch.arange(len(outputs)))


def everything():
    """Outputs of all kinds, some of them unused, some in place."""

    def forward(model, inputs):
        rows = model.linear(inputs).mul_(2).tanh_()
        classes = rows.argmax(1)
        doubled = torch.stack([rows, -rows], 1)
        return {
            "rows": rows,
            "again": rows,
            "nested": (rows.square(), [classes, "text", None]),
            "scale": model.log_scale.exp(),
            "itself": model.log_scale,
            "unused": rows * 3,
            "doubled": doubled,
            "constant": torch.ones(len(inputs), 2),
        }

    linear = nn.Linear(FEATURES, 4)
    log_scale = nn.Parameter(torch.tensor(0.2))
    return Of(forward, linear=linear, log_scale=log_scale)


def of_everything(outputs, _):
    square, (classes, text, nothing) = outputs["nested"]
    assert (text, nothing) == ("text", None)
    assert classes.dtype == torch.long
    doubled = outputs["doubled"].flatten(0, 1)
    assert doubled.shape[0] == 2 * len(classes)
    total = pairs(outputs["rows"] + outputs["again"], None) * outputs["scale"]
    of_classes = square * classes[:, None]
    total = total + of_classes.mean() * outputs["itself"]
    products = doubled @ doubled.T
    total = total + products.sin().mean()
    return total + outputs["constant"].sum()


class Versions:
    """As timm's JsdCrossEntropy: rows are three versions of pictures, one after
    another.
    """

    num_splits = 3

    def __call__(self, output, targets):
        clean, *augmented = output.chunk(self.num_splits)
        loss = cross_entropy(clean, targets[: len(clean)])
        for version in augmented:
            distance = version.softmax(1) - clean.softmax(1)
            loss = loss + distance.square().mean()
        return loss


ROWS = randn(19, FEATURES), None


def in_place(outputs, labels):
    """Writes to its arguments."""
    labels += 1
    mean = outputs.mean(0, keepdim=True).detach()
    outputs.mul_(2).sub_(mean)
    return cross_entropy(outputs @ outputs.T, labels)


def in_row_order(outputs, targets):
    """Entries of batches of one size were once joined with each other, first with
    first.
    """
    rows, (factor,) = targets
    lengths = [len(row) for row in rows]
    assert lengths == list(range(1, 12))
    sums = torch.stack([row.sum() for row in rows])
    products = outputs.sum(1) * sums * factor
    return products.sum()


def in_a_closure(model):
    """A criterion that reads a parameter of the model."""
    return lambda outputs, _: pairs(outputs * model.bias.exp(), None)


ENTRIES = [randn(length + 1) for length in range(11)]
FACTOR = torch.tensor(2.0)
PARTS = []  # the targets of three batches
for entries in (ENTRIES[:4], ENTRIES[4:8], ENTRIES[8:]):
    PARTS.append((Rows(entries), [Replicated(FACTOR)]))
SEVERAL = Rows.from_batches(ROWS[0][:11].split(4)), Rows.from_batches(PARTS)


def pairs_of_views(outputs, targets):
    return pairs(outputs.flatten(0, 1), targets)


def of_pairs(make, **columns):
    return Case(make, ROWS, lambda _: pairs, **columns)


def of_pairs_by_share(make, accum):
    return of_pairs(make, by_share=True, accum=accum)


WHOLE = {
    "outputs of all kinds": Case(everything, ROWS, lambda _: of_everything),
    "two entries per row, frozen statistics": Case(
        frozen_views, ROWS, lambda _: pairs_of_views
    ),
    "a criterion that writes": Case(
        linear, (ROWS[0], torch.arange(19) - 1), lambda _: in_place
    ),
    "a closure": Case(linear, ROWS, in_a_closure),
    "a criterion with parameters and a queue": Case(
        linear, ROWS, lambda _: build(Tempered), accum=3
    ),
    "several batches in row order": Case(
        linear,
        SEVERAL,
        lambda _: in_row_order,
        plain=(ROWS[0][:11], (ENTRIES, [FACTOR])),
    ),
    "statistics of a whole batch, 1": of_pairs_by_share(normed, accum=1),
    "statistics of a whole batch, 3": of_pairs_by_share(normed, accum=3),
    "counters, 1": of_pairs_by_share(counted, accum=1),
    "counters, 3": of_pairs_by_share(counted, accum=3),
}
CASES = {}
for name, case in WHOLE.items():
    CASES[name] = replace(case, only=("whole batch",), default_run=("whole batch",))
