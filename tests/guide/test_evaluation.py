"""The programs that evaluate on docs/recipes.md give what plain torch gives."""

from __future__ import annotations

import math
import re

import pytest
import torch
from harness.oracle import build, randint, randn
from harness.pages import blocks, sections
from torch import nn

from scatterpar import ScatterOnceParallel

SECTIONS = sections("docs/recipes.md")
(CLASSIFIER,) = blocks(SECTIONS["Evaluate"], "python")
(MEMORY,) = blocks(SECTIONS["Batches that do not fit"], "python")
# The page says in a sentence how this program differs from CLASSIFIER.
LANGUAGE = """
import math

from scatterpar import count_labels

count = count_labels()
engine.eval()
total, number = 0.0, 0
with torch.no_grad():
    for words, labels in loader:
        loss = engine.loss(words, labels, criterion, count=count)
        counted = int(count(words, labels))
        total += loss.item() * counted
        number += counted
engine.train()
print(f"perplexity {math.exp(total / number):.3f}")
"""
ROWS, FEATURES, CLASSES, LENGTH = 27, 4, 3, 6


def printed(snippet, model, loader, criterion, devices, capsys):
    """The numbers that a snippet prints, with two replicas and a ragged last batch."""
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        names = {"torch": torch, "engine": engine, "loader": loader}
        exec(snippet, names | {"criterion": criterion})
        assert model.training
    return [float(text) for text in re.findall(r"\d+\.\d+", capsys.readouterr().out)]


def in_batches(*tensors):
    return list(zip(*(tensor.split(10) for tensor in tensors), strict=True))


def test_classifier_as_plain_torch(devices, capsys):
    def network():
        hidden = nn.Linear(FEATURES, 8), nn.BatchNorm1d(8)
        return nn.Sequential(*hidden, nn.Linear(8, CLASSES))

    model = build(network)
    images, labels = randn(ROWS, FEATURES), randint(CLASSES, ROWS)
    criterion = nn.CrossEntropyLoss()
    found = printed(
        CLASSIFIER, model, in_batches(images, labels), criterion, devices, capsys
    )
    with torch.no_grad():
        logits = model.eval()(images)
    accuracy = (logits.argmax(1) == labels).double().mean().item()
    loss = criterion(logits, labels).item()
    assert found == [pytest.approx(loss, abs=1e-4), pytest.approx(100 * accuracy, 1e-3)]


def test_language_model_as_plain_torch(devices, capsys):
    def criterion(logits, labels):
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    model = build(lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7)))
    words, labels = randint(7, ROWS, LENGTH), randint(7, ROWS, LENGTH, seed=3)
    labels[torch.arange(ROWS) % 4 == 0, 2:] = -100
    found = printed(
        LANGUAGE, model, in_batches(words, labels), criterion, devices, capsys
    )
    with torch.no_grad():
        loss = criterion(model.eval()(words), labels).item()
    assert found == [pytest.approx(math.exp(loss), abs=1e-3)]


def in_eights(*tensors):
    return zip(*(tensor.split(8) for tensor in tensors), strict=True)


class Captioner(nn.Linear):
    """Has memory for 8 rows in training, and for 2 in ``generate``."""

    def forward(self, images):
        if torch.is_grad_enabled() and len(images) > 8:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(images)

    def generate(self, images):
        if len(images) > 2:
            raise torch.OutOfMemoryError("out of memory")
        return self(images).argmax(1)


@pytest.mark.filterwarnings('ignore:accum="auto"')
def test_memory_snippet_as_plain_torch(capsys):
    model = build(lambda: Captioner(FEATURES, CLASSES))
    images, labels = randn(32, FEATURES), randint(CLASSES, 32)
    criterion = nn.CrossEntropyLoss()
    names = {"torch": torch, "model": model, "images": images, "labels": labels}
    names |= {"criterion": criterion, "ScatterOnceParallel": ScatterOnceParallel}
    exec(MEMORY, names)
    engine = names["engine"]
    assert str(engine.last_step.plan) in capsys.readouterr().out
    found = [parameter.grad for parameter in model.parameters()]
    loss = sum(criterion(model(x), y) / 4 for x, y in in_eights(images, labels))
    expected = torch.autograd.grad(loss, list(model.parameters()))
    torch.testing.assert_close(found, list(expected))
    assert len(engine.plan(32).shares[0].micro_batches) == 4
    with torch.no_grad():
        scores = model(images)
    assert torch.equal(names["scores"], scores)
    assert torch.equal(names["captions"], scores.argmax(1))
    engine.close()
