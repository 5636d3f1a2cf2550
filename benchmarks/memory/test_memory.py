"""How much memory does a replica need? The activations of one micro-batch, no more.

``python -m benchmarks memory`` counts the peak of live tensors in each replica's thread
against ``accum``, beside forward and backward passes over one micro-batch by hand.
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
    rows = []
    for accum, (micro_batch, ours, alone) in peaks.items():
        sizes = [f"{ours / 1e6:.2f} MB", f"{alone / 1e6:.2f} MB"]
        rows.append([accum, micro_batch, *sizes, f"{ours / alone:.3f}"])
    columns = ["accum", "rows per sub-step", "engine, per replica"]
    columns += ["one sub-step by hand", "ratio"]
    publish(name, Table(columns, rows), {"rows_engine_alone": peaks}, draw(peaks))


def measure(case, accums, monkeypatch):
    """By accum: rows of a micro-batch, the worst replica's peak, the peak by hand."""
    peaks = {}
    for accum in accums:
        rows = case.batch // REPLICAS // accum
        ours = engine_peak(case, accum, monkeypatch)
        # A second pass finds gradients to add to, as later ones do.
        alone = alone_peak(case, rows, passes=min(accum, 2))
        peaks[accum] = (rows, ours, alone)
    return peaks


def engine_peak(case, accum, monkeypatch):
    """The most live bytes of a replica's thread in one step."""
    module = case.module()
    images, labels = case.data()
    meters = []

    @contextlib.contextmanager
    def metered(device, stream, use_device=streams.use_device):
        meter = LiveBytes()
        meters.append(meter)
        with use_device(device, stream), meter:
            yield

    devices = ["cpu"] * REPLICAS
    with (
        # A look would run in the replicas' threads, too.
        ScatterOnceParallel(module, accum, devices, verify=False) as engine,
        monkeypatch.context() as patches,
    ):
        # Each replica's thread enters this once per step, around all of its work.
        patches.setattr(streams, "use_device", metered)
        engine.forward_backward(images, labels, peers.criterion)
    assert len(meters) == REPLICAS
    return max(meter.peak for meter in meters)


def alone_peak(case, rows, passes):
    """The most live bytes of some passes by hand, the copies of their rows included."""
    module = case.module()
    images, labels = case.data()
    with LiveBytes() as meter:
        for start in range(0, passes * rows, rows):
            micro_images = images[start : start + rows].clone()
            micro_labels = labels[start : start + rows].clone()
            peers.criterion(module(micro_images), micro_labels).backward()
            del micro_images, micro_labels  # before the next ones are made
    return meter.peak


def draw(peaks):
    """Peak bytes against the rows of a micro-batch."""

    def on(axes):
        rows, ours, alone = zip(*peaks.values(), strict=True)
        engine = [peak / 1e6 for peak in ours]
        by_hand = [peak / 1e6 for peak in alone]
        axes.plot(rows, engine, "o-", label="engine, per replica")
        axes.plot(rows, by_hand, "x--", label="one sub-step by hand")
        axes.set_xlabel("rows per sub-step")
        axes.set_ylabel("peak of live tensors, MB")
        axes.legend()

    return on
