"""Checks that compare bits: graphs with eager, one layout with another, slow copies with fast."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from scatterpar import ScatterOnceParallel
from scatterpar.checkup.card.networks import Network, network
from scatterpar.checkup.card.ranks import Ranks
from scatterpar.checkup.card.setting import Finding, Setting
from scatterpar.devices.fingerprints import same_bits

_ACCUM = 4
_SLOW = 20_000_000  # cycles: some ten milliseconds
_SHAPES, _ENGINES = 8, 8  # an engine captures eight shapes for each replica


def deterministic() -> None:
    """Let torch choose kernels that give the same bits every time, before it chooses any."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False


def train(
    net: Network,
    devices: Sequence[torch.device],
    steps: int,
    *,
    place: Callable[[Tensor], Tensor] = Tensor.contiguous,
    **options: Any,
) -> list[Tensor]:
    """Train with SGD. Returns losses, parameters, buffers and the last gradients, on the host.

    The batches depend only on the number of ``devices``. ``place`` moves each of them before the
    step, for example into pinned memory.
    """
    deterministic()
    module, losses = net.module(devices[0]), []
    optimizer = torch.optim.SGD(module.parameters(), 0.01, momentum=0.9)
    with (
        warnings.catch_warnings(),
        ScatterOnceParallel(module, _ACCUM, devices, **options) as engine,
    ):
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="graphs=True")  # a sub-step was not captured
        torch.manual_seed(1)
        for step in range(steps):
            inputs, targets = map(place, net.batch(net.rows * _ACCUM * len(devices), step, False))
            optimizer.zero_grad()
            losses.append(engine.forward_backward(inputs, targets, net.criterion))
            optimizer.step()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    return [
        t.detach().cpu() for t in (*losses, *module.parameters(), *module.buffers(), *gradients)
    ]


def beside(expected: Sequence[Tensor], found: Sequence[Tensor]) -> Finding:
    """Whether two lists of tensors have the same bits."""
    pairs = [pair for pair in zip(expected, found, strict=True) if not same_bits(*pair)]
    if not pairs:
        return Finding(True, f"the same bits in {len(found)} tensors")
    worst = max(float((one - other).abs().max()) for one, other in pairs)
    return Finding(False, f"{len(pairs)} of {len(found)} tensors differ, by {worst:.1e} at most")


def graphs(name: str, count: int, setting: Setting) -> Finding:
    """20 steps with ``graphs=True`` beside the same ones without."""
    net, devices = network(name, setting), setting.devices[:count]
    eager = train(net, devices, 20, place=Tensor.pin_memory)
    return beside(eager, train(net, devices, 20, place=Tensor.pin_memory, graphs=True))


def twice(setting: Setting) -> Finding:
    """Three steps on all devices, with dropout, twice."""
    net = network("GPT", setting, dropout=0.1)
    return beside(train(net, setting.devices, 3), train(net, setting.devices, 3))


def layouts(one: Sequence[int], other: Sequence[int], setting: Setting) -> Finding:
    """Three steps with dropout, on two layouts of the same number of replicas."""
    net = network("GPT", setting, dropout=0.1)
    return beside(*(train(net, [setting.devices[i] for i in own], 3) for own in (one, other)))


def slow(setting: Setting) -> Finding:
    """Three steps with slow copies between memories, compared with three ordinary ones.

    Once with a pinned batch, once with a batch that is not pinned, once with one on the first GPU.
    """
    net, devices = network("GPT", setting), setting.devices
    expected = train(net, devices, 3)
    places: dict[str, Callable[[Tensor], Tensor]] = {
        "a pinned batch": Tensor.pin_memory,
        "a batch that is not pinned": Tensor.contiguous,
        "a batch on the first GPU": partial(Tensor.to, device=devices[0]),
    }
    for name, place in places.items():
        for captured in (False, True):
            with slow_copies() as count:
                found = train(net, devices, 3, place=place, graphs=captured)
            finding = beside(expected, found)
            if not finding.passed:
                how = f"{name}, {'with' if captured else 'without'} graphs"
                return Finding(False, f"{how}: {finding.words}")
    return Finding(True, f"the same bits in six runs, the last with {count[0]} slow copies")


@contextlib.contextmanager
def slow_copies() -> Iterator[list[int]]:
    """In the body, before each copy between two memories, the streams of both devices sleep.

    So the result has other bits if work reads the copy before it has ended, or writes the source
    before that. Yields a list with the number of copies so far.
    """
    count = [0]
    originals = {name: getattr(Tensor, name) for name in ("copy_", "to", "cpu")}

    def sleep(*devices: torch.device) -> None:
        if len({(device.type, device.index) for device in devices}) == 1:
            return
        count[0] += 1
        for device in devices:
            if device.type == "cuda":
                with torch.cuda.device(device):
                    if not torch.cuda.is_current_stream_capturing():
                        torch.cuda._sleep(_SLOW)

    def slowed(name: str, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        other = {"copy_": args[0].device if name == "copy_" else None, "cpu": torch.device("cpu")}
        target = kwargs.get("device", next(iter(args), None)) if name == "to" else other[name]
        if isinstance(target, (str, torch.device)):
            sleep(tensor.device, torch.device(target))
        made: Tensor = originals[name](tensor, *args, **kwargs)
        return made

    for name in originals:
        setattr(Tensor, name, lambda tensor, *a, _name=name, **k: slowed(_name, tensor, *a, **k))
    try:
        yield count
    finally:
        for name in originals:
            delattr(Tensor, name)


def new_shapes(setting: Setting) -> Finding:
    """64 steps, each with a shape that is captured, beside the same ones without graphs.

    The batch is on the first device, from where the others take their rows on streams of their own.
    """
    deterministic()
    net = network("GPT", Setting(setting.devices, True, setting.under))
    devices = setting.devices[:2]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="graphs=True")
        for number in range(_ENGINES):
            gradients: list[list[Tensor]] = [[], []]
            for captured in (False, True):
                module = net.module(devices[0])
                with ScatterOnceParallel(module, 2, devices, graphs=captured) as engine:
                    for shape in range(_SHAPES):
                        rows = 2 * len(devices) * (1 + number * _SHAPES + shape)
                        inputs, targets = (t.to(devices[0]) for t in net.batch(rows, shape, False))
                        engine.forward_backward(inputs, targets, net.criterion)
                gradients[captured] = [p.grad for p in module.parameters() if p.grad is not None]
            finding = beside(*gradients)
            if not finding.passed:
                return Finding(False, f"engine {number}: {finding.words}")
    return Finding(True, f"{_ENGINES * _SHAPES} shapes, each captured; the same bits")


def two_processes(setting: Setting) -> Finding:
    """Compare the gradient of two processes, each with half of the devices, to that of one process.

    Rounding may differ.
    """
    deterministic()
    half = len(setting.devices) // 2
    one = _gradients(0, 1, setting)
    with Ranks([setting.devices[0], setting.devices[half]]) as ranks:
        both = ranks.ask(_gradients, 2, setting)
    if not beside(*both).passed:
        return Finding(False, "the two processes have different gradients")
    off = sum(float((a - b).norm()) ** 2 for a, b in zip(one, both[0], strict=True)) ** 0.5
    off /= sum(float(a.norm()) ** 2 for a in one) ** 0.5
    how = ", the same bits" if beside(one, both[0]).passed else ""
    return Finding(off <= 1e-6, f"{off:.0e} apart{how}, {2 * half} devices")


def _gradients(rank: int, world: int, setting: Setting) -> list[Tensor]:
    """The gradients of one of ``world`` processes, with its part of the devices and rows."""
    deterministic()
    net = network("GPT", setting, mixed=False)
    count = len(setting.devices) // 2 * 2
    devices = setting.devices[:count][rank * count // world : (rank + 1) * count // world]
    inputs, targets = (t.chunk(world)[rank] for t in net.batch(2 * _ACCUM * count, 0, False))
    module = net.module(devices[0])
    group = torch.distributed.group.WORLD if world > 1 else None
    with ScatterOnceParallel(module, _ACCUM, devices, process_group=group) as engine:
        engine.forward_backward(inputs, targets, net.criterion)
    return [p.grad.cpu() for p in module.parameters() if p.grad is not None]
