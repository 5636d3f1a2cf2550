"""How often do gradients cross between memories? By the layout of eight replicas."""

from torch import nn

from benchmarks.models import CASES
from benchmarks.tables import Table
from scatterpar import ScatterOnceParallel

# The device of each replica, a digit each.
LAYOUTS = {
    "one card": "00000000",
    "two cards, 4 + 4": "00001111",
    "four cards, 2 + 2 + 2 + 2": "00112233",
    "eight cards": "01234567",
    "five cards, 2 + 2 + 2 + 1 + 1": "00112234",
    "three cards, 3 + 3 + 2": "00011122",
    "two cards, 1 + 7": "01111111",
    "two cards, in turn": "01010101",
}


def test_layouts(benchmark, publish):
    counts = benchmark.pedantic(count_all)
    # The sum's tree pairs neighbours, so two halves meet once.
    assert counts["two cards, 4 + 4"] == 1
    assert counts["eight cards"] == 7
    rows = []
    for name, layout in LAYOUTS.items():
        device_ids = [int(digit) for digit in layout]
        other_devices = len(set(device_ids)) - 1
        rows.append([name, f"`{device_ids}`", counts[name], other_devices])
    columns = ["layout", "device_ids", "gradients cross", "other devices"]
    publish("layouts", Table(columns, rows), {"crossings": counts})


def count_all():
    case = CASES["mlp"].small()
    return {name: count(case, layout) for name, layout in LAYOUTS.items()}


def count(case, layout):
    """The bytes that come back, as a multiple of all gradients' bytes."""
    module = case.module()
    device_ids = [f"cpu:{digit}" for digit in layout]
    with ScatterOnceParallel(module, 1, device_ids) as engine:
        engine.forward_backward(*case.data(), nn.CrossEntropyLoss())
        crossed = engine.last_step.bytes["reduce"]
    size = sum(parameter.nbytes for parameter in module.parameters())
    times, remainder = divmod(crossed, size)
    assert remainder == 0
    return times
