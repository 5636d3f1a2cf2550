"""Peak live bytes per replica against accum: the activations of one micro-batch, no
more.
"""

import contextlib
from dataclasses import replace

import pytest

from benchmarks import peers
from benchmarks.memory.live_bytes import LiveBytes
from benchmarks.models import CASES
from benchmarks.tables import Table
from scatterpar import ScatterOnceParallel
from scatterpar.devices import streams

REPLICAS = 2
ACCUMS = (1, 2, 4, 8, 16, 32)


@pytest.mark.parametrize("name", CASES)
def test_memory(benchmark, publish, quick, monkeypatch, name):
    case = replace(CASES[name], batch=128 if quick else 1024)
    accums = ACCUMS[:3] if quick else ACCUMS
    peaks = benchmark.pedantic(measure, args=(case, accums, monkeypatch), rounds=1)
    columns = [
        "accum",
        "rows per sub-step",
        "engine, per replica",
        "one sub-step by hand",
        "ratio",
    ]
    rows = [
        [accum, rows, _mb(ours), _mb(alone), f"{ours / alone:.3f}"]
        for accum, (rows, ours, alone) in peaks.items()
    ]
    publish(name, Table(columns, rows), {"rows_engine_alone": peaks}, draw(peaks))


def measure(case, accums, monkeypatch):
    """By accum: rows of a micro-batch, peak of the worst replica, peak of one pass by
    hand.
    """
    found = {}
    for accum in accums:
        rows = case.batch // REPLICAS // accum
        ours = engine_peak(case, accum, monkeypatch)
        found[accum] = (rows, ours, alone_peak(case, rows, min(accum, 2)))
    return found


def engine_peak(case, accum, monkeypatch):
    module = case.module()
    images, labels = case.data()
    meters = []

    @contextlib.contextmanager
    def metered(device, stream, on=streams.use_device):
        meter = LiveBytes()
        meters.append(meter)
        with on(device, stream), meter:
            yield

    with (
        ScatterOnceParallel(module, accum, ["cpu"] * REPLICAS) as engine,
        monkeypatch.context() as m,
    ):
        m.setattr(streams, "use_device", metered)
        engine.forward_backward(images, labels, peers.criterion)
    assert len(meters) == REPLICAS
    return max(meter.peak for meter in meters)


def alone_peak(case, rows, passes):
    """A second pass finds gradients to add to, as later ones do; the copy of the rows
    included.
    """
    module = case.module()
    images, labels = case.data()
    with LiveBytes() as meter:
        for start in range(0, passes * rows, rows):
            micro_images = images[start : start + rows].clone()
            micro_labels = labels[start : start + rows].clone()
            peers.criterion(module(micro_images), micro_labels).backward()
            del micro_images, micro_labels
    return meter.peak


def _mb(size):
    return f"{size / 1e6:.2f} MB"


def draw(peaks):
    """Peak bytes against the rows of a micro-batch."""

    def on(axes):
        rows, ours, alone = zip(*peaks.values(), strict=True)
        axes.plot(
            rows, [peak / 1e6 for peak in ours], "o-", label="engine, per replica"
        )
        axes.plot(
            rows, [peak / 1e6 for peak in alone], "x--", label="one sub-step by hand"
        )
        axes.set_xlabel("rows per sub-step")
        axes.set_ylabel("peak of live tensors, MB")
        axes.legend()

    return on
