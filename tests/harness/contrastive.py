"""Losses that compare rows with each other, and with a batch ``CASES``, by name."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from harness.agree import EVERY_WAY, USUAL, Case
from harness.models import Of
from harness.oracle import build, randint, randn

FEATURES, EMBEDDING = 5, 6


def make_two_views(between=None):
    """Two views of each row to two embeddings, and a temperature that is learned."""

    def forward(m, one, other):
        one, other = (m.last(m.between(m.first(view))) for view in (one, other))
        return {"one": one, "other": other, "scale": m.log_scale.exp()}

    parts = {
        "first": nn.Linear(FEATURES, 7),
        "between": nn.Tanh() if between is None else between,
    }
    scale = nn.Parameter(torch.tensor(0.7))
    return Of(forward, last=nn.Linear(7, EMBEDDING), log_scale=scale, **parts)


def two_views(*layers, seed=0):
    return build(lambda: make_two_views(*layers), seed)


def nt_xent(outputs, labels):
    """SimCLR: each view finds the other one of its row among all."""
    n = len(labels)
    z = normalize(torch.cat([outputs["one"], outputs["other"]]), dim=1)
    similarity = (z @ z.T / 0.5).masked_fill(
        torch.eye(2 * n, dtype=torch.bool), -torch.inf
    )
    return cross_entropy(similarity, torch.arange(2 * n).roll(n))


def clip(outputs, labels):
    """CLIP: both ways, with the model's own temperature, a 0-dim output."""
    one, other = normalize(outputs["one"], dim=1), normalize(outputs["other"], dim=1)
    logits = outputs["scale"] * one @ other.T
    right = torch.arange(len(labels))
    return (cross_entropy(logits, right) + cross_entropy(logits.T, right)) / 2


LOSSES = {f.__name__: f for f in (nt_xent, clip)}


def views(rows):
    """Two views of some rows, and labels."""
    both = randn(rows, FEATURES, seed=rows), randn(rows, FEATURES, seed=rows + 1)
    return both, randint(4, rows, seed=rows)


def case(name, rows, accum=3, default_run=USUAL):
    return Case(
        make_two_views,
        views(rows),
        lambda _: LOSSES[name],
        accum=accum,
        options={"whole_batch": True},
        only=("engine", "loss", "check", "by cost", "compiled", "guarded"),
        default_run=default_run,
    )


CASES = {
    **{name: case(name, 37) for name in LOSSES},
    "clip": case(
        "clip",
        37,
        default_run=(*EVERY_WAY, "2 ranks", "3 ranks", "3 ranks by cost"),
    ),
    **{f"{name}, one sub-step": case(name, 9, accum=1) for name in LOSSES},
    **{f"{name}, one row": case(name, 1, accum=16) for name in LOSSES},
}
