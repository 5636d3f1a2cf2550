"""The loop's order, evaluation, records and curves."""

import copy
import json
import re
import sys
import types

import pytest
import torch
from torch import nn

from scatterpar.__main__ import main as command
from scatterpar.train.data import TEST, TRAIN, Split, make_dataset
from scatterpar.train.feed import Feed
from scatterpar.train.options import parse
from scatterpar.train.records import Metrics, draw_curves
from scatterpar.train.training import Training

pytestmark = pytest.mark.draws
VIRTUAL = [torch.device("cpu", i) for i in range(2)]


class Toy(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, num_classes))


def toy_data(rows=10):
    images = (torch.arange(rows * 4) % 251).to(torch.uint8).view(rows, 1, 2, 2)
    split = Split(images, torch.arange(rows) % 2)
    return make_dataset("toy", split, split, ("even", "odd"))


@pytest.fixture
def toy():
    """Make a training of ten rows in batches of at most four, on two replicas."""
    made = []

    def toy_training(*more):
        options = ["--model", f"{__name__}:Toy", "--batch", "4", "--micro-batch-size", "1"]
        options += ["--momentum", "0", "--weight-decay", "0", "--base-lr", "30", "--epochs", "2"]
        training = Training(parse([*options, *more]), toy_data(), VIRTUAL)
        made.append(training.engine)
        return training

    yield toy_training
    for engine in made:
        engine.close()


def test_an_epoch_uses_every_row_once_in_even_batches_and_epochs_differ(toy):
    training = toy()
    first, second = training.order(0), training.order(1)
    assert [len(rows) for rows in first] == [4, 3, 3]
    order = torch.cat(first).tolist()
    assert sorted(order) == sorted(torch.cat(second).tolist()) == list(range(10))
    assert order != torch.cat(second).tolist()
    assert order == torch.cat(toy().order(0)).tolist()
    assert order != torch.cat(toy("--seed", "4").order(0)).tolist()


def test_a_run_wants_the_rest_of_its_epochs_and_their_tests(toy):
    training = toy()
    training.position.consumed = 4
    found = list(training.requests())
    assert [(r.part, len(r.rows), r.epoch) for r in found] == [
        *[(TRAIN, 3, 0), (TRAIN, 3, 0), (TEST, 10, 0)],
        *[(TRAIN, 4, 1), (TRAIN, 3, 1), (TRAIN, 3, 1), (TEST, 10, 0)],
    ]
    assert training.position.consumed == 4
    training.position.consumed = 20  # stopped between the last step of an epoch and its test
    training.position.tested = 1
    assert [(r.part, len(r.rows)) for r in training.requests()] == [(TEST, 10)]


def test_training_is_that_of_a_plain_loop(toy):
    training, data, criterion = toy(), toy_data(), nn.CrossEntropyLoss()
    plain = copy.deepcopy(training.model.network)
    reference = torch.optim.SGD(plain.parameters(), lr=0.0)
    losses, reports, rates = [], [], []
    feed = Feed(data, training.requests())
    for rows in training.order(0):
        images = data.standardise(data.train.images[rows])
        loss = criterion(plain(images), data.train.labels[rows])
        reference.zero_grad()
        loss.backward()
        rates.append(training.rate())
        reference.param_groups[0]["lr"] = rates[-1]
        reference.step()
        losses.append(loss.item())
        request, batch = feed.take()
        assert torch.equal(request.rows, rows)
        reports.append(training.step(len(rows), batch))
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-5)
    assert rates[0] == pytest.approx(30 * 10 / 3 / 256)
    assert (training.position.consumed, training.epoch, training.position.step) == (10, 1, 3)
    for ours, theirs in zip(training.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_evaluation_counts_every_row_the_same_in_uneven_batches(toy):
    training, data = toy(), toy_data(300)
    training.tests, training.position.consumed, training.epochs = 300, 10, 1
    found = training.test(Feed(data, training.requests()))
    scores = training.model(data.test.images)
    expected = nn.CrossEntropyLoss()(scores, data.test.labels).item()
    assert found["test_loss"] == pytest.approx(expected, rel=1e-6)
    right = (scores.argmax(1) == data.test.labels).sum().item()
    assert found["test_accuracy"] == pytest.approx(right / 300)
    assert found["test_accuracy_top5"] == 1.0


def test_a_batch_too_small_for_batch_normalisation_says_what_to_choose(tmp_path, capsys):
    options = ["--model", "harness.runs:Small", "--batch", "2", "--devices", "cpu:0,cpu:1"]
    assert command(["train", *options, "--out", str(tmp_path)]) == 2
    words = "a batch of 2 makes micro-batches of one row, which batch normalisation cannot train on"
    assert words in capsys.readouterr().err


def test_metrics_are_json_lines_also_for_numbers_that_json_lacks(tmp_path):
    with Metrics(tmp_path / "new" / "metrics.jsonl") as metrics:
        metrics.write("step", step=1, loss=float("nan"), seconds={"scatter": float("inf")})
        metrics.write("epoch", step=1, epoch=1, test_loss=0.5, test_accuracy=0.25)
    lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == metrics.records
    assert metrics.records[0]["loss"] is None
    assert metrics.records[0]["seconds"] == {"scatter": None}
    draw_curves(metrics, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


class Board:
    def __init__(self, purge_step):
        self.purge_step, self.scalars = purge_step, []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def close(self):
        pass


def test_tensorboard_keeps_all_steps_of_earlier_sessions(tmp_path, monkeypatch):
    """It drops those from `purge_step` on: a resumed run once lost its last step."""
    made = []

    def writer(folder, purge_step):
        made.append(Board(purge_step))
        return made[-1]

    board = types.SimpleNamespace(SummaryWriter=writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    path = tmp_path / "metrics.jsonl"
    with Metrics(path) as metrics:
        for step in (1, 2, 3):
            metrics.write("step", step=step, loss=0.5)
    with Metrics(path, 2) as metrics:
        metrics.write("step", step=3, loss=0.25)
    first, second = made
    assert second.purge_step == 3
    assert [step for *_, step in first.scalars] == [1, 2, 3]
    assert second.scalars == [("step/loss", 0.25, 3)]
    lines = map(json.loads, path.read_text().splitlines())
    assert [record["loss"] for record in lines] == [0.5, 0.5, 0.25]


def test_curves_are_drawn_of_a_run_that_reached_nothing(tmp_path):
    with Metrics(tmp_path / "metrics.jsonl") as metrics:
        draw_curves(metrics, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("package", ["tqdm", "tyro"])
def test_a_missing_package_names_the_extra(monkeypatch, capsys, package):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    words = rf"{package} is not installed.*pip install .*\[train\]"
    assert command(["train"]) == 2
    assert re.search(words, capsys.readouterr().err)
