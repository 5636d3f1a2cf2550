"""The examples of docs/batches.md run, and give the gradients of plain torch."""

from __future__ import annotations

import pytest
import torch
from helpers.oracle import assert_gradients, build, gradients, randint, randn
from helpers.pages import blocks, sections
from torch import nn
from torch.nn.utils.rnn import pack_sequence, pad_sequence

from scatterpar import Rows, ScatterOnceParallel

EXAMPLES = {title: blocks(text, "python")[0] for title, text in sections("docs/batches.md").items()}
LENGTHS = [3, 1, 4, 2, 5]


class Last(nn.Module):
    """The last state of a recurrent network, where padding with zeros follows no path."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4, bias=False)

    def forward(self, rows):
        return self.linear(rows).sum(1)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(3, 4)

    def forward(self, packed):
        return self.rnn(packed)[1][0][0]


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask):
        return self.linear(x @ mask)


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, images, targets):
        boxes = self.linear(torch.stack([image.mean((1, 2)) for image in images]))
        pairs = [(b - t["boxes"]).square().mean() for b, t in zip(boxes, targets, strict=True)]
        return {"boxes": torch.stack(pairs).mean(), "size": boxes.square().mean()}


class Language(nn.Module):
    """Returns what the pages' examples want, of a tiny language model."""

    def __init__(self, returns):
        super().__init__()
        self.words, self.head = nn.Embedding(6, 5), nn.Linear(5, 6)
        self.returns = returns

    def forward(self, *inputs):
        return self.returns(self, *inputs)


def logits_and_loss(model, ids, labels):
    logits = model.head(model.words(ids))
    return logits, nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-1
    )


def logits_and_router(model, ids):
    return model.head(model.words(ids)), model.words(ids)[..., :3]


def mean_of_words(model, ids):
    return model.head(model.words(ids).mean(1))


CRITERION = nn.CrossEntropyLoss()
LABELS = randint(4, 5)
SEQUENCES = [randn(n, 3, seed=n) for n in LENGTHS]
IMAGES = [randn(3, 4 + n, 5, seed=n) for n in LENGTHS]
TARGETS = [{"boxes": randn(n, 4, seed=n)} for n in LENGTHS]
IDS, FOLLOWING = randint(6, 5, 7), randint(6, 5, 7, seed=5)
PARTLY = FOLLOWING.where(randn(5, 7) > 0, -1)
LOADER = [{"ids": randint(6, n, n + 1, seed=n), "labels": randint(6, n)} for n in (4, 3, 2)]


def detection(model, _):
    return sum(model(IMAGES, TARGETS).values())


def windows(model, _):
    terms = [
        nn.functional.cross_entropy(model(b["ids"]), b["labels"], reduction="sum") for b in LOADER
    ]
    return sum(terms) / 9


def router(model, names):
    return names["with_router"](model(IDS), FOLLOWING)


def balance(model, names):
    return names["balanced"](model(IDS), FOLLOWING)


PLAIN = {
    "Tensors without rows": (
        Attend,
        {"x": randn(4, 4), "labels": LABELS[:4]},
        lambda model, names: CRITERION(model(randn(4, 4), names["mask"]), LABELS[:4]),
    ),
    "Sequences of different lengths": (
        Last,
        {"sequences": SEQUENCES, "labels": LABELS},
        lambda model, _: CRITERION(model(pad_sequence(SEQUENCES, batch_first=True)), LABELS),
    ),
    "Packed sequences": (
        Packed,
        {"sequences": SEQUENCES, "labels": LABELS},
        lambda model, _: CRITERION(model(pack_sequence(SEQUENCES, enforce_sorted=False)), LABELS),
    ),
    "Detection: a list of images and a list of dicts": (
        Detector,
        {"images": IMAGES, "targets": TARGETS},
        detection,
    ),
    "A window of batches": (
        lambda: Language(mean_of_words),
        {"loader": LOADER, "count": None},
        windows,
    ),
    "Models that return `(logits, loss)`": (
        lambda: Language(logits_and_loss),
        {"ids": IDS, "labels": PARTLY},
        lambda model, _: model(IDS, PARTLY)[1],
    ),
    "Auxiliary losses of a router": (
        lambda: Language(logits_and_router),
        {"ids": IDS, "labels": FOLLOWING},
        router,
    ),
    "A router's load balance": (
        lambda: Language(logits_and_router),
        {"ids": IDS, "labels": FOLLOWING},
        balance,
    ),
}


def test_every_example_is_compared():
    assert EXAMPLES.keys() == PLAIN.keys()


@pytest.mark.parametrize("title", PLAIN)
def test_example(title):
    factory, given, plain = PLAIN[title]
    model = build(factory)
    names = {"torch": torch, "nn": nn, "model": model, "criterion": CRITERION, **given}
    with ScatterOnceParallel(model, 2, ["cpu"] * 2) as engine:
        names |= {"engine": engine, "Rows": Rows}
        exec(EXAMPLES[title], names)
        if names["engine"] is not engine:
            names["engine"].close()
    assert any(gradient is not None for gradient in gradients(model).values())
    twin = build(factory)
    plain(twin, names).backward()
    assert_gradients(model, gradients(twin))
