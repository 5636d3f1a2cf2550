"""``python -m benchmarks card``: parts that end, and pages that say how it went."""

from __future__ import annotations

import json
import platform
import re
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch
from faults.processes import run
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT))

from benchmarks.card import contenders, findings, inside, page, parts, steps  # noqa: E402
from benchmarks.card.networks import Network  # noqa: E402
from benchmarks.card.parts import Outcome, Part, run_part  # noqa: E402

DEVICES = [torch.device("cpu", 0), torch.device("cpu", 1)]


def part(*command, seconds=170.0):
    return Part("part", "A part", seconds, lambda *_: list(command))


# ---- parts ---------------------------------------------------------------------------------------


def test_all_parts_together_end_after_ten_minutes():
    assert sum(one.seconds for one in parts.PARTS) <= 10 * 60


@pytest.mark.parametrize(
    ("command", "well", "words"),
    [
        (["timeit", "-n", "1", "pass"], True, r"done, in \d+ s"),
        (["no_such_module"], False, r"FAILED with code 1 .*last words: .*No module named"),
        (["timeit", "-n1", "import os; os._exit(3)"], False, r"FAILED with code 3 .* said nothing"),
        (["timeit", "-n1", "import os; os.kill(os.getpid(), 9)"], False, "FAILED with signal 9 "),
    ],
)
def test_how_a_part_went_is_told(tmp_path, command, well, words):
    outcome = run_part(part(*command), ["cpu"], tmp_path, True, {})
    assert outcome.went_well == well
    assert re.match(words, outcome.words), outcome.words


def test_the_tests_are_summed_up(tmp_path):
    summing = Part("part", "A part", 170.0, lambda *_: ["platform"], sums_up=True)
    words = run_part(summing, ["cpu"], tmp_path, True, {}).words
    assert re.fullmatch(rf"done, in \d+ s; its last words: {re.escape(platform.platform())}", words)


def test_a_part_that_hangs_is_ended_with_its_children(tmp_path):
    statement = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '1000']); "
        f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(1000)"
    )
    outcome = run_part(part("timeit", "-n1", statement, seconds=2.0), ["cpu"], tmp_path, True, {})
    assert not outcome.went_well
    assert re.match(r"not done after \d+ s, its limit, and ended", outcome.words)
    if (tmp_path / "child").exists():  # else the machine was too busy to begin
        state = Path("/proc", (tmp_path / "child").read_text() or "0", "stat")
        deadline = time.monotonic() + 60
        while state.exists() and state.read_text().split(")")[-1].split()[0] != "Z":
            assert time.monotonic() < deadline, "the child lives on"
            time.sleep(0.02)


def test_wrong_devices_are_code_2(capsys):
    from benchmarks.__main__ import main

    assert main(["card", "--devices", "cuda:99"]) == 2
    assert "cuda:99 is not here" in capsys.readouterr().err


# ---- contenders ----------------------------------------------------------------------------------


def linear(device, small):
    """A network of a moment."""

    def data(rows, seed):
        generator = torch.Generator().manual_seed(seed)
        labels = torch.randint(3, (rows,), generator=generator)
        return torch.randn(rows, 8, generator=generator), labels

    def module(device):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3))

    return Network("a linear network", module, data, data, 2, nn.CrossEntropyLoss())


@pytest.mark.draws
def test_all_contenders_have_the_same_gradient_and_take_their_steps(monkeypatch, tmp_path):
    """One that fails in the middle takes part no longer, and the others go on."""

    class Breaks(contenders.Contender):
        def step(self, size):
            if len(self.taken) == 5:
                raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
            self.taken.append(size)
            return super().step(size)

    def breaking(*_):
        found = contenders.loop(linear(*DEVICES), DEVICES[0], contenders.works_of(network, DEVICES))
        found.__class__, found.taken = Breaks, []
        return found

    network = linear(*DEVICES)
    monkeypatch.setitem(steps.NETWORKS, "linear", linear)
    monkeypatch.setattr(steps.Comparison, "_ddp", breaking)
    out = tmp_path / "found.json"
    comparison = steps.Comparison("linear", DEVICES, True, out, tmp_path)
    comparison.enter()
    comparison.rounds(until=0)
    found = json.loads(out.read_text())
    assert found["absent"][steps.PER_CALL] == "ValueError: on the CPU it calls the module itself"
    assert found["absent"][steps.DDP] == "OutOfMemoryError: CUDA out of memory."
    assert found["contenders"][steps.ENGINE]["apart"] < 1e-5
    for name in (steps.ENGINE, steps.LOOP):
        assert [len(found["contenders"][name][size]) for size in steps.SIZES] == [3, 3]
    assert len(found["contenders"][steps.DDP]["full"]) == 2
    assert found["rows of the loop"] * 2 == 2 * contenders.ACCUM * 2
    shown = page.steps_section(found)
    assert "| engine |" in shown
    assert f"- {steps.PER_CALL}: no part: ValueError: on the CPU" in shown


@pytest.mark.slow
@pytest.mark.parametrize(("accelerator", "network"), [(False, "gpt2"), (True, "resnet50")])
def test_a_run(simulated_accelerator, tmp_path, accelerator, network):
    pytest.importorskip("transformers")
    if accelerator and not simulated_accelerator:
        pytest.skip("there is no g++ to build it")
    options = ["--simulated"] if accelerator else ["--quick", "--devices", "cpu:0,cpu:1"]
    outcome = run(
        *("-m", "benchmarks", "card", "--out", str(tmp_path), *options, "--only", network),
        **(simulated_accelerator if accelerator else {}),
        silence=10 * 130,  # a part says nothing until its end
    )
    assert outcome.code == 0, outcome.out + outcome.err
    with tarfile.open(f"{tmp_path}.tar.gz") as packed:
        assert f"{tmp_path.name}/README.md" in packed.getnames()
    shown = (tmp_path / "README.md").read_text()
    assert "| engine |" in shown
    found = json.loads((tmp_path / f"{network}.json").read_text())
    assert found["contenders"][steps.ENGINE]["apart"] < 0.05
    peaks = found["contenders"][steps.ENGINE]["peaks"]
    assert len(peaks) == (2 if accelerator else 0)
    assert all(peaks.values())
    assert (steps.DDP in found["contenders"]) is not accelerator


# ---- looks ---------------------------------------------------------------------------------------


def test_a_look_that_fails_is_written_and_the_others_go_on(tmp_path):
    found = findings.Findings(tmp_path / "found.json")
    found.look("first", lambda: {"one": 1 / 0})
    found.look("second", lambda: {"two": "2 | 3"})
    assert found.close() == 1
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["first"]["FAILED"] == "ZeroDivisionError: division by zero"
    shown = page.looks_section(written).splitlines()
    assert shown[2] == "| first | FAILED | ZeroDivisionError: division by zero |"
    assert shown[4] == "| second | two | 2 \\| 3 |"


def test_how_long_a_card_was_busy_is_told_by_events_that_overlap():
    spans = [("kernel", "a", 0, 40), ("kernel", "b", 30, 20), ("kernel", "a", 90, 10)]
    copies = [("gpu_memcpy", "Memcpy HtoD (Pinned)", 40, 20), ("gpu_memcpy", "Memcpy DtoD", 0, 9)]
    keys = ("cat", "name", "ts", "dur")
    events = [dict(zip(keys, each, strict=True)) for each in spans + copies] + [{"ph": "M"}]
    told = "busy for 60.0% of 0.1 ms; copies to it 0.0 ms, 50.0% of it beside kernels"
    assert inside.busy(events) == told
    assert inside.busy(events[:3]) == "busy for 60.0% of 0.1 ms; no copies to it"
    assert inside.busy(events[5:]) == "the profiler saw nothing on the card"


def test_gradients_that_are_no_numbers_are_not_close():
    one = [torch.ones(3)]
    assert inside.close(one, one, within=0.1) == "0e+00"
    with pytest.raises(AssertionError, match="nan apart, more than 1e-01"):
        inside.close(one, [torch.full((3,), float("nan"))], within=0.1)


# ---- pages ---------------------------------------------------------------------------------------


def test_the_page_shows_ratios_of_rounds_and_what_failed(tmp_path):
    resnet, doctor = (Part(name, name, 1.0, lambda *_: []) for name in ("resnet50", "doctor"))
    contender = {"apart": 1e-4, "tiny": [0.016], "peaks": {"cuda:0": 3 * 2**20}}
    found = {
        "network": "ResNet-50",
        "precision": "bfloat16",
        "devices": ["cuda:0"],
        "rows": 64,
        "substeps": 16,
        "rows of the loop": 1024,
        "contenders": {
            steps.LOOP: contender | {"full": [1.0, 2.0, 4.0], "apart": None},
            steps.ENGINE: contender | {"full": [0.9, 1.9, 3.2]},
        },
        "absent": {steps.DDP: "ValueError: with one card it is a plain loop"},
    }
    (tmp_path / "resnet50.json").write_text(json.dumps(found))
    outcomes = [Outcome(resnet, 0, 1.0, "done, in 1 s"), Outcome(doctor, None, 1.0, "not | done")]
    page.write_page(tmp_path, {"torch": "2.13.0"}, outcomes, small=False)
    shown = (tmp_path / "README.md").read_text()
    assert "| plain loop | 2000.0 | 0.900 | 1.00 | 3 |  |" in shown
    assert "| engine | 1900.0 | 1.000 | 1.00 | 3 | 1e-04 |" in shown
    assert "| [doctor](doctor.txt) | not \\| done |" in shown
    assert "- DDP, no_sync: no part: ValueError: with one card it is a plain loop" in shown
    assert "mean nothing" not in shown
