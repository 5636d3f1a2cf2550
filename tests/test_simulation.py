"""The simulation of several GPUs, on traces that a reader computes by hand."""

import pytest
from nullcuda.card import Record

from benchmarks.many_cards.simulation import Costs, Durations, Simulation, Trace

DURATIONS = Durations(host=0, device=100, graph_launch=1, tape=0, hand_over=0, link=1e9)
COSTS = Costs(gil=1, call=1, backward_call=1, large=10, small=5)


def record(kind, thread=1, device=0, stream=1, address=0, size=0, name="gemm"):
    return Record(kind, device, stream, address, 0, size, False, False, thread, name)


def end_of(*records, durations=DURATIONS):
    return Simulation(Trace.of(records), durations, COSTS).end


def test_kernels_of_a_stream_run_in_order():
    # Launched at 2 and 4, computed from 2 to 12 and from 12 to 22.
    assert end_of(record("library"), record("library")) == 22


def test_gil_is_held_by_one_thread_at_a_time():
    begun = record("hand_over", 1, -1), record("hand_over", 2, -1)
    launches = record("library", 1), record("library", 2, device=1)
    # The second thread launches from 1 to 3, and its GPU computes until 13.
    assert end_of(*begun, *launches) == 13


def test_stream_waits_for_an_event():
    first = record("library"), record("event_record", address=7)
    second = record("event_wait", stream=2, address=7), record("library", stream=2)
    # The event is there at 12; the kernel behind it was launched before.
    assert end_of(*first, *second) == pytest.approx(22, abs=1e-3)


def test_graph_takes_what_a_sub_step_takes():
    assert end_of(record("graph_launch"), record("graph_launch")) == 201


def test_launches_beside_graphs_pay_for_a_tape():
    with_tape = Durations(
        host=0, device=100, graph_launch=1, tape=3, hand_over=0, link=1e9
    )
    # The graph is done at 101; the launch behind it ends at 1 + 1 + 3 + 1 = 6.
    records = record("graph_launch"), record("library", stream=2)
    assert end_of(*records, durations=with_tape) == 101
    assert end_of(*records[1:], durations=with_tape) == 12
    slow_tape = Durations(
        host=0, device=100, graph_launch=1, tape=200, hand_over=0, link=1e9
    )
    assert end_of(*records, durations=slow_tape) == 213


def test_copy_takes_its_bytes_over_the_link():
    copied = record("copy_peer", size=2_000_000_000)
    assert end_of(copied) == pytest.approx(2, abs=1e-3)


def test_worker_begins_when_the_caller_has_handed_over():
    caller = record("library", 1), record("hand_over", 1, -1, address=5)
    worker = record("take_over", 2, -1, address=5), record("library", 2, device=1)
    assert end_of(*caller, *worker) == 14


def test_workers_do_not_wait_for_each_other():
    """A worker that began late in the trace once waited for one that had ended."""
    begun = record("hand_over", 1, -1, address=5)
    first = record("take_over", 2, -1, address=5), record("library", 2, device=1)
    ended = record("hand_over", 2, -1, address=5)
    slow = record("event_sync", 2, address=9)
    second = record("take_over", 3, -1, address=5), record("library", 3, device=2)
    recorded = record("event_record", 2, device=1, address=9)
    end = end_of(begun, *first, recorded, slow, ended, *second)
    # The first worker waits for its GPU until 12, the second one launches at 3.
    assert end == pytest.approx(13, abs=1e-3)
