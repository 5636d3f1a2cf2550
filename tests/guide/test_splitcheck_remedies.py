"""What splitcheck's errors name as the way out is followed, and passes."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from harness.oracle import build, randint, randn
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import splitcheck


def of_batch(model, batch):
    rows, labels = batch
    return cross_entropy(model(rows), labels, reduction="sum") / 7


def loop(model, batches):
    for batch in batches:
        of_batch(model, batch).backward()


def of_one_batch(model, batch):
    of_batch(model, batch).backward()


def cleared(model, batches):
    loop(model, batches)
    model.zero_grad()


def drawn(model, batches):
    """Weights per row, centred: with constant numbers all are zero."""
    for rows, labels in batches:
        weights = torch.rand(len(rows), dtype=rows.dtype)
        losses = cross_entropy(model(rows), labels, reduction="none")
        ((weights - weights.mean()) * losses).sum().backward()


def drawn_before(model, batches):
    for rows, labels, weights in batches:
        losses = cross_entropy(model(rows), labels, reduction="none")
        (weights * losses).sum().backward()


BATCH = randn(13, 4), randint(3, 13)
CHECK = partial(splitcheck, loop)
REMEDIES = {
    "compares the step with itself": (
        partial(CHECK, batch=BATCH, parts=1),
        [
            partial(CHECK, batch=BATCH, parts=2),
            partial(CHECK, batch=BATCH, parts=1, loss=of_batch),
        ],
    ),
    "13 rows, too few for 9 parts": (
        partial(CHECK, batch=BATCH, parts=9),
        [partial(CHECK, batch=BATCH, parts=3)],
    ),
    "13 rows cannot be cut into 2 equal parts": (
        partial(CHECK, batch=BATCH, parts=2, equal=True),
        [partial(CHECK, batch=BATCH, parts=2, equal=False)],
    ),
    "was written for one batch": (
        partial(splitcheck, of_one_batch, batch=BATCH),
        [partial(CHECK, batch=BATCH)],
    ),
    "left no gradient": (
        partial(splitcheck, cleared, batch=BATCH),
        [partial(CHECK, batch=BATCH)],
    ),
    "with these the gradient is zero": (
        partial(splitcheck, drawn, batch=BATCH),
        [partial(splitcheck, drawn_before, batch=(*BATCH, randn(13)))],
    ),
}


@pytest.mark.parametrize("words", REMEDIES)
def test_remedy_is_followed(words):
    refused, remedies = REMEDIES[words]
    model = build(lambda: nn.Linear(4, 3))
    with pytest.raises(ValueError, match=words):
        refused(model=model)
    for remedy in remedies:
        remedy(model=model).assert_passed()
