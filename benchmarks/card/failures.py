"""How do steps end that fail? The error is raised, and the next step or the process ends."""

import contextlib
import os
import signal
import threading

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import ScatterOnceParallel
from scatterpar.devices.virtual_devices import physical


def _problem(devices):
    """A small network on the first device, words and targets."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 64), nn.Flatten(), nn.Linear(256, 4))
    rows = 8 * len(devices)
    words = torch.arange(4 * rows).view(rows, 4) % 8
    targets = torch.arange(rows) % 4
    return net.to(physical(devices[0])), words, targets


def out_of_memory(setting, say):
    """A fixed number of sub-steps raises it, and "auto" finds one that fits."""
    devices = setting.devices
    # Not all of the memory: other rows of the page run beside.
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    net, words, targets = _problem(devices)

    def take_a_third_for_each_row(module, args):
        (rows,) = args
        size = free // 3 * len(rows)
        torch.empty(size, dtype=torch.uint8, device=rows.device)

    net.register_forward_pre_hook(take_a_third_for_each_row)
    with ScatterOnceParallel(net, 1, devices) as engine:
        has_raised = False
        try:
            engine.forward_backward(words, targets, cross_entropy)
        except torch.OutOfMemoryError:
            has_raised = True
        assert has_raised, "memory did not run out"
    with ScatterOnceParallel(net, "auto", devices) as engine:
        engine.forward_backward(words, targets, cross_entropy)
        share = engine.last_step.plan.shares[0]
        say(f"raised; {len(share.micro_batches)} sub-steps fit")


def assertion(setting, say):
    """An index out of range in a kernel of the last device."""
    net, words, targets = _problem(setting.devices)
    with ScatterOnceParallel(net, 4, setting.devices, verify=False) as engine:
        engine.forward_backward(words, targets, cross_entropy)
        words[-1, -1] = 10**6  # the embedding has 8 words
        try:
            engine.forward_backward(words, targets, cross_entropy)
        except RuntimeError as error:
            say(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            # Torch aborts the process that frees tensors of such a GPU.
            os._exit(0)
        raise AssertionError("nothing was raised")


def interrupt(setting, say):
    """Ctrl-C ends a step, and the next one works."""
    net, words, targets = _problem(setting.devices)
    # A job of nohup ignores the signal otherwise.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with ScatterOnceParallel(net, 4, setting.devices) as engine:
        engine.forward_backward(words, targets, cross_entropy)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                engine.forward_backward(words, targets, cross_entropy)
        engine.forward_backward(words, targets, cross_entropy)
    say("KeyboardInterrupt, and the next step works")
