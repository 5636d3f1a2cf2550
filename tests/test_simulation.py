"""The simulation of several GPUs, on traces that a reader computes by hand."""

import dataclasses

import pytest
from nullcuda.card import Record

from benchmarks.many_cards import simulation
from benchmarks.many_cards.simulation import Host, Machine, Simulation, ratio
from benchmarks.many_cards.traces import Case, Round, Trace, Traced

SECOND = 10**9  # the nanoseconds that a thread has computed
# A graph takes 100, a convolution 10, another kernel 5; copies take their bytes.
MACHINE = Machine(
    pace=1,
    sub_step=100,
    large=10,
    small=5,
    graph_launch=1,
    hand_over=0,
    link=1e9,
    cores=4,
    wake_up=0,
    latency=0,
    pinned=1e9,
    pageable=1e9,
)


def record(kind, cpu=0, thread=1, device=0, stream=1, address=0, size=0, **options):
    """``cpu``: the seconds that the thread has computed when it gets here."""
    pageable = options.get("pageable", False)
    blocks = options.get("blocks", False)
    what = kind, device, stream, address, 0, size, blocks, pageable, thread, "gemm"
    return Record(*what, cpu * SECOND)


def begun(*threads):
    """The first record of each thread, before which nobody knows what it computed."""
    return [record("hand_over", 0, thread, -1, address=-1) for thread in threads]


def end_of(*records, **machine):
    trace = Trace.of(records)
    return Simulation(trace, dataclasses.replace(MACHINE, **machine)).end


def test_kernels_of_a_stream_run_in_order():
    # Launched at 2 and 4, computed from 2 to 12 and from 12 to 22.
    assert end_of(*begun(1), record("library", 2), record("library", 4)) == 22


def test_host_computes_between_records():
    records = *begun(1), record("library", 2), record("event_query", 20)
    # The query is no work of its own: what was computed for it counts for the launch.
    assert end_of(*records, record("library", 30)) == 40
    assert end_of(*records, record("library", 30), pace=2) == 70


def test_gil_is_held_by_one_thread_at_a_time():
    records = record("library", 10, 1), record("library", 10, 2, device=1)
    # The first thread holds the GIL until 6, the second one from 6 to 12. Each then
    # computes for 4 without it.
    assert end_of(*begun(1, 2), *records) == pytest.approx(16 + 10)
    assert end_of(*begun(1, 2), *records, hand_over=1) == pytest.approx(17 + 10)


def test_threads_wait_for_cores():
    # Autograd's threads do not hold the GIL.
    backward = record("library", 0, 2), record("library", 8, 2)
    other = record("library", 0, 3, device=1), record("library", 8, 3, device=1)
    assert end_of(*begun(1), *backward, *other) == 20
    assert end_of(*begun(1), *backward, *other, cores=1) == 26


def test_stream_waits_for_an_event():
    first = record("library", 2), record("event_record", 2, address=7)
    second = record("event_wait", 2, stream=2, address=7)
    # The event is there at 12; the kernel behind it was launched before.
    last = record("library", 4, stream=2)
    assert end_of(*begun(1), *first, second, last) == 22


def test_graph_takes_what_a_sub_step_takes():
    assert end_of(record("graph_launch"), record("graph_launch")) == 201


def test_copy_takes_its_bytes_over_the_link():
    size = 2_000_000_000
    assert end_of(record("copy_peer", size=size)) == 2
    assert end_of(record("copy_peer", size=size), copied_bytes=((size, SECOND),)) == 1


def test_thread_copies_pageable_memory_itself():
    size = 2_000_000_000
    copied = record("copy_in", size=size, pageable=True), record("graph_launch")
    # Until 2 to pinned memory, until 4 to the GPU, beside the launch that ends at 3.
    assert end_of(*copied) == 104
    pinned = record("copy_in", size=size), record("graph_launch", stream=2)
    assert end_of(*pinned) == 101


def test_worker_begins_when_the_caller_has_handed_over():
    first = record("library", 2), record("hand_over", 2, 1, -1, address=5)
    worker = record("take_over", 0, 2, -1, address=5), record("library", 2, 2, device=1)
    assert end_of(*begun(1), *first, *worker) == 14


def test_workers_do_not_wait_for_each_other():
    """A worker that began late in the trace once waited for one that had ended."""
    first = record("take_over", 0, 2, -1, address=5), record("library", 2, 2, device=1)
    recorded = record("event_record", 2, 2, device=1, address=9)
    slow = record("event_sync", 2, 2, address=9)
    ended = record("hand_over", 2, 2, -1, address=5)
    second = record("take_over", 0, 3, -1, address=5), record("library", 2, 3, device=2)
    handed_over = record("hand_over", 0, 1, -1, address=5)
    end = end_of(handed_over, *first, recorded, slow, ended, *second, hand_over=0)
    # The first worker waits for its GPU until 12; the second one launches at 2.8.
    assert end == pytest.approx(13.2)


def run_of_two_graphs(seconds, graphs=""):
    """A run of a case, with one step of two graphs: the host computes for ``seconds``
    before each graph, and for one second in an eager sub-step.
    """
    # Four sub-steps in four seconds, of a convolution and another kernel each.
    kernels = []
    for number in range(1, 5):
        kernels += [record("library", number), record("launch", number)]
    baseline = Trace.of([*begun(1), *kernels])
    launches = record("graph_launch", seconds), record("graph_launch", 2 * seconds)
    steps = Trace.of([*begun(1), *launches])
    return Traced(
        Case("gpt", 1, 2),
        num_steps=1,
        rounds=[Round(steps, baseline)],
        seconds=[],
        caller_seconds=[],
        host_seconds=[],
        baseline_host_seconds=[],
        graphs=graphs,
        micro_batch=512,
    )


def test_steps_in_times_of_what_a_gpu_computes():
    """The host's time for an eager sub-step sets its pace in all else."""
    host = Host(7, 28, hand_over=0, link=300, graph_launch=0, cores=16)
    # The first graph is launched at 7, and both are computed in 56 ms.
    assert ratio(run_of_two_graphs(1), host) == pytest.approx((7 + 56) / 56)


def test_row_has_median_and_range_of_runs(monkeypatch, tmp_path, capsys):
    def traced(case, folder, number=0):
        assert folder == tmp_path
        return run_of_two_graphs([2, 1, 4][number], f"of {case.cards}")

    monkeypatch.setattr(simulation, "traced", traced)
    monkeypatch.setattr(simulation, "ROWS", [Case("gpt", 0, 2)])
    options = ["--host", "7", "--graph-launch", "0", "--folder", str(tmp_path)]
    begin = "| gpt | `forward_backward` | 2 | of 4; of 8 |"
    simulation.main(options)
    assert capsys.readouterr().out.endswith(f"\n{begin} 1.25 | 1.25 |\n")
    simulation.main([*options, "--traces", "3"])
    cell = "1.25 (1.12 to 1.50)"
    assert capsys.readouterr().out.endswith(f"\n{begin} {cell} | {cell} |\n")
