"""``scatterpar.doctor()`` says what is wrong with a machine, and the engine looks for
itself.
"""

from __future__ import annotations

import contextlib
import functools
import json
from unittest import mock

import pytest
import torch
from harness.oracle import seeded
from torch import nn

import scatterpar
from scatterpar import ScatterOnceParallel
from scatterpar.__main__ import main
from scatterpar.checkup import copies, small_step
from scatterpar.devices.transfers import Transfers

VIRTUAL = [torch.device("cpu", 0), torch.device("cpu", 1)]
ENVIRONMENT = (
    f"PyTorch version: {torch.__version__}\nModel name: A\nVulnerability Spectre: no"
)


@pytest.fixture
def brief(monkeypatch):
    """Examinations of a moment; what they find is the same."""
    monkeypatch.setattr(copies, "SIZES", (1000, 2**16))
    monkeypatch.setattr(small_step, "BUDGET", 0)
    monkeypatch.setattr(small_step, "ACCUM", 2)
    monkeypatch.setattr(
        "scatterpar.checkup.doctor.get_pretty_env_info", lambda: ENVIRONMENT
    )


def kinds(verdicts):
    return [verdict.kind for verdict in verdicts]


def test_sound_machine_is_fine(brief, capsys, tmp_path):
    found = scatterpar.doctor(["cpu:0", "cpu:1"], json=tmp_path / "found.json")
    assert found.passed
    assert str(found) == capsys.readouterr().out
    assert repr(found) == "<verdicts: 2 fine, 1 note>"
    assert f"PyTorch version: {torch.__version__}" in str(found)
    assert "Vulnerability" not in str(found)
    written = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found.exit_code == written["exit_code"] == 0
    assert written["devices"] == ["cpu:0", "cpu:1"]
    assert [c["altered"] for c in written["copies"]] == [{"1000": 0, "65536": 0}] * 6
    assert written["step"]["is_exact"]


def test_broken_route_alone_is_blamed(brief, monkeypatch, capsys):
    whole = copies.carry

    def carry(tensor, source, target):
        arrived, seconds = whole(tensor, source, target)
        if [source, target] == VIRTUAL:
            arrived[::64] ^= 16
        return arrived, seconds

    monkeypatch.setattr(copies, "carry", carry)
    assert main(["doctor", "--devices", "cpu:0,cpu:1"]) == 1
    page = capsys.readouterr().out
    (wrong,) = (line for line in page.splitlines() if line.startswith("WRONG because"))
    sent = "copies from cpu:0 to cpu:1 bring other bytes than were sent: "
    for words in (
        sent,
        "16 of 1000, 1024 of 65536 bytes were altered",
        "NCCL_P2P_DISABLE=1",
    ):
        assert words in wrong
    # Verdicts come first, under what they judge; measurements and machine follow.
    verdicts = ("WRONG because: copies", "fine: the gradient", "note: ")
    for title, verdict in zip(
        ("copies", "one exact step", "speed"), verdicts, strict=True
    ):
        part = f"\n{page}".split(f"\n{title}\n")[1].split("\n\n")[0]
        assert f"\n{verdict}" in part
    titles = ("copies\n-", "\nmeasurements\n", "\nmachine\n", "PyTorch version")
    places = [page.index(title) for title in titles]
    assert places == sorted(places)
    assert places[0] == 0


def test_failed_step_is_a_finding(brief, monkeypatch):
    def copy(self, tensor, device, phase):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Transfers, "copy", copy)
    verdicts = scatterpar.doctor(["cpu:0", "cpu:1"]).verdicts
    assert kinds(verdicts) == ["fine", "WRONG", "WRONG"]
    fault = "failed: RuntimeError: an illegal memory access was encountered"
    assert [v.text for v in verdicts[1:]] == [
        f"one exact step {fault}",
        f"speed {fault}",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "moon:3"], "'moon:3' is not a device"),
        (["--devices", "cuda:99"], "cuda:99 is not here"),
        (["--json", "no/such/folder/found.json"], "no/such/folder/found.json"),
    ],
)
def test_bad_arguments_are_code_2(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", "--fast"])
    assert "--fast" in capsys.readouterr().err
    assert main(["doctor", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("scatterpar doctor: error: ")
    assert words in shown.err
    assert shown.out == ""


@contextlib.contextmanager
def one_bit_off():
    whole = Transfers.copy_into

    def copy_into(self, target, source, phase):
        whole(self, target, source, phase)
        target.view(torch.uint8)[-1] ^= 1

    with mock.patch.object(Transfers, "copy_into", copy_into):
        yield


def test_failed_step_does_not_lead_to_the_doctor(brief):
    with one_bit_off():
        verdicts = scatterpar.doctor(["cpu:0", "cpu:1"]).verdicts
    step = next(v.text for v in verdicts if v.text.startswith("one exact step failed"))
    assert step.endswith("do not trust any result of this machine")


def test_engine_refuses_corrupting_memory(monkeypatch):
    """In a step, in inference, and again after the doctor has looked."""
    with seeded():
        module, inputs, labels = (
            nn.Linear(4, 2),
            torch.randn(10, 4),
            torch.randint(2, (10,)),
        )
    monkeypatch.setattr(copies, "SIZES", (1000,))
    words = (
        "cpu:0 to cpu:1 arrived corrupted(?s:.*)the host's "
        "memory(?s:.*)scatterpar doctor"
    )
    with ScatterOnceParallel(module, 2, ["cpu:0", "cpu:1"]) as engine:
        step = functools.partial(
            engine.forward_backward, inputs, labels, nn.CrossEntropyLoss()
        )
        for call in (step, lambda: engine.eval()(inputs)):
            with one_bit_off(), pytest.raises(RuntimeError, match=words):
                call()
        assert module.weight.grad is None
        engine.train()
        torch.testing.assert_close(
            step(), nn.CrossEntropyLoss()(module(inputs), labels).detach()
        )
        assert not any(route.fault for route in copies.examine(VIRTUAL))
        with (
            one_bit_off(),
            pytest.raises(RuntimeError, match="cpu:0 to cpu:1 arrived corrupted"),
        ):
            step()
