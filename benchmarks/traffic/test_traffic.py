"""What crosses from one memory to another in one optimizer step, counted.

``python -m benchmarks traffic`` counts bytes and messages while a real step runs, on 2,
4 and 8 replicas with memories of their own::

    engine             engine.last_step.bytes and .messages
    nn.DataParallel    its schedule on the same virtual devices, called 16 times
    DDP, no_sync       the buckets and buffers of one gloo process per replica
    lower bound        by arithmetic: everything once

The engine's bytes equal the lower bound, or the run fails.
"""

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
    rows = []
    for replicas, by_contender in counts.items():
        bound = by_contender["lower bound"]
        assert by_contender["engine"]["bytes"] == bound["bytes"]
        for contender, count in by_contender.items():
            rows.append([replicas, contender, *_cells(count)])
    columns = ["replicas", "who", "scatter", "replicate", "outputs", "reduce", "total"]
    publish(name, Table(columns, rows), {"counts": counts}, draw(counts))


def count_all(case, sizes):
    """Bytes and messages by phase, by contender, by number of replicas."""
    counts = {}
    for replicas in sizes:
        counts[str(replicas)] = {
            "engine": count_engine(case, replicas),
            f"nn.DataParallel x {case.accum}": count_per_call(case, replicas),
            "DDP, no_sync": count_ddp(case, replicas),
            "lower bound": lower_bound(case, replicas),
        }
    return counts


def virtual(replicas):
    """Memories of their own. The batch comes from the host; the first is the master."""
    return [f"cpu:{index}" for index in range(replicas)]


def count_engine(case, replicas):
    module = case.module()
    images, labels = case.data()
    with ScatterOnceParallel(module, case.accum, virtual(replicas)) as engine:
        engine.forward_backward(images, labels, peers.criterion)
        report = engine.last_step
    return {"bytes": report.bytes, "messages": report.messages}


def count_per_call(case, replicas):
    """The schedule of nn.DataParallel. Labels go to the master alone."""
    parallel = PerCall(case.module(), resolve(virtual(replicas)))
    master = parallel.device_ids[0]
    transfers = parallel.transfers
    images, labels = case.data()
    pieces = zip(images.chunk(case.accum), labels.chunk(case.accum), strict=True)
    for micro_images, micro_labels in pieces:
        targets = transfers.copy(micro_labels, master, "scatter")
        loss = peers.criterion(parallel(micro_images), targets)
        (loss / case.accum).backward()
    return {"bytes": transfers.bytes, "messages": transfers.messages}


def count_ddp(case, replicas):
    """The ranks' collectives, times the copies of a ring.

    A ring all-reduce of g bytes over n ranks sends 2 (n - 1) g in all, in 2 (n - 1)
    messages of each rank.
    """
    with RankProcesses("ddp, counted", case, replicas) as processes:
        ranks = processes.traffic()
    first = ranks[0]
    other_ranks = replicas - 1
    sizes = by_phase(
        scatter=sum(rank["inputs"] for rank in ranks),
        replicate=other_ranks * first["buffers"],
        reduce=2 * other_ranks * first["gradients"],
    )
    tensors_per_micro_batch = 2
    messages = by_phase(
        scatter=tensors_per_micro_batch * case.accum * replicas,
        replicate=other_ranks * first["broadcasts"],
        reduce=2 * other_ranks * replicas * first["reductions"],
    )
    return {"bytes": sizes, "messages": messages}


def lower_bound(case, replicas):
    """The batch once; parameters and buffers out, and gradients back, once per device.

    Messages: one per tensor of a share, one per dtype out, one back.
    """
    module = case.module()
    batch = case.data()
    parameters = list(module.parameters())
    sent = [*parameters, *module.buffers()]
    other_devices = replicas - 1
    sizes = by_phase(
        scatter=size(batch),
        replicate=other_devices * size(sent),
        reduce=other_devices * size(parameters),
    )
    num_dtypes = len({tensor.dtype for tensor in sent})
    messages = by_phase(
        scatter=len(batch) * replicas,
        replicate=other_devices * num_dtypes,
        reduce=other_devices,
    )
    return {"bytes": sizes, "messages": messages}


def by_phase(**counts):
    """The counts of all phases; zero if there is none."""
    return {phase: counts.get(phase, 0) for phase in PHASES}


def size(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def _cells(count):
    """MB and messages of each phase, and of all of them."""
    sizes = count["bytes"]
    messages = count["messages"]
    cells = [_cell(sizes[phase], messages[phase]) for phase in PHASES]
    return [*cells, _cell(sum(sizes.values()), sum(messages.values()))]


def _cell(size, messages):
    return f"{size / 1e6:,.3f} ({messages:,})"


def draw(counts):
    """Grouped bars: all bytes, by replicas and contender, on a logarithmic scale."""

    def on(axes):
        contenders = list(next(iter(counts.values())))
        width = 0.8 / len(contenders)
        middle = (len(contenders) - 1) / 2
        for number, name in enumerate(contenders):
            shift = (number - middle) * width
            places = [place + shift for place in range(len(counts))]
            axes.bar(places, megabytes_of(name), width, label=name)
        names = [f"{replicas} replicas" for replicas in counts]
        axes.set_xticks(range(len(counts)), names)
        axes.set_yscale("log")
        axes.set_ylabel("MB per optimizer step")
        axes.legend()

    def megabytes_of(name):
        totals = []
        for by_contender in counts.values():
            sizes = by_contender[name]["bytes"].values()
            totals.append(sum(sizes) / 1e6)
        return totals

    return on
