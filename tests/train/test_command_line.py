"""The command line: options, defaults, refusals in one line, help."""

import re
import sys

import pytest
import torch

import scatterpar
from scatterpar.__main__ import main as command
from scatterpar.train.command_line import parse
from scatterpar.train.model_training import choose_devices
from scatterpar.train.tool_run import main

pytestmark = pytest.mark.draws


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--epochs 1.5", "invalid literal for int() with base 10: '1.5'"),
        ("--epoch 3", "Unrecognized options: --epoch"),
        ("--batch", "Missing value for argument '--batch'"),
    ],
)
def test_unreadable_argument_shows_help(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


REFUSED = {
    "--warmup-epochs 9 --epochs 9": "--drop-at and --epochs must rise, and are [9, 9]",
    "--accum 4": "there is no --accum: --micro-batch-size N sets the",
    "--batch_size 64": "there is no --batch_size: the images of a step are --batch N,",
    "--batch 0": "--batch: 0 is not above zero",
    "--base-lr inf": "--base-lr: inf is not above zero",
    "--momentum 1": "--momentum: 1.0 is not below 1",
    "--drop-at 2 0": "must rise, and are [3, 2, 0, 15]",
    "--devices gpu": "'gpu' is not a device",
    "--data /no/such --val 0.1": "/no/such: there is no such folder; known by name are",
    "photos --epochs 2": "photos: --data photos names the images",
    "--gpus 2": "there is no --gpus: --devices cuda:0,cuda:1 names them",
    "--amp": "--autocast bfloat16",
    "--config /no/such.toml": "--config /no/such.toml cannot be read: ",
    "--model resnet18": "--model resnet18: neither cnn nor timm:NAME",
    "--pretrained": "--pretrained is for timm:NAME and torchvision.models:NAME",
    "--resume": "checkpoint.pt; name the folder of a run that has written it",
    "--out /dev/null/runs": "--out: /dev/null/runs/metrics.jsonl cannot be written",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_argument_is_one_line_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert REFUSED[arguments] in printed
    assert re.fullmatch("scatterpar train: error: .*\n", printed)


def test_command_line_overrides_config(tmp_path, capsys):
    file = tmp_path / "run.toml"
    text = (
        "epochs = 9\ndrop_at = [3, 6]\nbatch = 512\ncompile = true\ndownload = false\n"
    )
    file.write_text(text + 'clip = 0.5\ndevices = "cpu:0,cpu:1"\n')
    given = parse(["--epochs", "12", "--config", str(file), "--clip", "2"])
    assert (given.epochs, given.drop_at, given.batch, given.clip) == (
        12,
        (3, 6),
        512,
        2.0,
    )
    assert (given.compile, given.download, given.devices) == (
        True,
        False,
        ("cpu:0,cpu:1",),
    )
    file.write_text("epoch = 9\n")
    with pytest.raises(SystemExit):
        parse([f"--config={file}"])
    assert "Unrecognized options: --epoch" in capsys.readouterr().err


@pytest.mark.parametrize("given", [" cpu:0, cpu:1", " cpu:0 cpu:1", "=cpu:0,cpu:1"])
def test_devices_by_comma_or_space(given):
    options = parse([*f"--devices{given}".split(), "--epochs", "3"])
    assert choose_devices(options.devices) == [torch.device("cpu", i) for i in range(2)]


def test_some_options_follow_from_others():
    assert parse(["--epochs", "1"]).warmup_epochs == 0
    assert parse(["--epochs", "100"]).warmup_epochs == 5
    assert (parse([]).epochs, parse(["--data", "photos"]).epochs) == (15, 20)


def test_help_has_defaults_and_examples(capsys):
    assert command(["--help"]) == 0
    text = capsys.readouterr().out
    for name in (
        "train    train a network",
        "predict  write the",
        "doctor   what this",
    ):
        assert name in text
    with pytest.raises(SystemExit) as caught:
        command(["train", "--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for words in (
        "as many as leave 50 steps an epoch, from 32 to 4096",
        "default: 64",
        *("torch/fashion_mnist", "timm:resnet50", "examples:"),
        "python -m scatterpar train --config photos.toml --epochs 90",
    ):
        assert words in text
    assert "default: None" not in text


def test_version_told_wrong_command_refused(capsys):
    for arguments in (["--version"], ["train", "--version"]):
        assert command(arguments) == 0
        said = f"scatterpar {scatterpar.__version__}, torch {torch.__version__}\n"
        assert capsys.readouterr().out == said
    for arguments, words in (
        ([], "a command is missing"),
        (["tain"], r"there is no command 'tain'; did you mean train\?"),
    ):
        assert command(arguments) == 2
        assert re.fullmatch(
            f"scatterpar: error: {words}.*usage: .*\n", capsys.readouterr().err
        )


@pytest.mark.parametrize("package", ["filelock", "tqdm", "tyro"])
def test_missing_package_names_extra(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"{package} is not installed.*pip install .*\[train\]"
    assert command(["train"]) == 2
    assert re.search(words, capsys.readouterr().err)
