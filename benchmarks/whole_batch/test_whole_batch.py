"""A loss over the whole batch: time beside one pass and the published way, memory by
rows.
"""

import statistics
from dataclasses import replace

import pytest

from benchmarks.memory.live_bytes import LiveBytes
from benchmarks.models import CASES
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio
from benchmarks.whole_batch import contenders
from benchmarks.whole_batch.contenders import supervised_contrastive

ACCUMS = (1, 2, 8, 16)
BATCH = 1024
TOLERANCE = 1e-3  # relative, between float32 gradients summed in different orders
MICRO_BATCH = 64
BATCHES = (256, 512, 1024, 2048, 4096)


@pytest.mark.parametrize("name", ["cnn", "resnet20"])
def test_time(benchmark, publish, quick, name):
    accums, rows_each = (ACCUMS[:2], 64) if quick else (ACCUMS, BATCH)
    cases = [replace(CASES[name], batch=rows_each, accum=n) for n in accums]
    steps, makers = (
        {},
        {
            "ours": contenders.in_two_passes,
            "published": contenders.cached_as_published,
            "one pass": contenders.in_one_pass,
            "not compared": contenders.without_comparison,
        },
    )
    for case in cases:
        peers = {who: make(case) for who, make in makers.items()}
        expected = peers["published"].gradient()
        off = float((peers["ours"].gradient() - expected).norm() / expected.norm())
        assert off < TOLERANCE, f"{off:.1e}"
        steps |= {f"{who}, {case.accum}": peer.step for who, peer in peers.items()}
    seconds = interleaved(benchmark, steps, 2 if quick else 15)
    rows = []
    for n in accums:
        ours = seconds[f"ours, {n}"]
        others = [ratio(ours, seconds[f"{who}, {n}"]) for who in list(makers)[1:]]
        rows.append([n, f"{statistics.median(ours) * 1e3:.1f}", *map(str, others)])
    columns = [
        "sub-steps",
        "ms, median",
        *(f"time / {who}" for who in list(makers)[1:]),
    ]
    publish(f"{name}-time", Table(columns, rows), {"seconds": seconds})


def test_memory(benchmark, publish, quick):
    batches = BATCHES[:2] if quick else BATCHES
    peaks = benchmark.pedantic(measure, args=(batches,), rounds=1)
    rows = [
        [batch, *(f"{peak / 1e6:.1f} MB" for peak in found)]
        for batch, found in peaks.items()
    ]
    columns = ["rows", *WAYS]
    publish("memory", Table(columns, rows), {"peaks": peaks, "ways": WAYS}, draw(peaks))


WAYS = [
    "plain",
    "nn.DataParallel, master of two",
    "nn.DataParallel, master of four",
    "ours, one replica",
]


def measure(batches):
    """By batch size: the peak of live bytes in each way."""
    return {
        batch: [
            by_hand(replace(CASES["cnn"], batch=batch), 1),
            by_hand(replace(CASES["cnn"], batch=batch), 2),
            by_hand(replace(CASES["cnn"], batch=batch), 4),
            ours(replace(CASES["cnn"], batch=batch, accum=batch // MICRO_BATCH)),
        ]
        for batch in batches
    }


def by_hand(case, replicas):
    """One device of several that gathers all outputs and computes the loss: its own
    live bytes.

    What the others computed comes in as it does from ``gather``: outputs, without their
    graph.
    """
    module = case.module()
    images, labels = case.data()
    outputs = module(images).detach()
    with LiveBytes() as meter:
        own = case.batch // replicas
        gathered = outputs.clone()
        gathered[:own] = module(images[:own].clone())
        supervised_contrastive(gathered, labels).backward()
    return meter.peak


def ours(case):
    peer = contenders.in_two_passes(case)
    with LiveBytes() as meter:  # one replica works in this thread
        peer.run()
    return meter.peak


def draw(peaks):
    """Peak bytes against the rows of the batch."""

    def on(axes):
        for way, found in zip(WAYS, zip(*peaks.values(), strict=True), strict=True):
            axes.plot(list(peaks), [peak / 1e6 for peak in found], "o-", label=way)
        axes.set_xlabel("rows of the batch")
        axes.set_ylabel("peak of live tensors, MB")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()

    return on
