"""One exact step and its speed, and what is concluded from them."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from scatterpar.checkup import small_step
from scatterpar.checkup.small_step import (
    ENGINE,
    GRAPHS,
    ONE,
    Speed,
    StepComparison,
    on_speed,
    on_step,
)
from scatterpar.devices.links import TO_THE_DOCTOR
from scatterpar.devices.transfers import Transfers

VIRTUAL = [torch.device("cpu", 0), torch.device("cpu", 1)]
CARDS = [torch.device("cuda", 0), torch.device("cuda", 1)]


def kinds(verdicts):
    return [verdict.kind for verdict in verdicts]


def test_step_on_two_devices_is_exact():
    step = small_step.take_step(VIRTUAL)
    assert step.is_exact
    assert str(step).startswith("exact: gradients of 19 rows are ")
    assert str(step).endswith("in torch.float64")
    assert kinds(on_step(step)) == ["fine"]


def test_each_warning_is_one_note():
    step = StepComparison(True, "gradients agree", ("too few rows", "too few rows"))
    assert kinds(on_step(step)) == ["fine", "note"]


def test_note_does_not_lead_to_the_doctor():
    step = StepComparison(True, "gradients agree", (f"corrupted{TO_THE_DOCTOR}",))
    *_, note = on_step(step)
    assert str(note) == "note: corrupted"


def test_wrong_gradient_is_told(monkeypatch):
    whole = Transfers.copy

    def copy(self, tensor, device, phase):
        return whole(self, tensor, device, phase) * (1.001 if phase == "reduce" else 1)

    monkeypatch.setattr(Transfers, "copy", copy)
    found = small_step.take_step(VIRTUAL)
    assert not found.is_exact
    assert re.search(r"gradients of 19 rows are 1.\de-03 apart at most \(", str(found))
    (verdict,) = on_step(found)
    assert str(verdict).startswith(f"WRONG because: {found.words}. If copies are fine")


def test_ratio_is_median_over_rounds():
    """Of 1 / 4, 2 / 1 and 9 / 3; not that of the medians, 2 / 3."""
    seconds = {ENGINE: [1.0, 2.0, 9.0], ONE: [4.0, 1.0, 3.0]}
    assert Speed(64, seconds, {}).ratio_to_one == 2.0


def test_graphs_are_told_apart():
    """What is faster counts, as the engine keeps it; no remedy excludes it."""
    eager = timed(1.9, 1.0)
    captured = Speed(64, {**eager.seconds, GRAPHS: [0.9] * 3}, eager.phases)
    assert captured.ratio_to_one == 0.9
    assert captured.compared() == (
        "0.90 of one device's time (0.90 with CUDA graphs, 1.90 without)"
    )
    (verdict,) = on_speed(CARDS, captured, 0)
    assert verdict.kind == "slow"
    assert "larger micro-batches (a smaller accum)." in verdict.text
    assert "compile=True" not in verdict.text
    (verdict,) = on_speed(CARDS, eager, 0)
    assert "compile=True" in verdict.text
    slower = Speed(64, {**eager.seconds, GRAPHS: [2.0] * 3}, eager.phases)
    (verdict,) = on_speed(CARDS, slower, 0)
    assert "compile=True" in verdict.text


def test_parts_add_up_to_batch_gradient():
    """``_loop`` is the plain loop that the engine is timed beside."""
    images, labels = small_step._batch(8, torch.float64)
    whole, in_parts = (small_step._network(VIRTUAL[0], torch.float64) for _ in range(2))
    for network, parts in ((whole, 1), (in_parts, 4)):
        small_step._loop(network, VIRTUAL[0], images, labels, parts).step()
    for one, other in zip(whole.parameters(), in_parts.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def timed(engine, one, phases=(0, 0, 1, 0), **alone):
    seconds = {ENGINE: [engine] * 3, ONE: [one] * 3}
    seconds |= {
        f"{name.replace('_', ':')} alone": [spent] * 3 for name, spent in alone.items()
    }
    names = ("scatter", "replicate", "compute", "reduce")
    return Speed(64, seconds, dict(zip(names, phases, strict=True)))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (timed(1.0, 1.0), "larger micro-batches (a smaller accum) or compile=True."),
        (
            timed(1.0, 1.0, phases=(0.3, 0.2, 1.0, 0.5)),
            "50% of the step is spent on moving",
        ),
        (timed(1.0, 1.9, cuda_0=0.1, cuda_1=0.25), "shares=[1.00, 0.40]"),
    ],
)
def test_slow_step_has_cause_and_remedy(found, words):
    slow = [
        verdict.text for verdict in on_speed(CARDS, found, 0) if verdict.kind == "slow"
    ]
    assert len(slow) == 1
    assert words in slow[0]


@pytest.mark.parametrize(
    ("count", "of_one", "words"),
    [
        (1, 1.2, ""),
        (2, 1.0, "2 processes with 1 of the GPUs each"),
        (6, 0.45, "3 processes with 2 of the GPUs each"),
        (8, 0.25, "2 processes with 4 of the GPUs each"),
        (8, 0.26, "4 processes with 2 of the GPUs each"),
        (8, 2.0, "8 processes with 1 of the GPUs each"),
    ],
)
def test_launches_need_so_many_processes(count, of_one, words):
    """Each process launches its devices' part of the engine's time."""
    devices = [torch.device("cuda", i) for i in range(count)]
    (slow,) = on_speed(devices, timed(of_one, 1.0), 0)
    assert words in slow.text
    assert ("processes" in slow.text) == bool(words)


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
def test_gpus_fine_within_1_5_of_ideal_time(count, of_one, kind):
    """Eight GPUs that took 0.6 of one GPU's time were called fine."""
    devices = [torch.device("cuda", i) for i in range(count)]
    equal = {f"cuda_{i}": 0.1 + 0.005 * (i > 0) for i in range(count)}  # nearly
    assert kinds(on_speed(devices, timed(of_one, 1.0, **equal), 0)) == [kind]


@pytest.mark.parametrize(
    ("devices", "load"), [([CARDS[0], *CARDS], 0.0), (VIRTUAL, 0.0), (CARDS, 4.0)]
)
def test_no_speed_verdict_on_shared_or_busy(devices, load):
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
def test_gpu_waiting_for_host_is_not_slow(devices, of_one, waited, kind):
    """The doctor's network is so small that a healthy GPU was idle most of the time."""
    speed = dataclasses.replace(timed(of_one, 1.0), waited=waited)
    (verdict,) = on_speed(devices, speed, 0)
    assert verdict.kind == kind
    assert ("waits for the host, so no speed is judged" in verdict.text) == (
        kind == "note"
    )
