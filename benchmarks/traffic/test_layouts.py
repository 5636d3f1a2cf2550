"""How often gradients cross, by the layout of eight replicas."""

from torch import nn

from benchmarks.models import CASES
from benchmarks.tables import Table
from scatterpar import ScatterOnceParallel

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
    case = CASES["mlp"].small()
    counts = benchmark.pedantic(
        lambda: {name: count(case, of) for name, of in LAYOUTS.items()}
    )
    assert counts["two cards, 4 + 4"] == 1
    assert counts["eight cards"] == 7
    rows = [
        [name, f"`{[*map(int, layout)]}`", counts[name], len({*layout}) - 1]
        for name, layout in LAYOUTS.items()
    ]
    columns = ["layout", "device_ids", "gradients cross", "other devices"]
    publish("layouts", Table(columns, rows), {"crossings": counts})


def count(case, layout):
    """How many times the size of the gradients comes back."""
    module = case.module()
    with ScatterOnceParallel(module, 1, [f"cpu:{i}" for i in layout]) as engine:
        engine.forward_backward(*case.data(), nn.CrossEntropyLoss())
        size = sum(p.numel() * p.element_size() for p in module.parameters())
        times, rest = divmod(engine.last_step.bytes["reduce"], size)
    assert not rest
    return times
