"""A private entry point of torch that is not there is named; those that no other test
tries.
"""

import re
import runpy
import subprocess
import sys

import pytest
import torch
from harness.oracle import assert_close, build, randn
from torch import nn
from torch.nn.utils import parametrize

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    ShardedOptimizer,
)
from scatterpar.torch_private import entry_points, random_key
from scatterpar.torch_private.compiler import (
    compile_fn_of,
    never_compiled,
    records_cuda_graphs,
)
from scatterpar.torch_private.modules import parametrizations_uncached

pytestmark = pytest.mark.core

WORDS = (
    r"torch \S+ has no {}, which scatterpar needs; install a version of torch that the"
)


@pytest.mark.parametrize("name", ["_foreach_copy_", "_C._current_graph_task_id"])
def test_missing_name_told_at_import(name, monkeypatch):
    monkeypatch.delattr(f"torch.{name}")
    with pytest.raises(RuntimeError, match=WORDS.format(re.escape(f"torch.{name}"))):
        runpy.run_path(entry_points.__file__)


def test_imports_without_the_dispatch_key(monkeypatch):
    """``threads/test_generators.py`` says what replicas then do."""
    monkeypatch.setattr("torch._C._dispatch_key_parse", lambda name: torch.device(name))
    assert random_key.HAS_RANDOM_KEY
    assert not runpy.run_path(random_key.__file__)["HAS_RANDOM_KEY"]


@pytest.mark.parametrize(
    ("options", "records"),
    [
        pytest.param({"mode": "reduce-overhead"}, True, marks=pytest.mark.slow),
        pytest.param({"mode": "default"}, False, marks=pytest.mark.slow),
        ({"backend": "cudagraphs"}, True),
        ({"backend": "eager"}, False),
    ],
)
def test_compile_options_are_repeated(options, records):
    how = compile_fn_of(torch.compile(lambda x: x, **options))
    assert records_cuda_graphs(how) == records
    runs = []
    compiled = torch.compile(
        lambda x: x, backend=lambda graph, _: runs.append(1) or graph.forward
    )
    assert compile_fn_of(compiled)(lambda x: x * 3)(torch.ones(1)).item() == 3.0
    assert runs == [1]


# ---- calls in compiled functions ----


def net():
    return build(
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    ).float()


def batch():
    return randn(13, 6, dtype=torch.float32), randn(13, 3, seed=2, dtype=torch.float32)


def of_pair(model, devices):
    compute = DataParallelModel(model, devices)
    criterion = DataParallelCriterion(nn.MSELoss())

    def step(inputs, targets):
        loss = criterion(compute(inputs), targets) + 0.0
        loss.backward()
        return loss.detach()

    return step


def of_engine(model, devices):
    engine = ScatterOnceParallel(model, 2, devices)
    return lambda *data: engine.forward_backward(*data, nn.MSELoss())


def of_returned_loss(model, devices):
    engine = ScatterOnceParallel(model, 2, devices)

    def step(inputs, targets):
        loss = engine.loss(inputs, targets, nn.MSELoss())
        loss.backward()
        return loss.detach()

    return step


OF_LOSS, OF_PAIR = (
    pytest.param(make, marks=pytest.mark.slow) for make in (of_returned_loss, of_pair)
)


@pytest.mark.parametrize("make", [OF_PAIR, of_engine, OF_LOSS])
def test_calls_in_a_compiled_step_run_as_written(make):
    model, plain = net(), net()
    step = torch.compile(make(model, ["cpu:0", "cpu:1"]), backend="eager")
    loss = step(*batch())
    expected = nn.functional.mse_loss(plain(batch()[0]), batch()[1])
    expected.backward()
    assert_close(loss, expected.detach(), "loss", relative=1e-5)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad, "gradient", relative=1e-4)


def test_compiled_wrappers_and_sharded_step():
    model = net()
    inputs, targets = batch()
    devices = ["cpu:0", "cpu:1"]
    with ScatterOnceParallel(model, 2, devices) as engine:
        optimizer = ShardedOptimizer(engine, torch.optim.AdamW)
        engine.forward_backward(inputs, targets, nn.MSELoss())
        before = model[0].weight.detach().clone()
        torch.compile(optimizer.step, backend="eager")()
        assert not torch.equal(model[0].weight, before)
        engine.eval()
        compiled = torch.compile(engine, backend="eager")
        with torch.no_grad():
            assert_close(compiled(inputs), model(inputs), "output", relative=1e-5)
        outputs = torch.compile(DataParallelModel(model, devices), backend="eager")
        joined = torch.cat(outputs(inputs))
        assert_close(joined, model(inputs), "output", relative=1e-5)


def test_never_compiled_asks_for_no_compiler(monkeypatch):
    called = never_compiled(lambda value: value + 1)
    for name in ("torch._dynamo", "torch._dynamo.eval_frame"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert called(1) == 2
    assert "torch._dynamo" not in sys.modules


def test_cache_of_parametrizations_counts_threads():
    """Another thread that entered, or left, meanwhile left the cache on for ever."""
    of_others = parametrize.cached()
    with parametrizations_uncached:
        of_others.__enter__()
    assert parametrize._cache_enabled == 1
    with parametrizations_uncached:
        of_others.__exit__(None, None, None)
    assert parametrize._cache_enabled == 0
    assert not parametrize._cache


@pytest.mark.slow
def test_never_compiled_imports_no_compiler():
    """Nor does the package, in a process that has imported nothing else."""
    program = """
import sys
from scatterpar.torch_private.compiler import never_compiled
called = never_compiled(lambda value: value + 1)
assert called(1) == 2
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
