"""What torch tests of ``nn.DataParallel``, asked of the pair and of the engine.

In words of our own, after test/distributed/test_data_parallel.py of
https://github.com/pytorch/pytorch. Its function ``data_parallel`` is the pair's forward and
``gather`` here; ``replicate`` is ``engine.replicas``.

Cases without a meaning here, and why:

* ``test_scatter_*``: no scatter of ours is public. That inputs get their gradients, first and
  second, is asked of the pair below.
* ``test_parallel_apply`` and its variants: what it promises (positional and bare arguments,
  autocast's dtype, the user's own exception) is asked of the pair and the engine.
* ``output_device``: ``gather`` is told where to; the pair's own outputs stay where they are.

* What ``test_agree.py``, ``test_inference.py``, ``pair/`` and ``test_kinds_of_modules.py`` ask of
  every module: dtypes, sparse gradients, buffers that require grad, grad mode, autocast around a
  call, ``zero_grad`` in forward, several inputs, nested inputs and outputs.

One answer differs on purpose: 0-dim outputs are averaged, where torch makes a vector of them with a
warning.
"""

from __future__ import annotations

import contextlib
import gc
import io
from functools import partial

import pytest
import torch
from helpers.agree import Case, agree
from helpers.oracle import assert_close, assert_gradients, build, gradients, randn
from torch import nn

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    Replicated,
    ScatterOnceParallel,
    gather,
)

ORDERS = [["cpu:0", "cpu:1"], ["cpu:1", "cpu:0"], ["cpu", "cpu"], ["cpu"]]
in_every_order = pytest.mark.parametrize("device_ids", ORDERS, ids=",".join)


def linear():
    return build(lambda: nn.Linear(10, 5))


def mean_square(output, _=None):
    return output.square().mean()


# --- gradients of parameters, buffers and inputs ---


@in_every_order
def test_outputs_and_gradients(device_ids):
    layer, plain, inputs = linear(), linear(), randn(20, 10)
    output = gather(DataParallelModel(layer, device_ids)(inputs), device_ids[0])
    expected = plain(inputs)
    assert_close(output, expected, "output")
    output.sum().backward()
    expected.sum().backward()
    assert_gradients(layer, gradients(plain))


@pytest.mark.draws  # torch's check does
def test_first_and_second_derivatives_of_inputs(devices):
    net = DataParallelModel(build(lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh())), devices(2))

    def function(inputs):
        return gather(net(inputs), "cpu")

    inputs = randn(4, 3).requires_grad_()
    assert torch.autograd.gradcheck(function, (inputs,))
    assert torch.autograd.gradgradcheck(function, (inputs,))


@pytest.mark.draws  # torch's check does
def test_first_and_second_derivatives_through_gather(devices):
    """Each entry's gradient is its own rows of the whole one."""
    entries = [randn(2, 4).requires_grad_(), randn(3, 4, seed=2).requires_grad_()]
    whole = gather(entries, devices(2)[-1])
    assert whole.shape == (5, 4)
    assert torch.equal(whole[:2], entries[0])
    slope = randn(5, 4, seed=3)
    whole.backward(slope)
    assert torch.equal(entries[0].grad, slope[:2])
    assert torch.equal(entries[1].grad, slope[2:])
    join = partial(_joined, devices(2)[0])
    assert torch.autograd.gradcheck(join, entries)
    assert torch.autograd.gradgradcheck(join, entries)


def _joined(device, *entries):
    return gather(entries, device)


def test_gather_of_numbers_averages(devices):
    entries = [randn(1).squeeze(0).requires_grad_() for _ in range(2)]
    mean = gather(entries, devices(2)[0])
    mean.backward()
    assert mean.ndim == 0
    assert [entry.grad.item() for entry in entries] == [0.5, 0.5]


# --- recurrent layers, layouts, dtypes ---


class Recurrent(nn.Module):
    """Flattens its weights in every forward pass, as many published models do."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(6, 8, 1, batch_first=True, bidirectional=True)

    def forward(self, inputs):
        self.rnn.flatten_parameters()
        return self.rnn(inputs)[0]


@pytest.mark.parametrize("by", ["engine", "pair"])
def test_a_recurrent_layer_first_without_grad(devices, by):
    """torch's issue 21108: a first call without grad broke the ones with grad."""
    model, plain = build(Recurrent), build(Recurrent)
    inputs, zeros = torch.ones(4, 4, 6).double(), torch.zeros(4, 4, 16).double()
    criterion = nn.MSELoss()
    optimizers = [torch.optim.SGD(m.parameters(), 10) for m in (model, plain)]
    if by == "engine":
        with ScatterOnceParallel(model, 1, devices(2)) as engine:
            with torch.no_grad():
                engine(inputs)
            engine.forward_backward(inputs, zeros, criterion)
    else:
        pair = DataParallelModel(model, devices(2))
        with torch.no_grad():
            pair(inputs)
        DataParallelCriterion(criterion)(pair(inputs), zeros).backward()
    criterion(plain(inputs), zeros).backward()
    for optimizer in optimizers:
        optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.detach(), other.detach(), "parameter after a step")


LAST, FIRST = torch.channels_last, torch.contiguous_format


@pytest.mark.parametrize("formats", [[FIRST] * 4, [LAST, LAST, FIRST, FIRST], [LAST] * 4], ids=str)
@pytest.mark.parametrize("wide", [4, 2], ids=["one dtype", "two dtypes"])
def test_gradients_have_the_parameters_strides(devices, formats, wide):
    """The second of two steps adds to gradients that are there."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            sizes = [(3, 4), (4, 3), (3, 4), (4, 3)]
            self.layers = nn.ModuleList(nn.Conv2d(a, b, 2) for a, b in sizes)

        def forward(self, images):
            for layer in self.layers:
                images = layer(images.to(layer.weight.dtype))
            return images.double()

    def make():
        net = build(Net)
        for i, (layer, layout) in enumerate(zip(net.layers, formats, strict=True)):
            layer.to(memory_format=layout, dtype=torch.float64 if i < wide else torch.float32)
        return net

    case = Case(
        make,
        batch=(randn(6, 3, 6, 6), randn(6, 3, 2, 2, seed=2)),
        criterion=lambda _: nn.MSELoss(),
        accum=1,
        keep_dtypes=True,
        relative=1e-10 if wide == 4 else 1e-5,
    )
    agree(case, "engine", devices(2))


# --- inputs and outputs ---


@pytest.mark.parametrize("empty", [[], {}, ()], ids=repr)
@pytest.mark.parametrize("by", ["engine", "pair"])
def test_keyword_inputs_with_something_empty(devices, empty, by):
    class Takes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, input):
            assert input["unused"] == empty
            return self.layer(input["data"])

    model, inputs = Takes().eval(), randn(20, 10)
    given = {"data": inputs, "unused": empty}
    if by == "engine":
        with ScatterOnceParallel(model, 2, devices(2)) as engine:
            output = engine(input=given)
    else:
        output = gather(DataParallelModel(model, devices(2))(input=given), "cpu")
    assert_close(output, model.layer(inputs), "output")


@pytest.mark.parametrize("ids", [(0, 1), [torch.device("cpu:0"), "cpu:1"]], ids=["tuple", "mixed"])
def test_ways_to_name_devices(ids):
    ids = [f"cpu:{i}" if isinstance(i, int) else i for i in ids]
    layer, inputs = linear(), randn(20, 10)
    for given in (ids, tuple(ids)):
        assert_close(gather(DataParallelModel(layer, given)(inputs), "cpu"), layer(inputs), "out")


# --- modules ---


@pytest.mark.draws
def test_parameters_elsewhere_are_refused_by_name():
    """Wherever in the module they are, and before anything runs."""
    here, away = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")
    for module in (nn.Sequential(away), nn.Sequential(here, away), nn.Sequential(away, here)):
        name = next(n for n, p in module.named_parameters() if p.is_meta)
        for make in (ScatterOnceParallel, DataParallelModel):
            with pytest.raises(ValueError, match=f"'{name}' is on meta"):
                make(module, device_ids=["cpu:0", "cpu:1"])


@pytest.mark.parametrize("by", ["engine", "pair"])
def test_no_reference_cycles(devices, by):
    """What a step took is given back when it ends, not when the collector runs.

    Two functions that call each other were a cycle, which kept what ``Replicated`` had brought.
    """

    class Masked(nn.Linear):
        def forward(self, input, mask):
            return super().forward(input * mask[0])

    inputs = randn(4, 10)
    if by == "engine":
        engine = ScatterOnceParallel(build(lambda: Masked(10, 5)), 2, devices(2))
        given = {"input": inputs, "mask": Replicated(torch.ones(4, 10).double())}
        step = partial(engine.forward_backward, given, criterion=mean_square)
        close = engine.close
    else:
        pair = DataParallelModel(linear(), devices(2))
        step = partial(_pair_step, pair, inputs)
        close = contextlib.nullcontext
    step()  # what is made once may be made in cycles
    gc.collect()
    gc.disable()
    try:
        step()
        found = gc.collect()
    finally:
        gc.enable()
        close()
    assert found == 0


def _pair_step(pair, inputs):
    gather(pair(inputs), "cpu").sum().backward()


def test_replicas_have_all_buffers():
    norm = nn.BatchNorm2d(10)
    with ScatterOnceParallel(norm, 1, ["cpu:0", "cpu:1"]) as engine:
        places = set()
        for replica in engine.replicas:
            assert {name for name, _ in replica.named_buffers()} == set(dict(norm.named_buffers()))
            places.add(replica.running_mean.data_ptr())
            assert torch.equal(replica.running_var, norm.running_var)
    assert len(places) == 2


def test_replicas_can_be_saved(devices):
    """torch's issue 37182."""
    with ScatterOnceParallel(linear(), 1, devices(2)) as engine:
        file = io.BytesIO()
        torch.save(list(engine.replicas), file)
        file.seek(0)
        for one, other in zip(torch.load(file, weights_only=False), engine.replicas, strict=True):
            assert torch.equal(one.weight, other.weight)


# --- autocast and errors ---


@pytest.mark.draws
@pytest.mark.parametrize("by", ["engine", "pair"])
def test_autocast_inside_forward(devices, by):
    class Casts(nn.Linear):
        @torch.autocast("cpu", dtype=torch.bfloat16)
        def forward(self, inputs):
            return super().forward(inputs)

    model, inputs = Casts(8, 8).eval(), randn(8, 8, dtype=torch.float32)
    if by == "engine":
        with ScatterOnceParallel(model, 1, devices(2)) as engine:
            output = engine(inputs)
    else:
        output = gather(DataParallelModel(model, devices(2))(inputs), "cpu")
    assert output.dtype == torch.bfloat16
