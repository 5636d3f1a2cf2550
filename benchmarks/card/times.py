"""A step's time beside DistributedDataParallel's, on one GPU beside a plain loop's."""

import contextlib
import functools
import time
from collections import defaultdict
from math import nan
from operator import truediv
from statistics import median

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.card.networks import NAMES, Network, criterion, free_memory
from benchmarks.ranks import Ranks
from scatterpar import ScatterOnceParallel
from scatterpar.checkup.copies import synchronize
from scatterpar.devices.device_ids import physical

_ACCUM, _ROUNDS = 16, 3
_LIMIT = 1.1  # of DDP's time
# in a process of ``ranks``: by number of GPUs, a group to wait in and DDP's
_groups = {}
_alone = {}  # the seconds of a step on one GPU


@pytest.fixture(scope="module")
def ranks(request):
    devices = request.config.setting.devices
    with Ranks(devices) as ranks:
        ranks.ask(_join_groups, len(devices))
        yield ranks


def _join_groups(rank, world):
    for count in range(1, world + 1):
        _groups[count] = (
            dist.new_group(range(count), backend="gloo"),
            dist.new_group(range(count)),
        )


@pytest.mark.ranks
@pytest.mark.parametrize("name", NAMES)
def test_step_is_as_fast_as_ddps(setting, say, ranks, name, count):
    """The better of eager and graphs counts: graphs are the remedy if launching bounds
    eager.
    """
    Network(name, setting)  # skips the row if the library is missing
    seconds = ranks.ask(_measure, name, count, setting, first=count)[0]
    theirs, ratios, words = seconds.pop("DDP"), [], []
    for mode, ours in seconds.items():
        if count == 1:
            _alone[name, mode] = median(ours)
        ratios.append(median(map(truediv, ours, theirs)))
        pace = _alone.get((name, mode), nan) / median(ours)
        words.append(f"{mode} {ratios[-1]:.2f} of it ({pace:.2f} of one GPU's pace)")
    words = f"DDP {1e3 * median(theirs):.0f} ms, {', '.join(words)}"
    say(words)
    assert not setting.is_real or min(ratios) <= _LIMIT, f"{words}: more than {_LIMIT}"


def _measure(rank, name, count, setting):
    """In one of the processes: the seconds of steps of each program in turn, by its
    name.
    """
    # The first process has the engine, too; the others wait, so that one alone fills
    # the first GPU.
    free_memory()  # that of the row before
    net, devices, (waiting, group) = (
        Network(name, setting),
        setting.devices[:count],
        _groups[count],
    )
    steps, seconds = (
        {"DDP": _ddp(net, devices[rank], count, group, setting)},
        defaultdict(list),
    )
    modes = ("eager", "graphs") if setting.is_real else ("eager",)
    places = devices if rank == 0 else [devices[rank]]
    with contextlib.ExitStack() as engines:
        batch = _batch(net, count, setting) if rank == 0 else ()
        for mode in modes if rank == 0 else ():
            options = {"graphs": mode == "graphs"}
            engine = ScatterOnceParallel(
                net.module(devices[0]), _ACCUM, devices, **options
            )
            step = engines.enter_context(engine).forward_backward
            steps[mode] = engine.module, functools.partial(step, *batch, criterion)
        for mode in (1 + _ROUNDS) * ("DDP", *modes):
            dist.barrier(waiting)  # gloo's: that of NCCL would occupy the GPUs
            if mode in steps:
                module, step = steps[mode]
                module.zero_grad()
                synchronize(places)
                start = time.perf_counter()
                step()
                synchronize(places)
                seconds[mode].append(time.perf_counter() - start)
    # the first round is a warm-up
    return {mode: spent[1:] for mode, spent in seconds.items()}


def _ddp(net, device, count, group, setting):
    module = net.module(device)
    if count > 1:
        module = DistributedDataParallel(module, process_group=group)
    pieces = list(
        zip(*(part.chunk(_ACCUM) for part in _batch(net, 1, setting)), strict=True)
    )

    def step():
        for number, piece in enumerate(pieces, 1):
            with (
                module.no_sync()
                if count > 1 and number < _ACCUM
                else contextlib.nullcontext()
            ):
                x, y = (part.to(physical(device), non_blocking=True) for part in piece)
                (criterion(module(x), y) / _ACCUM).backward()

    return module, step


def _batch(net, count, setting):
    batch = net.batch(net.rows * _ACCUM * count)
    return [part.pin_memory() for part in batch] if setting.is_real else batch
