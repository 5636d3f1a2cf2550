"""The race checker on traces written by hand: what is ordered, and by what."""

from __future__ import annotations

import pytest

from nullcuda import mutations
from nullcuda.card import Record
from nullcuda.races import races

pytestmark = pytest.mark.nullcuda


def on(stream, kind, address=0, size=64, *, device=0, source=0, blocks=False, pageable=False):
    return Record(kind, device, stream, address, source, size, blocks, pageable, 1, kind)


HOST_WRITES = on(0, "write", device=-1)
WRITE, READ = on(1, "write"), on(2, "read")
RECORD, WAIT = on(1, "event_record", 7), on(2, "event_wait", 7)


@pytest.mark.parametrize(
    "trace",
    [
        [on(1, "write"), on(1, "read")],
        [on(1, "read"), on(2, "read")],
        [WRITE, on(2, "read", 64)],
        [WRITE, RECORD, WAIT, READ],
        [WRITE, on(1, "stream_sync"), READ],
        [WRITE, on(0, "device_sync"), READ],
        [WRITE, RECORD, on(0, "event_sync", 7), READ],
        [on(1, "copy_out", 10**9, source=0, blocks=True), on(2, "write")],
        [WRITE, on(5, "device_free"), READ],
        [on(1, "copy_in", 10**9), on(1, "stream_sync"), HOST_WRITES],
        [on(1, "copy_in", 10**9, pageable=True), HOST_WRITES],
        [HOST_WRITES, on(1, "copy_in", 10**9)],
    ],
    ids=str.split("stream reads bytes event sync device event_sync copy free host staged new"),
)
def test_what_is_ordered(trace):
    assert races(trace) == []


@pytest.mark.parametrize(
    "trace",
    [
        [WRITE, READ],
        [on(1, "read"), on(2, "write")],
        [WRITE, on(2, "read", 63)],
        [RECORD, WRITE, WAIT, READ],
        [WRITE, RECORD, on(3, "event_wait", 7), READ],
        [WRITE, on(0, "device_sync", device=1), READ],
        [on(1, "copy_out", 10**9, source=0), on(2, "write")],
        [on(1, "copy_peer", 10**9, source=0), on(1, "read", 10**9, device=1)],
        [on(1, "copy_in", 10**9), HOST_WRITES],
    ],
    ids=str.split("write read overlap early other device asynchronous peer host"),
)
def test_what_is_not(trace):
    assert len(races(trace)) == 1


def test_a_third_stream_may_carry_the_order_on():
    trace = [WRITE, RECORD, on(3, "event_wait", 7), on(3, "event_record", 8)]
    assert races([*trace, on(2, "event_wait", 8), READ]) == []


def test_every_wait_of_the_engine_is_taken_out_by_a_mutation():
    """Whether a test fails then is what ``python -m nullcuda.mutations`` tries."""
    assert mutations.faults_of_the_table() == []
