"""`--batch auto`: the batch follows the gradient's noise scale, and a run goes on where it was."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re

import pytest
import torch
from helpers.pictures import needs_torchvision, write_folder
from helpers.torchrun import assert_same_run, records, steps
from test_train_runs import Stop, stop_after
from torch.optim.lr_scheduler import CosineAnnealingLR, MultiStepLR

from scatterpar.recipe import gradual_warmup
from scatterpar.train import pictures, run
from scatterpar.train.data import TRAIN, Split, load, make_dataset
from scatterpar.train.feed import Feed, Request
from scatterpar.train.options import Options, parse
from scatterpar.train.pictures import open_data
from scatterpar.train.run import main
from scatterpar.train.training import Batches, Growth, make_scheduler

pytestmark = pytest.mark.draws

ROWS, EPOCHS = 4096, 3
GROWING = ["--batch", "auto", "--model", "helpers.torchrun:Small", "--epochs", str(EPOCHS)]
GROWING += ["--devices", "cpu:0,cpu:1", "--base-lr", "0.05", "--micro-batch-size", "256"]


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    monkeypatch.setattr(run, "draw_curves", lambda records, path: path.touch())


def test_sizes_end_where_an_epoch_would_run_out_of_updates():
    assert Growth.up_to(8192).sizes == (256, 512, 1024)
    assert Growth.up_to(8191).sizes == (256, 512)
    assert Growth.up_to(100).sizes == (100,)
    assert Growth.up_to(60_000, fits=lambda batch: batch != 1024).sizes == (256, 512, 2048, 4096)


@pytest.mark.parametrize(
    ("batch", "scale", "after"),
    [
        *[(256, 511.9, 256), (256, 512.0, 512), (256, 1e9, 512), (512, 1e9, 2048)],
        *[(512, 100.0, 512), (4096, 1e9, 4096)],  # never smaller, and never beyond
        *[(256, float("nan"), 256), (256, float("inf"), 256)],  # nothing is known
    ],
)
def test_the_batch_takes_the_next_size_that_the_noise_scale_reaches(batch, scale, after):
    growth = Growth.up_to(60_000, fits=lambda size: size != 1024)
    assert growth.after(batch, scale) == after


def rates(make, rows, epochs):
    """The rate of every step, with batches of 256."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    batches = Batches(rows, 256, seed=0)
    scheduler, found = make(optimizer, batches), []
    while batches.epoch < epochs:
        for batch in batches.rest_of_epoch():
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            batches.consumed += len(batch)
            scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 2])
@pytest.mark.parametrize("drops", [(), (3, 4)])
def test_a_batch_that_does_not_grow_has_the_schedule_of_a_fixed_one(warmup, drops):
    """That of torch's own schedulers, which go by steps."""
    epochs, a_step = 6, 4  # updates of an epoch

    def fixed(optimizer, batches):
        rest = CosineAnnealingLR(optimizer, (epochs - warmup) * a_step)
        if drops:
            rest = MultiStepLR(optimizer, [(drop - warmup) * a_step for drop in drops])
        steps = warmup * a_step
        return gradual_warmup(optimizer, steps, 0.1 / (steps + 1), rest) if steps else rest

    def growing(optimizer, batches):
        return make_scheduler(optimizer, batches, epochs, warmup, drops)

    assert rates(growing, 1024, epochs) == pytest.approx(rates(fixed, 1024, epochs), abs=1e-9)


@pytest.fixture(scope="module", autouse=True)
def _noisy_data():
    """Half of the images that are included, with three of four labels wrong: a noisy gradient."""
    data, splits = load(), []
    for split, rows in ((data.train, ROWS), (data.test, 100)):
        numbers, labels = torch.arange(rows), split.labels[:rows]
        labels = torch.where(numbers % 4 == 0, labels, numbers // 4 % 10)
        splits.append(Split(split.images[:rows], labels))
    with pytest.MonkeyPatch.context() as patch:
        noisy = make_dataset("noisy", *splits, data.class_names)
        patch.setattr(pictures, "load", lambda: noisy)
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
    growth, epochs, made = Growth.up_to(ROWS), records(out, "epoch"), steps(out)
    batches = [record["batch"] for record in epochs]
    assert batches[0] == 256
    assert batches[-1] > 256
    for number, (batch, following) in enumerate(itertools.pairwise(batches), 1):
        scale = [r["noise_scale"] for r in made if r["epoch"] == number][-1]
        assert following == growth.after(batch, scale)
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
    assert "the batch follows the gradient's noise scale, up to 512 images" in printed
    assert "batches of 256 to " in (out / "report.html").read_text()


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
    assert main(["--batch", "auto", "--accum", "4"]) == 2
    assert "so it takes --micro-batch-size" in capsys.readouterr().err
    given = parse(["--batch", "auto", "--epochs", "10"])
    assert (given.micro_batch_size, given.warmup_epochs) == (64, 0)
    assert given.measure_noise
    assert parse(["--batch", "auto", "--micro-batch-size", "32"]).micro_batch_size == 32


@needs_torchvision
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
