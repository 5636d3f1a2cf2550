"""A step on several GPUs beside DistributedDataParallel's over NCCL, in turns."""

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
from scatterpar.devices.device_ids import physical

_ACCUM, _ROUNDS = 16, 3
_WARM_UPS = 2
_LIMIT = 1.1  # of DDP's time
DDP = "DDP"


def steps(setting, say, name, count):
    """The better of eager and graphs counts: graphs are the remedy if launching bounds
    eager.
    """
    if setting.under:
        raise NotRun("null GPUs have no NCCL")
    Network(name, setting).build()  # a library may be missing
    with Ranks(setting.devices[:count]) as ranks:
        seconds = ranks.ask(_measure, name, count, setting)[0]
    theirs = seconds.pop(DDP)
    ratios = {
        mode: median(ours / other for ours, other in zip(spent, theirs, strict=True))
        for mode, spent in seconds.items()
    }
    compared = ", ".join(f"{mode} {ratio:.2f} of it" for mode, ratio in ratios.items())
    best = min(ratios.values())
    words = f"{best:.2f} of DDP's time, {_LIMIT} is allowed"
    verdict = words if best <= _LIMIT else f"{FAILED}: {words}"
    say(f"DDP {1e3 * median(theirs):.0f} ms, {compared}", verdict=verdict)


def _measure(rank, name, count, setting):
    """In one of the processes: the seconds of steps of each program in turn.

    The first process has the engine, too; the others wait, so that one alone fills the
    first GPU.
    """
    free_memory()
    waiting = dist.new_group(range(count), backend="gloo")
    net = Network(name, setting)
    devices = setting.devices[:count]
    programs = {DDP: _ddp(net, devices[rank], setting)}
    modes = {"eager": {"verify": False}, "graphs": {"graphs": True, "verify": False}}
    places = devices if rank == 0 else [devices[rank]]
    seconds = {mode: [] for mode in (DDP, *modes)}
    with contextlib.ExitStack() as engines:
        if rank == 0:
            for mode, options in modes.items():
                programs[mode] = _engine(net, devices, options, setting, engines)
        for mode in (_WARM_UPS + _ROUNDS) * (DDP, *modes):
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
    batch = _batch(net, len(devices), setting)
    module = net.module(devices[0])
    engine = ScatterOnceParallel(module, _ACCUM, devices, **options)
    engines.enter_context(engine)

    def step():
        engine.forward_backward(*batch, criterion)

    return module, step


def _ddp(net, device, setting):
    module = DistributedDataParallel(net.module(device))
    pieces = [part.chunk(_ACCUM) for part in _batch(net, 1, setting)]

    def step():
        for number, (rows, labels) in enumerate(zip(*pieces, strict=True), 1):
            is_last = number == _ACCUM
            with contextlib.nullcontext() if is_last else module.no_sync():
                x = rows.to(physical(device), non_blocking=True)
                y = labels.to(physical(device), non_blocking=True)
                (criterion(module(x), y) / _ACCUM).backward()

    return module, step


def _batch(net, count, setting):
    batch = net.batch(net.rows * _ACCUM * count)
    return [part.pin_memory() for part in batch] if setting.is_real else batch
