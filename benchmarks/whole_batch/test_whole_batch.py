"""What does a loss over the whole batch cost, in time and in memory?

``python -m benchmarks whole_batch`` times a supervised contrastive loss in several ways
(``contenders.py``), and counts live bytes beside a device that gathers all outputs.
"""

import statistics
from dataclasses import replace

import pytest

from benchmarks.memory.live_bytes import LiveBytes
from benchmarks.models import CASES
from benchmarks.tables import Table
from benchmarks.timing import interleaved, ratio
from benchmarks.whole_batch.contenders import (
    MAKERS,
    in_two_passes,
    supervised_contrastive,
)

ACCUMS = (1, 2, 8, 16)
BATCH = 1024
TOLERANCE = 1e-3  # relative, between float32 gradients summed in different orders
MICRO_BATCH = 64
BATCHES = (256, 512, 1024, 2048, 4096)
WAYS = (
    "plain",
    "nn.DataParallel, master of two",
    "nn.DataParallel, master of four",
    "ours, one replica",
)


@pytest.mark.parametrize(
    "name", ["cnn", pytest.param("resnet20", marks=pytest.mark.longer)]
)
def test_time(benchmark, publish, quick, rounds, name):
    accums = ACCUMS[:2] if quick else ACCUMS
    batch = 64 if quick else BATCH
    steps = {}
    for accum in accums:
        case = replace(CASES[name], batch=batch, accum=accum)
        peers = {maker: make(case) for maker, make in MAKERS.items()}
        assert_same_gradient(peers["ours"], peers["published"])
        for maker, peer in peers.items():
            steps[f"{maker}, {accum}"] = peer.step
    seconds = interleaved(benchmark, steps, rounds(15))
    peers = list(MAKERS)[1:]
    rows = []
    for accum in accums:
        ours = seconds[f"ours, {accum}"]
        ratios = [str(ratio(ours, seconds[f"{peer}, {accum}"])) for peer in peers]
        rows.append([accum, f"{statistics.median(ours) * 1e3:.1f}", *ratios])
    columns = ["sub-steps", "ms, median", *[f"time / {peer}" for peer in peers]]
    publish(f"{name}-time", Table(columns, rows), {"seconds": seconds})


def assert_same_gradient(ours, published):
    expected = published.gradient()
    difference = (ours.gradient() - expected).norm() / expected.norm()
    assert difference < TOLERANCE, f"{difference:.1e}"


def test_memory(benchmark, publish, quick):
    batches = BATCHES[:2] if quick else BATCHES
    peaks = benchmark.pedantic(measure, args=(batches,), rounds=1)
    rows = []
    for batch, by_way in peaks.items():
        rows.append([batch, *[f"{peak / 1e6:.1f} MB" for peak in by_way]])
    data = {"peaks": peaks, "ways": WAYS}
    publish("memory", Table(["rows", *WAYS], rows), data, draw(peaks))


def measure(batches):
    """The peak of live bytes in each of ``WAYS``, by batch size."""
    peaks = {}
    for batch in batches:
        case = replace(CASES["cnn"], batch=batch, accum=batch // MICRO_BATCH)
        by_hand = [gathering_peak(case, replicas) for replicas in (1, 2, 4)]
        peaks[batch] = [*by_hand, our_peak(case)]
    return peaks


def gathering_peak(case, replicas):
    """The live bytes of one device of several, which gathers all outputs.

    The other devices' outputs come in as they do from ``gather``, without their graph.
    """
    module = case.module()
    images, labels = case.data()
    outputs = module(images).detach()
    share = case.batch // replicas
    with LiveBytes() as meter:
        gathered = outputs.clone()
        gathered[:share] = module(images[:share].clone())
        supervised_contrastive(gathered, labels).backward()
    return meter.peak


def our_peak(case):
    peer = in_two_passes(case)
    with LiveBytes() as meter:  # one replica works in this thread
        peer.run()
    return meter.peak


def draw(peaks):
    """Peak bytes against the rows of the batch."""

    def on(axes):
        for number, way in enumerate(WAYS):
            megabytes = [by_way[number] / 1e6 for by_way in peaks.values()]
            axes.plot(list(peaks), megabytes, "o-", label=way)
        axes.set_xlabel("rows of the batch")
        axes.set_ylabel("peak of live tensors, MB")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.legend()

    return on
