"""What a test counts, and what a run says of its results."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.train.results import (
    CONFUSION_CLASSES,
    Tally,
    accuracies_in_words,
    accuracy_per_class,
    traffic,
)


@pytest.mark.draws
@pytest.mark.parametrize("classes", [2, 10])
def test_tally_counts_batches_as_one(classes):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(50, classes, generator=generator)
    labels = torch.randint(classes, (50,), generator=generator)
    tally = Tally(classes)
    for rows in torch.arange(50).split(17):
        tally.add(scores[rows], labels[rows], rows[:, None])
    chosen = scores.argmax(1)
    assert tally.loss == pytest.approx(float(nn.CrossEntropyLoss()(scores, labels)))
    assert tally.accuracy == pytest.approx(float((chosen == labels).float().mean()))
    top5 = (scores.topk(min(5, classes)).indices == labels[:, None]).any(1)
    assert tally.accuracy_top5 == pytest.approx(float(top5.float().mean()))
    for label in range(classes):
        for choice in range(classes):
            number = int(((labels == label) & (chosen == choice)).sum())
            assert tally.confusion[label, choice] == number
    wrong = (chosen != labels).nonzero().flatten().tolist()
    confidence = scores.softmax(1).amax(1)
    wrong.sort(key=lambda row: -confidence[row])
    assert [int(mistake.image) for mistake in tally.mistakes] == wrong[:24]
    assert tally.mistakes[0].predicted == chosen[wrong[0]]
    assert Tally(CONFUSION_CLASSES + 1).confusion is None


def test_lowest_class_accuracies_first():
    confusion = torch.tensor([[3, 1, 0], [0, 0, 0], [2, 0, 0]])
    found = accuracy_per_class(confusion, ["a", "without images", "c"])
    assert list(found.items()) == [("c", 0.0), ("a", 0.75), ("without images", None)]
    said = "accuracy per class: c 0.0%, a 75.0%, without images -"
    assert accuracies_in_words(found) == said
    many = {str(number): number / 100 for number in range(50)}
    assert accuracies_in_words(many).startswith(
        "lowest accuracies of 50 classes: 0 0.0%"
    )
    assert accuracies_in_words(many).endswith("19 19.0%")


@pytest.mark.draws
@pytest.mark.parametrize(
    ("devices", "accum", "is_told"),
    [("cpu:0 cpu:1", 4, True), ("cpu:0 cpu:1", 1, False), ("cpu cpu", 4, False)],
)
def test_traffic_as_last_step_counted(devices, accum, is_told):
    model = nn.Linear(4, 3)
    with ScatterOnceParallel(model, accum, devices.split()) as engine:
        batch = torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64)
        engine.forward_backward(*batch, nn.CrossEntropyLoss())
        report = engine.last_step
    if not is_told:
        assert traffic(report) == ""
        return
    copied = sum(report.bytes.values())
    model_and_gradients = copied - report.bytes["scatter"]
    assert traffic(report) == (
        f"copied per step: {copied:,} bytes; nn.DataParallel, called for each of 4 "
        f"sub-steps, copies {copied + 3 * model_and_gradients:,}"
    )
