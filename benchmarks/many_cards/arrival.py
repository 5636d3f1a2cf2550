"""How long do rows take to arrive beside the computation?

Steps of simulated cards, which have clocks::

    compute     kernels take time, copies none
    arrival     copies take time, kernels none; for each speed of the links
    both        copies and kernels take time; for each speed of the links

``python -m benchmarks.many_cards.arrival host 4`` (see ``process.py``) prints seconds,
and the most memory that the last card holds beyond what it holds between steps.
"""

import torch
from simulated import NAME, control
from torch import Tensor, nn

from benchmarks.many_cards import process
from scatterpar import ScatterOnceParallel

ROWS = 16384  # of a card
FEATURES = 512
ACCUM = 16
MEMORY = 1e9  # bytes per second that kernels read and write
LINKS = (8e8, 4e8, 2e8)  # bytes per second
NO_TIME = 0.0  # the pace of copies or kernels that take none


def measure(place: str, devices: int) -> dict[str, object]:
    """Times of steps with the batch on the ``host``, ``pinned``, or on the first card."""
    torch.manual_seed(0)
    layers = nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 4)
    model = nn.Sequential(*layers).to(f"{NAME}:0")
    batch = batch_at(place, devices * ROWS)
    with ScatterOnceParallel(model, ACCUM, range(devices), verify=False) as engine:
        step(engine, batch, NO_TIME, NO_TIME)  # warms up
        compute, peak = step(engine, batch, NO_TIME, MEMORY)
        both = [step(engine, batch, link, MEMORY)[0] for link in LINKS]
        arrival = [step(engine, batch, link, NO_TIME)[0] for link in LINKS]
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


def batch_at(place: str, rows: int) -> list[Tensor]:
    """Inputs and targets in this place."""
    batch = [torch.randn(rows, FEATURES), torch.randint(4, (rows,))]
    if place == "pinned":
        return [tensor.pin_memory() for tensor in batch]
    if place == "card":
        return [tensor.to(f"{NAME}:0") for tensor in batch]
    return batch


def step(
    engine: ScatterOnceParallel, batch: list[Tensor], link: float, memory: float
) -> tuple[float, int]:
    """Take a step at this pace. Returns its seconds, and the last card's peak."""
    devices = len(engine.device_ids)
    engine.module.zero_grad()
    process.reset_peaks(devices)
    before = torch.accelerator.memory_allocated(devices - 1)
    with control.paced(link, memory):
        engine.forward_backward(*batch, nn.CrossEntropyLoss())
        seconds = control.seconds()
    return seconds, process.peaks(devices)[-1] - before


if __name__ == "__main__":
    process.main(measure)
