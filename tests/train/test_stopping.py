"""Nothing is lost: signals that end a run, and the line that goes on."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import psutil
import pytest
import torch
from faults.forked import start_forked
from faults.processes import SILENCE, finish
from harness.pictures import write_folder
from harness.runs import Small, assert_same_run, environment, steps, wait_until

from scatterpar.__main__ import main as command

pytestmark = pytest.mark.draws
PICTURES = find_spec("torchvision") is not None  # else what stays in memory, without workers
OPTIONS = ["--batch", "24" if PICTURES else "1639", "--epochs", "4", "--devices", "cpu:0,cpu:1"]
OPTIONS += [
    "--micro-batch-size",
    "6" if PICTURES else "410",
    "--ema",
    "0.9",
    "--model",
    f"{__name__}:Dropping",
]
STEPS = 4 * 5


class Dropping(Small):
    """Takes its time, so that a test can interrupt it where it likes; of one colour."""

    def forward(self, images):
        time.sleep(0.01 * self.training)
        return super().forward(images[:, :1])


class Stuck(Small):
    """Its third step takes longer than anyone waits."""

    def forward(self, images):
        if self.training and int(self.body[3].num_batches_tracked) == 2:
            print("stuck", flush=True)
            time.sleep(3600)
        return super().forward(images)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not PICTURES:
        return "embedded"
    return write_folder(tmp_path_factory.mktemp("pictures"), train=40, test=4)


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """The checkpoint's folder of a run that nobody stopped."""
    out = tmp_path_factory.mktemp("whole")
    with torch.random.fork_rng():
        command(["train", "--data", str(folder), *OPTIONS, "--workers", "0", "--out", str(out)])
    return out


def arguments(folder, out):
    tool = ["-m", "scatterpar", "train", "--data", str(folder), *OPTIONS]
    return [*tool, "--workers", "2", "--out", str(out)]


def send_in_the_second_epoch(process, number, out):
    """Send a signal; return the processes that were the run's."""
    poll = getattr(process, "poll", lambda: None)
    wait_until(lambda: len(steps(out)) >= 6 or poll() is not None, out.parent)
    assert poll() is None, process.stderr.read()
    others = psutil.Process(process.pid).children(recursive=True)
    assert len(others) >= 3 * PICTURES  # the fork server and two workers
    process.send_signal(number)
    return others


def assert_gone(processes):
    """However long a busy machine takes: one that was left behind would wait for ever."""
    start = time.monotonic()
    while left := [process for process in processes if is_running(process)]:
        assert time.monotonic() - start < SILENCE, left
        time.sleep(0.005)


def is_running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False  # it ended in between


def test_a_stopped_run_goes_on_with_the_line_that_it_prints(folder, whole, tmp_path, capsys):
    """What a service manager or SLURM sends; the line is what was typed, and two words more."""
    out = tmp_path / "out"
    typed = [sys.executable, *arguments(folder, out)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(typed, **pipes, env=environment()) as process:
        others = send_in_the_second_epoch(process, signal.SIGTERM, out)
        process.wait(SILENCE)
        assert_gone(others)
        printed, errors = process.communicate(timeout=SILENCE)
    assert process.returncode == 143
    assert "Traceback" not in errors
    assert "SIGTERM: saving at the end of this step; again: ending now" in errors
    made = len(steps(out))
    assert f"ended by SIGTERM after 1 of 4 epochs, {made} steps" in printed
    found = re.search(r"saved after step (\d+); this goes on from there:\n  (.*)\n", printed)
    assert int(found[1]) == made < STEPS
    again = shlex.split(found[2])
    assert again == [*typed, "--resume"]
    goes_on(again[3:], whole, out)


def goes_on(again, whole, out):
    """The rest of a run, in this process; all of it is the run that nobody stopped, to the bit."""
    assert command(again) == 0
    assert_same_run(whole, out, STEPS)


def test_ctrl_c_keeps_what_was_reached(folder, whole, tmp_path, capsys):
    out = tmp_path / "out"
    process = start_forked(*arguments(folder, out))
    wait_until(lambda: len(steps(out)) >= 7, tmp_path)
    process.send_signal(signal.SIGINT)
    ended = finish(process)
    assert ended.code == 130
    assert "Traceback" not in ended.err
    assert re.search(r"interrupted after [12] of 4 epochs, \d+ steps", ended.out)
    assert re.search(r"test accuracy: \d", ended.out)
    assert (out / "curves.png").exists()
    assert json.loads((out / "metrics.jsonl").open().readlines()[-1])["ending"] == "interrupted"
    goes_on([*arguments(folder, out)[2:], "--workers", "0", "--resume"], whole, out)


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_goes_on_from_its_checkpoint(folder, whole, tmp_path):
    """Workers watched their parent, the fork server, and that one waited for them."""
    out, often = tmp_path / "out", ["--checkpoint-every", "2"]
    process = start_forked(*arguments(folder, out), *often)
    others = send_in_the_second_epoch(process, signal.SIGKILL, out)
    assert_gone(others)
    assert finish(process).code == -signal.SIGKILL
    goes_on([*arguments(folder, out)[2:], *often, "--resume"], whole, out)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_a_run_at_once(tmp_path, number):
    options = ["--model", f"{__name__}:Stuck", "--batch", "1024", "--devices", "cpu"]
    options += ["--micro-batch-size", "1024", "--checkpoint-every", "1", "--out", str(tmp_path)]
    process = start_forked("-m", "scatterpar", "train", *options)
    wait_until(lambda: len(steps(tmp_path)) == 2, tmp_path)
    while process.stdout.readline() != "stuck\n":
        pass
    process.send_signal(number)
    while "again: ending now" not in process.stderr.readline():  # else two might be seen as one
        pass
    process.send_signal(number)
    assert finish(process).code == 128 + number
    assert torch.load(tmp_path / "checkpoint.pt")["position"]["step"] == 2
