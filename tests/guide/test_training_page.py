"""The commands and the options of docs/training-program.md are those of the program."""

from __future__ import annotations

import re

import pytest
import torch
from harness.optional import import_torchvision_first
from harness.pages import blocks, read
from harness.pictures import write_folder

from scatterpar import train
from scatterpar.__main__ import main as command

PAGE = read("docs/training-program.md")
COMMANDS = blocks(PAGE, "sh")[0].splitlines()
# What makes a run of the page small, without a hub and a GPU.
SMALL = [
    "--epochs",
    "1",
    "--workers",
    "0",
    "--micro-batch-size",
    "1024",
    "--devices",
    "cpu:0",
    "cpu:1",
]
OF_FILES = ["--img-size", "32", "--model", "test_resnet"]


def run(line, *more):
    start = "python -m scatterpar "
    assert line.startswith(start)
    with torch.random.fork_rng():
        assert command([*line.removeprefix(start).split(), *more]) == 0


@pytest.mark.draws
@pytest.mark.slow
def test_first_and_last_command_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(COMMANDS[0], *SMALL, "--output", "runs/a")
    run(COMMANDS[3])


@pytest.mark.draws
@pytest.mark.pictures
def test_commands_on_files_run(tmp_path, monkeypatch):
    import_torchvision_first()
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos")
    run(COMMANDS[1].replace(" --pretrained", ""), *SMALL, *OF_FILES)
    pytest.importorskip("datasets", reason="the extra `datasets`")
    here = COMMANDS[2].replace("food101", str(tmp_path / "photos"))
    run(here, *SMALL, *OF_FILES, "--output", "runs/b")


def test_table_has_all_options():
    rows = re.findall(r"^\| (`-.*?) \|", PAGE, re.MULTILINE)
    named = re.findall(r"`(-.*?)`", " ".join(rows))
    assert named == [name for names, *_ in train.OPTIONS for name in names.split()]


def test_page_names_what_data_may_change():
    text = PAGE.partition("may have other values of")[2].partition("\n\n")[0]
    named = {name.removeprefix("--") for name in re.findall("`(.*?)`", text)}
    assert named == {*train.CHANGEABLE} - {"output", "resume"}
