"""``scatterpar.doctor()`` says what is wrong with a machine, and the engine looks for
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
from unittest import mock

import pytest
import torch
from harness.oracle import seeded
from torch import nn

import scatterpar
from scatterpar import ScatterOnceParallel
from scatterpar.__main__ import main
from scatterpar.checkup import copies, training
from scatterpar.checkup.copies import RouteResult, on_copies
from scatterpar.checkup.training import ENGINE, ONE, PER_CALL, Speed, on_speed, on_step
from scatterpar.devices.transfers import Transfers

VIRTUAL = [torch.device("cpu", 0), torch.device("cpu", 1)]
ENVIRONMENT = (
    f"PyTorch version: {torch.__version__}\nModel name: A\nVulnerability Spectre: no"
)
CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.fixture
def brief(monkeypatch):
    """Examinations of a moment; what they find is the same."""
    monkeypatch.setattr(copies, "SIZES", (1000, 2**16))
    monkeypatch.setattr(training, "BUDGET", 0)
    monkeypatch.setattr(training, "ACCUM", 2)
    monkeypatch.setattr(
        "scatterpar.checkup.doctor.get_pretty_env_info", lambda: ENVIRONMENT
    )


def kinds(verdicts):
    return [verdict.kind for verdict in verdicts]


def test_a_sound_machine_is_fine(brief, capsys, tmp_path):
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


def test_a_broken_way_is_found_and_no_other_is_blamed(brief, monkeypatch, capsys):
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
    # Verdicts stand under what they judge.
    verdicts = ("WRONG because: copies", "fine: the gradient", "note: ")
    for title, verdict in zip(
        ("copies", "one exact step", "speed"), verdicts, strict=True
    ):
        part = page.split(f"\n{title}\n")[1].split("\n\n")[0]
        assert f"\n{verdict}" in part


def test_a_copy_that_fails_is_a_finding_and_the_others_go_on(monkeypatch):
    whole = copies.carry

    def carry(tensor, source, target):
        if source == VIRTUAL[1]:
            raise RuntimeError("peer access is not supported")
        return whole(tensor, source, target)

    monkeypatch.setattr(copies, "SIZES", (1000,))
    monkeypatch.setattr(copies, "carry", carry)
    found = list(copies.examine(VIRTUAL))
    assert [route.source for route in found if route.fault] == ["cpu:1", "cpu:1"]
    words = (
        "a copy from cpu:1 to host failed: RuntimeError: peer access is not supported"
    )
    assert {verdict.text for verdict in on_copies(found)} >= {words}


def test_a_wrong_gradient_is_wrong(monkeypatch):
    whole = Transfers.copy

    def copy(self, tensor, device, phase):
        return whole(self, tensor, device, phase) * (1.001 if phase == "reduce" else 1)

    monkeypatch.setattr(Transfers, "copy", copy)
    found = training.take_step(VIRTUAL)
    assert not found.is_exact
    assert re.search(r"gradients of 19 rows are 1.\de-03 apart at most \(", str(found))
    (verdict,) = on_step(found)
    assert str(verdict).startswith(f"WRONG because: {found.words}. If copies are fine")


def test_a_step_that_fails_is_a_finding(brief, monkeypatch):
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


def test_where_the_host_is_involved_the_advice_is_another():
    altered = {1000: 0, 2**20: 5}
    ways = ("host", "cuda:0"), ("cuda:0", "cuda:1")
    for verdict in on_copies([RouteResult(*way, altered, 10.0) for way in ways]):
        assert verdict.kind == "WRONG"
        assert "test the memory" in verdict.text
        assert "NCCL" not in verdict.text


def timed(engine, one, per_call=None, phases=(0, 0, 1, 0), **alone):
    seconds = {ENGINE: [engine] * 3, ONE: [one] * 3}
    seconds |= {
        f"{name.replace('_', ':')} alone": [spent] * 3 for name, spent in alone.items()
    }
    if per_call is not None:
        seconds[PER_CALL] = [per_call] * 3
    names = ("scatter", "replicate", "compute", "reduce")
    return Speed(64, seconds, dict(zip(names, phases, strict=True)))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (timed(1.0, 1.0), "Take a smaller accum than 16"),
        (
            timed(1.0, 1.0, phases=(0.3, 0.2, 1.0, 0.5)),
            "50% of the step is spent on moving",
        ),
        (
            timed(1.0, 2.0, per_call=0.5),
            "2.00 of the time of nn.DataParallel x 16. That should",
        ),
        (timed(1.0, 1.9, cuda_0=0.1, cuda_1=0.25), "shares=[1.00, 0.40]"),
    ],
)
def test_why_it_is_slow_and_what_to_do(found, words):
    slow = [
        verdict.text for verdict in on_speed(CARDS, found, 0) if verdict.kind == "slow"
    ]
    assert len(slow) == 1
    assert words in slow[0]


@pytest.mark.parametrize(
    ("count", "of_one", "kind"),
    [
        (1, 1.09, "fine"),
        (1, 1.2, "slow"),
        (2, 0.74, "fine"),
        (2, 0.76, "slow"),
        (8, 0.6, "slow"),
    ],
)
def test_n_gpus_may_take_one_and_a_half_nth_of_one_gpus_time(count, of_one, kind):
    """Eight GPUs that took 0.6 of one GPU's time were called fine."""
    devices = [torch.device("cuda", i) for i in range(count)]
    equal = {f"cuda_{i}": 0.1 + 0.005 * (i > 0) for i in range(count)}  # nearly
    assert kinds(on_speed(devices, timed(of_one, 1.0, **equal), 0)) == [kind]


@pytest.mark.parametrize(
    ("devices", "load"), [([CARDS[0], *CARDS], 0.0), (VIRTUAL, 0.0), (CARDS, 4.0)]
)
def test_replicas_on_one_processor_and_busy_machines_get_no_verdict_on_speed(
    devices, load
):
    """``[0, 0]`` was called slow, which it cannot help."""
    (verdict,) = on_speed(devices, timed(1.0, 1.0), load)
    assert verdict.kind == "note"
    assert "so no speed is judged" in verdict.text


@pytest.mark.parametrize(
    ("devices", "of_one", "waited", "kind"),
    [
        (CARDS[:1], 1.3, 0.02, "note"),
        (CARDS[:1], 1.3, 0.5, "slow"),
        (CARDS[:1], 1.05, 0.02, "fine"),
        (CARDS, 1.0, 0.02, "note"),
    ],
)
def test_a_gpu_that_waits_for_the_host_is_not_called_slow(
    devices, of_one, waited, kind
):
    """The doctor's network is so small that a healthy GPU was idle most of the time."""
    speed = dataclasses.replace(timed(of_one, 1.0), waited=waited)
    (verdict,) = on_speed(devices, speed, 0)
    assert verdict.kind == kind
    assert ("waits for the host, so no speed is judged" in verdict.text) == (
        kind == "note"
    )


@contextlib.contextmanager
def one_bit_off():
    whole = Transfers.copy_into

    def copy_into(self, target, source, phase):
        whole(self, target, source, phase)
        target.view(torch.uint8)[-1] ^= 1

    with mock.patch.object(Transfers, "copy_into", copy_into):
        yield


def test_the_engine_refuses_devices_whose_memory_brings_other_bytes(monkeypatch):
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
