"""How steps end that fail on all devices: raised, and the process ends."""

import contextlib
import os
import signal
import threading

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import ScatterOnceParallel
from scatterpar.devices.device_ids import physical


def _problem(devices):
    torch.manual_seed(0)
    rows, layers = (
        8 * len(devices),
        (nn.Embedding(8, 64), nn.Flatten(), nn.Linear(256, 4)),
    )
    batch = torch.arange(4 * rows).view(rows, 4) % 8, torch.arange(rows) % 4
    return nn.Sequential(*layers).to(physical(devices[0])), batch


def out_of_memory(setting, say):
    """A fixed number of sub-steps raises it, and "auto" finds one that fits."""
    devices = setting.devices
    free = min(
        torch.cuda.mem_get_info(device)[0] for device in devices
    )  # other rows run beside
    net, batch = _problem(devices)

    def take_a_third_for_each_row(module, args):
        torch.empty(free // 3 * len(args[0]), dtype=torch.uint8, device=args[0].device)

    net.register_forward_pre_hook(take_a_third_for_each_row)
    with ScatterOnceParallel(net, 1, devices) as engine:
        try:
            engine.forward_backward(*batch, cross_entropy)
        except torch.OutOfMemoryError:
            raised = "raised"
        else:
            raise AssertionError("memory did not run out")
    with ScatterOnceParallel(net, "auto", devices) as engine:
        engine.forward_backward(*batch, cross_entropy)
        say(
            f"{raised}; {len(engine.last_step.plan.shares[0].micro_batches)} sub-steps fit"
        )


def assertion(setting, say):
    """An index out of range in a kernel of the last device."""
    net, (words, targets) = _problem(setting.devices)
    with ScatterOnceParallel(net, 4, setting.devices, verify=False) as engine:
        engine.forward_backward(words, targets, cross_entropy)
        words[-1, -1] = 10**6
        try:
            engine.forward_backward(words, targets, cross_entropy)
        except RuntimeError as error:
            say(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        else:
            raise AssertionError("nothing was raised")


def interrupt(setting, say):
    """Ctrl-C ends a step, and the next one works."""
    net, batch = _problem(setting.devices)
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # nohup's jobs may ignore it
    with ScatterOnceParallel(net, 4, setting.devices) as engine:
        engine.forward_backward(*batch, cross_entropy)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                engine.forward_backward(*batch, cross_entropy)
        engine.forward_backward(*batch, cross_entropy)
    say("KeyboardInterrupt, and the next step works")
