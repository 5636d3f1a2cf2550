"""Steps that must have the same bits: with graphs, on other layouts, with slow copies,
on ranks.
"""

import os
import warnings
from contextlib import nullcontext
from functools import partialmethod

import pytest
import torch
from torch import Tensor

from benchmarks.card.networks import NAMES, Network, criterion
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel
from scatterpar.devices.fingerprints import same_bits

_ACCUM = 4
_SLOW = 20_000_000  # cycles: some ten milliseconds


def _choose_kernels():
    """Let torch choose kernels that give the same bits every time, before it chooses
    any.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def train(net, devices, steps, place=Tensor.contiguous, growth=None, **options):
    """Train with SGD. Returns losses, parameters, buffers and the last gradients, on
    the host.

    ``place`` moves each batch before its step. With ``growth`` each is larger than the
    one before.
    """
    _choose_kernels()
    module, losses = net.module(devices[0]), []
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    with (
        warnings.catch_warnings(),
        ScatterOnceParallel(module, _ACCUM, devices, **options) as engine,
    ):
        # a sub-step was not captured
        warnings.filterwarnings("error", message="graphs=True")
        torch.manual_seed(1)
        for step in range(steps):
            rows = net.rows if growth is None else 1 + growth + step
            inputs, targets = map(place, net.batch(rows * _ACCUM * len(devices), step))
            optimizer.zero_grad()
            losses.append(engine.forward_backward(inputs, targets, criterion))
            optimizer.step()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = *losses, *module.parameters(), *module.buffers(), *gradients
    return [tensor.detach().cpu() for tensor in tensors]


def compare(expected, actual):
    """Assert that two lists of tensors have the same bits. Returns a result for the
    page.
    """
    pairs = zip(expected, actual, strict=True)
    off = [(a - b).abs().max() for a, b in pairs if not same_bits(a, b)]
    assert not off, (
        f"{len(off)} of {len(actual)} tensors differ, by {max(off):.1e} at most"
    )
    return f"the same bits in {len(actual)} tensors"


@pytest.mark.cuda
@pytest.mark.parametrize("name", NAMES)
def test_20_steps_with_graphs_are_those_of_eager(setting, say, name, count):
    net, devices = Network(name, setting, exact=True), setting.devices[:count]
    eager = train(net, devices, 20, Tensor.pin_memory)
    say(compare(eager, train(net, devices, 20, Tensor.pin_memory, graphs=True)))


_PAIRS, _SPREAD = ((0, 0, 1, 1), (0, 1, 0, 1)), ((0, 0, 1, 1), (0, 1, 2, 3))
_ON_2 = pytest.param(
    *_PAIRS, marks=pytest.mark.needs(2), id="[0, 0, 1, 1] and [0, 1, 0, 1]"
)
_ON_4 = pytest.param(
    *_SPREAD, marks=pytest.mark.needs(4), id="[0, 0, 1, 1] and [0, 1, 2, 3]"
)


@pytest.mark.parametrize(
    ("one", "other"), [pytest.param((), (), id="all, twice"), _ON_2, _ON_4]
)
def test_3_steps_with_dropout(setting, say, one, other):
    net = Network("GPT-2", setting, exact=True, dropout=0.1)
    layouts = [
        [setting.devices[i] for i in layout] or setting.devices
        for layout in (one, other)
    ]
    say(compare(*(train(net, layout, 3) for layout in layouts)))


@pytest.mark.cuda
def test_steps_with_every_copy_made_slow(setting, say, monkeypatch):
    """A batch in pinned memory, in other memory and on the first GPU, eager and with
    graphs.
    """
    net, devices = Network("GPT-2", setting, exact=True), setting.devices
    expected = train(net, devices, 3)
    places = Tensor.pin_memory, Tensor.contiguous, lambda tensor: tensor.to(devices[0])
    with monkeypatch.context() as patch:
        count = slow_copies(patch)
        for graphs in (False, True):
            for place in places:
                words = compare(expected, train(net, devices, 3, place, graphs=graphs))
    say(f"{words} of each of six runs, {count[0]} slow copies in all")


def slow_copies(patch):
    """Let both devices' streams sleep before each copy. Returns a list with the number
    so far.
    """
    count = [0]

    def slowed(tensor, original, *args, **kwargs):
        target = kwargs.get("device", args[0] if args else "cpu")
        target = target.device if isinstance(target, Tensor) else target
        if (
            isinstance(target, (str, torch.device))
            and torch.device(target) != tensor.device
        ):
            count[0] += 1
            for device in (tensor.device, torch.device(target)):
                with (
                    torch.cuda.device(device)
                    if device.type == "cuda"
                    else nullcontext()
                ):
                    if (
                        device.type == "cuda"
                        and not torch.cuda.is_current_stream_capturing()
                    ):
                        torch.cuda._sleep(_SLOW)
        return original(tensor, *args, **kwargs)

    for name in ("copy_", "to", "cpu"):
        patch.setattr(Tensor, name, partialmethod(slowed, getattr(Tensor, name)))
    return count


@pytest.mark.cuda
def test_64_new_shapes_are_captured(setting, say):
    """The batch is on the first GPU, from where the others take their rows on other
    streams.
    """
    net, devices = (
        Network("GPT-2", setting._replace(small=True), exact=True),
        setting.devices[:2],
    )
    for first in range(0, 64, 8):  # an engine captures eight shapes for each replica
        runs = [
            train(net, devices, 8, lambda t: t.to(devices[0]), first, graphs=graphs)
            for graphs in (False, True)
        ]
        words = compare(*runs)
    say(f"{words} of each of 8 engines")


@pytest.mark.needs(2)
@pytest.mark.ranks
def test_two_processes_have_the_gradient_of_one(setting, say):
    """Each has half of the devices. Rounding may differ."""
    half = len(setting.devices) // 2
    with Ranks([setting.devices[0], setting.devices[half]]) as ranks:
        both = ranks.ask(_gradients, 2, setting)
    compare(*both)
    one = _gradients(0, 1, setting)
    off = (
        sum(float((a - b).norm()) ** 2 for a, b in zip(one, both[0], strict=True))
        ** 0.5
    )
    off /= sum(float(a.norm()) ** 2 for a in one) ** 0.5
    assert off <= 1e-6, f"{off:.0e} apart, 1e-6 is allowed"
    say(f"{off:.0e} apart, {2 * half} devices")


def _gradients(rank, world, setting):
    _choose_kernels()
    net = Network("GPT-2", setting, exact=True)
    count = len(setting.devices) // 2 * 2
    devices = setting.devices[:count][
        rank * count // world : (rank + 1) * count // world
    ]
    inputs, targets = (
        part.chunk(world)[rank] for part in net.batch(2 * _ACCUM * count)
    )
    module = net.module(devices[0])
    group = torch.distributed.group.WORLD if world > 1 else None
    with ScatterOnceParallel(module, _ACCUM, devices, process_group=group) as engine:
        engine.forward_backward(inputs, targets, criterion)
    return [p.grad.cpu() for p in module.parameters()]
