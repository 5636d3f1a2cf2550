"""The command line: options, their names in timm, defaults, refusals, help."""

import re
import sys
from pathlib import Path

import pytest
import torch

import scatterpar
from scatterpar.__main__ import main as command
from scatterpar.train.command_line import Options, as_words, parse
from scatterpar.train.training import choose_devices, main

pytestmark = pytest.mark.draws


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--epochs 1.5", "argument --epochs: invalid int value: '1.5'"),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
        ("--batch", "argument --batch/--batch-size/-b: expected one argument"),
        ("--autocast int8", "invalid choice: 'int8'"),
    ],
)
def test_unreadable_argument_shows_usage(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


REFUSED = {
    "--warmup-epochs 9 --epochs 9": "--warmup-epochs: 9 is not below the 9 of --epochs",
    "--accum 4": "there is no --accum: --micro-batch-size N sets the",
    "--bs 64": "there is no --bs: the images of a step are --batch N",
    "--processes 2": "one process uses all GPUs",
    "--train-folder x": "a data set is train/CLASS and val/CLASS, or CLASS with --val",
    "--batch 0": "--batch: 0 is not above zero",
    "--base-lr inf": "--base-lr: inf is not above zero",
    "--val 1": "--val: 1.0 is not below 1",
    "--decay-milestones 2 4": "the learning rate warms up, and a cosine to zero follows",
    "--data-dir photos": "no --data-dir: --data FOLDER names the pictures; sets of torch",
    "--grad-accum-steps 4": "--micro-batch-size N sets the images of a sub-step",
    "--from-scratch": "weights are random without --pretrained and --weights",
    "--devices gpu": "gpu is not a device",
    "--data /no/such --val 0.1": "/no/such: there is no such folder; known by name are",
    "photos --epochs 2": "photos: --data photos names the images",
    "--gpus 2": "there is no --gpus: --devices cuda:0,cuda:1 names them",
    "--amp": "--autocast bfloat16",
    "--config /no/such.toml": "--config /no/such.toml cannot be read: ",
    "--model resnet18": "--model resnet18: neither cnn nor timm:NAME",
    "--pretrained": "--pretrained is for timm:NAME and torchvision.models:NAME",
    "--pretrained --weights w": "exclude each other",
    "--weights no.pth": "--weights: there is no file no.pth",
    "--resume": "checkpoint.pt; name the folder of a run that has written it",
    "--resume no": "no/checkpoint.pt; name the folder",
    "--out /dev/null/runs": "--out: /dev/null/runs/metrics.jsonl cannot be written",
    "--image-size 32": "embedded: it is used as it is: --image-size is for pictures",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_wrong_argument_is_one_line_code_2(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    assert main(arguments.split()) == 2
    printed = capsys.readouterr().err
    assert REFUSED[arguments] in printed
    assert re.fullmatch("scatterpar train: error: .*\n", printed)


def test_names_of_timm_are_accepted():
    words = "--batch-size 8 --lr-base 0.1 --opt lamb --img-size 32 --aa rand-m9 "
    words += "--smoothing 0.1 --clip-grad 1 --model-ema-decay 0.9 --amp-dtype float16 "
    words += "--torchcompile --output x --initial-checkpoint w --dataset-download"
    options = parse(words.split())
    assert (options.batch, options.base_lr, options.optimizer) == (8, 0.1, "lamb")
    assert (options.image_size, options.augment) == (32, "rand-m9")
    assert (options.label_smoothing, options.clip, options.ema) == (0.1, 1.0, 0.9)
    assert (options.autocast, options.compile, options.out) == (
        *("float16", True, Path("x")),
    )
    assert (options.weights, options.download) == (Path("w"), True)
    assert parse(list(as_words(vars(options)))) == options
    options = parse(["-b", "8", "-j", "3", "--recovery-interval", "7"])
    assert (options.batch, options.workers, options.checkpoint_every) == (8, 3, 7)


def test_command_line_overrides_config(tmp_path, capsys):
    file = tmp_path / "run.toml"
    text = 'epochs = 9\ndevices = ["cpu:0", "cpu:1"]\nbatch = 64\ncompile = true\n'
    file.write_text(text + "download = false\nclip = 0.5\n")
    options = parse(["--epochs", "12", "-c", str(file), "--clip", "2"])
    assert (options.epochs, options.devices) == (12, ("cpu:0", "cpu:1"))
    assert (options.batch, options.clip, options.compile) == (64, 2.0, True)
    assert not options.download
    file.write_text("epoch = 9\n")
    with pytest.raises(SystemExit):
        parse([f"--config={file}"])
    assert "unrecognized arguments: --epoch 9" in capsys.readouterr().err


def test_home_folder_in_config_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "run.toml"
    lines = [f'{name} = "~/{name}"\n' for name in ("data", "out", "weights")]
    file.write_text("".join(lines))
    options = parse(["--config", str(file)])
    assert options.data == str(tmp_path / "data")
    for name in ("out", "weights"):
        assert getattr(options, name) == tmp_path / name


@pytest.mark.parametrize("devices", [" cpu:0, cpu:1", " cpu:0 cpu:1", "=cpu:0,cpu:1"])
def test_devices_by_comma_or_space(devices):
    options = parse([*f"--devices{devices}".split(), "--epochs", "3"])
    assert choose_devices(options.devices) == ["cpu:0", "cpu:1"]


def test_some_options_follow_from_others(tmp_path):
    assert parse(["--epochs", "1"]).warmup_epochs == 0
    assert parse(["--epochs", "100"]).warmup_epochs == 5
    assert (parse([]).epochs, parse(["--data", "photos"]).epochs) == (15, 20)
    for words in (["--resume", "a"], ["--out", "a", "--resume"], ["--resume=a"]):
        options = parse(words)
        assert (options.out, options.resume) == (Path("a"), "a")


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
    text = " ".join(capsys.readouterr().out.split())
    for words in (
        "leave 50 steps an epoch, from 32 to 4096",
        "(default: 64)",
        *("hfds/NAME", "timm:resnet50", "examples:"),
        "python -m scatterpar train --config photos.toml --epochs 90",
    ):
        assert words in text
    # Python 3.13 names the value once, after all the names of an option.
    assert re.search("--batch( N)?, --batch-size( N)?, -b N", text)
    assert "default: None" not in text
    for name in vars(Options()):
        assert f"--{name.replace('_', '-')}" in text


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


@pytest.mark.parametrize("package", ["filelock", "tqdm", "matplotlib"])
def test_missing_package_names_extra(monkeypatch, capsys, package):
    monkeypatch.setitem(sys.modules, package, None)
    words = rf"{package} is not installed.*pip install .*\[train\]"
    assert command(["train"]) == 2
    assert re.search(words, capsys.readouterr().err)
