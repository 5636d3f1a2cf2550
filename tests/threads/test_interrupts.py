"""Signals wait for the end of the body. In steps, at every instruction: ``faults/``."""

from __future__ import annotations

import signal
import threading
import types

import pytest

from scatterpar.threads.interrupts import _INTERRUPTS, Interrupts

pytestmark = pytest.mark.core
FIRST, SECOND = signal.SIGINT, signal.SIGTERM


class Interrupted(Exception):
    pass


def interrupt():
    raise Interrupted


@pytest.fixture
def order():
    """What happens, in order; the handlers of both signals are there."""
    happened = []

    def handler(number, _):
        happened.append(signal.Signals(number).name)

    before = {number: signal.signal(number, handler) for number in (FIRST, SECOND)}
    yield happened
    for number, earlier in before.items():
        signal.signal(number, earlier)


def test_signal_waits_for_end_of_body(order):
    with Interrupts():
        signal.raise_signal(FIRST)
        order.append("body")
    order.append("after")
    assert order == ["body", "SIGINT", "after"]


def test_allowed_signals_come_at_once(order):
    with Interrupts() as interrupts:
        signal.raise_signal(FIRST)
        order.append("body")
        with interrupts.allowed():
            order.append("allowed")
            signal.raise_signal(SECOND)
            order.append("still allowed")
        signal.raise_signal(SECOND)
        order.append("body again")
    assert order == [
        "body",
        "SIGINT",
        "allowed",
        "SIGTERM",
        "still allowed",
        "body again",
        "SIGTERM",
    ]


def test_deliver_runs_waiting_handlers(order):
    with Interrupts() as interrupts:
        signal.raise_signal(FIRST)
        interrupts.deliver()
        order.append("body")
    assert order == ["SIGINT", "body"]


def test_handlers_restored_after_error(order):
    handlers = [signal.getsignal(number) for number in (FIRST, SECOND)]
    with pytest.raises(Interrupted), Interrupts():
        interrupt()
    assert [signal.getsignal(number) for number in (FIRST, SECOND)] == handlers


def test_all_handlers_run_if_one_raises(order):
    def raising(number, _):
        order.append(signal.Signals(number).name)
        raise Interrupted

    signal.signal(FIRST, raising)
    signal.signal(SECOND, raising)
    interrupts = Interrupts()
    interrupts.__enter__()
    signal.raise_signal(FIRST)
    signal.raise_signal(SECOND)
    assert not order
    with pytest.raises(Interrupted):
        interrupts.__exit__()
    assert sorted(order) == ["SIGINT", "SIGTERM"]


def test_signals_without_handler_untouched(order):
    signal.signal(SECOND, signal.SIG_IGN)
    with Interrupts():
        assert signal.getsignal(SECOND) is signal.SIG_IGN


def test_other_threads_change_no_handler(order):
    seen = []

    def body():
        with Interrupts():
            seen.append(signal.getsignal(FIRST))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(FIRST)]


@pytest.fixture
def three(order):
    """Three signals with handlers, and an order in which handlers are called."""
    third = next(each for each in _INTERRUPTS if each not in (FIRST, SECOND))
    before = signal.signal(third, lambda *_: order.append("third"))
    yield [FIRST, SECOND, third]
    signal.signal(third, before)


def end_body(monkeypatch, places):
    """End a body while interrupts come at these places: at 2 before the second call
    that sets a handler, at 2.5 after it.
    """
    body = Interrupts()
    body.__enter__()
    signal.raise_signal(SECOND)
    interrupts = []
    calls = 0

    def interrupted_at(place):
        if place in places:
            interrupts.append(Interrupted(place))
            raise interrupts[-1]

    def put(number, handler):
        nonlocal calls
        calls += 1
        interrupted_at(calls)
        signal.signal(number, handler)
        interrupted_at(calls + 0.5)

    functions = types.SimpleNamespace(signal=put, getsignal=signal.getsignal)
    monkeypatch.setattr("scatterpar.threads.interrupts._signal", functions)
    with pytest.raises(Interrupted) as caught:
        body.__exit__()
    assert len(interrupts) == len(places)
    assert caught.value is interrupts[-1]


@pytest.mark.parametrize(
    "places",
    [
        *((1.5,), (2.0,), (2.5,), (3.5,)),
        *((1.5, 2.5), (1.5, 2), (2, 3), (2.5, 3.0), (2.5, 3.5)),
        (1.5, 2.5, 3.5),
    ],
    ids=str,
)
def test_all_handlers_are_back_if_some_raise(three, order, monkeypatch, places):
    """A handler that is back may be called before the next one is."""
    before = [signal.getsignal(number) for number in three]
    end_body(monkeypatch, places)
    assert [signal.getsignal(number) for number in three] == before
    assert order == ["SIGTERM"]  # the signal that came in the body


def test_body_that_was_not_entered_replaces_nothing(three, order, monkeypatch):
    """An interrupt comes while the handlers are replaced."""

    def put(number, handler):
        signal.signal(number, handler)
        if number == SECOND and not order:
            order.append("raised")
            raise Interrupted

    before = [signal.getsignal(number) for number in three]
    functions = types.SimpleNamespace(signal=put, getsignal=signal.getsignal)
    monkeypatch.setattr("scatterpar.threads.interrupts._signal", functions)
    with pytest.raises(Interrupted):
        Interrupts().__enter__()
    assert [signal.getsignal(number) for number in three] == before
