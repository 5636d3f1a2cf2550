"""A tensor of the user's own class that raises ``StopIteration``, wherever it is looked at."""

from __future__ import annotations

import threading

import torch


class RaisesStopIteration(torch.Tensor):
    """Raises when it is looked at for the ``left``-th time."""

    lock = threading.RLock()
    left = -1
    raised = None

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with RaisesStopIteration.lock:
            RaisesStopIteration.left -= 1
            if RaisesStopIteration.left == 0:
                RaisesStopIteration.raised = StopIteration("mine")
                raise RaisesStopIteration.raised
        return super().__torch_function__(function, types, args, kwargs or {})


def assert_arrives_from_everywhere(step):
    """``step()`` raises the very ``StopIteration`` that was raised, at every look it takes.

    Inside a generator of ours, Python would make a RuntimeError of it.
    """
    tried, caught = 0, RaisesStopIteration
    while caught is not None:
        tried += 1
        RaisesStopIteration.left, RaisesStopIteration.raised, caught = tried, None, None
        try:
            step()
        except BaseException as error:
            caught = error
        assert caught is RaisesStopIteration.raised, tried
    RaisesStopIteration.left = -1
    assert tried > 20
