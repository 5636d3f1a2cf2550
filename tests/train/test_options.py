"""The tool from the outside: options, exit codes, what it prints and leaves behind."""

import json
import re
import subprocess
import sys

import psutil
import pytest
import torch
from torch import nn

import scatterpar
from scatterpar.__main__ import main as command
from scatterpar.train.options import parse
from scatterpar.train.run import main
from scatterpar.train.training import Training, default_batch

pytestmark = pytest.mark.draws
SMALL = ["--model", "harness.runs:Small"]  # a run of the default network takes seconds
TWO_CPUS = ["--devices", "cpu:0,cpu:1", "--micro-batch-size", "128", "--epochs", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--epochs 1.5", "invalid literal for int() with base 10: '1.5'"),
        ("--drop-at 3 x", "Error parsing --drop-at"),
        ("--batch much", "--batch"),
        ("--autocast float8", "float8"),
        ("--epoch 3", "Unrecognized options: --epoch"),
        ("--batch", "Missing value for argument '--batch'"),
    ],
)
def test_an_argument_that_cannot_be_read_is_said_beside_its_help(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--warmup-epochs 9 --epochs 9", "--drop-at and --epochs must rise, and 9 follows 9"),
        ("--accum 4", "there is no --accum: removed in 0.3.0; --micro-batch-size N sets the"),
        ("--init x.pth", "there is no --init: removed in 0.3.0; --model package.module:callable"),
        ("--wandb=demo", "there is no --wandb: removed in 0.3.0; wandb.init(sync_tensorboard=T"),
        ("--batch-size 64", "there is no --batch-size: the images of a step are --batch N,"),
        ("--batch_size 64", "there is no --batch_size: the images of a step are --batch N,"),
        ("--batch 0", "--batch: 0 is not above zero"),
        ("--micro-batch-size -1", "--micro-batch-size: -1 is not above zero"),
        ("--warmup-epochs -1", "--warmup-epochs: -1 is not zero or above"),
        ("--base-lr 0", "--base-lr: 0.0 is not above zero"),
        ("--base-lr nan", "--base-lr: nan is not above zero"),
        ("--base-lr inf", "--base-lr: inf is not above zero"),
        ("--momentum 1", "--momentum: 1.0 is not below 1"),
        ("--erase 1.5", "--erase: 1.5 is not at most 1"),
        ("--drop-at 2 0", "--drop-at: (2, 0) is not above zero"),
        (f"--seed {2**31}", "--seed: 2147483648 is not below 2**31"),
        ("--devices gpu", "'gpu' is not a device"),
        ("--data /no/such/folder", "/no/such/folder: there is no folder with train/ and test/"),
        ("--data /no/such --val 0.1", "/no/such: there is no folder with train/ and test/"),
        ("--devices 2", "and none is visible here; name them like cuda:0,cuda:1"),
        ("--config /no/such.toml", "--config /no/such.toml cannot be read: "),
        ("--model transformer", "--model transformer: neither cnn"),
        ("--val 1", "--val: 1.0 is not below 1"),
        ("--val 0.1", "embedded: it has images to test on; leave out --val"),
        ("--model resnet18", "did you mean timm:resnet18?"),
        ("--pretrained", "--pretrained is for timm:NAME"),
        ("--resume", "checkpoint.pt; --out names the folder of the run"),
        ("--out /dev/null/runs", "--out: /dev/null/runs/metrics.jsonl cannot be written"),
        ("--drop-at 2 2 --epochs 3 --warmup-epochs 0", "must rise, and 2 follows 2"),
        ("--drop-at 3 --epochs 3", "must rise, and 3 follows 3"),
    ],
)
def test_what_does_not_go_together_is_one_line_and_exit_code_2(
    capsys, tmp_path, monkeypatch, arguments, words
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert re.fullmatch("scatterpar train: error: .*\n", printed.err)


def test_options_come_from_a_file_and_those_of_the_line_after_it(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        'epochs = 9\ndrop_at = [3, 6]\nbatch = "auto"\ncompile = true\ndownload = false\n'
        "clip = 0.5\n"
    )
    given = parse(["--epochs", "12", "--config", str(file), "--clip", "2"])
    assert (given.epochs, given.drop_at, given.batch, given.clip) == (12, (3, 6), "auto", 2.0)
    assert (given.compile, given.download) == (True, False)
    file.write_text("epoch = 9\n")
    with pytest.raises(SystemExit):
        parse([f"--config={file}"])
    assert "Unrecognized options: --epoch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"), [([], "a command is missing"), (["tain"], "there is no command 'tain'")]
)
def test_a_wrong_command_is_one_line_and_exit_code_2(capsys, arguments, words):
    assert command(arguments) == 2
    assert re.fullmatch(f"scatterpar: error: {words}.*usage: .*\n", capsys.readouterr().err)


def test_help_says_what_the_defaults_are_and_shows_examples(capsys):
    assert command(["--help"]) == 0
    with pytest.raises(SystemExit) as caught:
        command(["train", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "default: as many as leave 50 steps an epoch, from 32 to 4096" in text
    assert "default: 64" in text
    for words in ("torch/fashion_mnist", "timm:resnet50", "examples:"):
        assert words in text
    assert "python -m scatterpar train --config photos.toml --epochs 90" in text
    assert "default: None" not in text
    for group in ("images", "training", "device", "file"):
        assert f"{group} options" in text


def test_a_reader_that_leaves_early_gets_no_traceback():
    """`--help | head` ended with a message about a broken pipe."""
    line = [sys.executable, "-m", "scatterpar", "train", "--help"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        process.wait(timeout=100)


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--version"]])
def test_the_version_is_said(capsys, arguments):
    assert command(arguments) == 0
    said = f"scatterpar {scatterpar.__version__}, torch {torch.__version__}\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("given", ["cpu:0,cpu:1", "cpu:0, cpu:1", "cpu:0 cpu:1", "=cpu:0,cpu:1"])
def test_lists_are_separated_by_commas_or_spaces(given, capsys):
    """`--devices` wanted commas where other options and the doctor wanted spaces."""
    words = [f"--devices{given}"] if given[0] == "=" else ["--devices", *given.split()]
    assert parse([*words, "--epochs", "3"]).devices == ("cpu:0", "cpu:1")
    words = [word.replace("devices", "drop-at").replace("cpu:", "1") for word in words]
    assert parse([*words, "--epochs", "12"]).drop_at == (10, 11)


def test_lists_in_a_file_are_lists_or_text(tmp_path):
    file = tmp_path / "run.toml"
    for devices in ('["cpu:0", "cpu:1"]', '"cpu:0,cpu:1"'):
        file.write_text(f"devices = {devices}\ndrop_at = [2, 4]\n")
        given = parse(["--config", str(file)])
        assert (given.devices, given.drop_at) == (("cpu:0", "cpu:1"), (2, 4))


def test_some_options_follow_from_others():
    assert parse(["--epochs", "1"]).warmup_epochs == 0
    assert parse(["--epochs", "100"]).warmup_epochs == 5
    assert (parse([]).epochs, parse(["--data", "photos"]).epochs) == (5, 20)


def test_the_default_batch_leaves_an_epoch_enough_steps(tmp_path, capsys):
    """A folder of 480 pictures was one batch of 4096, and one of 379 had batches of 4."""
    sizes = [default_batch(images) for images in (30, 379, 480, 8192, 204_799, 10**7)]
    assert sizes == [32, 32, 32, 128, 2048, 4096]
    assert main([*TWO_CPUS[:2], "--epochs", "1", *SMALL, "--out", str(tmp_path)]) == 0
    said = "batches of 128, for 64 steps an epoch of 8,192; --batch sets it"
    assert said in capsys.readouterr().out


def test_a_run_reports_what_it_did(capsys, tmp_path):
    options = [*TWO_CPUS, *SMALL, "--batch", "1024"]
    assert main([*options, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    tested = torch.load(tmp_path / "best.pt")["accuracy"]
    for words in (
        f"writing to {tmp_path}\n",
        "8,192 images to train on, 1,808 to test",
        "cpu:1   512:1024  4 x 128",
        "epoch 1/1: loss",
        "finished after 1 of 1 epochs, 8 steps",
        "test accuracy: ",
        "crossed between devices in a step, in MB: scatter 0.811, replicate 0.",
        f"best epoch: 1, test accuracy {tested:.2%}, in {tmp_path / 'best.pt'}",
    ):
        assert words in printed.out
    assert printed.err == ""  # a bar is for terminals

    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in records] == ["run", *["step"] * 8, "epoch", "summary"]
    step, epoch, summary = records[1], records[-2], records[-1]
    assert step["images"] == 1024
    assert step["bytes"]["scatter"] == 1024 * (28 * 28 + 8)
    assert summary["test_accuracy"] == epoch["test_accuracy"]
    assert f"test accuracy: {epoch['test_accuracy']:.2%}" in printed.out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_gives_the_same_run(tmp_path, capsys):
    losses = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        options = [*TWO_CPUS, *SMALL, "--batch", "4096", "--seed", seed]
        assert main([*options, "--out", str(tmp_path / name)]) == 0
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in lines])
    assert losses[0] == losses[1] != losses[2]


class Diverging(nn.Module):
    """Scores without bounds from the second step on."""

    def __init__(self, num_classes):
        super().__init__()
        self.head = nn.Linear(28 * 28, num_classes)
        self.register_buffer("step", torch.zeros(()))

    def forward(self, images):
        self.step += self.training
        return self.head(images.flatten(1)) * torch.where(self.step > 1, torch.nan, 1.0)


def test_diverged_training_ends_with_what_was_reached(tmp_path, capsys):
    arguments = ["--model", f"{__name__}:Diverging", "--out", str(tmp_path), "--epochs", "2"]
    arguments += ["--batch", "4096"]
    assert main([*arguments, "--devices", "cpu:0", "--micro-batch-size", "4096"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"training diverged \(.*\); a lower --base-lr may help; stopped", printed)
    assert "stopped after 0 of 2 epochs, 1 steps" in printed
    assert "test accuracy: not measured, no epoch was finished" in printed


def test_an_interrupt_before_training_is_one_line(monkeypatch, capsys, tmp_path):
    def interrupted(self, epoch):
        raise KeyboardInterrupt

    monkeypatch.setattr(Training, "order", interrupted)
    assert main([*TWO_CPUS, "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "scatterpar train: interrupted\n"


def test_torchrun_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "night-7")
    assert main([]) == 2
    assert "start it without torchrun (on several machines use" in capsys.readouterr().err


def listening():
    return {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def test_one_machine_opens_no_port(tmp_path, capsys, monkeypatch):
    def opened(self, address):
        raise AssertionError(f"a port was opened: {address}")

    monkeypatch.setattr("socket.socket.bind", opened)
    monkeypatch.setattr("torch.distributed.init_process_group", opened)
    arguments = [*SMALL, "--devices", "cpu", "--epochs", "1", "--batch", "4096"]
    before = listening()
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert listening() == before
