"""Steps on several GPUs beside DistributedDataParallel over NCCL, in turns.

::

    for each round:
        DDP       all processes: 16 sub-steps, all except the last under no_sync()
        eager     the first process: engine.forward_backward(rows, labels, criterion)
        graphs    the first process: the same with graphs=True

The better of eager and graphs counts: graphs are the remedy if launching is the bound.
"""

import contextlib
import time
from statistics import median

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.card.networks import Network, criterion
from benchmarks.card.page import FAILED
from benchmarks.card.setting import NotRun, free_memory
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel
from scatterpar.checkup.copies import synchronize_all
from scatterpar.devices.virtual_devices import physical

_ACCUM = 16
_ROUNDS = 3
_WARM_UPS = 2
_LIMIT = 1.1  # of DDP's time
DDP = "DDP"
MODES = {
    "eager": {"verify": False},
    "graphs": {"verify": False, "graphs": True},
}


def steps(setting, say, name, count):
    """A line of the page for a network on so many GPUs."""
    if setting.under:
        raise NotRun("null GPUs have no NCCL")
    Network(name, setting).build()  # a library may be missing
    with Ranks(setting.devices[:count]) as ranks:
        seconds = ranks.ask(_measure, name, count, setting)[0]
    ratios = {mode: _ratio(seconds[mode], seconds[DDP]) for mode in MODES}
    compared = [f"{mode} {ratio:.2f} of it" for mode, ratio in ratios.items()]
    milliseconds = 1e3 * median(seconds[DDP])
    best = min(ratios.values())
    words = f"{best:.2f} of DDP's time, {_LIMIT} is allowed"
    verdict = words if best <= _LIMIT else f"{FAILED}: {words}"
    say(f"DDP {milliseconds:.0f} ms, {', '.join(compared)}", verdict=verdict)


def _ratio(ours, theirs):
    """The median of the ratios, round by round."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


def _measure(rank, name, count, setting):
    """In one of the processes: the seconds of steps of each program.

    The first process has the engines. The others wait then, and use no GPU.
    """
    free_memory()
    waiting = dist.new_group(range(count), backend="gloo")
    net = Network(name, setting)
    devices = setting.devices[:count]
    programs = {DDP: _ddp(net, devices[rank], setting)}
    places = devices if rank == 0 else [devices[rank]]
    seconds = {mode: [] for mode in (DDP, *MODES)}
    with contextlib.ExitStack() as engines:
        if rank == 0:
            for mode, options in MODES.items():
                programs[mode] = _engine(net, devices, options, setting, engines)
        for mode in (_WARM_UPS + _ROUNDS) * (DDP, *MODES):
            dist.barrier(waiting)  # gloo's: that of NCCL would occupy the GPUs
            if mode in programs:
                module, step = programs[mode]
                module.zero_grad()
                synchronize_all(places)
                start = time.perf_counter()
                step()
                synchronize_all(places)
                seconds[mode].append(time.perf_counter() - start)
    return {mode: spent[_WARM_UPS:] for mode, spent in seconds.items()}


def _engine(net, devices, options, setting, engines):
    rows, labels = _batch(net, len(devices), setting)
    module = net.module(devices[0])
    engine = ScatterOnceParallel(module, _ACCUM, devices, **options)
    engines.enter_context(engine)

    def step():
        engine.forward_backward(rows, labels, criterion)

    return module, step


def _ddp(net, device, setting):
    module = DistributedDataParallel(net.module(device))
    rows, labels = _batch(net, 1, setting)
    place = physical(device)

    def step():
        pairs = zip(rows.chunk(_ACCUM), labels.chunk(_ACCUM), strict=True)
        for number, (x, y) in enumerate(pairs, 1):
            x = x.to(place, non_blocking=True)
            y = y.to(place, non_blocking=True)
            is_last = number == _ACCUM
            with contextlib.nullcontext() if is_last else module.no_sync():
                (criterion(module(x), y) / _ACCUM).backward()

    return module, step


def _batch(net, count, setting):
    """Rows for ``count`` GPUs, pinned."""
    batch = net.batch(net.rows * _ACCUM * count)
    if not setting.is_real:
        return batch
    return [tensor.pin_memory() for tensor in batch]
