"""Ranks end in time and leave nothing: no process, no socket, no file."""

import os
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from faults.processes import environment
from splitting.loop_models import Net, average, backward_sums, gathered, images, new
from torch.nn.parallel import DistributedDataParallel

from scatterpar import splitcheck
from scatterpar.splitting import rank_processes


def names_of_children(process):
    commands = [child.cmdline() for child in process.children(recursive=True)]
    return [command for command in commands if "resource_tracker" not in str(command)]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path, monkeypatch):
    """No process, socket or file of the ranks is left, and no variable is set.

    Of spawned processes Python's ``multiprocessing`` keeps one that cleans up at exit.
    """
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    process = psutil.Process()
    children = names_of_children(process)
    sockets = len(process.net_connections("all"))
    variables = set(os.environ)
    yield
    assert names_of_children(process) == children
    assert len(process.net_connections("all")) == sockets
    assert not list(tmp_path.iterdir())
    assert set(os.environ) == variables


def averaged(model, batches):
    backward_sums(model, batches)
    average(model)


def test_ranks_get_what_a_launcher_sets():
    def step(model, batches):
        assert int(os.environ["RANK"]) == dist.get_rank()
        assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        averaged(model, batches)

    splitcheck(step, new(Net), images(), ranks=2).assert_passed()


def test_rank_computes_with_several_threads():
    """OpenMP's threads do not survive a fork: a rank that needed them waited for ever.

    accelerate sets a number of threads in each process.
    """
    large = torch.ones(500, 500, dtype=torch.float64)

    def step(model, batches):
        torch.set_num_threads(3)
        large.tanh()
        averaged(model, batches)

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        large.tanh()
        report = splitcheck(step, new(Net), images(), ranks=2, timeout=20)
    finally:
        torch.set_num_threads(before)
    report.assert_passed()


def test_model_in_this_process_unchanged():
    model = new(Net)
    before = [parameter.tolist() for parameter in model.parameters()]
    storage = [parameter.data_ptr() for parameter in model.parameters()]

    def step(model, batches):
        torch.nn.init.ones_(model.first.weight)
        averaged(model, batches)

    splitcheck(step, model, images(), ranks=2).assert_passed()
    assert [parameter.tolist() for parameter in model.parameters()] == before
    assert [parameter.data_ptr() for parameter in model.parameters()] == storage
    assert not any(parameter.is_shared() for parameter in model.parameters())


def test_wrong_gradient_of_the_last_rank_is_found():
    def step(model, batches):
        averaged(model, batches)
        if dist.get_rank() == dist.get_world_size() - 1 > 0:
            model.first.weight.grad *= 1.001

    report = splitcheck(step, new(Net), images(), ranks=2)
    assert report.cause == "ranks differ"
    assert report.wrong == ["first.weight"]


def test_error_on_rank_told_ends_others():
    def step(model, batches):
        averaged(model, batches)
        if dist.get_rank() == 1:
            raise KeyError("label")
        dist.barrier()

    with pytest.raises(RuntimeError, match=r"(?s)failed on rank 1 of 2.*KeyError: 'la"):
        splitcheck(step, new(Net), images(), ranks=2)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a fork")
def test_error_is_told_without_a_time_limit(monkeypatch):
    def failure(error):
        return rank_processes._Failure(f"{signal.getitimer(signal.ITIMER_REAL)}", 0.0)

    monkeypatch.setattr(rank_processes, "_failure", failure)
    with pytest.raises(RuntimeError, match=r"rank . of .: \(0\.0, 0\.0\)"):
        splitcheck(lambda model, batches: 1 / 0, new(Net), images(), ranks=2)


@pytest.mark.slow
def test_exit_is_told():
    def leave(model, batches):
        averaged(model, batches)
        if dist.get_rank() == 1:
            sys.exit("enough")

    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2.*SystemExit: enough"):
        splitcheck(leave, new(Net), images(), ranks=2)


def test_end_of_a_process_is_told():
    def end(model, batches):
        averaged(model, batches)
        if dist.get_rank() == 1:
            os._exit(3)

    with pytest.raises(RuntimeError, match=r"rank 1 of 2: its process .* exit code 3"):
        splitcheck(end, new(Net), images(), ranks=2)


def test_gather_of_unequal_tensors_told():
    def step(model, batches):
        parallel = DistributedDataParallel(model)
        ((pixels, _),) = batches
        gathered(parallel(pixels)).square().sum().backward()

    with pytest.raises(RuntimeError, match="tensors of one shape"):
        splitcheck(step, new(Net), images(), ranks=2, equal=False)


@pytest.mark.slow
def test_timeout_tells_where_ranks_wait():
    def step(model, batches):
        averaged(model, batches)
        if dist.get_world_size() == 2 and dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # waits for the other rank
        elif dist.get_world_size() == 2:
            time.sleep(60)  # is late

    line = step.__code__.co_firstlineno
    waits = (
        rf"rank 0 is at .*test_rank_processes.py:{line + 3} in step: dist.all_reduce.*"
    )
    sleeps = rf"rank 1 is at .*test_rank_processes.py:{line + 5} in step: time.sleep"
    with pytest.raises(TimeoutError, match=f"{waits}\n{sleeps}"):
        splitcheck(step, new(Net), images(), ranks=2, timeout=5)


SCRIPT = """
import time
import torch.distributed as dist
from splitting.loop_models import Net, backward_sums, images
from scatterpar import splitcheck

def step(model, batches):
    backward_sums(model, batches)
    if dist.get_world_size() == 2:
        dist.barrier()
        if dist.get_rank() == 0:
            print("waits", flush=True)
        time.sleep(600)

try:
    splitcheck(step, Net(), images(), ranks=2, timeout=300)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    input()
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_ranks(tmp_path):
    script = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment() | {"TMPDIR": str(tmp_path)},
        text=True,
        start_new_session=True,
    )
    try:
        assert script.stdout.readline() == "waits\n"
        os.killpg(script.pid, signal.SIGINT)  # as a terminal does
        assert script.stdout.readline() == "interrupted\n"
        assert not psutil.Process(script.pid).children(recursive=True)
        assert not list(tmp_path.iterdir())
        _, errors = script.communicate("\n")
        assert "Traceback" not in errors
    finally:
        script.kill()
        script.wait()


def test_lambda_refused_by_spawned_ranks(monkeypatch):
    monkeypatch.setattr(rank_processes, "can_fork", lambda: False)
    with pytest.raises(ValueError, match="in a file that can be imported"):
        splitcheck(lambda *call: averaged(*call), new(Net), images(), ranks=2)


@pytest.mark.slow
def test_spawned_ranks_give_the_same(monkeypatch):
    monkeypatch.setattr(rank_processes, "can_fork", lambda: False)
    splitcheck(averaged, new(Net), images(), ranks=2).assert_passed()


# --- in a notebook ---

CELLS = [
    """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from scatterpar import splitcheck

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
batch = torch.randn(16, 8), torch.randint(3, (16,))
model(batch[0]).sum().backward()  # a kernel has used its threads before
model.zero_grad()

def children():
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return file.read().split()

def step(model, batches):
    parallel = DistributedDataParallel(model)
    for rows, classes in batches:
        loss = cross_entropy(parallel(rows), classes) / len(batches)
        (loss / dist.get_world_size() if is_divided_twice else loss).backward()
""",
    "is_divided_twice = False\nsplitcheck(step, model, batch, ranks=2)",
    "is_divided_twice = True\nsplitcheck(step, model, batch, ranks=2)",
    "splitcheck(lambda *_: 1 / 0, model, batch, ranks=2)",
    "print(children(), next(model.parameters()).grad, torch.randn(1).shape)",
]


# In a process of its own, because a client opens sockets.
EXECUTE = """
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=300, allow_errors=True).execute()
nbformat.write(notebook, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a fork")
def test_functions_of_notebook_cells_run(tmp_path_factory):
    nbformat = pytest.importorskip("nbformat", reason="the extra `test`")
    pytest.importorskip("nbclient", reason="the extra `test`")
    path = tmp_path_factory.mktemp("notebook") / "cells.ipynb"
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    nbformat.write(notebook, path)
    subprocess.run([sys.executable, "-c", EXECUTE, path], timeout=400, check=True)
    cells = nbformat.read(path, as_version=4).cells
    made, right, wrong, failed, after = [cell.outputs for cell in cells]
    assert made == []
    first_line, *_ = right[0].data["text/plain"].splitlines()
    assert "8 | 8 on 2 ranks" in first_line
    assert first_line.endswith("only rounding differs")
    assert "why: constant factor" in wrong[0].data["text/plain"]
    assert failed[0].ename == "RuntimeError"
    assert "ZeroDivisionError" in failed[0].evalue
    assert after[0].text == "[] None torch.Size([1])\n"


def test_error_on_a_rank_begins_with_the_error():
    """Lines of torch and of the standard library are left out, except for the last."""

    def step(model, batches):
        for pixels, _ in batches:
            model(pixels[:, :3])

    with pytest.raises(RuntimeError, match="failed on rank 0 of 1: RuntimeError") as e:
        splitcheck(step, new(Net), images(), ranks=2)
    lines = str(e.value).splitlines()
    assert "shapes cannot be multiplied" in lines[0]
    assert 2 <= len(lines) <= 8
    assert "test_rank_processes.py" in lines[1]
    assert "in step: model(pixels[:, :3])" in lines[1]
