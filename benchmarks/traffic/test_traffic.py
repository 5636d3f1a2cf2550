"""What crosses from one memory to another in one optimizer step, counted."""

import pytest

from benchmarks import peers
from benchmarks.models import CASES
from benchmarks.per_call import PerCall
from benchmarks.processes import RankProcesses
from benchmarks.tables import Table
from scatterpar import ScatterOnceParallel
from scatterpar.devices.device_ids import resolve
from scatterpar.devices.transfers import PHASES

REPLICAS = (2, 4, 8)


@pytest.mark.parametrize("name", CASES)
def test_traffic(benchmark, publish, quick, name):
    case = CASES[name].small() if quick else CASES[name]
    sizes = REPLICAS[:1] if quick else REPLICAS
    counts = benchmark.pedantic(count_all, args=(case, sizes), rounds=1)
    for by_who in counts.values():
        assert by_who["engine"]["bytes"] == by_who["lower bound"]["bytes"]
    rows = []
    for replicas, by_who in counts.items():
        for who, count in by_who.items():
            rows.append([replicas, who, *_cells(count)])
    columns = ["replicas", "who", "scatter", "replicate", "outputs", "reduce", "total"]
    publish(name, Table(columns, rows), {"counts": counts}, draw(counts))


def count_all(case, sizes):
    """Bytes and messages by phase, by contender, by number of replicas."""
    return {
        str(replicas): {
            "engine": count_engine(case, replicas),
            f"nn.DataParallel x {case.accum}": count_per_call(case, replicas),
            "DDP, no_sync": count_ddp(case, replicas),
            "lower bound": lower_bound(case, replicas),
        }
        for replicas in sizes
    }


def virtual(replicas):
    """Memories of their own; the batch comes from the host, and the master is the
    first.
    """
    return [f"cpu:{i}" for i in range(replicas)]


def count_engine(case, replicas):
    module = case.module()
    images, labels = case.data()
    with ScatterOnceParallel(module, case.accum, virtual(replicas)) as engine:
        engine.forward_backward(images, labels, peers.criterion)
        report = engine.last_step
    return {"bytes": report.bytes, "messages": report.messages}


def count_per_call(case, replicas):
    """The schedule of nn.DataParallel, run on virtual devices; labels stay with the
    master.
    """
    parallel = PerCall(case.module(), resolve(virtual(replicas)))
    master = parallel.device_ids[0]
    images, labels = case.data()
    transfers = parallel.transfers
    pieces = zip(images.chunk(case.accum), labels.chunk(case.accum), strict=True)
    for inputs, targets in pieces:
        targets = transfers.copy(targets, master, "scatter")
        loss = peers.criterion(parallel(inputs), targets)
        (loss / case.accum).backward()
    return {"bytes": transfers.bytes, "messages": transfers.messages}


def count_ddp(case, replicas):
    """What the ranks hand to their collectives, times what a ring sends for each byte
    of it.
    """
    with RankProcesses("ddp, counted", case, replicas) as processes:
        ranks = processes.traffic()
    others = replicas - 1
    tensors_per_micro_batch = 2
    return {
        "bytes": {
            "scatter": sum(rank["inputs"] for rank in ranks),
            "replicate": others * ranks[0]["buffers"],
            "compute": 0,
            "reduce": 2 * others * ranks[0]["gradients"],
        },
        "messages": {
            "scatter": tensors_per_micro_batch * case.accum * replicas,
            "replicate": others * ranks[0]["broadcasts"],
            "compute": 0,
            "reduce": 2 * others * replicas * ranks[0]["reductions"],
        },
    }


def lower_bound(case, replicas):
    """Inputs once; parameters and buffers out, and gradients back, once per other
    device.
    """
    module = case.module()
    others = replicas - 1
    parameters = list(module.parameters())
    sent = [*parameters, *module.buffers()]
    kinds = len({tensor.dtype for tensor in sent})
    return {
        "bytes": {
            "scatter": size(case.data()),
            "replicate": others * size(sent),
            "compute": 0,
            "reduce": others * size(parameters),
        },
        "messages": {
            "scatter": len(case.data()) * replicas,
            "replicate": others * kinds,
            "compute": 0,
            "reduce": others,
        },
    }


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _cells(count):
    def cell(bytes_, messages):
        return f"{bytes_ / 1e6:,.3f} ({messages:,})"

    by_phase = count["bytes"]
    messages = count["messages"]
    cells = [cell(by_phase[phase], messages[phase]) for phase in PHASES]
    return [*cells, cell(sum(by_phase.values()), sum(messages.values()))]


def draw(counts):
    """Grouped bars: all bytes, by replicas and contender, on a logarithmic scale."""

    def on(axes):
        first, *_ = counts.values()
        width = 0.8 / len(first)
        middle = (len(first) - 1) / 2
        for number, name in enumerate(first):
            totals = []
            for by_who in counts.values():
                totals.append(sum(by_who[name]["bytes"].values()) / 1e6)
            shift = (number - middle) * width
            places = [place + shift for place in range(len(counts))]
            axes.bar(places, totals, width, label=name)
        names = [f"{replicas} replicas" for replicas in counts]
        axes.set_xticks(range(len(counts)), names)
        axes.set_yscale("log")
        axes.set_ylabel("MB per optimizer step")
        axes.legend()

    return on
