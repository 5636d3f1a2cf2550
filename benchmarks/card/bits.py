"""Pairs of trainings that must have the same bits.

With graphs and without; twice, and on another layout; with slow copies into poisoned
memory and with none; in two processes.
"""

import contextlib
import os
import warnings
from dataclasses import dataclass
from functools import partialmethod
from unittest import mock

import torch
from torch import Tensor

from benchmarks.card.networks import Network, criterion
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel
from scatterpar.devices.bits import same_bits
from scatterpar.devices.transfers import Prefetcher

_ACCUM = 4
_SLOW = 20_000_000  # cycles of a GPU's clock: some ten milliseconds


def _choose_kernels():
    """Only kernels that give the same bits every time, before torch chooses any."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def train(net, devices, steps, place=Tensor.contiguous, growth=None, **options):
    """Train with SGD.

    Args:
        place: moves each batch before its step.
        growth: with it each batch is larger than the one before; the first one has
            ``growth + 1`` rows per sub-step.

    Returns losses, parameters, buffers and the last gradients, on the host.
    """
    _choose_kernels()
    module = net.module(devices[0])
    losses = []
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    engine = ScatterOnceParallel(module, _ACCUM, devices, **options)
    with engine, warnings.catch_warnings():
        # The warning that a sub-step was not captured.
        warnings.filterwarnings("error", message="graphs=True")
        torch.manual_seed(1)
        for step in range(steps):
            rows = net.rows if growth is None else 1 + growth + step
            inputs, targets = net.batch(rows * _ACCUM * len(devices), step)
            optimizer.zero_grad()
            loss = engine.forward_backward(place(inputs), place(targets), criterion)
            losses.append(loss)
            optimizer.step()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    tensors = [*losses, *module.parameters(), *module.buffers(), *gradients]
    return [tensor.detach().cpu() for tensor in tensors]


def compare(expected, tensors):
    """Assert that both lists have the same bits. Returns words for the page."""
    differences = []
    for a, b in zip(expected, tensors, strict=True):
        if not same_bits(a, b):
            differences.append((a - b).abs().max())
    words = f"{len(differences)} of {len(tensors)} tensors differ"
    assert not differences, f"{words}, by {max(differences):.1e} at most"
    return f"the same bits in {len(tensors)} tensors"


def graphs(setting, say, name, count):
    """Steps with graphs beside eager ones."""
    net = Network(name, setting, exact=True)
    devices = setting.devices[:count]
    steps = setting.rounds(20, least=3)
    eager = train(net, devices, steps, Tensor.pin_memory)
    captured = train(net, devices, steps, Tensor.pin_memory, graphs=True)
    say(f"{steps} steps, {compare(eager, captured)}")


def dropout_twice(setting, say):
    """The same layout twice."""
    _with_dropout(setting, say, setting.devices, setting.devices)


def dropout_on_two(setting, say):
    """Four replicas on two devices in another order."""
    first, second, *_ = setting.devices
    neighbours = (first, first, second, second)
    in_turn = (first, second, first, second)
    _with_dropout(setting, say, neighbours, in_turn)


def dropout_on_four(setting, say):
    """Four replicas on two devices, and on four."""
    first, second, *_ = setting.devices
    neighbours = (first, first, second, second)
    _with_dropout(setting, say, neighbours, setting.devices[:4])


def _with_dropout(setting, say, layout, other_layout):
    net = Network("GPT-2", setting, exact=True, dropout=0.1)
    expected = train(net, layout, 3)
    say(compare(expected, train(net, other_layout, 3)))


def poisoned_copies(setting, say):
    """Rows arrive late, in memory that holds poison: a missing wait shows as NaN.

    The control leaves the wait out. Its bits have to differ.
    """
    net = Network("ResNet-50", setting, exact=True)
    devices = setting.devices
    expected = train(net, devices, 3)
    for graphs in (False, True):
        for name, place in (("pinned", Tensor.pin_memory), ("pageable", _unchanged)):
            with poisoned_targets() as count:
                trained = train(net, devices, 3, place, graphs=graphs)
            mode = "graphs" if graphs else "eager"
            words = compare(expected, trained)
            say(f"{words}, {count.number} late copies", f"{name} rows, {mode}")
    with poisoned_targets(), without_waits():
        trained = train(net, devices, 3, Tensor.pin_memory)
    is_seen = not all(map(same_bits, expected, trained))
    if setting.is_real:
        assert is_seen, "control: without the wait the bits are the same"
    outcome = "differ" if is_seen else "are the same"
    say(f"without the wait the bits {outcome}", "control")


def _unchanged(tensor):
    return tensor


@dataclass
class Count:
    """A number that grows."""

    number: int = 0


@contextlib.contextmanager
def poisoned_targets():
    """Rows that arrive ahead come late, into memory of NaN, or zeros in integers.

    Yields the count of groups of copies.
    """
    count = Count()
    issue = Prefetcher.issue

    def late(self, number):
        targets = [target for _, target in self._requested]
        # On the computing stream, for which the copies wait.
        for target in targets:
            target.fill_(float("nan") if target.is_floating_point() else 0)
        stream = self._stream
        if targets and stream is not None and stream.device.type == "cuda":
            count.number += 1
            with torch.cuda.device(stream.device), stream:
                torch.cuda._sleep(_SLOW)
        issue(self, number)

    with mock.patch.object(Prefetcher, "issue", late):
        yield count


@contextlib.contextmanager
def without_waits():
    """The fault that poisoned targets have to show: nobody waits for rows."""

    def wait_for_nothing(self, number):
        pass

    with mock.patch.object(Prefetcher, "wait_on_stream", wait_for_nothing):
        yield


def slow_copies(setting, say):
    """All copies are late, those of parameters and gradients too."""
    net = Network("GPT-2", setting, exact=True)
    devices = setting.devices
    expected = train(net, devices, 3)

    def on_first_device(tensor):
        return tensor.to(devices[0])

    for graphs in (False, True):
        for place in (Tensor.pin_memory, _unchanged, on_first_device):
            with _all_copies_slow() as count:
                trained = train(net, devices, 3, place, graphs=graphs)
            words = compare(expected, trained)
    say(f"{words} of each of six runs, {count.number} slow copies in the last")


@contextlib.contextmanager
def _all_copies_slow():
    """Both devices' streams sleep before each copy. Yields the count of copies."""
    count = Count()

    def slowed(tensor, original, *args, **kwargs):
        # The other memory: an argument of ``to`` and ``copy_``, and none of ``cpu``.
        target = kwargs.get("device", args[0] if args else "cpu")
        if isinstance(target, Tensor):
            target = target.device
        is_device = isinstance(target, (str, torch.device))  # or a dtype
        if is_device and torch.device(target) != tensor.device:
            count.number += 1
            _sleep_on(tensor.device)
            _sleep_on(torch.device(target))
        return original(tensor, *args, **kwargs)

    methods = {}
    for name in ("copy_", "to", "cpu"):
        methods[name] = partialmethod(slowed, getattr(Tensor, name))
    with mock.patch.multiple(Tensor, **methods):
        yield count


def _sleep_on(device):
    if device.type != "cuda":
        return
    with torch.cuda.device(device):
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda._sleep(_SLOW)


def new_shapes(setting, say):
    """Each step has another shape. An engine captures eight of them for each replica."""
    net = Network("GPT-2", setting._replace(small=True), exact=True)
    devices = setting.devices[:2]

    def place(tensor):
        return tensor.to(devices[0])  # the others take their rows from there

    engines = setting.rounds(8, least=2)
    for number in range(engines):
        eager = train(net, devices, 8, place, 8 * number)
        captured = train(net, devices, 8, place, 8 * number, graphs=True)
        words = compare(eager, captured)
    say(f"{8 * engines} shapes, {words} of each of {engines} engines")


def two_processes(setting, say):
    """Two processes with half of the devices each, beside one. Rounding may differ."""
    half = len(setting.devices) // 2
    if setting.under:
        say("null GPUs have no NCCL", verdict="not run")
        return
    with Ranks([setting.devices[0], setting.devices[half]]) as ranks:
        first, second = ranks.ask(_gradients, 2, setting)
    compare(first, second)
    expected = _gradients(0, 1, setting)
    distance = relative_distance(expected, first)
    assert distance <= 1e-6, f"{distance:.0e} apart, 1e-6 is allowed"
    say(f"{distance:.0e} apart, {2 * half} devices, of 1e-6 that are allowed")


def relative_distance(expected, tensors):
    """The norm of all differences, divided by that of ``expected``."""
    difference = 0.0
    size = 0.0
    for a, b in zip(expected, tensors, strict=True):
        difference += float((a - b).norm()) ** 2
        size += float(a.norm()) ** 2
    return (difference / size) ** 0.5


def _gradients(rank, world, setting):
    """The gradients of a step with this rank's part of the devices and rows."""
    _choose_kernels()
    net = Network("GPT", setting, exact=True)
    count = len(setting.devices) // 2 * 2  # an even number, for two ranks
    per_rank = count // world
    devices = setting.devices[rank * per_rank : (rank + 1) * per_rank]
    inputs, targets = net.batch(2 * _ACCUM * count)
    rows = inputs.chunk(world)[rank]
    labels = targets.chunk(world)[rank]
    module = net.module(devices[0])
    group = torch.distributed.group.WORLD if world > 1 else None
    engine = ScatterOnceParallel(module, _ACCUM, devices, process_group=group)
    with engine:
        engine.forward_backward(rows, labels, criterion)
    return [p.grad.cpu() for p in module.parameters()]
