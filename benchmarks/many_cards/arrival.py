"""How long rows take to arrive beside the computation, in a process of its own.

``SIMULATED_ACCELERATOR=…/accelerator.so python -m benchmarks.many_cards.arrival host
4`` prints one line of JSON: seconds of simulated cards, by how fast their links are,
and the most memory that a card other than the master's holds beyond what it holds
between steps.
"""

import json
import sys

import torch
from simulated import NAME, control, load_built
from torch import nn

from scatterpar import ScatterOnceParallel

ROWS, FEATURES, ACCUM = 16384, 512, 16  # rows of a card
MEMORY = 1e9  # bytes per second that kernels read and write
LINKS = (8e8, 4e8, 2e8)  # bytes per second


def measure(place: str, devices: int) -> dict[str, object]:
    """What a step takes with the batch on the ``host``, ``pinned``, or on the first
    card.
    """
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 4)
    model = nn.Sequential(*layers).to(f"{NAME}:0")
    rows = devices * ROWS
    batch = [torch.randn(rows, FEATURES), torch.randint(4, (rows,))]
    if place == "pinned":
        batch = [tensor.pin_memory() for tensor in batch]
    if place == "card":
        batch = [tensor.to(f"{NAME}:0") for tensor in batch]
    with ScatterOnceParallel(model, ACCUM, range(devices), verify=False) as engine:

        def seconds_and_peak(link: float, memory: float) -> tuple[float, int]:
            """Of one step; the peak is that of the last card."""
            model.zero_grad()
            for index in range(devices):
                torch.accelerator.synchronize(index)
                torch.accelerator.reset_peak_memory_stats(index)
            before = torch.accelerator.memory_allocated(devices - 1)
            with control.paced(link, memory):
                engine.forward_backward(*batch, nn.CrossEntropyLoss())
                seconds = control.seconds()
            return seconds, torch.accelerator.max_memory_allocated(devices - 1) - before

        seconds_and_peak(0.0, 0.0)  # warms up
        compute, peak = seconds_and_peak(0.0, MEMORY)
        both = [seconds_and_peak(link, MEMORY)[0] for link in LINKS]
        arrival = [seconds_and_peak(link, 0.0)[0] for link in LINKS]
    micro_batch = sum(tensor.nbytes for tensor in batch) // devices // ACCUM
    return {
        "links": LINKS,
        "compute": compute,
        "arrival": arrival,
        "both": both,
        "micro_batch": [micro_batch / link for link in LINKS],
        "peak": peak,
        "bytes_of_a_micro_batch": micro_batch,
    }


if __name__ == "__main__":
    load_built()
    torch.set_num_threads(1)
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
