"""``python -m benchmarks card``: checks that hang or crash fail, and the page says what ran."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scatterpar.checkup.card import __main__ as card
from scatterpar.checkup.card import bits, times
from scatterpar.checkup.card.checks import CHECKS
from scatterpar.checkup.card.setting import Check, Finding, NotRun, Setting

sys.path.append(str(Path(__file__).parent.parent))

CPU = Setting((torch.device("cpu", 0), torch.device("cpu", 1)), small=True)
GPUS = Setting(tuple(torch.device("cuda", i) for i in range(8)), small=False)
ALL = [check for checks in CHECKS.values() for check in checks]


def check(what="a check", find=None, seconds=30.0, **needs):
    return Check(what, "a threshold", find, seconds, **needs)


def test_ten_minutes_on_eight_gpus_settle_it():
    assert all(one.missing(GPUS) == "" for one in ALL)
    assert sum(one.seconds for one in ALL) <= 10 * 60
    assert len({one.what for one in ALL}) == len(ALL)


@pytest.mark.parametrize(
    ("needs", "setting", "words"),
    [
        ({}, CPU, ""),
        ({"gpus": 4}, CPU, "4 devices are needed, and 2 are here"),
        ({"cuda": True}, CPU, "CPU replicas have no CUDA"),
        ({"cuda": True, "real": "time"}, GPUS, ""),
        ({"real": "time"}, Setting(GPUS.devices, True, "nullcuda"), "null GPUs have no time"),
    ],
)
def test_what_cannot_run_here_says_why(needs, setting, words):
    assert check(**needs).missing(setting) == words


def test_one_that_hangs_or_crashes_fails_and_the_others_go_on(monkeypatch, tmp_path):
    """The second hangs, with a child; the third crashes; the fourth needs what is not here."""
    script = """
import os, subprocess, sys, time
for number in map(int, sys.argv[1:]):
    if number == 1:
        subprocess.run(["sleep", "1000"])
    if number == 2:
        os._exit(3)
    print(f'some words\\n@result [{number}, ["passed", "fine"]]', flush=True)
"""

    def start(setting, *command, stdout, session):
        numbers = command[command.index("--numbers") + 1 : command.index("--devices")]
        command = [sys.executable, "-c", script, *numbers]
        return subprocess.Popen(command, stdout=stdout, start_new_session=session)

    checks = [check(), check(seconds=0.1), check(), check(gpus=4), check()]
    monkeypatch.setitem(CHECKS, "some", checks)
    monkeypatch.setattr(Setting, "start", start)
    found = card.run("some", CPU, tmp_path)
    assert [result.verdict for result in found.values()] == [
        *("passed", "FAILED", "FAILED", "not run", "passed")
    ]
    assert found[1].words == "not done after 2 s, and ended"
    assert found[2].words == "its process ended with 3; see some.txt"
    assert (tmp_path / "some.txt").read_text().count("some words") == 2


def test_findings_become_verdicts(monkeypatch, capsys):
    def not_here(setting):
        raise NotRun("torchvision is not installed")

    finds = [lambda _: Finding(True, "1.02"), lambda _: Finding(False, "1.2"), not_here]
    finds.append(lambda _: 1 / 0)
    monkeypatch.setitem(CHECKS, "some", [check(find=find) for find in finds])
    card.find("some", range(4), CPU)
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        '@result [0, ["passed", "1.02"]]',
        '@result [1, ["FAILED", "1.2"]]',
        '@result [2, ["not run", "torchvision is not installed"]]',
        '@result [3, ["FAILED", "ZeroDivisionError: division by zero"]]',
    ]


def test_the_page_begins_with_the_table(monkeypatch):
    monkeypatch.setitem(CHECKS, "some", [check("bits"), check("time", gpus=8, real="time")])
    results = {0: card.Result("passed", "a | b"), 1: card.Result("not run", "2 are here")}
    lines = card.page({"some": results}, {"torch": "2.13.0"}, CPU, 90.0).splitlines()
    assert lines[:4] == [
        "| check | needs | threshold | result | verdict |",
        "|---|---|---|---|---|",
        "| bits | 1 GPU or CPU replicas | a threshold | a / b | passed |",
        "| time | 8 GPUs: time | a threshold | 2 are here | not run |",
    ]
    assert "**No GPU computed this: null GPUs, or replicas on a processor.**" in lines
    assert "torch: 2.13.0" in lines


def test_wrong_devices_are_code_2(capsys):
    from benchmarks.__main__ import main

    assert main(["card", "--devices", "cuda:99"]) == 2
    assert "cuda:99 is not here" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_on_a_processor(tmp_path):
    from benchmarks.__main__ import main

    options = ["--devices", "cpu:0,cpu:1", "--out", str(tmp_path / "card")]
    assert main(["card", *options, "--only", "bits", "endings"]) == 0
    page = (tmp_path / "card.md").read_text(encoding="utf-8")
    assert page.count("| the same bits in 55 tensors | passed |") == 2
    assert "0e+00 apart, the same bits, 2 devices | passed |" in page
    assert "KeyboardInterrupt: ended in" in page


# ---- the checks themselves -----------------------------------------------------------------------


def test_other_bits_are_counted():
    one, other = [torch.ones(3), torch.zeros(2)], [torch.ones(3), torch.tensor([0.0, -0.0])]
    assert bits.beside(one, one) == Finding(True, "the same bits in 2 tensors")
    assert bits.beside(one, other) == Finding(False, "1 of 2 tensors differ, by 0.0e+00 at most")


def test_copies_are_slow_in_the_body_alone():
    before = {name: getattr(Tensor, name) for name in ("copy_", "to", "cpu")}
    with bits.slow_copies() as count:
        assert torch.zeros(2).to("meta").device.type == "meta"
        assert torch.zeros(2).copy_(torch.ones(2)).to(torch.float64).cpu().sum() == 2
    assert count == [1]
    assert {name: getattr(Tensor, name) for name in before} == before


def test_how_much_of_copies_is_under_kernels_is_told_by_events_that_overlap():
    spans = [("kernel", "a", 0, 40), ("kernel", "b", 30, 20), ("kernel", "a", 90, 10)]
    copies = [("gpu_memcpy", "Memcpy HtoD (Pinned)", 40, 20), ("gpu_memcpy", "Memcpy DtoD", 0, 9)]
    keys = ("cat", "name", "ts", "dur")
    events = [dict(zip(keys, each, strict=True)) for each in spans + copies] + [{"ph": "M"}]
    assert times.under_kernels(events) == (10, 20)
    assert times.under_kernels(events[:3]) == (0, 0)
