"""The checker on torch's own streams and allocator: faults that are planted are found."""

from __future__ import annotations

import contextlib

import pytest
import torch

from nullcuda import card
from nullcuda.races import races

pytestmark = [pytest.mark.nullcuda, pytest.mark.races, pytest.mark.draws]


def found(work):
    """The races of ``work``, whose device is idle before."""
    torch.cuda.synchronize(1)
    card.trace(True)
    work()
    card.trace(False)
    return races(card.records())


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_that_does_not_wait(waits):
    stream, start = torch.cuda.Stream(1), torch.randn(1000, device="cuda:1")

    def work():
        made = start * 2
        if waits:
            stream.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(stream):
            made + 1

    assert bool(found(work)) is not waits


@pytest.mark.parametrize("recorded", [True, False])
def test_a_block_that_is_used_again_too_early(recorded):
    stream, start = torch.cuda.Stream(1), torch.randn(1000, device="cuda:1")

    def work():
        made = start * 2
        stream.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(stream):
            made + 1
        if recorded:
            made.record_stream(stream)
        del made
        torch.zeros(1000, device="cuda:1").add_(1)  # the allocator gives the same bytes

    assert bool(found(work)) is not recorded


def test_a_kernel_on_the_wrong_card(counted):
    first, second = torch.zeros(4, device="cuda:0"), torch.cuda.Stream(1)
    handle = second.cuda_stream
    with contextlib.suppress(RuntimeError), torch.cuda.device(0):
        foreign = torch.cuda.ExternalStream(handle, 0)  # card 1's stream, said to be card 0's
        with torch.cuda.stream(foreign):
            first.add_(1)
    assert counted(1)["wrong_device"] > 0
