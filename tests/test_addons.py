"""A capability beside the engine can be deleted with its file, and everything but it
works.
"""

import shutil
from pathlib import Path

import pytest
from faults.processes import run

import scatterpar

PACKAGE = Path(scatterpar.__file__).parent

SETUP = """
import sys
import torch
import torch.distributed as dist
from torch import nn
# An editable install would find the deleted file where it was installed from.
sys.meta_path = [f for f in sys.meta_path if not str(f.__module__).startswith("__editable__")]
import scatterpar

MODEL = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2)).double()
INPUTS, TARGETS = torch.randn(12, 4).double(), torch.randn(12, 2).double()
LOSS = nn.MSELoss()

def engine(**options):
    return scatterpar.ScatterOnceParallel(MODEL, device_ids=["cpu:0", "cpu:1"], **options)

def step(call={}, **options):
    engine(**options).forward_backward(INPUTS, TARGETS, LOSS, **call)

def plain():
    MODEL.eval().zero_grad()
    step()
    found = [p.grad.clone() for p in MODEL.parameters()]
    MODEL.zero_grad()
    LOSS(MODEL(INPUTS), TARGETS).backward()
    for one, p in zip(found, MODEL.parameters()):
        torch.testing.assert_close(one, p.grad, rtol=1e-10, atol=1e-12)
    MODEL.train().zero_grad()

def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        step(process_group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()

def pair():
    outputs = scatterpar.DataParallelModel(MODEL, ["cpu:0", "cpu:1"])(INPUTS)
    scatterpar.DataParallelCriterion(LOSS)(outputs, TARGETS).backward()
"""

# The file of each capability, and a call that needs it.
ADDONS = {
    "auto_accum": "step(accum='auto')",
    "batch_statistics": "step(buffers='batch')",
    "compiled": "step(compile={'backend': 'eager'})",
    "costs": "step(micro_batch_cost=8, call={'costs': [1, 2] * 6})",
    "distributed": "one_rank()",
    "graphs": "step(graphs=True)",
    "inference": "engine().map(lambda replica, x: replica(x), INPUTS)",
    "noise": "step(measure_noise=True)",
    "pair": "pair()",
    "recipe": "scatterpar.linear_scaled_lr(0.1, 512)",
    "sharded": "scatterpar.ShardedOptimizer(engine(), torch.optim.SGD, lr=0.1)",
    "trace": "with engine().trace(): pass",
    "two_passes": "step(call={'whole_batch': True})",
    "verify": "engine().check(INPUTS, TARGETS, LOSS)",
}

TRY = """
try:
    {call}
except ModuleNotFoundError as error:
    print("{name}:", error.name)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDONS)
def test_without_its_file_a_capability_is_an_import_error_and_the_others_work(
    name, tmp_path
):
    shutil.copytree(
        PACKAGE, tmp_path / "scatterpar", ignore=shutil.ignore_patterns("__pycache__")
    )
    places = [tmp_path / "scatterpar" / name, tmp_path / "scatterpar" / f"{name}.py"]
    (place,) = (place for place in places if place.exists())
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink()
    calls = [TRY.format(call=call, name=each) for each, call in ADDONS.items()]
    program = SETUP + "plain()\n" + "".join(calls) + "plain()\n"
    outcome = run("-P", "-c", program, PYTHONPATH=str(tmp_path))
    missing = outcome.out.splitlines()
    assert outcome.code == 0, outcome.err
    assert missing[0].startswith(f"{name}: scatterpar.{name}")
    assert all(line.split(": ")[1].startswith(f"scatterpar.{name}") for line in missing)
    assert len(missing) == 1
