"""The loop's order, evaluation, records and curves."""

import copy
import json
import re

import pytest
import torch
from torch import nn

from scatterpar import ScatterOnceParallel
from scatterpar.__main__ import main as command
from scatterpar.train.data import TEST, Split, make_dataset
from scatterpar.train.feed import Feed, Request
from scatterpar.train.models import OnPixels
from scatterpar.train.records import Metrics, draw_curves
from scatterpar.train.training import Batches, Training, evaluate, foresee, train_epoch

pytestmark = pytest.mark.draws
VIRTUAL = [torch.device("cpu", i) for i in range(2)]


def toy_data(rows=10):
    images = torch.arange(rows * 4, dtype=torch.uint8).view(rows, 1, 2, 2)
    split = Split(images, torch.arange(rows) % 2)
    return make_dataset("toy", split, split, ("even", "odd"))


def toy_model(*layers):
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 3), *layers, nn.Linear(3, 2))


def toy_training(model, data, accum=1):
    """Of ten rows in batches of four, at a rate of 0.5, on two replicas."""
    engine = ScatterOnceParallel(OnPixels(model, data.mean, data.std), accum, VIRTUAL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    return Training(engine, optimizer, scheduler, Batches(rows=10, batch=4, seed=0))


def test_an_epoch_uses_every_row_once_and_epochs_differ():
    batches = Batches(rows=10, batch=4, seed=3)
    first, second = [torch.cat(list(torch.split(batches.order(e), 4))) for e in (0, 1)]
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()
    assert first.tolist() == Batches(rows=10, batch=4, seed=3).order(0).tolist()
    assert first.tolist() != Batches(rows=10, batch=4, seed=4).order(0).tolist()
    assert batches.steps_per_epoch == 3


def test_training_is_that_of_a_plain_loop():
    data, plain, criterion = toy_data(), toy_model(), nn.CrossEntropyLoss()
    model = copy.deepcopy(plain)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    losses = []
    for rows in Batches(rows=10, batch=4, seed=0).rest_of_epoch():
        images = data.standardise(data.train.images[rows])
        loss = criterion(plain(images), data.train.labels[rows])
        reference.zero_grad()
        loss.backward()
        reference.step()
        losses.append(loss.item())

    training = toy_training(model, data, accum=2)
    batches = training.batches
    with training.engine:
        wanted = foresee(batches, 0, 1, 10, 4, training.machines)
        steps = list(train_epoch(training, Feed(data, wanted), criterion))
    assert [report.loss for report, _ in steps] == pytest.approx(losses, rel=1e-5)
    assert [rate for _, rate in steps] == [0.5] * 3
    assert batches.consumed == 10
    assert batches.epoch == 1
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_evaluation_counts_every_row_the_same_in_uneven_batches():
    data, model, criterion = toy_data(), toy_model(), nn.CrossEntropyLoss()
    training = toy_training(model, data)
    with training.engine:
        wanted = [Request(TEST, rows) for rows in torch.arange(10).split(4)]
        found = evaluate(training, Feed(data, wanted))
    scores = model(data.standardise(data.test.images))
    assert found.loss == pytest.approx(criterion(scores, data.test.labels).item(), rel=1e-6)
    wrong = (scores.argmax(1) != data.test.labels).nonzero().flatten().tolist()
    assert found.top1 == 1 - len(wrong) / 10
    assert found.top5 == 1.0
    assert sorted(mistake.row for mistake in found.worst) == wrong
    assert found.confusion.sum(1).tolist() == [5, 5]
    assert found.confusion.diag().sum() == 10 - len(wrong)


def test_metrics_are_json_lines_also_for_numbers_that_json_lacks(tmp_path):
    with Metrics(tmp_path / "new" / "metrics.jsonl") as metrics:
        metrics.write("step", step=1, loss=float("nan"), seconds={"scatter": float("inf")})
        metrics.write("epoch", step=1, epoch=1, test_loss=0.5, test_accuracy=0.25)
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == metrics.records
    assert metrics.records[0]["loss"] is None
    assert metrics.records[0]["seconds"] == {"scatter": None}
    draw_curves(metrics.records, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_drawn_of_a_run_that_reached_nothing(tmp_path):
    draw_curves([], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("package", ["tqdm", "tyro"])
def test_a_missing_package_names_the_extra(monkeypatch, capsys, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    words = rf"{package} is not installed.*pip install .*\[train\]"
    assert command(["train"]) == 2
    assert re.search(words, capsys.readouterr().err)
