"""Losses that compare rows with each other, and with a batch ``CASES``, by name."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from harness.agree import USUAL, Case
from harness.models import Of
from harness.oracle import build, randint, randn

FEATURES = 5
EMBEDDING = 6


def make_two_views(between=None):
    """Two views of each row to two embeddings, and a temperature that is learned."""

    def embed(model, view):
        hidden = model.between(model.first(view))
        return model.last(hidden)

    def forward(model, view, other_view):
        return {
            "one": embed(model, view),
            "other": embed(model, other_view),
            "scale": model.log_scale.exp(),
        }

    if between is None:
        between = nn.Tanh()
    first = nn.Linear(FEATURES, 7)
    scale = nn.Parameter(torch.tensor(0.7))
    last = nn.Linear(7, EMBEDDING)
    return Of(forward, last=last, log_scale=scale, first=first, between=between)


def two_views(*layers, seed=0):
    return build(lambda: make_two_views(*layers), seed)


def nt_xent(outputs, labels):
    """SimCLR: each view finds the other one of its row among all."""
    rows = len(labels)
    views = torch.cat([outputs["one"], outputs["other"]])
    embeddings = normalize(views, dim=1)
    similarity = embeddings @ embeddings.T / 0.5
    is_same_view = torch.eye(2 * rows, dtype=torch.bool)
    similarity = similarity.masked_fill(is_same_view, -torch.inf)
    partners = torch.arange(2 * rows).roll(rows)
    return cross_entropy(similarity, partners)


def clip(outputs, labels):
    """CLIP: both ways, with the model's own temperature, a 0-dim output."""
    images = normalize(outputs["one"], dim=1)
    texts = normalize(outputs["other"], dim=1)
    logits = outputs["scale"] * images @ texts.T
    partners = torch.arange(len(labels))
    loss_of_images = cross_entropy(logits, partners)
    loss_of_texts = cross_entropy(logits.T, partners)
    return (loss_of_images + loss_of_texts) / 2


LOSSES = {"nt_xent": nt_xent, "clip": clip}


def views(rows):
    """Two views of some rows, and labels."""
    view = randn(rows, FEATURES, seed=rows)
    other_view = randn(rows, FEATURES, seed=rows + 1)
    labels = randint(4, rows, seed=rows)
    return (view, other_view), labels


def case(name, rows, accum=3, default_run=USUAL):
    criterion = LOSSES[name]
    return Case(
        make_two_views,
        views(rows),
        lambda _: criterion,
        accum=accum,
        options={"whole_batch": True},
        only=("engine", "loss", "check", "compiled", "guarded"),
        default_run=default_run,
    )


CASES = {
    **{name: case(name, 37) for name in LOSSES},
    "clip": case(
        "clip",
        37,
        default_run=(
            "engine",
            "one",
            "loss",
            "check",
            "2 ranks",
            "3 ranks",
        ),
    ),
    **{f"{name}, one sub-step": case(name, 9, accum=1) for name in LOSSES},
    **{f"{name}, one row": case(name, 1, accum=16) for name in LOSSES},
}
