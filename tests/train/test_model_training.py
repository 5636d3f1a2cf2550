"""The model, its optimizer and devices; order, rate, a step, and the test."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from scatterpar.recipe import gradual_warmup
from scatterpar.train import models as models_module
from scatterpar.train.command_line import UsageError, parse
from scatterpar.train.data import Source
from scatterpar.train.data_parts import Names
from scatterpar.train.feed import Feed
from scatterpar.train.model_training import (
    Training,
    choose_devices,
    first_batch,
    make_optimizer,
    start_model,
)
from scatterpar.train.models import build_model
from scatterpar.train.processes import Processes

pytestmark = pytest.mark.draws


class Toy(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, num_classes))


def toy_data(rows=10):
    images = (torch.arange(rows * 4) % 251).to(torch.uint8).view(rows, 1, 2, 2)
    labels = torch.arange(rows) % 2
    parts = dict.fromkeys(("train", "test"), torch.arange(rows))
    pixel = torch.full((1,), 100.0)
    return Source(
        images,
        labels,
        parts,
        ("even", "odd"),
        name="toy",
        image_shape=(1, 2, 2),
        mean=pixel,
        std=pixel,
    )


@pytest.fixture
def toy():
    """Make a training of so many rows, by default ten in batches of at most four."""
    with contextlib.ExitStack() as engines:

        def toy_training(*more, rows=10):
            options = [
                "--model",
                f"{__name__}:Toy",
                "--batch",
                "4",
                "--micro-batch-size",
                "1",
            ]
            options += ["--momentum", "0", "--weight-decay", "0", "--base-lr", "30"]
            devices = [torch.device("cpu", i) for i in range(2)]
            made = Training(
                parse([*options, "--epochs", "2", *more]), toy_data(rows), devices
            )
            engines.enter_context(made.engine)
            return made

        yield toy_training


def test_epoch_has_each_row_once(toy):
    training = toy()
    first, second = training.order(0), training.order(1)
    assert [len(rows) for rows in first] == [4, 3, 3]
    order = torch.cat(first).tolist()
    assert sorted(order) == sorted(torch.cat(second).tolist()) == list(range(10))
    assert order != torch.cat(second).tolist()
    assert order == torch.cat(toy().order(0)).tolist()
    assert order != torch.cat(toy("--seed", "4").order(0)).tolist()


def test_training_equals_plain_loop(toy):
    training, data, criterion = toy(), toy_data(), nn.CrossEntropyLoss()
    plain, feed = copy.deepcopy(training.model), Feed(data, training.requests())
    reference = torch.optim.SGD(plain.parameters(), lr=0.0)
    assert training.rate() == pytest.approx(30 * 10 / 3 / 256)
    for rows in training.order(0):
        images, labels = data.sources[rows], data.labels[rows]
        loss = criterion(plain(images), labels)
        reference.zero_grad()
        loss.backward()
        reference.param_groups[0]["lr"] = training.rate()
        reference.step()
        request, batch = feed.take()
        assert torch.equal(request.rows, rows)
        assert training.train(len(rows), batch).loss == pytest.approx(
            loss.item(), rel=1e-5
        )
    assert (training.consumed, training.epoch, training.step) == (
        10,
        1,
        3,
    )
    for ours, theirs in zip(
        training.model.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_evaluation_weighs_rows_alike(toy):
    training, data = toy(), toy_data(300)
    training.source, training.consumed, training.epochs = data, 10, 1
    found = training.test(Feed(data, training.requests()))
    images, labels = data.sources, data.labels
    scores = training.model(images)
    expected = nn.CrossEntropyLoss()(scores, labels).item()
    assert found.loss == pytest.approx(expected, rel=1e-6)
    right = (scores.argmax(1) == labels).sum().item()
    assert found.accuracy == pytest.approx(right / 300)
    assert found.accuracy_top5 == 1.0
    assert found.confusion.sum(1).tolist() == [150, 150]
    assert int(found.confusion.diagonal().sum()) == right


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("drops", [(), (3, 4)])
def test_rate_equals_torch_schedulers(toy, warmup, drops):
    """They count steps; the tool counts images."""
    epochs, a_step = 6, 4  # updates of an epoch
    options = [
        "--batch",
        "256",
        "--epochs",
        str(epochs),
        "--warmup-epochs",
        str(warmup),
    ]
    options += ["--base-lr", "0.1", *(["--drop-at", *map(str, drops)] if drops else [])]
    training = toy(*options, rows=1024)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, (epochs - warmup) * a_step)
    if drops:
        scheduler = MultiStepLR(optimizer, [(drop - warmup) * a_step for drop in drops])
    if warmup:
        number = warmup * a_step
        scheduler = gradual_warmup(optimizer, number, 0.1 / (number + 1), scheduler)
    for _ in range(epochs * a_step):
        assert training.rate() == pytest.approx(
            optimizer.param_groups[0]["lr"], abs=1e-9
        )
        optimizer.step()
        scheduler.step()
        training.consumed += 256


def test_default_batch_leaves_enough_steps():
    """A folder of 480 pictures was one batch of 4096, and one of 379 had
    batches of 4.
    """
    photos = parse(["--data", "photos"])
    images = (30, 379, 480, 8192, 204_799, 10**7)
    sizes = [first_batch(photos, number) for number in images]
    assert sizes == [32, 32, 32, 128, 2048, 4096]


@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ([], 4096),
        (["--batch", "64"], 64),
        (["--data", "x"], 128),
    ],
)
def test_included_images_use_large_batches(options, batch):
    assert first_batch(parse(options), 8192) == batch


def test_average_forgets_initial_weights(toy):
    """In few steps a fixed decay of 0.999 keeps them; the decay is warmed up."""
    training = toy("--ema", "0.999", "--base-lr", "1")
    feed = Feed(toy_data(), training.requests())
    expected = None
    for updates in range(3):
        request, batch = feed.take()
        training.train(len(request.rows), batch)
        weight = training.model.network[1].weight.detach().clone()
        decay = (1 + updates) / (10 + updates)
        if expected is None:
            expected = weight
        else:
            expected = decay * expected + (1 - decay) * weight
    found = training.average.module.network[1].weight
    torch.testing.assert_close(found, expected)
    assert "averages over 1,000 steps, and the run has 6" in training.rates_in_words()
    assert "warning" not in toy("--ema", "0.3").rates_in_words()


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *[("SGD", 0.0125 * 16), ("AdamW", 0.001 * 4), ("nadam", 0.002 * 4)],
        *[("ASGD", 0.05 * 16), ("RMSprop", 0.001 * 4), ("Adagrad", 0.01 * 4)],
    ],
)
def test_rate_fits_optimizer_and_batch(name, rate):
    """Linear for SGD, by the square root for what divides by the gradient's size."""
    options = ["--model", f"{__name__}:Toy", "--optimizer", name, "--epochs", "1"]
    options += ["--batch", "4096", "--micro-batch-size", "4096"]
    training = Training(parse(options), toy_data(4096), [torch.device("cpu")])
    with training.engine:
        assert training.peak_rate() == pytest.approx(rate)
        assert f"a learning rate of {rate:.3g}" in training.rates_in_words()


# --- optimizers and devices ---


@pytest.mark.pictures
def test_timm_optimizer_has_rate_and_decay():
    model = build_model("cnn", (1, 28, 28), 7)
    optimizer = make_optimizer(
        model, parse(["--optimizer", "lamb", "--base-lr", "0.1"])
    )
    assert type(optimizer).__name__ == "Lamb"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    assert make_optimizer(model, parse(["--optimizer", "SGD"])).param_groups[0][
        "nesterov"
    ]
    words = r"^--optimizer adamn: .*not found .*a class of torch.optim, or .*; did you .*adam"
    with pytest.raises(UsageError, match=words):
        make_optimizer(model, parse(["--optimizer", "adamn"]))


@pytest.mark.parametrize(
    ("gpus", "given", "chosen"),
    [
        (0, None, ["cpu:0", "cpu:1"]),
        (2, None, ["cuda:0", "cuda:1"]),
        (2, "cuda:1, cpu", ["cuda:1", "cpu"]),
    ],
)
def test_each_device_has_a_replica(monkeypatch, gpus, given, chosen):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: gpu
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    assert [str(d) for d in choose_devices(given)] == chosen
    with pytest.raises(UsageError, match=r"^--devices: cuda:2 is not here"):
        choose_devices("cuda:2")


# --- initial weights ---


class Answering(Processes):
    """A process that hears from the first one whether that has pretrained weights."""

    def __init__(self, rank, answer):
        super().__init__(rank, 2)
        self.answer = answer
        self.asked = []

    def largest(self, number):
        self.asked.append(number)
        return max(number, self.answer)


def network_of_library(monkeypatch, are_cached):
    """Let timm have a small network, with weights of five if they are cached."""

    def create(name, shape, classes, pretrained):
        if pretrained and not are_cached:
            raise UsageError("no server answers")
        network = Toy(classes)
        network.pretrained_cfg = {"mean": [0.5], "std": [0.25]}
        network.get_classifier = lambda: network[2]
        if pretrained:
            nn.init.constant_(network[1].weight, 5.0)
        return network

    monkeypatch.setattr(models_module, "_create_timm_model", create)


def start(processes, *options):
    files = toy_data()
    files.sources = Names(["a.png", "b.png"])
    options = parse(["--model", "timm:toy", *options])
    model, chosen = start_model(options, files, None, processes)
    return model.network[1].weight, chosen, files.notes


@pytest.mark.parametrize("are_cached", [True, False])
def test_first_process_decides_on_weights(monkeypatch, are_cached):
    """In the second one the library would answer otherwise: another optimizer, and
    other weights, which the engine then replaces.
    """
    network_of_library(monkeypatch, are_cached)
    first = Answering(0, answer=0)
    weight, chosen, notes = start(first)
    assert first.asked == [int(are_cached)]
    assert bool((weight == 5).all()) is are_cached
    assert ("starts from random weights" in notes[0]) is not are_cached
    network_of_library(monkeypatch, not are_cached)
    second = Answering(1, answer=int(are_cached))
    weight, chosen_by_second, notes = start(second)
    assert second.asked == [0]
    assert not (weight == 5).all()
    assert notes == []
    assert chosen_by_second == dataclasses.replace(chosen, out=chosen_by_second.out)
    assert chosen.optimizer == ("AdamW" if are_cached else "SGD")


def test_weights_are_not_asked_for_from_scratch(monkeypatch):
    network_of_library(monkeypatch, are_cached=True)
    process = Answering(0, answer=0)
    _, chosen, _ = start(process, "--from-scratch")
    assert (process.asked, chosen.pretrained) == ([0], False)
    network_of_library(monkeypatch, are_cached=False)
    with pytest.raises(UsageError, match="no server answers"):
        start(Answering(0, answer=0), "--pretrained")
