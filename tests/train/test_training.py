"""`--batch auto`: the batch follows the gradient's noise scale, and a run goes on where it was."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import types

import pytest
import torch
from harness.pictures import write_folder
from harness.runs import assert_same_run, records, steps
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from scatterpar.recipe import gradual_warmup
from scatterpar.train import data as data_module
from scatterpar.train import run
from scatterpar.train.data import TRAIN, Split, load, make_dataset, open_data
from scatterpar.train.feed import Feed, Request
from scatterpar.train.options import Options, parse
from scatterpar.train.run import main
from scatterpar.train.training import Training
from train.test_run import Stop, stop_after

pytestmark = pytest.mark.draws

ROWS, EPOCHS = 4096, 3
GROWING = ["--batch", "auto", "--model", "harness.runs:Small", "--epochs", str(EPOCHS)]
GROWING += ["--devices", "cpu:0,cpu:1", "--base-lr", "0.05", "--micro-batch-size", "256"]


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    monkeypatch.setattr(run, "draw_curves", lambda metrics, path: path.touch())


@pytest.fixture
def made():
    """Make a training of so many images of one pixel, with the growing batch by default."""
    engines = []

    def training(images, *options):
        split = Split(torch.arange(images).view(-1, 1, 1, 1).to(torch.uint8), torch.zeros(images))
        data = make_dataset("pixels", split, split, ("a", "b"))
        options = [*(options or ["--batch", "auto"]), "--model", f"{__name__}:Pixel"]
        found = Training(parse(options), data, [torch.device("cpu")] * 2)
        engines.append(found.engine)
        return found

    yield training
    for engine in engines:
        engine.close()


class Pixel(torch.nn.Linear):
    def __init__(self, num_classes):
        super().__init__(1, num_classes)

    def forward(self, images):
        return super().forward(images.flatten(1))


def test_sizes_end_where_an_epoch_would_run_out_of_updates(made):
    for images, largest in ((8192, 1024), (8191, 512), (100, 100)):
        training = made(images)
        training.noise = types.SimpleNamespace(scale=1e9)
        while training.grow():
            pass
        assert training.position.batch == largest


@pytest.mark.parametrize(
    ("batch", "scale", "after"),
    [
        *[(256, 511.9, 256), (256, 512.0, 512), (256, 1e9, 512), (512, 1e9, 1024)],
        *[(512, 100.0, 512), (4096, 1e9, 4096)],  # never smaller, and never beyond
        *[(256, float("nan"), 256), (256, float("inf"), 256)],  # nothing is known
    ],
)
def test_the_batch_takes_the_next_size_that_the_noise_scale_reaches(made, batch, scale, after):
    training = made(60_000)
    training.position.batch = batch
    training.noise = types.SimpleNamespace(scale=scale)
    assert training.grow() == (after > batch)
    assert training.position.batch == after


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("drops", [(), (3, 4)])
def test_the_rate_is_that_of_torchs_schedulers(made, warmup, drops):
    """They count steps; the tool counts images."""
    epochs, a_step = 6, 4  # updates of an epoch
    options = ["--batch", "256", "--epochs", str(epochs), "--warmup-epochs", str(warmup)]
    options += ["--base-lr", "0.1", *(["--drop-at", *map(str, drops)] if drops else [])]
    training = made(1024, *options)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, (epochs - warmup) * a_step)
    if drops:
        scheduler = MultiStepLR(optimizer, [(drop - warmup) * a_step for drop in drops])
    if warmup:
        number = warmup * a_step
        scheduler = gradual_warmup(optimizer, number, 0.1 / (number + 1), scheduler)
    for _ in range(epochs * a_step):
        assert training.rate() == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        scheduler.step()
        training.position.consumed += 256


@pytest.fixture(scope="module", autouse=True)
def _noisy_data():
    """Half of the images that are included, with seven of eight labels wrong: a noisy gradient."""
    data, splits = load(), []
    for split, rows in ((data.train, ROWS), (data.test, 100)):
        numbers, labels = torch.arange(rows), split.labels[:rows]
        labels = torch.where(numbers % 8 == 0, labels, numbers // 8 % 10)
        splits.append(Split(split.images[:rows], labels))
    with pytest.MonkeyPatch.context() as patch:
        noisy = make_dataset("noisy", *splits, data.class_names)
        patch.setattr(data_module, "load", lambda: noisy)
        yield


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """An uninterrupted run and what it printed."""
    out, printed = tmp_path_factory.mktemp("growing") / "whole", io.StringIO()
    with torch.random.fork_rng(), contextlib.redirect_stdout(printed):
        assert main([*GROWING, "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_a_run_follows_the_noise_scale_that_it_measures(grown):
    out, printed = grown
    epochs, made = records(out, "epoch"), steps(out)
    batches = [record["batch"] for record in epochs]
    assert batches[0] == 256
    assert batches[-1] > 256
    for number, (batch, following) in enumerate(itertools.pairwise(batches), 1):
        scale = [r["noise_scale"] for r in made if r["epoch"] == number][-1]
        assert following == (2 * batch if scale >= 2 * batch and 16 * batch <= ROWS else batch)
    for number, batch in enumerate(batches, 1):
        sizes = [r["images"] for r in made if r["epoch"] == number]
        assert sizes == [batch] * (ROWS // batch)
        assert f"epoch {number}/{EPOCHS}: loss " in printed
        rate = next(r["learning_rate"] for r in made if r["epoch"] == number)
        cosine = 0.5 * (1 + math.cos(math.pi * (number - 1) / EPOCHS))
        assert rate == pytest.approx(0.05 * cosine * batch / 256)
    assert re.search(
        r"batch 256, noise scale [\d,]+ images\n  batches of 512 images from here on", printed
    )
    assert "batches of 256, for 16 steps an epoch of 4,096; the gradient's noise scale" in printed


def test_a_run_whose_batch_has_grown_is_resumed_bit_for_bit(grown, tmp_path, monkeypatch):
    whole, parts = grown[0], tmp_path / "parts"
    small = sum(record["images"] == 256 for record in steps(whole))
    for last in (small, small + 3):  # before the growth, and in the middle of the epoch after it
        stop_after(monkeypatch, last)
        resume = [] if last == small else ["--resume"]
        with pytest.raises(Stop):
            main([*GROWING, "--out", str(parts), "--checkpoint-every", "1", *resume])
    monkeypatch.undo()
    assert main([*GROWING, "--out", str(parts), "--resume"]) == 0
    assert_same_run(whole, parts, len(steps(whole)))


def test_what_it_needs_is_said(tmp_path, capsys):
    assert main(["--batch", "auto", "--devices", "cpu", "--out", str(tmp_path)]) == 2
    words = "compare the gradients of replicas, and there is one: name its device twice"
    printed = capsys.readouterr().err
    assert words in printed
    assert "--devices cpu,cpu" in printed
    given = parse(["--batch", "auto", "--epochs", "10"])
    assert (given.micro_batch_size, given.warmup_epochs) == (64, 0)
    assert given.measure_noise
    assert parse(["--batch", "auto", "--micro-batch-size", "32"]).micro_batch_size == 32


@pytest.mark.pictures
@pytest.mark.parametrize("workers", [0, 2])
def test_other_requests_may_come_than_the_first_ones(tmp_path, workers):
    data = open_data(Options(data=str(write_folder(tmp_path, train=40, test=1))))
    rows = torch.arange(120)
    first, second = ([Request(TRAIN, part) for part in rows.split(size)] for size in (50, 30))
    with Feed(data, iter(first), workers) as feed:
        assert feed.take()[1].rows.tolist() == rows[:50].tolist()
        feed.request(second)
        for request in second:
            _, found = feed.take()
            assert found.rows.tolist() == request.rows.tolist()
            assert torch.equal(found.images, data.read(TRAIN, request.rows, 0).images)
