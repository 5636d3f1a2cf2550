"""The process of one measurement on the simulated accelerator, and its devices.

``SIMULATED_ACCELERATOR=…/accelerator.so python -m benchmarks.many_cards.count gpt2 4``
prints one line of JSON, of a model and a number of devices; ``tests`` must be
importable. ``arrival``, ``host`` and ``sharded`` are called in the same way.
"""

import json
import sys
from collections.abc import Callable

import torch
from simulated import load_built


def main(measure: Callable[[str, int], object]) -> None:
    """Print what ``measure`` returns for this process's arguments."""
    load_built()
    torch.set_num_threads(1)
    name, devices = sys.argv[1:]
    print(json.dumps(measure(name, int(devices))))


def reset_peaks(devices: int) -> None:
    """Wait for all devices, and let their peaks of memory begin anew."""
    for index in range(devices):
        torch.accelerator.synchronize(index)
        torch.accelerator.reset_peak_memory_stats(index)


def peaks(devices: int) -> list[int]:
    """The most bytes of each device since ``reset_peaks``."""
    return [torch.accelerator.max_memory_allocated(index) for index in range(devices)]
