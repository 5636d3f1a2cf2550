"""What the host launches, copies and waits for in two steps on null GPUs.

In a process of its own, because a process has one number of null GPUs::

    NULLCUDA_DEVICES=4 python -m benchmarks.many_cards.launch_trace resnet50 4 FILE

writes the records of two later steps, in order, to FILE. ``simulation.py`` reads it.
"""

from __future__ import annotations

import argparse
import pickle
import sys
from pathlib import Path

import torch
from nullcuda import card, values
from nullcuda.plugin import record_hand_overs

from benchmarks.launching import batch, network
from benchmarks.many_cards.simulation import ACCUM, GRAPHS, STEPS
from scatterpar import ScatterOnceParallel

# Sub-steps are captured after some eager steps, and looks are not part of a later step.
_WARM_UPS = 8
_ROWS = 2  # of a micro-batch: what is launched is the same for any number


def main(arguments: list[str]) -> None:
    """Record the steps of one network on so many GPUs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("network", choices=["resnet50", "gpt"])
    parser.add_argument("cards", type=int)
    parser.add_argument("file", type=Path)
    parser.add_argument("--graphs", choices=GRAPHS, default="default")
    options = parser.parse_args(arguments)
    record_hand_overs()
    values.install()
    model = network(options.network)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    inputs, targets = batch(options.network, options.cards * ACCUM * _ROWS)
    criterion = torch.nn.CrossEntropyLoss()
    devices = list(range(options.cards))
    with ScatterOnceParallel(
        model, ACCUM, devices, verify=False, graphs=GRAPHS[options.graphs]
    ) as engine:
        # The first steps compare values. They are computed here, so rows are few.
        for _ in range(2):
            few = options.cards * _ROWS
            engine.forward_backward(inputs[:few], targets[:few], criterion)
        # Else parameters are compared by kernels that do not run, and count as written
        # unseen.
        optimizer.step()
        values.remove()
        for number in range(_WARM_UPS + STEPS):
            if number == _WARM_UPS:
                card.trace(True)
            optimizer.zero_grad()
            engine.forward_backward(inputs, targets, criterion)
            optimizer.step()
        card.trace(False)
    records = [tuple(record) for record in card.records()]
    options.file.write_bytes(pickle.dumps(records))


if __name__ == "__main__":
    main(sys.argv[1:])
