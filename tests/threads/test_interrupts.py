"""Signals wait for the end of the body. In steps, at every instruction: ``faults/``."""

from __future__ import annotations

import signal
import threading
import types

import pytest

from scatterpar.threads.interrupts import Interrupts

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


@pytest.mark.parametrize("times", [1, 2])
def test_all_handlers_are_back_if_one_raises(order, monkeypatch, times):
    """A handler that is back may be called before the next one is."""
    interrupts = [Interrupted() for _ in range(times)]

    def put(number, handler):
        signal.signal(number, handler)
        if is_leaving and interrupts:
            raise interrupts.pop()

    before = [signal.getsignal(number) for number in (FIRST, SECOND)]
    functions = types.SimpleNamespace(signal=put, getsignal=signal.getsignal)
    monkeypatch.setattr("scatterpar.threads.interrupts._signal", functions)
    is_leaving = False
    body = Interrupts()
    body.__enter__()
    signal.raise_signal(SECOND)
    is_leaving = True
    with pytest.raises(Interrupted):
        body.__exit__()
    assert [signal.getsignal(number) for number in (FIRST, SECOND)] == before
    assert order == ["SIGTERM"]
