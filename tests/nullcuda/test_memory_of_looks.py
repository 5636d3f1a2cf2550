"""What a look (``verify=True``) adds to the memory of a step, by torch's own allocator.

Rows of these networks are larger than what the networks compute of them. So if rows of
the first sub-step are in memory beside those of a look, the peak is 1.12 to 1.51 times
as high. So does a look that computes all rows of a small batch at once. Micro-batches
are large: a look takes some MiB however small they are.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from scatterpar import ScatterOnceParallel

pytestmark = [pytest.mark.nullcuda, pytest.mark.draws]

CLASSES = 10
STEPS = 4  # with looks in steps 1, 2 and 4
MOST = 1.1


def convolutions():
    first = nn.Conv2d(3, 4, 8, stride=8)
    second = nn.Conv2d(4, 4, 3, padding=1)
    last = nn.Linear(4 * 8 * 8, CLASSES)
    layers = first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), last
    return nn.Sequential(*layers), (3, 64, 64)


def mlp():
    first, last = nn.Linear(8192, 16), nn.Linear(16, CLASSES)
    return nn.Sequential(first, nn.Tanh(), last), (8192,)


def peaks(make, accum, pinned, count, rows, *, verify):
    """For each step the most that each card holds, except what it held before."""
    model, shape = make()
    model.cuda(0)
    inputs = torch.randn(rows, *shape)
    targets = torch.randint(CLASSES, (rows,))
    if pinned:
        inputs, targets = inputs.pin_memory(), targets.pin_memory()
    devices = range(count)
    of_steps = []
    options = {"verify": verify, "graphs": False}
    with ScatterOnceParallel(model, accum, devices, **options) as engine:
        for _ in range(STEPS):
            model.zero_grad()
            before = list(map(torch.cuda.memory_allocated, devices))
            for card in devices:
                torch.cuda.reset_peak_memory_stats(card)
            engine.forward_backward(inputs, targets, nn.CrossEntropyLoss())
            most = map(torch.cuda.max_memory_allocated, devices)
            of_cards = zip(most, before, strict=True)
            of_steps.append([peak - start for peak, start in of_cards])
    return of_steps


# In a batch of 256 rows a look may ask about all rows.
CASES = [(256, 1, 1), (512, 1, 1), (512, 4, 1), (1024, 1, 2), (1024, 4, 2)]


@pytest.mark.parametrize(("rows", "accum", "count"), CASES)
@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("make", [convolutions, mlp])
def test_look_adds_at_most_a_tenth(caplog, make, pinned, rows, accum, count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} cards")
    caplog.set_level(logging.DEBUG, "scatterpar")
    # The first step of a process adds the workspaces of cuBLAS.
    _, *without = peaks(make, accum, pinned, count, rows, verify=False)
    with_looks = peaks(make, accum, pinned, count, rows, verify=True)
    looks = [text for text in caplog.messages if text.startswith("check ")]
    assert len(looks) == 3
    assert all(text.endswith("right") for text in looks)
    for card in range(count):
        most = max(of_cards[card] for of_cards in with_looks)
        assert most <= MOST * min(of_cards[card] for of_cards in without)
