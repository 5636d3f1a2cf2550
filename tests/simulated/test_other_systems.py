"""What can be told of Windows and macOS without them: a Python that lacks what they
lack.

Folders have spaces and backslashes in their names. docs/limits.md says what that does
not show.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.pictures import write_folder

SECONDS = 600
WITHOUT = '''
"""Python itself imports this file in every process."""
import multiprocessing
import multiprocessing.context
import os
import platform
import signal
import sys

for name in ["fcntl", "resource", "pwd", "grp", "termios"]:
    sys.modules[name] = None  # importing them fails
for holder, names in {
    os: ["fork", "forkpty", "sched_getaffinity", "sched_setaffinity",
         "getloadavg", "O_DIRECTORY", "geteuid", "killpg", "setsid"],
    signal: ["SIGKILL", "SIGHUP", "SIGQUIT", "SIGCHLD", "SIGUSR1", "SIGALRM", "pthread_sigmask",
             "pthread_kill", "setitimer", "sigwait"],
}.items():
    for name in names:
        if hasattr(holder, name):
            delattr(holder, name)
multiprocessing.get_all_start_methods = lambda: ["spawn"]
multiprocessing.context._default_context.set_start_method("spawn", force=True)
platform.libc_ver = lambda *args, **more: ("", "")
'''
READING = """
signal.SIGCHLD = signal.SIGCLD  # torch's loader asks for the name of the system instead
from harness.optional import import_torchvision_first
import_torchvision_first()
"""
STEP = """
import contextlib, torch, scatterpar
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
x, y = torch.randn(13, 4), torch.randint(3, (13,))
criterion = torch.nn.CrossEntropyLoss()

def broken(scores, labels):
    raise KeyboardInterrupt

for devices in (["cpu"] * 2, ["cpu:0", "cpu:1"]):
    with scatterpar.ScatterOnceParallel(model, 2, devices) as engine:
        with contextlib.suppress(KeyboardInterrupt):
            engine.forward_backward(x, y, broken)
        assert model[0].weight.grad is None
        engine.forward_backward(x, y, criterion)
        model.zero_grad()
        engine.eval()
        assert engine.check(x, y, criterion).passed
        engine.train()
print("exact")
"""


@pytest.fixture
def python(tmp_path):
    """Run Python as on Windows, in a folder with an unusual name; what it printed."""
    here = tmp_path / "my programs" / r"back\slash"
    here.mkdir(parents=True)
    (here / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    paths = [here, *Path(__file__).parents[1:3]]
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    environment |= {"PYTHONUTF8": "0", "PYTHONWARNDEFAULTENCODING": "1"}

    def run(*arguments: str, code: int = 0) -> str:
        how = {
            "cwd": here,
            "env": environment,
            "timeout": SECONDS,
            "capture_output": True,
        }
        command = [sys.executable, *arguments]
        found = subprocess.run(command, encoding="utf-8", check=False, **how)
        assert found.returncode == code, found.stdout + found.stderr
        warned = [
            line for line in found.stderr.splitlines() if "EncodingWarning" in line
        ]
        ours = [line for line in warned if "site-packages" not in line]
        assert not [line for line in ours if "scatterpar" in line], ours
        return found.stdout

    run.folder = here
    return run


@pytest.mark.slow
def test_step_without_posix_is_exact(python):
    assert python("-c", STEP).endswith("exact\n")


@pytest.mark.slow
def test_doctor_and_training_program_work(python):
    words = python("-m", "scatterpar", "doctor", "--json", "what it found.json")
    assert "fine: the gradient" in words
    assert (python.folder / "what it found.json").exists()
    small = [
        "--devices",
        "cpu:0",
        "cpu:1",
        "--epochs",
        "1",
        "--micro-batch-size",
        "512",
    ]
    python("-m", "scatterpar", "train", *small, "--output", "a run")
    python("-m", "scatterpar", "train", "--resume", "a run")
    assert (python.folder / "a run" / "checkpoint.pt").exists()


@pytest.mark.pictures
def test_reading_processes_are_spawned(python):
    write_folder(python.folder / "my pictures", train=24)
    with (python.folder / "sitecustomize.py").open("a", encoding="utf-8") as file:
        file.write(READING)
    few = "--batch-size 24 --model cnn --epochs 1 --devices cpu:0 cpu:1 --img-size 28"
    few = [*few.split(), "--workers", "2", "--output", r"a\run of mine"]
    python("-m", "scatterpar", "train", "--data", "my pictures", *few)
    assert (python.folder / r"a\run of mine" / "checkpoint.pt").exists()
