"""Runs: the order, the rate and a step beside plain torch; how runs are stopped, break, and
go on bit for bit; what they report.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import errno
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from faults.processes import finish, start_forked
from harness.pictures import truncate, write_folder
from harness.runs import (
    Small,
    assert_same_run,
    records,
    steps,
    stop_after,
    wait_until,
)
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from scatterpar import ScatterOnceParallel
from scatterpar.__main__ import main as command
from scatterpar.devices import pieces
from scatterpar.recipe import gradual_warmup
from scatterpar.train import data as data_module
from scatterpar.train import records as record_module
from scatterpar.train import training as training_module
from scatterpar.train.command_line import UsageError, parse
from scatterpar.train.data import DataPart, Source, load
from scatterpar.train.feed import Feed, FeedError
from scatterpar.train.models import build_model
from scatterpar.train.training import (
    Training,
    choose_devices,
    default_batch,
    describe,
    main,
    make_optimizer,
)

pytestmark = pytest.mark.draws
# else the included images, without workers
HAS_PICTURES = find_spec("torchvision") is not None
OPTIONS = f"--batch {24 if HAS_PICTURES else 103} --epochs 4 --devices cpu:0,cpu:1 "
OPTIONS += f"--micro-batch-size {6 if HAS_PICTURES else 26} --ema 0.9 --clip 1 "
OPTIONS += f"--label-smoothing 0.1 --model {__name__}:Slow"
OPTIONS = OPTIONS.split()
STEPS = 4 * 5
QUICK = "--batch 48 --epochs 3 --devices cpu --micro-batch-size 48 --workers 0 "
QUICK += "--augment none --model harness.runs:Small"
QUICK = QUICK.split()
EMBEDDED = "--model harness.runs:Small --epochs 1 --micro-batch-size 1024 --devices cpu"
EMBEDDED = EMBEDDED.split()


class Slow(Small):
    """Takes its time, so that a test can interrupt it where it likes."""

    def forward(self, images):
        time.sleep(0.01 * self.training)
        return super().forward(images)


class Stuck(Small):
    """Its third step takes longer than anyone waits."""

    def forward(self, images):
        if self.training and int(self.body[3].num_batches_tracked) == 2:
            print("stuck", flush=True)
            time.sleep(3600)
        return super().forward(images)


class Diverging(Small):
    """Its scores are no numbers from the second step on."""

    def forward(self, images):
        later = self.training and int(self.body[3].num_batches_tracked) > 0
        return super().forward(images) * (torch.nan if later else 1.0)


class Swinging(nn.Module):
    """Has one weight, and takes all images for one of two classes."""

    def __init__(self, num_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.05]))

    def forward(self, images):
        return torch.stack([self.weight, -self.weight], 1).expand(len(images), 2)


class Toy(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, num_classes))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """What ``--data`` names in the runs that are compared, and a context in which the
    included images are a few.
    """
    if not HAS_PICTURES:
        return "embedded", few_included
    folder = write_folder(tmp_path_factory.mktemp("pictures"), train=40, test=8)
    return folder, contextlib.nullcontext


@pytest.fixture
def folder(pictures):
    name, context = pictures
    with context():
        yield name


@pytest.fixture(autouse=True)
def quick_figures(monkeypatch, request):
    """Figures are drawn in test_records.py, and by one run here."""

    def touch(*arguments, **_):
        (path,) = (value for value in arguments if isinstance(value, Path))
        path.touch()

    if "reports" not in request.node.name:
        for name in ("curves", "confusion", "mistakes", "first_batch"):
            monkeypatch.setattr(record_module, f"draw_{name}", touch)


@contextlib.contextmanager
def few_included():
    """Some of the included images are in the place of all; yields them."""
    data = load()
    for name, number in (("train", 512), ("test", 128)):
        part = data.parts[name]
        is_chosen = torch.arange(len(part.rows)) < number
        data.parts[name] = part.selected(is_chosen)
    with mock.patch.object(data_module, "load", return_value=data):
        yield data


# ``python -m scatterpar``, on these.
ON_FEW_INCLUDED = f"""
from scatterpar.__main__ import run
from {__name__} import few_included

with few_included():
    run()
"""


@pytest.fixture
def included():
    with few_included() as data:
        yield data


def train(folder, out, *options):
    return main(["--data", str(folder), *QUICK, "--out", str(out), *options])


# --- a step, its order and its rate ---


def toy_data(rows=10):
    images = (torch.arange(rows * 4) % 251).to(torch.uint8).view(rows, 1, 2, 2)
    part = DataPart(
        images, torch.arange(rows), torch.arange(rows) % 2, [*map(str, range(rows))]
    )
    return Source(
        name="toy",
        parts={"train": part, "test": part},
        class_names=("even", "odd"),
        image_shape=(1, 2, 2),
        mean=torch.full((1,), 100.0),
        std=torch.full((1,), 100.0),
    )


@pytest.fixture
def toy():
    """Make a training of so many rows, by default ten in batches of at most four."""
    with contextlib.ExitStack() as engines:

        def toy_training(*more, rows=10):
            words = f"--model {__name__}:Toy --batch 4 --micro-batch-size 1 --epochs 2 "
            words += "--weight-decay 0 --base-lr 30 --optimizer sgd"
            options = parse([*words.split(), *more])
            data = toy_data(rows)
            torch.manual_seed(options.seed)
            model = build_model(options.model, (1, 2, 2), 2, data.mean, data.std)
            about = describe(options, data)
            made = Training(options, data, model, ["cpu:0", "cpu:1"], about)
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
    training, criterion = toy(), nn.CrossEntropyLoss()
    images, _, labels, _ = toy_data().parts["train"]
    plain, feed = copy.deepcopy(training.model), Feed(toy_data(), training.requests())
    reference = torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9, nesterov=True)
    assert training.rate() == pytest.approx(30 * 10 / 3 / 256)
    for rows in training.order(0):
        loss = criterion(plain(images[rows]), labels[rows])
        reference.zero_grad()
        loss.backward()
        reference.param_groups[0]["lr"] = training.rate()
        reference.step()
        request, batch = feed.take()
        assert torch.equal(request.rows, rows)
        assert training.train(batch).loss == pytest.approx(loss.item(), rel=1e-5)
    assert (training.consumed, training.epoch, training.step) == (10, 1, 3)
    for ours, theirs in zip(
        training.model.parameters(), plain.parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_evaluation_weighs_rows_alike(toy):
    training = toy(rows=300)
    images, _, labels, _ = training.source.parts["test"]
    tally = training.test(Feed(training.source, training.test_requests("test")))
    scores = training.model(images)
    expected = nn.CrossEntropyLoss()(scores, labels).item()
    assert tally.loss == pytest.approx(expected, rel=1e-6)
    right = (scores.argmax(1) == labels).sum().item()
    assert tally.accuracy == pytest.approx(right / 300)
    assert tally.accuracy_top5 == 1.0
    assert tally.confusion.sum(1).tolist() == [150, 150]
    assert int(tally.confusion.diagonal().sum()) == right


def test_interrupted_test_puts_weights_back(toy):
    """A checkpoint of that moment has the weights that are trained, not the averaged."""
    training = toy("--ema", "0.9")
    feed = Feed(toy_data(), training.requests())
    training.train(feed.take()[1])
    before = copy.deepcopy(training.model.state_dict())
    training.train(feed.take()[1])
    trained = copy.deepcopy(training.model.state_dict())
    feed.request(training.test_requests("test"))
    with pytest.raises(KeyboardInterrupt):
        training.test(feed, between=mock.Mock(side_effect=KeyboardInterrupt))
    for name, value in training.model.state_dict().items():
        assert torch.equal(value, trained[name])
    assert not torch.equal(before["network.1.weight"], trained["network.1.weight"])


@pytest.mark.parametrize("warmup", [0, 2])
def test_rate_equals_torch_schedulers(toy, warmup):
    """They count steps; the tool counts images."""
    epochs, a_step = 6, 4  # updates of an epoch
    words = f"--batch 256 --epochs {epochs} --warmup-epochs {warmup} --base-lr 0.1"
    training = toy(*words.split(), rows=1024)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, (epochs - warmup) * a_step)
    if warmup:
        number = warmup * a_step
        scheduler = gradual_warmup(optimizer, number, 0.1 / (number + 1), scheduler)
    for _ in range(epochs * a_step):
        expected = optimizer.param_groups[0]["lr"]
        assert training.rate() == pytest.approx(expected, abs=1e-9)
        optimizer.step()
        scheduler.step()
        training.consumed += 256


def test_default_batch_leaves_enough_steps():
    """A folder of 480 pictures was one batch of 4096, and one of 379 had
    batches of 4.
    """
    photos = parse(["--data", "photos"])
    images = (30, 379, 480, 8192, 204_799, 10**7)
    sizes = [default_batch(photos, number) for number in images]
    assert sizes == [32, 32, 32, 128, 2048, 4096]
    assert default_batch(parse([]), 8192) == 4096
    assert default_batch(parse(["--batch", "64"]), 8192) == 64


def test_average_forgets_initial_weights(toy):
    """In few steps a fixed decay of 0.999 keeps them; the decay is warmed up."""
    training = toy("--ema", "0.999", "--base-lr", "1")
    feed = Feed(toy_data(), training.requests())
    expected = None
    for updates in range(3):
        training.train(feed.take()[1])
        weight = training.model.network[1].weight.detach().clone()
        decay = (1 + updates) / (10 + updates)
        if expected is None:
            expected = weight
        else:
            expected = decay * expected + (1 - decay) * weight
    average = training.average.module.network[1].weight
    torch.testing.assert_close(average, expected)
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
    words = f"--optimizer {name} --epochs 1 --batch 4096 --micro-batch-size 4096"
    options = parse(words.split())
    data, model = toy_data(4096), build_model(f"{__name__}:Toy", (1, 2, 2), 2)
    training = Training(options, data, model, ["cpu"], describe(options, data))
    with training.engine:
        assert training.peak_rate() == pytest.approx(rate)
        assert f"a learning rate of {rate:.3g}" in training.rates_in_words()


@pytest.mark.parametrize("more", ["--pretrained", "--weights w.pth"])
def test_fine_tuning_has_adamw_at_its_rate(more):
    options = parse(["--data", "photos", *more.split()])
    data, model = toy_data(), build_model(f"{__name__}:Toy", (1, 2, 2), 2)
    training = Training(options, data, model, ["cpu"], describe(options, data))
    with training.engine:
        assert type(training.optimizer) is torch.optim.AdamW
        assert training.base_lr == 0.002


# --- optimizers and devices ---


@pytest.mark.pictures
def test_timm_optimizer_has_rate_and_decay():
    model = build_model("cnn", (1, 28, 28), 7)
    options = parse(["--optimizer", "lamb", "--base-lr", "0.1"])
    optimizer = make_optimizer(model, options)
    assert type(optimizer).__name__ == "Lamb"
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {0.1}
    vectors = [name for name, p in model.named_parameters() if p.ndim < 2]
    assert len(optimizer.param_groups[1]["params"]) == len(vectors)


UNUSABLE = {
    "adamn": "not found .*; did you mean .*adam",
    "lbfgs": "only supports one set of|closure|parameter groups",
    "sparseadam --base-lr 0.1": "dense gradients",
    "adahessian": "grad",
    "optimizer": "a class of torch.optim that needs gradients alone",
    "lion --base-lr 0": "--base-lr: 0.0 is not above zero",
    "adabelief": "its learning rate is not known; --base-lr X is that for batches of 256",
}


@pytest.mark.pictures
@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_optimizer_refused_before_data(name, tmp_path, capsys):
    """Some need a closure, a graph of the gradient, or one group of parameters."""
    words = ["--optimizer", *name.split(), "--out", str(tmp_path / "run")]
    assert main(["--model", f"{__name__}:Small", *words]) == 2
    printed = capsys.readouterr().err
    assert re.search(UNUSABLE[name], printed, re.IGNORECASE)
    assert printed.count("\n") == 1
    assert f"did you mean {name}" not in printed


@pytest.mark.parametrize(
    ("gpus", "words", "chosen"),
    [
        (0, (), ["cpu:0", "cpu:1"]),
        (2, (), [0, 1]),
        (2, ("cpu:1,", "cpu"), ["cpu:1", "cpu"]),
    ],
)
def test_each_device_has_a_replica(monkeypatch, gpus, words, chosen):
    gpu = torch.device("cuda") if gpus else None
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: gpu
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus)
    assert choose_devices(words) == chosen
    with pytest.raises(UsageError, match=r"^--devices: cuda:99 is not a device"):
        choose_devices(["cuda:99"])


# --- stopped, and resumed ---


@pytest.fixture(scope="module")
def whole(pictures, tmp_path_factory):
    """The folder of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole")
    folder, context = pictures
    with torch.random.fork_rng(), context():
        words = ["--data", str(folder), *OPTIONS, "--workers", "0", "--out", str(out)]
        assert main(words) == 0
    return out


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_stopped_run_resumes_bit_for_bit(folder, whole, tmp_path, capsys, number):
    """By the line that it prints. Other workers may read."""
    out = tmp_path / "out"
    words = ["train", "--data", str(folder), *OPTIONS, "--checkpoint-every", "2"]
    words += ["--out", str(out)]
    program = ("-m", "scatterpar") if HAS_PICTURES else ("-c", ON_FEW_INCLUDED)
    process = start_forked(*program, *words, "--workers", "2")
    wait_until(lambda: len(steps(out)) >= 6, tmp_path)
    others = psutil.Process(process.pid).children(recursive=True)
    assert len(others) >= 2 * HAS_PICTURES
    process.send_signal(number)
    ended = finish(process)
    wait_until(lambda: not any(map(is_running, others)), tmp_path)
    assert ended.code == (-number if number == signal.SIGKILL else 128 + number)
    # A worker whose main process is killed may say so.
    assert "Traceback" not in ended.err or number == signal.SIGKILL
    again = ["train", "--out", str(out), "--resume"]
    if number != signal.SIGKILL:
        made, name = len(steps(out)), signal.Signals(number).name
        assert f"{name}: saving at the end of this step; again: ending now" in ended.err
        said = "interrupted" if number == signal.SIGINT else f"ended by {name}"
        assert re.search(rf"{said} after [12] of 4 epochs, {made} steps", ended.out)
        assert re.search(r"(val|test) accuracy: \d", ended.out)
        assert (out / "curves.png").exists()
        assert records(out, "summary")[0]["ending"] == said
        line = r"saved after step (\d+); this goes on from there:\n  (.*)\n"
        last, words = re.search(line, ended.out).groups()
        assert int(last) == made < STEPS
        again = shlex.split(words)[3:]
        assert again == ["train", "--resume", str(out)]
    assert command([*again, "--workers", "0"]) == 0
    assert_same_run(whole, out, STEPS)
    (said,) = re.findall(r"finished after .* (\d+\.\d) s\n", capsys.readouterr().out)
    assert float(said) >= sum(r["seconds_whole"] for r in steps(out)) - 0.1
    resumed = [start["options"]["resume"] for start in records(out, "run")]
    assert resumed == [None, str(out)]


def is_running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False  # it ended in between


def test_run_that_ends_anywhere_resumes_bit_for_bit(
    folder, whole, tmp_path, monkeypatch
):
    """In an epoch, between its last step and its test, and after its test."""
    words = ["--data", str(folder), *OPTIONS, "--workers", "0", "--out", str(tmp_path)]
    words += ["--checkpoint-every", "1"]
    with stop_after(monkeypatch, 3):
        main(words)
    with monkeypatch.context() as patch:
        patch.setattr(Training, "test", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            main([*words, "--resume"])
    with stop_after(monkeypatch, 10):
        main([*words, "--resume"])
    assert main(["--resume", str(tmp_path)]) == 0
    assert_same_run(whole, tmp_path, STEPS)


def test_finished_run_stays_as_it_is(folder, whole, capsys):
    before = {file: file.read_bytes() for file in whole.iterdir()}
    words = ["--data", str(folder), *OPTIONS, "--out", str(whole)]
    finished = "finished before, after 4 epochs and 20 steps; --out starts a new run"
    refused = (
        "has a run of 20 steps: --resume goes on from its checkpoint.pt, if there is"
    )
    other = "is of a run with --seed 0, not 1: pass --seed 0"
    for more, code, said in (
        (["--resume"], 0, finished),
        ([], 2, refused),
        (["--resume", "--seed", "1"], 2, other),
    ):
        capsys.readouterr()
        assert main([*words, *more]) == code
        assert said in "".join(capsys.readouterr())
    assert {file: file.read_bytes() for file in whole.iterdir()} == before
    fields = {"command", "devices", "options", "versions"}
    assert records(whole, "run")[0].keys() >= fields


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_ends_run_at_once(tmp_path, number):
    options = ["--model", f"{__name__}:Stuck", "--batch", "1024", "--devices", "cpu"]
    options += ["--micro-batch-size", "1024", "--checkpoint-every", "1"]
    options += ["--out", str(tmp_path)]
    process = start_forked("-m", "scatterpar", "train", *options)
    while process.stdout.readline() != "stuck\n":
        pass
    process.send_signal(number)
    # else two might be seen as one
    while "again: ending now" not in process.stderr.readline():
        pass
    process.send_signal(number)
    assert finish(process).code == 128 + number
    assert torch.load(tmp_path / "checkpoint.pt")["position"]["step"] == 2


def test_folder_of_a_run_refused(included, tmp_path, capsys, monkeypatch):
    """A second run once overwrote what was there; two once wrote into one folder."""
    options = [*EMBEDDED, "--batch", "128", "--out", str(tmp_path)]
    with record_module.locked(tmp_path):
        assert main(options) == 2
    assert "another run is writing into" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()
    with stop_after(monkeypatch, 2):
        main(options)
    with record_module.locked(tmp_path):  # it is free again
        pass
    before = (tmp_path / "metrics.jsonl").read_bytes()
    for more, words in (
        ([], "has a run of 2 steps: --resume goes on .* another --out starts anew"),
        (["--resume"], "there is no .*checkpoint.pt; name the folder of a run"),
    ):
        assert main([*options, *more]) == 2
        assert re.search(words, capsys.readouterr().err)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "best.pt").touch()
    assert main(options) == 2


def test_resumed_run_keeps_its_options(included, tmp_path, monkeypatch, capsys):
    words = "--epochs 2 --batch 256 --seed 3 --channels-last --label-smoothing 0.1 "
    words += f"--out {tmp_path}"
    with stop_after(monkeypatch, 2):
        main([*EMBEDDED, *words.split()])
    position = torch.load(tmp_path / "checkpoint.pt")["position"]
    assert (position["step"], position["tested"]) == (2, 1)  # at the end of an epoch
    again = ["--resume", str(tmp_path)]
    same = "of a run with --seed 3, not 4: pass --seed 3 or leave it out"
    for more, said in (
        (["--seed", "4"], same),
        (["--clip", "1"], "of a run with --clip None, not 1.0: leave out --clip"),
        (["--pretrained"], "of a run with --pretrained False, not True"),
    ):
        assert main([*again, *more]) == 2
        assert said in capsys.readouterr().err
    assert main([*again, "--seed", "3", "--micro-batch-size", "64"]) == 0
    first, second = (start["options"] for start in records(tmp_path, "run"))
    assert second == first | {"resume": str(tmp_path), "micro_batch_size": 64}


@pytest.mark.pictures
def test_resume_with_other_images_refused(tmp_path, monkeypatch, capsys):
    folder, out = write_folder(tmp_path / "data", train=16, test=8), tmp_path / "out"
    with stop_after(monkeypatch, 1):
        train(folder, out, "--epochs", "2")
    checkpoint = (out / "checkpoint.pt").read_bytes()
    again = ["--out", str(out), "--resume"]
    bags = folder / "train" / "Bag"
    first = min(bags.iterdir())

    def refused(words):
        assert main(again) == 2
        assert words in capsys.readouterr().err

    other = first.rename(folder / "train" / "Sandal" / first.name)
    refused("{'train': [15, 17, 16], 'val': [8, 8, 8]}; restore them")
    # As many, but another name: --val would hold out others.
    other.rename(bags / "zz.png")
    refused(
        "some have other names, so that images to test on may be among those to train"
    )
    (bags / "zz.png").rename(first)
    for part in ("train", "val"):
        (folder / part / "Bag").rename(folder / part / "Hat")
    refused("its class_names were ['Bag', 'Sandal', 'Trouser'], and those of")
    for part in ("train", "val"):
        (folder / part / "Hat").rename(folder / part / "Bag")
    assert (out / "checkpoint.pt").read_bytes() == checkpoint
    folder.rename(tmp_path / "moved")
    refused("--data FOLDER names where it is now")
    assert main([*again, "--data", str(tmp_path / "moved")]) == 0


# --- broken ---


@pytest.mark.pictures
def test_broken_pictures_named_before_first_step(tmp_path, capsys, monkeypatch):
    """All are named and counted, of any part. With --skip-broken they are left out, after
    a resume, too.
    """
    folder, out = write_folder(tmp_path / "data", 40, 8, ending="jpg"), tmp_path / "out"
    files = []
    contents = []
    for part in ("train", "val"):
        file = min((folder / part / "Sandal").iterdir())
        files.append(str(file))
        contents.append(file.read_bytes())
        truncate(file)
    for more in ((), ("--skip-broken", "1")):
        assert train(folder, out, *more) == 2
        printed = capsys.readouterr()
        for file in files:
            assert (
                f"{file} cannot be read as an image: image file is truncated"
                in printed.out
            )
        assert f"2 of the images cannot be read, such as {files[0]}: " in printed.err
        assert "--skip-broken 2 leaves out so many" in printed.err
        assert not (out / "metrics.jsonl").exists()
    with stop_after(monkeypatch, 4):
        train(folder, out, "--skip-broken", "2")
    assert [record["images"] for record in steps(out)] == [40, 40, 39, 40]
    for file, content in zip(files, contents, strict=True):
        with open(file, "wb") as written:
            written.write(content)
    assert main(["--resume", str(out)]) == 0
    assert "2 broken files left out" in capsys.readouterr().out
    assert sum(record["images"] for record in steps(out)) == 3 * 119
    assert [record["left_out"] for record in records(out, "epoch")] == [2] * 3
    (summary,) = records(out, "summary")
    assert summary["left_out"].keys() == set(files)


@pytest.mark.pictures
def test_picture_lost_in_a_run_keeps_a_checkpoint(
    folder, tmp_path, capsys, monkeypatch
):
    take = Feed.take
    calls = []

    def taken(self):
        calls.append(self)
        if len(calls) == 3:
            raise FeedError("1.jpg cannot be read any more: the disk is away")
        return take(self)

    with monkeypatch.context() as patch:
        patch.setattr(Feed, "take", taken)
        assert train(folder, tmp_path) == 2
    printed = capsys.readouterr().err
    assert (
        "1.jpg cannot be read any more: the disk is away; the checkpoint after "
        in printed
    )
    assert torch.load(tmp_path / "checkpoint.pt")["position"]["step"] == 2
    assert train(folder, tmp_path, "--resume") == 0
    assert len(steps(tmp_path)) == 9


@pytest.mark.parametrize(
    "where", ["checkpoint.pt", pytest.param("metrics.jsonl", marks=pytest.mark.slow)]
)
def test_full_disk_leaves_old_checkpoint(
    included, tmp_path, capsys, monkeypatch, where
):
    def full_for_line(line, **to):
        if '"step": 3' in line:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        print(line, **to)

    def full_for_file(source, target):
        if target.name == where:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        shutil.move(source, target)

    options = [*EMBEDDED, "--batch", "128", "--out", str(tmp_path)]
    with stop_after(monkeypatch, 2):
        main([*options, "--checkpoint-every", "2"])
    before = (tmp_path / "checkpoint.pt").read_bytes()
    options += ["--checkpoint-every", "1", "--resume"]
    with monkeypatch.context() as patch:
        if where == "metrics.jsonl":
            patch.setattr(record_module, "print", full_for_line, raising=False)
        else:
            patch.setattr(record_module.os, "replace", full_for_file)
        capsys.readouterr()
        assert main(options) == 2
    printed = capsys.readouterr().err
    assert re.search(
        rf"error: --out: .*{where} cannot be written: No space left on dev", printed
    )
    assert "the checkpoint after step 2 is kept: --resume goes on from it" in printed
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert not list(tmp_path.glob("*.part"))
    assert main(options) == 0
    assert [r["step"] for r in steps(tmp_path)] == [*range(1, 5)]


def test_diverged_run_keeps_what_was_reached(included, tmp_path, capsys):
    options = f"--model {__name__}:Diverging --epochs 2 --devices cpu --batch 256 "
    options += f"--micro-batch-size 4096 --out {tmp_path}"
    assert main(options.split()) == 1
    printed = capsys.readouterr().out
    assert re.search(
        r"training diverged \(.*\); a lower --base-lr may help; stopped", printed
    )
    assert "stopped after 0 of 2 epochs, 1 steps" in printed
    assert "test accuracy: not measured, no epoch was finished" in printed
    (summary,) = records(tmp_path, "summary")
    assert summary["test_accuracy"] is None
    assert "accuracy_per_class" not in summary


def test_signal_after_training_ends_run_at_once(included, tmp_path, monkeypatch):
    """While it draws what was reached."""

    def interrupt(*_, **__):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Feed, "take", mock.Mock(side_effect=FloatingPointError))
    monkeypatch.setattr(record_module, "draw_curves", interrupt)
    with pytest.raises(KeyboardInterrupt):
        main([*EMBEDDED, "--out", str(tmp_path)])


@pytest.mark.parametrize(("batch", "devices"), [("1", "cpu"), ("2", "cpu:0,cpu:1")])
def test_sub_step_of_one_image_is_told(included, tmp_path, capsys, batch, devices):
    options = ["--batch", batch, "--devices", devices, "--out", str(tmp_path)]
    assert main(options) == 2
    printed = capsys.readouterr().err
    assert "--batch with two images for each device; no checkpoint was wri" in printed


def test_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night-7")
    assert main([]) == 2
    assert "without torchrun: one process uses all GPUs" in capsys.readouterr().err


# --- what a run does and says ---


def test_run_reports_and_opens_no_port(included, tmp_path, capsys, monkeypatch):
    def opened(self, address):
        raise AssertionError(f"a port was opened: {address}")

    drawn = mock.Mock(wraps=record_module.draw_curves)
    monkeypatch.setattr(record_module, "draw_curves", drawn)
    monkeypatch.setattr("socket.socket.bind", opened)
    monkeypatch.setattr(record_module, "_LINE_SECONDS", 0.0)
    monkeypatch.setattr(training_module, "_SECONDS_OF_DRAWINGS", math.inf)
    words = f"--devices cpu:0,cpu:1 --batch 128 --micro-batch-size 16 --out {tmp_path}"
    assert main([*EMBEDDED, *words.split(), "--epochs", "2"]) == 0
    printed, best = capsys.readouterr(), torch.load(tmp_path / "best.pt")
    accuracy = best["accuracy"]
    for text in (
        f"writing to {tmp_path}\n",
        "cpu:1   64:128  4 x 16",
        "batches of 128, for 4 steps an epoch of 512; --batch sets it",
        "epoch 1/2: loss",
        "finished after 2 of 2 epochs, 8 steps",
        f", test accuracy {accuracy:.2%}, in {tmp_path / 'best.pt'}",
        f"\ntest accuracy: {accuracy:.2%}",
        "images of each class: T-shirt/top ",
        "wrote metrics.jsonl, curves.png, confusion.png, mistakes.png, first_batch.png",
    ):
        assert text in printed.out
    line = r"^epoch 1/2: 25%, .* images/s, .* left, loss=\d+\.\d{4}, waiting=\d+%$"
    assert re.search(line, printed.out, re.MULTILINE)
    assert printed.err == ""  # a bar is for terminals
    drawn.assert_called_once()  # at the end
    text = (tmp_path / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    epoch = [*["step"] * 4, "epoch"]
    assert [line["kind"] for line in lines] == ["run", *epoch, *epoch, "summary"]
    assert lines[1]["images"] == 128
    assert lines[1]["bytes"]["scatter"] == 128 * (28 * 28 + 8)
    assert lines[-1]["test_accuracy"] == accuracy
    assert lines[-1]["accuracy_per_class"].keys() == set(included.class_names)
    copied = sum(lines[4]["bytes"].values())
    assert f"copied per step: {copied:,} bytes; nn.DataParallel, called" in printed.out
    for name in ("curves.png", "confusion.png", "first_batch.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("large", "copied"), [(1, 392), (2**20, 352)])
def test_traffic_of_data_parallel_is_that_of_a_tree(monkeypatch, large, copied):
    """Large gradients are copied once more by the engine, and not by the other."""
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", large)
    model = nn.Linear(4, 2)
    devices = ["cpu:0", "cpu:1", "cpu:2"]
    with ScatterOnceParallel(model, 2, devices, verify=False) as engine:
        engine.forward_backward(torch.ones(12, 4), None, lambda out, _: out.sum())
    rows = 12 * 4 * 4
    of_data_parallel = rows + 2 * (2 * 40 + 2 * 40)
    assert training_module.traffic(engine.last_step, model) == (
        f"copied per step: {copied} bytes; nn.DataParallel, called for each of 2 "
        f"sub-steps, copies {of_data_parallel}"
    )


@pytest.mark.pictures
def test_long_run_is_drawn_meanwhile(folder, tmp_path, monkeypatch):
    drawn = mock.Mock()
    for name in ("draw_curves", "draw_confusion", "draw_mistakes"):
        monkeypatch.setattr(record_module, name, drawn)
    monkeypatch.setattr(training_module, "_SECONDS_OF_DRAWINGS", 0.0)
    assert train(folder, tmp_path, "--epochs", "1") == 0
    assert drawn.call_count == 3 * 2  # after the epoch, and at the end


@pytest.mark.pictures
def test_accuracies_of_the_summary_are_the_best_epochs(tmp_path, capsys):
    """The last epoch's was beside classes whose mean was the best one's."""
    folder, out = tmp_path / "data", tmp_path / "out"
    for part, name, count in (
        *[("train", "Bag", 10), ("train", "Trouser", 30)],
        *[("val", "Bag", 8), ("val", "Trouser", 2)],
    ):
        other = write_folder(
            tmp_path / f"{part}{name}", train=count, test=0, classes=[name]
        )
        shutil.copytree(other / "train" / name, folder / part / name)
    words = f"--model {__name__}:Swinging --batch 40 --base-lr 0.2 --epochs 4"
    assert train(folder, out, *words.split()) == 0
    epochs = [epoch["val_accuracy"] for epoch in records(out, "epoch")]
    assert max(epochs) > epochs[-1]  # else this shows nothing
    (summary,) = records(out, "summary")
    per_class = summary["accuracy_per_class"]
    assert summary["val_accuracy"] == max(epochs)
    assert summary["test_accuracy"] is None
    assert 0.8 * per_class["Bag"] + 0.2 * per_class["Trouser"] == pytest.approx(
        max(epochs)
    )
    assert f"\nval accuracy: {max(epochs):.2%}\n" in capsys.readouterr().out
    assert torch.load(out / "best.pt")["accuracy"] == max(epochs)


@pytest.mark.pictures
@pytest.mark.parametrize("ends", [pytest.param(False, marks=pytest.mark.slow), True])
def test_val_picks_best_epoch_test_runs_once(tmp_path, capsys, monkeypatch, ends):
    """Also by a run that ends before that test, and goes on."""
    folder, out = write_folder(tmp_path / "data", train=40, test=8), tmp_path / "out"
    other = write_folder(tmp_path / "other", train=1, test=12)
    (other / "val").rename(folder / "test")
    tested = []
    test_part = Training.test

    def test(self, feed, part="test", *more, **options):
        tested.append(part)
        if part == "test" and ends and len(tested) == 4:
            raise MemoryError
        return test_part(self, feed, part, *more, **options)

    monkeypatch.setattr(Training, "test", test)
    words = ["--base-lr", "0.1"]
    if ends:
        with pytest.raises(MemoryError):
            train(folder, out, *words)
        assert main(["--out", str(out), "--resume"]) == 0
    else:
        assert train(folder, out, *words) == 0
    assert tested == ["val"] * 3 + ["test"] * (1 + ends)
    printed = capsys.readouterr().out
    epochs, (summary,) = records(out, "epoch"), records(out, "summary")
    best = max(epoch["val_accuracy"] for epoch in epochs)
    assert torch.load(out / "best.pt")["accuracy"] == best == summary["val_accuracy"]
    assert "test_accuracy" not in epochs[0]
    assert f"val accuracy {best:.2%}, in {out / 'best.pt'}" in printed
    accuracy = summary["test_accuracy"]
    assert f"test accuracy: {accuracy:.2%}, of the best epoch's weights" in printed
    words = [str(out), str(folder / "test"), "--workers", "0"]
    assert command(["predict", *words, "--model", "harness.runs:Small"]) == 0
    printed = capsys.readouterr()
    lines = list(csv.DictReader(printed.out.splitlines()))
    right = sum(line["file"].split("/")[0] == line["class"] for line in lines)
    assert right / len(lines) == pytest.approx(accuracy)
    assert (
        f"accuracy: {accuracy:.2%} of 36 pictures in folders of classes" in printed.err
    )


@pytest.mark.pictures
def test_training_options_reach_the_run(folder, tmp_path, capsys):
    words = "--optimizer adamw --autocast float16 --channels-last --base-lr 0.003 "
    words += "--warmup-epochs 1 --micro-batch-size 12"
    assert train(folder, tmp_path, *words.split(), "--devices", "cpu:0,cpu:1") == 0
    printed = capsys.readouterr().out
    rates = [r["learning_rate"] for r in steps(tmp_path)]
    peak = 0.003 * (40 / 256) ** 0.5  # 120 images in three steps
    assert rates[:4] == pytest.approx([peak * part / 4 for part in (1, 2, 3, 4)])
    state, best = (torch.load(tmp_path / name) for name in ("checkpoint.pt", "best.pt"))
    assert state["scaler"]["scale"] > 0
    assert "cpu:0   0:20" in printed
    assert re.search(r"images/s, waiting \d+%", printed)
    assert "pretrained weights help most: --model timm:resnet18 --pretrained" in printed
    assert best["model"].keys() == Small(3).state_dict().keys()


def test_engine_options_reach_the_engine(included, tmp_path):
    refused = mock.patch.object(
        training_module, "ScatterOnceParallel", side_effect=KeyError
    )
    with refused as engine, pytest.raises(KeyError):
        main([*EMBEDDED, "--devices", "cpu,cpu", "--compile", "--out", str(tmp_path)])
    passed = {"buffers": "batch", "compile": True, "micro_batch_size": 1024}
    passed |= {"device_ids": ["cpu", "cpu"]}
    assert passed.items() <= engine.call_args.kwargs.items()


def test_averaged_weights_tested_and_kept(included, tmp_path):
    words = f"--batch 256 --ema 0.5 --out {tmp_path}"
    assert main([*EMBEDDED, *words.split()]) == 0
    state, best = (torch.load(tmp_path / name) for name in ("checkpoint.pt", "best.pt"))
    assert int(state["average"]["n_averaged"]) == 2
    for name, value in best["model"].items():
        assert torch.equal(value, state["average"][f"module.network.{name}"]), name
    assert not torch.equal(best["model"]["head.weight"], state["model"]["head.weight"])


@pytest.mark.pictures
def test_names_beyond_consoles_letters_are_escaped(tmp_path, monkeypatch):
    """As on Windows, in a file; the run ended at its third line."""
    folder = write_folder(tmp_path / "data", train=8, test=4)
    for part in ("train", "val"):
        (folder / part / "Bag").rename(folder / part / "日本")
        (folder / part / "Sandal").rename(folder / part / "Grüße")
    out = tmp_path / "run"
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr("sys.stdout", console)
    assert train(folder, out, "--epochs", "1") == 0
    words = ["predict", str(out), str(folder), "--workers", "0"]
    assert command([*words, "--model", "harness.runs:Small"]) == 0
    console.flush()
    printed = console.buffer.getvalue().decode("cp1252")
    assert "Grüße 8 + 4" in printed
    assert r"\u65e5\u672c 8 + 4" in printed
    assert r"val/\u65e5\u672c/" in printed
