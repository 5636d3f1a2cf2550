"""Steps that must have the same bits: with graphs, on other layouts, with slow copies into
poisoned memory, on ranks.
"""

import contextlib
import os
import warnings
from functools import partialmethod

import torch
from torch import Tensor

from benchmarks.card.networks import Network, criterion
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.transfers import Prefetcher

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
    module = net.module(devices[0])
    losses = []
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    engine = ScatterOnceParallel(module, _ACCUM, devices, **options)
    with engine, warnings.catch_warnings():
        # A sub-step was not captured.
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


def compare(expected, found):
    """Assert that two lists of tensors have the same bits. Returns words for the
    page.
    """
    pairs = zip(expected, found, strict=True)
    off = [(a - b).abs().max() for a, b in pairs if not same_bits(a, b)]
    words = f"{len(off)} of {len(found)} tensors differ"
    assert not off, f"{words}, by {max(off):.1e} at most"
    return f"the same bits in {len(found)} tensors"


def graphs(setting, say, name, count):
    """Steps with graphs beside eager ones."""
    net = Network(name, setting, exact=True)
    devices = setting.devices[:count]
    steps = setting.rounds(20, least=3)
    eager = train(net, devices, steps, Tensor.pin_memory)
    captured = train(net, devices, steps, Tensor.pin_memory, graphs=True)
    say(f"{steps} steps, {compare(eager, captured)}")


def dropout_twice(setting, say):
    _with_dropout(setting, say, setting.devices, setting.devices)


def dropout_on_two(setting, say):
    first, second, *_ = setting.devices
    layouts = (first, first, second, second), (first, second, first, second)
    _with_dropout(setting, say, *layouts)


def dropout_on_four(setting, say):
    first, second, *_ = setting.devices
    _with_dropout(setting, say, (first, first, second, second), setting.devices[:4])


def _with_dropout(setting, say, one, other):
    net = Network("GPT-2", setting, exact=True, dropout=0.1)
    say(compare(train(net, one, 3), train(net, other, 3)))


def poisoned_copies(setting, say):
    """Rows arrive late, in memory that holds poison: a missing wait shows as NaN.

    The control leaves the wait out, and has to be seen.
    """
    net = Network("ResNet-50", setting, exact=True)
    devices = setting.devices
    expected = train(net, devices, 3)
    for graphs in (False, True):
        for name, place in (("pinned", Tensor.pin_memory), ("pageable", _unchanged)):
            with poisoned_targets() as count:
                found = train(net, devices, 3, place, graphs=graphs)
            words = f"{name} rows, {'graphs' if graphs else 'eager'}"
            say(f"{compare(expected, found)}, {count[0]} late copies", words)
    with poisoned_targets(), without_waits():
        found = train(net, devices, 3, Tensor.pin_memory)
    is_seen = not all(map(same_bits, expected, found))
    if setting.is_real:
        assert is_seen, "control: without the wait the bits are the same"
    say(
        f"without the wait the bits {'differ' if is_seen else 'are the same'}",
        "control",
    )


def _unchanged(tensor):
    return tensor


@contextlib.contextmanager
def poisoned_targets():
    """Rows that arrive ahead come late, into memory that holds NaN, or zero in
    integers.

    Yields a list with the number of groups of copies so far.
    """
    count = [0]
    issue = Prefetcher.issue

    def late(self, number):
        targets = [target for _, target in self._requested]
        for target in targets:  # on the computing stream, for which the copies wait
            target.fill_(float("nan") if target.is_floating_point() else 0)
        if targets and self._stream is not None and self._stream.device.type == "cuda":
            count[0] += 1
            with torch.cuda.device(self._stream.device), self._stream:
                torch.cuda._sleep(_SLOW)
        issue(self, number)

    Prefetcher.issue = late
    try:
        yield count
    finally:
        Prefetcher.issue = issue


@contextlib.contextmanager
def without_waits():
    """The fault that poisoned targets have to show: nobody waits for rows."""
    wait = Prefetcher.wait_on_stream
    Prefetcher.wait_on_stream = lambda self, number: None
    try:
        yield
    finally:
        Prefetcher.wait_on_stream = wait


def slow_copies(setting, say):
    """All copies are late, those of parameters and gradients too."""
    net = Network("GPT-2", setting, exact=True)
    devices = setting.devices
    expected = train(net, devices, 3)
    places = Tensor.pin_memory, _unchanged, lambda tensor: tensor.to(devices[0])
    for graphs in (False, True):
        for place in places:
            with _all_copies_slow() as count:
                found = train(net, devices, 3, place, graphs=graphs)
            words = compare(expected, found)
    say(f"{words} of each of six runs, {count[0]} slow copies in the last")


@contextlib.contextmanager
def _all_copies_slow():
    """Both devices' streams sleep before each copy. Yields a list with their number."""
    count = [0]
    names = "copy_", "to", "cpu"
    originals = {name: getattr(Tensor, name) for name in names}

    def slowed(tensor, original, *args, **kwargs):
        target = kwargs.get("device", args[0] if args else "cpu")
        target = target.device if isinstance(target, Tensor) else target
        is_device = isinstance(target, (str, torch.device))
        if is_device and torch.device(target) != tensor.device:
            count[0] += 1
            for device in (tensor.device, torch.device(target)):
                _sleep_on(device)
        return original(tensor, *args, **kwargs)

    for name, original in originals.items():
        setattr(Tensor, name, partialmethod(slowed, original))
    try:
        yield count
    finally:
        for name, original in originals.items():
            setattr(Tensor, name, original)


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
    """Two processes with half of the devices each have the gradient of one. Rounding may
    differ.
    """
    half = len(setting.devices) // 2
    if setting.under:
        say("null GPUs have no NCCL", verdict="not run")
        return
    with Ranks([setting.devices[0], setting.devices[half]]) as ranks:
        both = ranks.ask(_gradients, 2, setting)
    compare(*both)
    one = _gradients(0, 1, setting)
    off = sum(float((a - b).norm()) ** 2 for a, b in zip(one, both[0], strict=True))
    size = sum(float(a.norm()) ** 2 for a in one)
    apart = (off / size) ** 0.5
    assert apart <= 1e-6, f"{apart:.0e} apart, 1e-6 is allowed"
    say(f"{apart:.0e} apart, {2 * half} devices, of 1e-6 that are allowed")


def _gradients(rank, world, setting):
    _choose_kernels()
    net = Network("GPT", setting, exact=True)
    count = len(setting.devices) // 2 * 2
    devices = setting.devices[:count][
        rank * count // world : (rank + 1) * count // world
    ]
    inputs, targets = (
        part.chunk(world)[rank] for part in net.batch(2 * _ACCUM * count)
    )
    module = net.module(devices[0])
    group = torch.distributed.group.WORLD if world > 1 else None
    engine = ScatterOnceParallel(module, _ACCUM, devices, process_group=group)
    with engine:
        engine.forward_backward(inputs, targets, criterion)
    return [p.grad.cpu() for p in module.parameters()]
