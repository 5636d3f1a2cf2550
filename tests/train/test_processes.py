"""`--processes 2`: the same run as of one process, stopped, broken, and resumed."""

from __future__ import annotations

import re
import signal

import psutil
import pytest
import torch
from faults.processes import finish, run, start
from harness.runs import assert_same_run, differences, records, steps, wait_until

from scatterpar.train.command_line import UsageError
from scatterpar.train.model_training import choose_devices
from scatterpar.train.processes import ALONE, Processes
from scatterpar.train.tool_run import main

OPTIONS = ["--model", "harness.runs:Steady", "--batch", "2048", "--epochs", "3"]
OPTIONS += ["--micro-batch-size", "512", "--label-smoothing", "0.1"]
STEPS = 3 * 4
TWO = ["--processes", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a run of one process, with a replica for each of two."""
    out = tmp_path_factory.mktemp("whole")
    with torch.random.fork_rng():
        assert main([*OPTIONS, "--devices", "cpu:0,cpu:1", "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_each_row_is_of_one_process(size):
    rows = torch.arange(7)
    parts = [Processes(rank, size).part_of(rows) for rank in range(size)]
    assert torch.equal(torch.cat(parts), rows)
    lengths = [len(part) for part in parts]
    assert max(lengths) - min(lengths) <= 1


def test_processes_divide_the_devices():
    names = "cpu:0,cpu:1,cpu:2,cpu:3"
    devices = choose_devices(names, Processes(1, 2))
    assert [str(device) for device in devices] == ["cpu:2", "cpu:3"]
    with pytest.raises(UsageError, match=r"^--processes 3 cannot divide 4 devices"):
        choose_devices(names, Processes(0, 3))


def test_one_process_has_all_rows():
    rows = torch.arange(6.0)
    assert ALONE.gathered(rows) == [rows]
    assert ALONE.part_of(rows).equal(rows)
    assert ALONE.largest(7) == 7


@pytest.mark.slow
@pytest.mark.draws
def test_two_processes_equal_one_bit_for_bit(tmp_path):
    words = [*OPTIONS, "--epochs", "1"]
    one, two = (tmp_path / name for name in ("one", "two"))
    assert main([*words, "--devices", "cpu:0,cpu:1", "--out", str(one)]) == 0
    ended = run("-m", "scatterpar", "train", *words, *TWO, "--out", str(two))
    assert ended.code == 0, ended.err
    assert ended.err == ""
    assert differences(one, two) == []
    best, best_of_one = (torch.load(out / "best.pt") for out in (two, one))
    assert best["accuracy"] == best_of_one["accuracy"]
    assert torch.equal(best["confusion"], best_of_one["confusion"])
    for name in ("mistakes.png", "confusion.png"):
        assert (two / name).read_bytes() == (one / name).read_bytes()
    assert ended.out.count("epoch 1/1: loss") == 1
    assert "2 processes divide each batch; the first one:\n1024 rows" in ended.out
    assert [step["images"] for step in steps(two)] == [2048] * 4


@pytest.mark.draws
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_and_run_goes_on_in_one_process(whole, tmp_path, number):
    out = tmp_path / "out"
    words = ["train", *OPTIONS, "--out", str(out), *TWO]
    words += ["--checkpoint-every", "2"]
    process = start("-m", "scatterpar", *words, STEADY_SECONDS="0.1")
    wait_until(lambda: len(steps(out)) >= 2, tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    ended = finish(process)
    assert ended.code == 128 + number
    assert "Traceback" not in ended.err
    name = signal.Signals(number).name
    assert ended.err.count(f"{name}: saving at the end of this step") == 1
    assert re.search(r"saved after step \d+; this goes on from there:", ended.out)
    assert len(steps(out)) < STEPS
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)
    resumed = ["--out", str(out), "--resume", "--processes", "1"]
    assert main([*resumed, "--devices", "cpu:0,cpu:1"]) == 0
    assert_same_run(whole, out, STEPS)


@pytest.mark.slow
def test_second_signal_ends_all_at_once(tmp_path):
    words = ["train", *OPTIONS, "--out", str(tmp_path), *TWO]
    process = start("-m", "scatterpar", *words, "--model", "harness.runs:Stuck")
    wait_until(lambda: len(steps(tmp_path)) >= 1, tmp_path)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert "again: ending now" in process.stderr.readline() + process.stderr.readline()
    process.send_signal(signal.SIGINT)
    assert finish(process).code == 128 + signal.SIGINT
    psutil.wait_procs(children, timeout=60)
    assert not any(child.is_running() for child in children)


@pytest.mark.draws
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_killed_process_ends_the_others_resumable(whole, tmp_path, rank):
    words = ["train", *OPTIONS, "--out", str(tmp_path), *TWO]
    words += ["--checkpoint-every", "2"]
    process = start("-m", "scatterpar", *words, STEADY_SECONDS="0.1")
    wait_until(lambda: len(steps(tmp_path)) >= 3, tmp_path)
    children = psutil.Process(process.pid).children()
    ranks = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    sorted(ranks, key=lambda child: child.pid)[rank].kill()
    ended = finish(process)
    assert ended.code == 2
    lines = ended.err.splitlines()
    expected = f"train: error: process {rank} of 2 was ended by SIGKILL, and the others"
    assert expected in lines[-1]
    assert "Traceback" not in ended.err
    if rank == 1:
        assert re.search(r"saved after step \d+; this goes on", ended.out)
    # In two processes again: the number is one of the run's options.
    resumed = run("-m", "scatterpar", "train", "--out", str(tmp_path), "--resume")
    assert resumed.code == 0, resumed.err
    assert_same_run(whole, tmp_path, STEPS)
    assert records(tmp_path, "run")[-1]["options"]["processes"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        ("harness.runs:Diverging", 1, "training diverged (the loss is nan)"),
        ("harness.runs:FailsInSecondProcess", 1, "ValueError: only here"),
        # The first process has saved.
        ("harness.runs:UnreadInSecondProcess", 2, "no worker; the checkpoint after st"),
        ("harness.runs:Missing", 2, "has no attribute 'Missing'"),
    ],
)
def test_error_is_told_once(tmp_path, model, code, words):
    options = [*OPTIONS, *TWO, "--out", str(tmp_path), "--model", model]
    ended = run("-m", "scatterpar", "train", *options)
    printed = ended.out + ended.err
    assert ended.code == code
    assert printed.count(words) == 1, printed
