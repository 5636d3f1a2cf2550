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
LINKS = (0.0, 8e8, 4e8, 2e8)  # bytes per second; zero: copies take no time


def measure(place: str, devices: int) -> dict[str, object]:
    """What a step takes with the batch on the ``host``, ``pinned``, or on the first
    card.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 4)).to(
        f"{NAME}:0"
    )
    batch = [torch.randn(devices * ROWS, FEATURES), torch.randint(4, (devices * ROWS,))]
    if place == "pinned":
        batch = [tensor.pin_memory() for tensor in batch]
    if place == "card":
        batch = [tensor.to(f"{NAME}:0") for tensor in batch]
    found = []
    with ScatterOnceParallel(model, ACCUM, range(devices), verify=False) as engine:
        for number, (link, memory) in enumerate(
            [
                (0.0, 0.0),
                *((link, MEMORY) for link in LINKS),
                *((link, 0.0) for link in LINKS[1:]),
            ]
        ):
            model.zero_grad()
            for index in range(devices):
                torch.accelerator.synchronize(index)
                torch.accelerator.reset_peak_memory_stats(index)
            held = torch.accelerator.memory_allocated(devices - 1)
            with control.paced(link, memory):
                engine.forward_backward(*batch, nn.CrossEntropyLoss())
                found.append(control.seconds())
            if number == 1:
                peak = torch.accelerator.max_memory_allocated(devices - 1) - held
    micro_batch = sum(tensor.nbytes for tensor in batch) // devices // ACCUM
    compute, both, links = found[1], found[2 : len(LINKS) + 1], found[len(LINKS) + 1 :]
    return {
        "links": LINKS[1:],
        "compute": compute,
        "arrival": links,
        "both": both,
        "micro_batch": [micro_batch / link for link in LINKS[1:]],
        "peak": peak,
        "bytes_of_a_micro_batch": micro_batch,
    }


if __name__ == "__main__":
    load_built()
    torch.set_num_threads(1)
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
