"""The training program: a run beside plain torch; stopped and resumed runs; wrong values;
pictures in files.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from itertools import chain
from unittest import mock

import psutil
import pytest
import torch
from faults.processes import SILENCE, finish, start_forked
from harness.leak_checks import put_back_random_states, random_states
from harness.optional import import_torchvision_first
from harness.pictures import CLASSES, write_folder
from torch import nn

import scatterpar
from scatterpar import embedded, train
from scatterpar.__main__ import main as command
from scatterpar.embedded import LabelledImages
from scatterpar.train import ImageBatches, InMemory, Run, SmallCNN, main, read_options

pytestmark = pytest.mark.draws
# 4 steps an epoch, of 24 or 25 images, of the images that `few` leaves.
QUICK = "--batch-size 25 --epochs 3 --micro-batch-size 7 --devices cpu:0 cpu:1"


def few_images():
    """Some of the included images, in the place of all."""
    parts = embedded.load()
    return tuple(
        LabelledImages(part.images[:number], part.labels[:number])
        for part, number in zip(parts, (97, 40), strict=True)
    )


@pytest.fixture
def few(monkeypatch):
    parts = few_images()
    monkeypatch.setattr(embedded, "load", lambda: parts)
    return parts


def run_of(arguments):
    options, checkpoint = read_options(arguments.split())
    return Run(options, checkpoint)


def records(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def assert_same_run(folder, expected):
    """The same bits in all that a run has saved, but for the speed."""
    for name in ("checkpoint.pt", "best.pt"):
        ours, theirs = (torch.load(run / name) for run in (folder, expected))
        for state in (ours, theirs):
            for key in train.CHANGEABLE:
                state.get("options", {}).pop(key, None)
            for record in state.get("records", []):
                del record["images_per_second"]
        # Where CI is set pytest writes the difference of two networks for hours.
        is_same = flat(ours) == flat(theirs)
        assert is_same, f"{name} of {folder} and {expected} differ"
    assert len(records(folder)) == len(records(expected))


def flat(state):
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: flat(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [flat(value) for value in state]
    return state


# --- a run beside plain torch ---


def order_of(batches, epoch):
    return [images.flatten().tolist() for images, _ in batches.of_epoch(epoch)]


@pytest.mark.parametrize("workers", [0, 2])
def test_epoch_has_each_image_once(workers):
    options, _ = read_options(f"--batch-size 70 --workers {workers}".split())
    data = InMemory(torch.arange(200), torch.arange(200) % 3)
    batches = ImageBatches(data, options, is_shuffled=True)
    first = order_of(batches, 0)
    assert [len(batch) for batch in first] == [67, 67, 66]
    assert sorted(chain(*first)) == list(range(200))
    assert order_of(batches, 1) != first
    assert order_of(batches, 0) == first
    in_order = ImageBatches(data, options, is_shuffled=False)
    assert list(chain(*order_of(in_order, 0))) == list(range(200))


def test_epoch_equals_plain_torch(few, tmp_path):
    """Replica and sub-step are one: batch normalisation sees the whole batch."""
    run = run_of(
        "--batch-size 25 --epochs 4 --warmup-epochs 1 --micro-batch-size 32 --devices cpu "
        f"--lr-base 0.1 --weight-decay 0.01 --output {tmp_path / 'run'}"
    )
    plain = copy.deepcopy(run.network)
    expected = []
    images, labels = few[0]
    pixels = images.float()
    pixels = (pixels - pixels.mean()) / pixels.std(correction=0)
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    others = [p for p in plain.parameters() if p.ndim > 1]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": vectors}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
    peak = 0.1 * 97 / 4 / 256
    step = 0
    for epoch in range(4):
        rows_of_epoch = train.seed_of("order", 0, epoch)
        generator = torch.Generator().manual_seed(rows_of_epoch)
        losses = 0.0
        for rows in torch.randperm(97, generator=generator).tensor_split(4):
            rate = peak * (step + 1) / 5
            if step >= 4:
                rate = peak * 0.5 * (1 + math.cos(math.pi * (step - 4) / 12))
            for group in optimizer.param_groups:
                group["lr"] = rate
            plain.train()
            loss = nn.functional.cross_entropy(plain(pixels[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += loss.item() * len(rows)
            step += 1
        plain.eval()
        with torch.no_grad():
            scores = plain(
                (few[1].images.float() - images.float().mean())
                / images.float().std(correction=0)
            )
        right = (scores.argmax(1) == few[1].labels).float().mean()
        test_loss = nn.functional.cross_entropy(scores, few[1].labels)
        expected.append((losses / 97, float(test_loss), float(right)))
    with run.engine:
        run.train()
    found = records(tmp_path / "run")
    names = ("train_loss", "test_loss", "accuracy")
    for record, values in zip(found, expected, strict=True):
        assert [record[name] for name in names] == pytest.approx(values, rel=1e-3)
    for ours, theirs in zip(run.network.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    best = max(found, key=lambda record: record["accuracy"])
    assert best["accuracy"] == max(right for _, _, right in expected)
    assert (tmp_path / "run" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("opt", "rate"), [("sgd", 0.0125 * 16), ("adamw", 0.001 * 4), ("lamb", 0.5 * 4)]
)
def test_rate_fits_optimizer_and_batch(opt, rate, monkeypatch):
    """Linear for SGD, by the square root for what divides by the gradient's size."""
    given = []
    timm = mock.Mock()
    timm.optim.create_optimizer_v2 = lambda network, name, lr, decay: (
        given.append(lr) or torch.optim.SGD(network.parameters(), lr)
    )
    monkeypatch.setattr(train, "import_timm", lambda reason: timm)
    words = f"--opt {opt} --warmup-epochs 0" + " --lr-base 0.5" * (opt == "lamb")
    options, _ = read_options(words.split())
    batches = ImageBatches(
        InMemory(torch.zeros(4096), torch.zeros(4096)), options, is_shuffled=True
    )
    optimizer, _ = train.build_optimizer(options, SmallCNN((1, 8, 8), 2), batches)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)


def test_bar_moves_within_a_step(few, tmp_path, monkeypatch):
    bars = []

    class Bar(train.tqdm):
        monitor_interval = 0

        def __init__(self, *arguments, **options):
            options |= {"file": io.StringIO(), "disable": False}
            super().__init__(*arguments, **options)
            self.positions = []
            bars.append(self)

        def update(self, number=1):
            super().update(number)
            self.positions.append(self.n)

    monkeypatch.setattr(train, "tqdm", Bar)
    assert main(f"{QUICK} --epochs 1 --output {tmp_path / 'run'}".split()) == 0
    (bar,) = bars
    assert bar.n == 97
    assert len(bar.positions) >= 4 * 4


@pytest.mark.slow
def test_included_images_are_learned(tmp_path, capsys):
    """Seeds 0 to 4 reached 85.5, 85.0, 86.1, 84.4 and 85.8 %."""
    assert main(["--output", str(tmp_path / "run")]) == 0
    assert max(record["accuracy"] for record in records(tmp_path / "run")) > 0.84
    assert "best epoch 1" in capsys.readouterr().out


# --- stopped, and resumed ---


@pytest.fixture(scope="module")
def run_that_ended(tmp_path_factory):
    """The folder of a run that nobody stopped."""
    folder = tmp_path_factory.mktemp("ended") / "whole"
    parts = few_images()
    before = random_states()
    with mock.patch.object(embedded, "load", return_value=parts):
        assert main(f"{QUICK} --output {folder}".split()) == 0
    put_back_random_states(before)
    return folder


@pytest.fixture
def whole(run_that_ended, few, tmp_path):
    """A copy of it, of this test alone."""
    return shutil.copytree(run_that_ended, tmp_path / "whole")


class Killed(BaseException):
    """Ends a run as a killed process does."""


@pytest.mark.parametrize(
    ("place", "done", "workers"),
    [
        ("_train_epoch", 1, 0),
        ("_evaluate", 2, 1),
        pytest.param("_train_epoch", 2, 1, marks=pytest.mark.slow),
        pytest.param("_evaluate", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_resumed_run_ends_with_the_same_bits(
    whole, tmp_path, monkeypatch, place, done, workers
):
    folder = tmp_path / "run"
    method = getattr(Run, place)

    def killed(self):
        result = method(self)
        if self.epochs_done == done:
            raise Killed
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Run, place, killed)
        with pytest.raises(Killed):
            main(f"{QUICK} --output {folder}".split())
    assert len(records(folder)) == done
    assert main(f"--resume {folder} --workers {workers}".split()) == 0
    assert_same_run(folder, whole)
    # A run that is finished stays as it is.
    assert main(["--resume", str(folder)]) == 0
    assert_same_run(folder, whole)


# A run of few images in its own process, whose epochs take a while.
PROGRAM = f"""
import sys, time
from unittest import mock
from scatterpar import embedded, train
from scatterpar.__main__ import run
from {__name__} import few_images

class Slow(train.SmallCNN):
    def forward(self, images):
        time.sleep(0.02 * self.training)
        return super().forward(images)

parts = few_images()
with mock.patch.object(embedded, "load", lambda: parts), mock.patch.object(train, "SmallCNN", Slow):
    run()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_all_ends_run_after_its_step(whole, tmp_path, number):
    """To the workers that read images, too, as from a terminal or a scheduler."""
    folder = tmp_path / "run"
    words = f"{QUICK} --workers 1 --output {folder}"
    process = start_forked("-c", PROGRAM, "train", *words.split())
    limit = time.monotonic() + SILENCE
    while not (folder / "checkpoint.pt").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    workers = psutil.Process(process.pid).children(recursive=True)
    assert len(workers) >= 2
    process.send_signal(number)
    for worker in workers:
        worker.send_signal(number)
    ended = finish(process)
    assert "Traceback" not in ended.err
    assert ended.code == 128 + number
    assert "ending after this step; again: ending now" in ended.err
    done = int(re.search(r"stopped after (\d) epochs", ended.err)[1])
    assert len(records(folder)) == done
    assert (folder / "curves.png").exists()
    (words,) = re.findall(
        "this goes on from there: python -m scatterpar (.*)", ended.err
    )
    assert command(words.split()) == 0
    assert_same_run(folder, whole)


def test_second_signal_ends_the_process(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.getsignal(signal.SIGINT)
    with train.deferred_signals() as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert (received, ended) == ([signal.SIGINT], [])
        os.kill(os.getpid(), signal.SIGINT)
        assert ended == [130]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks")
def test_worker_that_ends_with_a_signal_is_no_error(monkeypatch):
    """Both signals wait when the run sees the first one."""

    def raises(*_):
        raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    ignored = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    before = signal.signal(signal.SIGCHLD, raises)
    both = {signal.SIGTERM, signal.SIGCHLD}
    try:
        with train.deferred_signals() as received:
            signal.pthread_sigmask(signal.SIG_BLOCK, both)
            for number in both:  # to this thread: others do not block them
                signal.pthread_kill(threading.get_ident(), number)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        assert received == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGCHLD) is raises
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert ignored == []


def test_signal_to_all_processes_is_a_stop(few, tmp_path, monkeypatch):
    """A worker that it has ended is no error of its own."""

    def broken(self):
        self.signals.append(signal.SIGTERM)
        raise RuntimeError("DataLoader worker is killed by signal: Terminated")

    monkeypatch.setattr(Run, "_train_epoch", broken)
    assert main(f"{QUICK} --output {tmp_path / 'run'}".split()) == 143


def test_file_is_old_or_new(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def write_half():
        with train.atomic_file(file) as new:
            new.write(b"half")
            new.flush()
            assert file.read_bytes() == b"old"
            raise Killed

    with pytest.raises(Killed):
        write_half()
    assert file.read_bytes() == b"old"
    with train.atomic_file(file) as new:
        new.write(b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_diverged_run_says_so(few, tmp_path, monkeypatch, capsys):
    def broken(self, images):
        return nn.Sequential.forward(self, images) * math.nan

    monkeypatch.setattr(SmallCNN, "forward", broken)
    assert main(f"{QUICK} --output {tmp_path / 'run'}".split()) == 1
    assert "a lower --lr-base may help" in capsys.readouterr().err


# --- options ---

REFUSED = {
    "--epochs 0": "--epochs 0: pass a number above zero",
    "--batch-size -3": "--batch-size -3: pass a number above zero",
    "--lr-base nan": "--lr-base nan: pass a number above zero",
    "--lr-base inf": "--lr-base inf: pass a number above zero",
    "--weight-decay -1": "--weight-decay -1.0: pass zero or a number above it",
    "--workers -1": "--workers -1: pass zero or a number above it",
    "--epochs 3 --warmup-epochs 3": "--warmup-epochs 3: pass a number below --epochs 3",
    "--opt lion": "--opt lion: its usual rate is not known; pass --lr-base",
    "--amp-dtype int8": "--amp-dtype int8: pass bfloat16 or float16",
    "--img-size 32": "--img-size 32: the included images are used as they are",
    "--aa rand-m6": "--aa rand-m6: the included images are used as they are",
    "--pretrained": "--model cnn: it has no pretrained weights",
    "--resume no": "--resume no: no/checkpoint.pt cannot be read",
    "--output /dev/null/runs": "--output /dev/null/runs: Not a directory",
    "--data phtos": "--data phtos: ",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_value_is_one_line_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert REFUSED[arguments] in printed
    assert re.fullmatch("scatterpar train: error: .*\n", printed)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--epochs 1.5", "argument --epochs: invalid int value: '1.5'"),
        ("--grad-accum-steps 3", "unrecognized arguments: --grad-accum-steps 3"),
    ],
)
def test_unreadable_argument_is_argparses(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_run_in_the_way_is_refused(whole, capsys):
    assert main(f"{QUICK} --output {whole}".split()) == 2
    assert f"a run is there; pass --resume {whole} to go on" in capsys.readouterr().err


def test_resumed_run_refuses_other_values(whole, tmp_path, capsys):
    assert main(f"--resume {whole} --epochs 90".split()) == 2
    words = f"--epochs 90: the run in {whole} has 3; leave it out"
    assert words in capsys.readouterr().err
    assert main(f"--resume {whole} --epochs 3".split()) == 0


def test_resumed_run_refuses_other_images(whole, monkeypatch, capsys):
    parts = [LabelledImages(*(values[:50] for values in part)) for part in few_images()]
    monkeypatch.setattr(embedded, "load", lambda: parts)
    assert main(f"--resume {whole}".split()) == 2
    assert "its images differ from the run in" in capsys.readouterr().err


def test_checkpoint_of_another_program_is_refused(tmp_path, capsys):
    torch.save({"state_dict": {}}, tmp_path / "checkpoint.pt")
    assert main(["--resume", str(tmp_path)]) == 2
    assert "checkpoint.pt cannot be read ('options')" in capsys.readouterr().err


def test_some_defaults_follow_from_others():
    included, _ = read_options([])
    pictures, _ = read_options(["--data", "photos"])
    assert (included.model, included.batch_size, included.workers) == ("cnn", 4096, 0)
    assert (pictures.model, pictures.batch_size) == ("resnet18", 256)
    assert pictures.workers == min(8, os.cpu_count())
    assert read_options(["--epochs", "4"])[0].warmup_epochs == 0
    assert read_options(["--epochs", "90"])[0].warmup_epochs == 5


@pytest.mark.parametrize(
    ("gpus", "expected"), [(0, ["cpu:0", "cpu:1"]), (2, ["cuda:0", "cuda:1"])]
)
def test_each_gpu_has_a_replica(monkeypatch, gpus, expected):
    gpu = torch.device("cuda") if gpus else None
    accelerator = torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda check_available: gpu)
    monkeypatch.setattr(accelerator, "device_count", lambda: gpus)
    assert train.default_devices() == expected


def test_help_fits_on_a_screen_and_a_half(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "88")
    with pytest.raises(SystemExit):
        command(["train", "--help"])
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 45
    for names, _, _, _ in train.OPTIONS:
        assert all(name in printed for name in names.split())


def test_version_told_wrong_command_refused(capsys):
    for arguments in (["--version"], ["train", "--version"]):
        assert command(arguments) == 0
        said = f"scatterpar {scatterpar.__version__}, torch {torch.__version__}\n"
        assert capsys.readouterr().out == said
    assert command(["tain"]) == 2
    words = r"there is no command 'tain'; did you mean train\?"
    said = capsys.readouterr().err
    assert re.fullmatch(f"scatterpar: error: {words}.*usage: .*\n", said)


def test_without_a_command_all_are_printed(capsys):
    assert command([]) == 2
    without = capsys.readouterr()
    assert command(["--help"]) == 0
    assert without == capsys.readouterr()
    assert re.search("^  doctor ", without.out, re.MULTILINE)


@pytest.mark.parametrize("package", ["tqdm", "matplotlib"])
def test_missing_package_names_extra(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"{package} is not installed.*pip install .*\[train\]"
    assert command(["train"]) == 2
    assert re.search(words, capsys.readouterr().err)


def test_missing_timm_names_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "timm.data", None)
    assert main(["--data", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "this option needs timm, and a torchvision for this torch" in printed
    assert "pip install -e '.[images]'" in printed


# --- pictures in files ---

ON_FILES = "--model cnn --img-size 32 --batch-size 20 --epochs 2 --devices cpu:0 cpu:1 "
ON_FILES += "--aa rand-m6-mstd0.5 --micro-batch-size 4"


@pytest.fixture
def folder(tmp_path):
    import_torchvision_first()
    return write_folder(tmp_path / "photos", train=12, test=4)


@pytest.mark.pictures
def test_run_on_files_is_same_with_any_workers(folder, tmp_path):
    words = f"--data {folder} {ON_FILES}"
    assert main(f"{words} --workers 0 --output {tmp_path / 'one'}".split()) == 0
    assert main(f"{words} --workers 2 --output {tmp_path / 'two'}".split()) == 0
    assert_same_run(tmp_path / "two", tmp_path / "one")


@pytest.mark.pictures
def test_resumed_run_on_files_has_the_same_bits(folder, tmp_path, monkeypatch):
    words = f"--data {folder} {ON_FILES} --workers 0"
    assert main(f"{words} --output {tmp_path / 'whole'}".split()) == 0
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_draw", mock.Mock(side_effect=Killed))
        patch.setattr(train, "SECONDS_OF_A_LONG_EPOCH", 0.0)
        with pytest.raises(Killed):
            main(f"{words} --output {tmp_path / 'run'}".split())
    random.seed(3)
    assert len(records(tmp_path / "run")) == 1
    moved = folder.rename(tmp_path / "moved")
    assert main(f"--resume {tmp_path / 'run'} --data {moved}".split()) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.pictures
def test_best_weights_are_timms(folder, tmp_path):
    import timm

    words = f"--data {folder} --model test_resnet --img-size 32 --epochs 1 --workers 0"
    assert main(f"{words} --output {tmp_path / 'run'}".split()) == 0
    best = tmp_path / "run" / "best.pt"
    network = timm.create_model("test_resnet", num_classes=3, checkpoint_path=best)
    state = torch.load(best)
    assert state["classes"] == sorted(CLASSES)
    for name, value in network.state_dict().items():
        assert torch.equal(value, state["state_dict"][name])


@pytest.mark.pictures
@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_picture_is_named(folder, tmp_path, capsys, workers):
    broken = sorted((folder / "train" / "Bag").iterdir())[3]
    content = broken.read_bytes()
    broken.write_bytes(content[: 2 * len(content) // 3])
    words = f"--data {folder} {ON_FILES} --workers {workers}"
    assert main(f"{words} --output {tmp_path / 'run'}".split()) == 2
    printed = capsys.readouterr().err
    assert f"these pictures cannot be read: {broken} (" in printed
    assert printed.endswith("mend or remove them\n")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


def without_val(folder):
    (folder / "val").rename(folder / "other")


def flat_folder(folder):
    without_val(folder)
    (folder / "train").rename(folder / "Shirt")


def empty(folder):
    for file in folder.rglob("*.png"):
        file.unlink()


def other_classes(folder):
    (folder / "val" / "Bag").rename(folder / "val" / "Coat")


LAYOUTS = {
    without_val: "it lacks a part; a data set is a folder with train/CLASS/1.jpg",
    flat_folder: "it lacks a part; a data set is a folder with train/CLASS/1.jpg",
    empty: "Found 0 images in subfolders of",
    other_classes: "the training part has the classes ['Bag'",
}


@pytest.mark.pictures
@pytest.mark.parametrize("change", LAYOUTS, ids=lambda change: change.__name__)
def test_other_layout_is_one_line(folder, capsys, change):
    change(folder)
    assert main(["--data", str(folder)]) == 2
    printed = capsys.readouterr().err
    assert f"--data {folder}: " in printed
    assert LAYOUTS[change] in printed
    assert printed.count("\n") == 1


UNKNOWN = {
    "--model resnet18.wrong": "--model resnet18.wrong: Invalid pretrained tag",
    "--model resnet17": "--model resnet17: .*resnet17.*; did you mean .*resnet18",
    "--opt sdg --lr-base 0.1": "--opt sdg: .*sdg.*; did you mean .*sgd",
    "--aa random": "--aa random: timm has no such policy",
    "--data hfds/no/such": "--data hfds/no/such: ",
    "--model test_resnet --pretrained": "--model test_resnet: ",
}


@pytest.mark.pictures
@pytest.mark.parametrize("words", UNKNOWN)
def test_unknown_name_is_one_line(folder, tmp_path, monkeypatch, capsys, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = f"--data {folder} --output {tmp_path / 'run'} {words}"
    assert main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert re.search(UNKNOWN[words], printed)
    assert printed.count("\n") == 1


@pytest.mark.pictures
def test_transformer_gets_size_of_pictures(folder, tmp_path):
    words = f"--data {folder} --model test_vit --img-size 64 --epochs 1 --workers 0"
    assert main(f"{words} --output {tmp_path / 'run'}".split()) == 0


@pytest.mark.pictures
def test_set_of_hugging_face(folder, tmp_path):
    """A folder is a set of this library, too, without a hub."""
    pytest.importorskip("datasets", reason="the extra `datasets`")
    words = f"--data hfds/{folder} {ON_FILES} --workers 0"
    assert main(f"{words} --output {tmp_path / 'run'}".split()) == 0
    state = torch.load(tmp_path / "run" / "best.pt")
    assert state["classes"] == sorted(CLASSES)
