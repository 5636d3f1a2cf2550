"""Which stream does what, how long memory lives that a copy writes, and what graphs
leave behind.

The race checker looks on in every test (``plugin.py``).
"""

from __future__ import annotations

import pytest
import torch
from devices.cards.test_accelerator import LOSS, streams_of_the_users
from harness.models import Of
from torch import nn

from nullcuda import card
from nullcuda.test_the_path import batch, network
from scatterpar import ScatterOnceParallel
from scatterpar.devices.transfers import Prefetcher, to_host

pytestmark = [pytest.mark.nullcuda, pytest.mark.draws]
CARD = torch.device("cuda:0")
TWO = [0, 1] if torch.cuda.device_count() > 1 else [0, 0]  # replicas


def traced(work):
    """What happened in ``work``."""
    card.trace(True)
    work()
    card.trace(False)
    return card.records()


# --- streams ---


@pytest.mark.parametrize("place", ["pinned", "cuda:0"])
def test_engines_take_their_streams_once(place):
    model, given = network(), batch(place=place)

    def step():
        with ScatterOnceParallel(model, 2, TWO, verify=False) as engine:
            engine.forward_backward(*given, LOSS)

    kinds = ("copy_in", "copy_peer")
    used = [
        {(r.device, r.stream) for r in traced(step) if r.kind in kinds}
        for _ in range(20)
    ]
    assert all(each == used[0] for each in used[1:])


def test_rows_that_are_not_pinned_are_staged():
    """A copy from pageable memory keeps the host, and is no copy beside the
    computation.
    """
    given = batch(place="cpu")
    with ScatterOnceParallel(network(), 4, TWO, verify=False) as engine:
        engine.forward_backward(*given, LOSS)
        records = traced(lambda: engine.forward_backward(*given, LOSS))
    size = given[0].nbytes // 8
    copies = [r.pageable for r in records if r.kind == "copy_in" and r.bytes == size]
    assert copies == [False] * 8


def test_what_the_host_reads_has_arrived():
    """A copy to pinned memory, as torch makes one that does not wait, would be read too
    early.
    """
    values = torch.ones(4, device=CARD)
    records = traced(lambda: to_host([values]))
    assert [r.blocks for r in records if r.kind == "copy_out"] == [True]


# --- lifetimes ---


@pytest.mark.parametrize("is_dropped", [False, True])
def test_memory_that_a_copy_still_writes_is_not_given_out(is_dropped):
    """Nobody waits for these rows: their tensor is dropped, and so is what asked for
    them.
    """
    source = torch.randn(2**20).pin_memory()
    torch.zeros(1, device=CARD)
    torch.cuda.synchronize(0)
    ahead = Prefetcher(CARD)
    target = ahead.copy(source, CARD, "scatter")
    ahead.issue(0)
    del target
    if is_dropped:
        del ahead
    torch.empty(2**20, device=CARD).add_(1)  # the allocator gives the same bytes
    if not is_dropped:
        ahead.synchronize()


# --- graphs ---


def test_gradients_may_be_read_on_another_stream_during_the_next_captured_step():
    """They are the caller's own; a graph adds up in tensors that stay."""
    model, given = network(), batch()
    engine = ScatterOnceParallel(model, 4, [0], graphs=True, verify=False)
    with engine, streams_of_the_users():
        engine.forward_backward(*given, LOSS)
        reading = torch.cuda.Stream(0)
        reading.wait_stream(torch.cuda.current_stream(0))
        kept = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        with torch.cuda.stream(reading):
            for gradient in kept:
                gradient.norm()
        engine.forward_backward(*given, LOSS)
        torch.cuda.synchronize(0)


def reads(m, x):
    """Reads a value in the forward pass, which no graph can."""
    return m.dropout(m.body(x) * float(x.sum().item() > -1e9))


def test_a_failed_capture_leaves_allocator_and_generator_as_they_were():
    """Before torch 2.13 both stayed in the capture: no draws, and memory that never
    came back.
    """
    model = Of(reads, body=nn.Linear(8, 8), dropout=nn.Dropout(0.5)).to(CARD)
    engine = ScatterOnceParallel(model, 4, [0], graphs=True, verify=False)
    with engine, pytest.warns(match="cannot be captured"):
        engine.forward_backward(torch.randn(16, 8), torch.arange(16) % 8, LOSS)
    stream = torch.cuda.Stream(0)
    block = torch.empty(200 << 20, dtype=torch.uint8, device=CARD)
    block.record_stream(stream)
    place = block.data_ptr()
    del block
    torch.cuda.synchronize(0)
    assert torch.empty(200 << 20, dtype=torch.uint8, device=CARD).data_ptr() == place
    assert set(torch.dropout(torch.ones(64, device=CARD), 0.5, True).tolist()) == {
        0.0,
        2.0,
    }
