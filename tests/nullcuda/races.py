"""Accesses to the same bytes that nothing orders, found in a trace by vector clocks.

Every stream has a clock, and so has the host. What a stream is given to do comes after
what the host knew then: ``clock[stream]`` says for each other stream up to which of its
operations this one waits. Events carry clocks from stream to stream, synchronisations
to the host. Two accesses of one byte, of which one writes, must be ordered: on a real
card the result may differ from run to run, while the values here, where everything is
done at once, would never tell.

Each thread of the host that is told to hand work over or take it over (the caller's and
the engine's, ``plugin.py``) knows what it has waited for, and what was handed to it.
All others, such as autograd's, count as knowing everything: who asks them to do what is
not in the trace. What a query answers is known to all, since torch's allocators ask,
and give memory to any thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from nullcuda.card import Record

__all__ = ["Race", "races"]

_HOST = -1  # what the caller does to memory of the host, told by ``card.host_writes``
_PAGE = 12  # bits: accesses are looked up by pages of 4 KiB
_Stream = tuple[int, int]
_Clock = dict[_Stream, int]


class Race(NamedTuple):
    """Two accesses that nothing orders: the operations, and their devices and streams."""

    first: str
    first_stream: _Stream
    second: str
    second_stream: _Stream


class _Access(NamedTuple):
    start: int
    stop: int
    writes: bool
    stream: _Stream
    tick: int  # of the stream's clock
    operation: str


def races(records: Iterable[Record]) -> list[Race]:
    """Each kind of unordered pair once, in the order in which they were found."""
    checker = _Checker()
    for record in records:
        checker.add(record)
    return list(checker.races)


class _Checker:
    """Reads a trace.

    Attributes:
        races: the unordered pairs so far; the values say nothing.
    """

    def __init__(self) -> None:
        self.races: dict[Race, None] = {}
        self._common: _Clock = {}  # of what every thread knows
        # Of what the threads that take part in hand-overs know.
        self._by_thread: dict[int, _Clock] = {}
        self._handed_over: defaultdict[int, _Clock] = defaultdict(dict)  # by key
        self._streams: defaultdict[_Stream, _Clock] = defaultdict(dict)
        self._events: dict[int, _Clock] = {}
        self._pages: defaultdict[int, list[_Access]] = defaultdict(list)

    def add(self, record: Record) -> None:
        """Move the clocks on, and compare the record's accesses with earlier ones."""
        stream = (record.device, record.stream)
        thread = record.thread
        match record.kind:
            case "read" | "write":
                self._begin(stream, thread)
                self._access(record, stream, record.address, record.kind == "write")
                if record.device == _HOST:
                    self._learn(thread, self._streams[stream])
            case "copy_in" | "copy_out" | "copy_within" | "copy_peer" | "fill":
                self._begin(stream, thread)
                self._copy(record, stream)
                if record.blocks:
                    self._learn(thread, self._streams[stream])
            case "event_record":
                event = dict(self._streams[stream])
                self._events[record.address] = event
                for clock in self._known(thread):
                    _join(event, clock)
            case "event_wait":
                _join(self._streams[stream], self._event(record))
            case "event_sync":
                self._learn(thread, self._event(record))
            case "event_query" if record.blocks:
                _join(self._common, self._event(record))
            case "stream_sync":
                self._learn(thread, self._streams[stream])
            case "stream_query" if record.blocks:
                _join(self._common, self._streams[stream])
            case "device_sync":
                for (device, _), clock in list(self._streams.items()):
                    if device == record.device:
                        self._learn(thread, clock)
            case "device_free":  # waits for everything
                for clock in list(self._streams.values()):
                    self._learn(thread, clock)
            case "hand_over":
                self._by_thread.setdefault(thread, {})
                for clock in self._known(thread):
                    _join(self._handed_over[record.address], clock)
            case "take_over":
                clock = self._by_thread.setdefault(thread, {})
                _join(clock, self._handed_over[record.address])

    def _copy(self, record: Record, stream: _Stream) -> None:
        """The accesses of a copy or a fill."""
        # Pageable memory was staged when the copy was issued: nothing reads it later.
        is_staged = record.kind == "copy_in" and record.pageable
        if record.kind != "fill" and not is_staged:
            self._access(record, stream, record.source, writes=False)
        if record.kind != "copy_out":
            self._access(record, stream, record.address, writes=True)

    def _event(self, record: Record) -> _Clock:
        """The clock of the record's event; empty if it was never recorded."""
        return self._events.get(record.address, {})

    def _known(self, thread: int) -> list[_Clock]:
        """The clocks that make up what a thread knows to be done."""
        if thread in self._by_thread:
            return [self._common, self._by_thread[thread]]
        return [self._common, *self._by_thread.values()]

    def _learn(self, thread: int, clock: _Clock) -> None:
        _join(self._by_thread.get(thread, self._common), clock)

    def _begin(self, stream: _Stream, thread: int) -> None:
        """The stream's next operation comes after all that the thread knows to be done."""
        clock = self._streams[stream]
        for known in self._known(thread):
            _join(clock, known)
        clock[stream] = clock.get(stream, 0) + 1

    def _access(
        self, record: Record, stream: _Stream, address: int, writes: bool
    ) -> None:
        """Compare with earlier accesses of the same pages."""
        if not record.bytes:
            return
        operation = record.name if record.kind in ("read", "write") else record.kind
        clock = self._streams[stream]
        stop = address + record.bytes
        access = _Access(address, stop, writes, stream, clock[stream], operation)
        first_page = address >> _PAGE
        last_page = (stop - 1) >> _PAGE
        for page in range(first_page, last_page + 1):
            unsettled = []
            for earlier in self._pages[page]:
                if not self._is_settled(earlier, access, clock):
                    unsettled.append(earlier)
            self._pages[page] = [*unsettled, access]

    def _is_settled(self, earlier: _Access, access: _Access, clock: _Clock) -> bool:
        """Whether ``access`` stands for ``earlier`` from now on; notes a race."""
        if earlier.stop <= access.start or access.stop <= earlier.start:
            return False
        is_same_stream = earlier.stream == access.stream
        is_ordered = is_same_stream or clock.get(earlier.stream, 0) >= earlier.tick
        if not is_ordered and (earlier.writes or access.writes):
            race = Race(
                earlier.operation, earlier.stream, access.operation, access.stream
            )
            self.races.setdefault(race)
        is_covered = access.start <= earlier.start and earlier.stop <= access.stop
        return is_ordered and is_covered and (access.writes or not earlier.writes)


def _join(clock: _Clock, other: _Clock) -> None:
    """Let ``clock`` know what ``other`` does."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
