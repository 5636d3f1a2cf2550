"""Misuse gets words, not hangs: bad inputs, and steps where none can be."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from faults.bad_inputs import attempt, bad_inputs
from faults.processes import run_forked
from faults.state import nothing_changes
from harness.models import CLASSES, FEATURES, Of, linear, mlp
from harness.oracle import assert_gradients, assert_step, gradients, randint, randn
from torch import nn

from scatterpar import DataParallelModel, ScatterOnceParallel

INSIDE = (
    "this engine is in the middle of a step: another step cannot start from inside a "
    "criterion"
)


@pytest.mark.parametrize("line", bad_inputs(), ids=lambda line: line[0][:72])
def test_bad_input_refused_changes_nothing(line):
    """After an expression with the engine, its next step is exact."""
    code, expected, *words = line
    kind, said, names = attempt(code)
    assert kind == expected, said
    assert all(word in said for word in words), said
    model, x, y, loss = (names[name] for name in ("model", "x", "y", "loss"))
    if model.weight.is_meta:  # the user's own doing
        return
    assert torch.equal(model.weight.grad, torch.ones(2, 4))
    assert model.bias.grad is None
    if "engine" in names and "close()" not in code:
        with names["engine"] as engine:
            engine.train()
            engine.verify = False  # a look would take as long as the step
            assert_step(engine, x, y, loss, relative=1e-5)


# --- a step inside a step ---


@pytest.fixture
def engine(devices):
    with ScatterOnceParallel(mlp(), 2, devices(2)) as engine:
        yield engine
    gc.collect()


def data(rows=8):
    return randn(rows, FEATURES), randint(CLASSES, rows)


def step(engine, criterion=nn.functional.cross_entropy, **options):
    return engine.forward_backward(*data(), criterion, **options)


@torch.no_grad()
def infer(engine):
    engine(data()[0])


CALLS = {
    "criterion": lambda engine: {"criterion": lambda *_: step(engine)},
    "inference": lambda engine: {"criterion": lambda *_: infer(engine)},
    "count": lambda engine: {"count": lambda *_: step(engine)},
}
HOOKS = {
    "forward": lambda layer: layer.register_forward_hook,
    "pre": lambda layer: layer.register_forward_pre_hook,
    "backward": lambda layer: layer.register_full_backward_hook,
    "parameter": lambda layer: layer.weight.register_hook,
    "post-accumulate": lambda layer: layer.weight.register_post_accumulate_grad_hook,
}


@pytest.mark.contract
@pytest.mark.parametrize("place", [*CALLS, *HOOKS])
def test_step_inside_a_step_refused(engine, place):
    """It fails with our words, changes nothing, and the next one works."""
    options, handles = CALLS.get(place, lambda _: {})(engine), []
    if place in HOOKS:
        handles.append(HOOKS[place](engine.module[0])(lambda *_: step(engine)))
    with nothing_changes(engine.module), pytest.raises(RuntimeError, match=INSIDE):
        step(engine, **options)
    for handle in handles:
        handle.remove()
    assert_step(engine, *data(), nn.CrossEntropyLoss())


# --- arguments ---


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_ordinals_without_gpu_name_cpu():
    with pytest.raises(ValueError, match=r'none is visible here.*\["cpu"\] \* 2'):
        ScatterOnceParallel(mlp(), 1, [0, 1])


def test_list_is_one_argument_tuple_several(devices):
    def forward(m, first, second=None):
        first, second = first if second is None else (first, second)
        return m.linear(first * second)

    with ScatterOnceParallel(Of(forward, linear=linear()), 2, devices(3)) as engine:
        rows, labels = data(6)
        by_tuple, by_list, by_dict = (
            engine.forward_backward(inputs, labels, nn.CrossEntropyLoss())
            for inputs in ((rows, rows), [rows, rows], {"first": rows, "second": rows})
        )
    assert by_tuple == by_list == by_dict


# --- other processes ---

FORKED = """
import os, sys
import torch
from torch import nn
from scatterpar import ScatterOnceParallel
data = torch.ones(8, 2), torch.ones(8, 1), nn.MSELoss()
def step_of_another():
    with ScatterOnceParallel(nn.Linear(2, 1), 2, ["cpu"] * 4) as other:
        other.forward_backward(*data)
def is_refused():
    try:
        engine.forward_backward(*data)
    except RuntimeError as error:
        engine.close()
        return "another process: threads do not survive a fork; make another" in str(error)
engine = ScatterOnceParallel(nn.Linear(2, 1), 2, ["cpu"] * 4)
engine.forward_backward(*data)
codes = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        step_of_another()
        os._exit(0 if is_refused() else 3)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(".", file=sys.stderr)  # not silent on a busy machine
engine.forward_backward(*data)
print(codes)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_forked_children_compute_at_once():
    """One in four once crashed: two threads made autograd's engine anew at the same
    time.
    """
    outcome = run_forked("-c", FORKED)
    assert (outcome.code, outcome.out) == (0, f"{[0] * 8}\n"), outcome.err


# --- modules that cannot be replicated ---


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_criterion_may_call_torchscript():
    loss = torch.jit.script(nn.CrossEntropyLoss())
    with ScatterOnceParallel(mlp(), 2, ["cpu"] * 2) as engine:
        assert_step(engine, *data(), lambda output, targets: loss(output, targets))


@pytest.mark.parametrize("make", [ScatterOnceParallel, DataParallelModel])
@pytest.mark.parametrize(
    "walk", [nn.Module.train, lambda m: m.to("cpu"), nn.Module.state_dict]
)
def test_engine_as_child_of_module_refused(make, walk):
    model = linear()
    model.engine = make(model, device_ids=["cpu"] * 2)
    words = (
        rf"Linear contains the {make.__name__} that wraps it .* in a list, "
        r"self.eng"
    )
    with pytest.raises(ValueError, match=words):
        walk(model)


def test_engine_in_list_of_module_trains(devices):
    model, twin = linear(), linear()
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        model.engine = [engine]
        assert list(model.train().state_dict()) == ["weight", "bias"]
        step(engine)
    nn.functional.cross_entropy(twin(data()[0]), data()[1]).backward()
    assert_gradients(model, gradients(twin))
