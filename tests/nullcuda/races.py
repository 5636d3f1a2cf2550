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
_PAGE = 21  # bits: accesses are looked up by pages of 2 MB
_Stream = tuple[int, int]
_Clock = dict[_Stream, int]


class Race(NamedTuple):
    """Two accesses that nothing orders: what was done, and on which
    device and stream.
    """

    first: str
    on: _Stream
    second: str
    and_on: _Stream


class _Access(NamedTuple):
    start: int
    stop: int
    writes: bool
    stream: _Stream
    tick: int
    what: str


def races(records: Iterable[Record]) -> list[Race]:
    """Each kind of unordered pair once, in the order in which they were found."""
    checker = _Checker()
    for record in records:
        checker.look_at(record)
    return list(checker.found)


class _Checker:
    def __init__(self) -> None:
        self.found: dict[Race, None] = {}
        self._all: _Clock = {}  # what every thread knows
        # what each thread that takes part in hand-overs knows
        self._own: dict[int, _Clock] = {}
        self._handed: defaultdict[int, _Clock] = defaultdict(dict)
        self._streams: defaultdict[_Stream, _Clock] = defaultdict(dict)
        self._events: dict[int, _Clock] = {}
        self._pages: defaultdict[int, list[_Access]] = defaultdict(list)

    def look_at(self, record: Record) -> None:
        stream, thread = (record.device, record.stream), record.thread
        match record.kind:
            case "read" | "write":
                self._begin(stream, thread)
                self._access(record, stream, record.address, record.kind == "write")
                if record.device == _HOST:
                    self._learn(thread, self._streams[stream])
            case "copy_in" | "copy_out" | "copy_within" | "copy_peer" | "fill":
                self._begin(stream, thread)
                if record.kind != "fill" and not (
                    record.kind == "copy_in" and record.pageable
                ):
                    self._access(record, stream, record.source, False)
                if record.kind != "copy_out":
                    self._access(record, stream, record.address, True)
                if record.blocks:
                    self._learn(thread, self._streams[stream])
            case "event_record":
                self._events[record.address] = dict(self._streams[stream])
                for clock in self._known(thread):
                    _join(self._events[record.address], clock)
            case "event_wait":
                _join(self._streams[stream], self._events.get(record.address, {}))
            case "event_sync":
                self._learn(thread, self._events.get(record.address, {}))
            case "event_query" if record.blocks:
                _join(self._all, self._events.get(record.address, {}))
            case "stream_sync":
                self._learn(thread, self._streams[stream])
            case "stream_query" if record.blocks:
                _join(self._all, self._streams[stream])
            case "device_sync":
                for (device, _), clock in list(self._streams.items()):
                    if device == record.device:
                        self._learn(thread, clock)
            case "device_free":  # waits for everything
                for clock in list(self._streams.values()):
                    self._learn(thread, clock)
            case "hand_over":
                self._own.setdefault(thread, {})
                for clock in self._known(thread):
                    _join(self._handed[record.address], clock)
            case "take_over":
                _join(self._own.setdefault(thread, {}), self._handed[record.address])

    def _known(self, thread: int) -> list[_Clock]:
        """The clocks that make up what a thread knows to be done."""
        own = [self._own[thread]] if thread in self._own else [*self._own.values()]
        return [self._all, *own]

    def _learn(self, thread: int, clock: _Clock) -> None:
        _join(self._own.get(thread, self._all), clock)

    def _begin(self, stream: _Stream, thread: int) -> None:
        """A stream's next operation comes after all that the thread
        knows to be done.
        """
        clock = self._streams[stream]
        for known in self._known(thread):
            _join(clock, known)
        clock[stream] = clock.get(stream, 0) + 1

    def _access(
        self, record: Record, stream: _Stream, address: int, writes: bool
    ) -> None:
        if not record.bytes:
            return
        what = record.name if record.kind in ("read", "write") else record.kind
        clock = self._streams[stream]
        new = _Access(
            address, address + record.bytes, writes, stream, clock[stream], what
        )
        for page in range(address >> _PAGE, (new.stop - 1 >> _PAGE) + 1):
            before = self._pages[page]
            kept = [old for old in before if not self._is_settled(old, new, clock)]
            self._pages[page] = [*kept, new]

    def _is_settled(self, old: _Access, new: _Access, clock: _Clock) -> bool:
        """Whether nobody has to know of ``old`` any more, since ``new``
        stands for it.
        """
        if old.stop <= new.start or new.stop <= old.start:
            return False
        is_ordered = old.stream == new.stream or clock.get(old.stream, 0) >= old.tick
        if not is_ordered and (old.writes or new.writes):
            self.found.setdefault(Race(old.what, old.stream, new.what, new.stream))
        is_covered = new.start <= old.start and old.stop <= new.stop
        return is_ordered and is_covered and (new.writes or not old.writes)


def _join(into: _Clock, other: _Clock) -> None:
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick
