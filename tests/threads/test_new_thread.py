"""A function runs in a thread of its own, with the caller's context."""

from __future__ import annotations

import contextvars
import threading

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode

from scatterpar.threads.new_thread import call_in_new_thread

pytestmark = pytest.mark.core
VARIABLE = contextvars.ContextVar("VARIABLE", default="of nobody")


def test_result_comes_from_another_thread():
    def twice(number):
        return 2 * number, threading.get_ident()

    result, thread = call_in_new_thread(twice, 3)
    assert result == 6
    assert thread != threading.get_ident()


def test_thread_has_the_callers_context():
    def context():
        return VARIABLE.get(), torch.is_grad_enabled()

    token = VARIABLE.set("of the caller")
    try:
        with torch.no_grad():
            assert call_in_new_thread(context) == ("of the caller", False)
    finally:
        VARIABLE.reset(token)


def test_mode_of_the_caller_is_no_replicas(recwarn):
    """``splitcheck`` forks in such a thread, and has no replicas to speak of."""
    with BaseTorchDispatchMode():
        assert call_in_new_thread(int, "3") == 3
    assert not recwarn.list


def test_error_is_the_callers_and_thread_ends():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        call_in_new_thread(divmod, 1, 0)
    assert threading.active_count() == before
