"""Streams of copies and kernels, lifetimes of memory, and what graphs leave behind.

The race checker looks on in every test (``plugin.py``).
"""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings

import pytest
import torch
from devices.cards.test_accelerator import LOSS, streams_of_the_users
from harness.models import Of
from torch import nn
from torch.utils.checkpoint import checkpoint

from nullcuda import card
from nullcuda.test_the_path import batch, network
from scatterpar import Rows, ScatterOnceParallel
from scatterpar.devices import coalescing, pieces
from scatterpar.devices.coalescing import to_host
from scatterpar.devices.lanes import Lanes
from scatterpar.devices.pieces import Piece
from scatterpar.devices.transfers import Prefetcher, Transfers

pytestmark = [pytest.mark.nullcuda, pytest.mark.draws]
CARD = torch.device("cuda:0")
WORKSPACE = 32 << 20  # cuBLAS's, on this generation of cards
TWO = [0, 1] if torch.cuda.device_count() > 1 else [0, 0]  # replicas


def traced(work):
    """The records of ``work``."""
    card.trace(True)
    work()
    card.trace(False)
    return card.records()


# --- streams ---


@pytest.mark.parametrize("place", ["pinned", "cuda:0"])
def test_engines_take_their_streams_once(place):
    model = network()
    inputs, targets = batch(place=place)

    def step():
        with ScatterOnceParallel(model, 2, TWO, verify=False) as engine:
            engine.forward_backward(inputs, targets, LOSS)

    expected = streams_of_copies(traced(step))
    for _ in range(19):
        assert streams_of_copies(traced(step)) == expected


def streams_of_copies(records):
    kinds = ("copy_in", "copy_peer")
    return {
        (record.device, record.stream) for record in records if record.kind in kinds
    }


def test_unpinned_rows_are_staged():
    """A copy from pageable memory keeps the host, and runs beside no computation."""
    inputs, targets = batch(place="cpu")
    with ScatterOnceParallel(network(), 4, TWO, verify=False) as engine:
        engine.forward_backward(inputs, targets, LOSS)
        records = traced(lambda: engine.forward_backward(inputs, targets, LOSS))
    size = inputs.nbytes // 8
    copies = [r.pageable for r in records if r.kind == "copy_in" and r.bytes == size]
    assert copies == [False] * 8


def in_channels_last(inputs):
    return inputs.contiguous(memory_format=torch.channels_last).pin_memory()


def every_other(inputs):
    """Pinned, but torch would copy it in pageable memory first."""
    return inputs.repeat_interleave(2, dim=1).pin_memory()[:, ::2]


def as_entries(inputs):
    return Rows(list(inputs), torch.stack)


@pytest.mark.skipif(TWO == [0, 0], reason="needs two cards")
@pytest.mark.parametrize(
    ("placed", "is_early"),
    [
        (torch.Tensor.pin_memory, True),
        (in_channels_last, True),
        (torch.Tensor.cuda, True),
        (torch.Tensor.clone, False),  # not pinned
        (every_other, False),
        (as_entries, False),
    ],
)
def test_first_rows_arrive_beside_parameters(placed, is_early):
    """Unless the host has to copy them, which several threads do at the same time."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = batch()
    inputs = placed(inputs)

    def step():
        engine.forward_backward(inputs, targets, LOSS)
        optimizer.step()

    with ScatterOnceParallel(model, 4, TWO, graphs=True, verify=False) as engine:
        for _ in range(4):
            step()
        assert engine.last_step.graphs.replayed
        records = traced(step)
    copies = [r for r in records if r.kind in ("copy_in", "copy_peer")]
    size = sum(parameter.nbytes for parameter in model.parameters())
    sent = next(i for i, copy in enumerate(copies) if copy.bytes >= size)
    rows = batch()[0][:8].nbytes
    early = [copy for copy in copies[:sent] if copy.bytes == rows]
    # Rows on the first card are not copied for it.
    num_copied = 1 if placed is torch.Tensor.cuda else 2
    assert len(early) == (num_copied if is_early else 0)


@pytest.mark.parametrize("ids", [[0, 0], [0, 0, 0]])
def test_rows_of_one_card_arrive_in_turn(ids):
    """Those of a second replica there would take memory while the first computes."""
    inputs, targets = batch()
    with ScatterOnceParallel(network(), 4, ids, graphs=True, verify=False) as engine:
        for _ in range(4):
            engine.forward_backward(inputs, targets, LOSS)
        assert engine.last_step.graphs.replayed
        records = traced(lambda: engine.forward_backward(inputs, targets, LOSS))
        rows = inputs[: engine.last_step.plan.substep_rows[0]].nbytes
    computed = [record.kind for record in records].index("graph_launch")
    early = [r for r in records[:computed] if r.kind == "copy_in" and r.bytes == rows]
    assert len(early) == 1


@pytest.mark.parametrize("is_memory", [False, True])
def test_first_rows_fail_whole_or_not_at_all(is_memory, monkeypatch):
    """In the caller's thread. The error names the replica, and its rows. Without memory,
    the step is computed without graphs.
    """
    request = Prefetcher.copy
    number = len(set(TWO)) - 1
    kind = torch.OutOfMemoryError if is_memory else RuntimeError

    def refused(ahead, tensor, device, phase):
        is_caller = threading.current_thread() is threading.main_thread()
        if is_caller and device.index == number:
            raise kind("no room")
        return request(ahead, tensor, device, phase)

    inputs, targets = batch()
    model, plain = network(), network()
    with ScatterOnceParallel(plain, 4, TWO, verify=False) as engine:
        expected = engine.forward_backward(inputs, targets, LOSS)
    with ScatterOnceParallel(model, 4, TWO, graphs=True, verify=False) as engine:
        for _ in range(4):
            engine.forward_backward(inputs, targets, LOSS)
        assert engine.last_step.graphs.replayed
        engine.zero_grad()
        with monkeypatch.context() as patch:
            patch.setattr(Prefetcher, "copy", refused)
            if is_memory:
                found = engine.forward_backward(inputs, targets, LOSS)
                assert not engine.last_step.graphs.replayed
            else:
                with pytest.raises(RuntimeError) as caught:
                    engine.forward_backward(inputs, targets, LOSS)
        if not is_memory:
            words = "".join(caught.value.__notes__)
            assert f"in replica {number} on cuda:{number}, sub-step 0, rows" in words
            assert all(parameter.grad is None for parameter in model.parameters())
            found = engine.forward_backward(inputs, targets, LOSS)
    assert torch.equal(found, expected)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_values_read_by_host_have_arrived():
    """A copy that does not wait, to pinned memory, would be read too early."""
    values = torch.ones(4, device=CARD)
    records = traced(lambda: to_host([values]))
    assert [r.blocks for r in records if r.kind == "copy_out"] == [True]


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four cards")
def test_large_models_are_sent_in_lanes(monkeypatch):
    """Parameters along a chain and gradients by owners, on streams for each direction.

    Pieces are packed, and more than two use the same buffers.
    """
    monkeypatch.setattr(pieces, "BYTES_PER_DEVICE", 64)
    monkeypatch.setattr(coalescing, "CHUNK_BYTES", 2048)
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(40)]
    model = nn.Sequential(*layers, nn.Linear(8, 200), nn.Linear(200, 4)).to(CARD)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    inputs, targets = torch.randn(64, 8), torch.arange(64) % 4

    def step():
        optimizer.zero_grad()
        engine.forward_backward(inputs, targets, LOSS)
        # Memory that the lanes have used is given out again.
        for device in range(4):
            torch.zeros(4096, device=f"cuda:{device}")
        optimizer.step()

    with ScatterOnceParallel(model, 2, [0, 1, 2, 3], verify=False) as engine:
        for _ in range(3):
            step()
        records = traced(step)
        size = sum(parameter.nbytes for parameter in model.parameters())
        assert engine.last_step.bytes["replicate"] == 3 * size
        assert engine.last_step.bytes["reduce"] == 4 * size
    computing = {
        (record.device, record.stream)
        for record in records
        if record.kind == "library"  # matrix products
    }
    copies = [record for record in records if record.kind == "copy_peer"]
    assert copies
    assert not computing & {(record.device, record.stream) for record in copies}


@pytest.mark.skipif(TWO == [0, 0], reason="needs two cards")
def test_lanes_wait_for_what_was_computed():
    """Of the source, and of the memory that a copy writes."""
    second = torch.device("cuda:1")
    source = torch.ones(2**16, device=CARD).mul_(2)
    target = torch.ones(2**16, device=second).mul_(2)
    with Lanes([CARD, second], Transfers(), "reduce") as lanes:
        lanes.send(source, CARD, target, second)
    assert torch.accelerator.current_stream(second).stream_id == 0
    target.mul_(2)


def test_unpacked_tensors_count_as_written():
    """A graph that has saved one refuses its backward pass, as after any write."""
    weights = [torch.ones(size, device=CARD, requires_grad=True) for size in (3, 5)]
    loss = sum(weight.square().sum() for weight in weights)
    piece = Piece(torch.float32, [(0, 0, 3), (1, 0, 5)])
    with torch.no_grad():
        flat = [weight.detach() for weight in weights]
        piece.unpack(torch.full((8,), 2.0, device=CARD), flat)
    assert [weight.tolist() for weight in weights] == [[2.0] * 3, [2.0] * 5]
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()


# --- lifetimes ---


@pytest.mark.parametrize("is_dropped", [False, True])
def test_memory_being_written_not_given_out(is_dropped):
    """Nobody waits for these rows: their tensor is dropped, and the prefetcher, too."""
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


@pytest.mark.parametrize("is_one", [False, True], ids=["all", "one parameter"])
def test_gradients_readable_during_next_replay(is_one):
    """They are the caller's own; a graph adds up in tensors that stay.

    The gradient of one parameter is no part of a larger tensor, so nobody else copies.
    """
    model = network()
    parameters = [*model.parameters()]
    if is_one:
        model.requires_grad_(False)
        parameters = [parameters[0].requires_grad_()]
    inputs, targets = batch()
    engine = ScatterOnceParallel(model, 8, [0], graphs=True, verify=False)
    with engine, streams_of_the_users():
        engine.forward_backward(inputs, targets, LOSS)
        assert engine.last_step.graphs == "3 of 8 sub-steps replayed"
        reading = torch.cuda.Stream(0)
        reading.wait_stream(torch.cuda.current_stream(0))
        gradients = [parameter.grad for parameter in parameters]
        model.zero_grad()
        with torch.cuda.stream(reading):
            for gradient in gradients:
                gradient.norm()
        engine.forward_backward(inputs, targets, LOSS)
        torch.cuda.synchronize(0)


def test_next_rows_copied_behind_the_first_replay():
    """The card has nothing to do before it. Yet the rows arrive while it computes."""
    model = network()
    inputs, targets = (tensor.cpu().pin_memory() for tensor in batch())
    with ScatterOnceParallel(model, 8, [0], graphs=True, verify=False) as engine:

        def step():
            engine.forward_backward(inputs, targets, LOSS)

        step()
        step()
        assert engine.last_step.graphs == "7 of 8 sub-steps replayed"
        records = traced(step)
    kinds = [record.kind for record in records]
    launch = kinds.index("graph_launch")
    assert kinds[:launch].count("copy_in") == 2  # inputs and targets of sub-step 0
    copy = kinds.index("copy_in", launch)
    waits_of_copy = [
        record.address
        for record in records[launch:copy]
        if (record.kind, record.stream) == ("event_wait", records[copy].stream)
    ]
    recorded = {r.address for r in records[:launch] if r.kind == "event_record"}
    since = {r.address for r in records[launch:copy] if r.kind == "event_record"}
    assert waits_of_copy
    assert recorded.issuperset(waits_of_copy)
    assert since.isdisjoint(waits_of_copy)


def waits(m, x):
    """Waits for the card in the forward pass, which no graph can, and no tape sees."""
    torch.cuda.synchronize(0)
    return m.dropout(m.body(x))


def test_failed_capture_restores_allocator():
    """Before torch 2.13 both stayed in the capture: no draws, and memory was lost."""
    model = Of(waits, body=nn.Linear(8, 8), dropout=nn.Dropout(0.5)).to(CARD)
    engine = ScatterOnceParallel(model, 8, [0], graphs=True, verify=False)
    with engine, pytest.warns(match="cannot be captured"):
        engine.forward_backward(torch.randn(16, 8), torch.arange(16) % 8, LOSS)
    size = 200 << 20
    stream = torch.cuda.Stream(0)
    block = torch.empty(size, dtype=torch.uint8, device=CARD)
    block.record_stream(stream)
    place = block.data_ptr()
    del block
    torch.cuda.synchronize(0)
    assert torch.empty(size, dtype=torch.uint8, device=CARD).data_ptr() == place
    dropped = torch.dropout(torch.ones(64, device=CARD), 0.5, True)
    assert set(dropped.tolist()) == {0.0, 2.0}


def captured_engine(criterion=LOSS, ids=(0,), accum=8):
    """An engine with captured sub-steps, after a step."""
    engine = ScatterOnceParallel(network(), accum, ids, graphs=True, verify=False)
    engine.forward_backward(*batch(), criterion)
    return engine


def workspaces_in_pools():
    """How many of cuBLAS's workspaces are in the memory pools of live graphs.

    Torch must not know them any more: else what is computed later writes to them, too.
    """
    gc.collect()
    torch.cuda.empty_cache()
    count = 0
    for segment in torch.cuda.memory_snapshot():
        is_of_graph = segment["segment_pool_id"] != (0, 0)
        if is_of_graph and segment["total_size"] >= WORKSPACE:
            assert not segment["active_size"]
            count += 1
    return count


def test_closed_engine_leaves_others_workspaces():
    """All graphs are captured on one stream. From torch 2.12 on the end of a graph frees
    the workspaces of its stream, to which the kernels of another graph still write.
    """
    earlier = workspaces_in_pools()
    with captured_engine():
        of_engine = workspaces_in_pools() - earlier
        assert of_engine >= 1
        with captured_engine():
            assert workspaces_in_pools() == earlier + 2 * of_engine
        assert workspaces_in_pools() == earlier + of_engine
    assert workspaces_in_pools() == earlier


def wait_for_the_card(number):
    """Another thread waits for all work on the card; an error is its own."""

    def wait():
        with contextlib.suppress(RuntimeError):
            torch.cuda.synchronize(number)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()


@pytest.mark.parametrize(("lost", "is_told"), [(1, False), (2, True)])
@pytest.mark.parametrize("when", ["in the criterion", "at the end"])
def test_waiting_thread_breaks_the_capture(when, lost, is_told, monkeypatch):
    """The capture is lost. A second try may succeed; else sub-steps run without graphs.

    At the end: no operator fails, but the end of the capture.
    """
    waits = []  # the card of each lost capture
    begun = []  # captures of sub-steps that have not ended
    end = torch.cuda.CUDAGraph.capture_end

    def wait(place):
        here = torch.cuda.current_device()
        if place == when and begun and waits.count(here) < lost:
            begun.clear()
            waits.append(here)
            wait_for_the_card(here)

    is_capturing = torch.cuda.is_current_stream_capturing

    def asked():
        if is_capturing():
            begun.append(True)
        wait("in the criterion")
        return is_capturing()

    # Not by a variable of the criterion: one that each call writes is not captured.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)

    def criterion(output, targets):
        torch.cuda.is_current_stream_capturing()
        return LOSS(output, targets)

    def capture_end(graph):
        wait("at the end")
        end(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", capture_end)
    inputs, targets = batch()
    results = []
    for graphs in (False, True):
        model = network()
        engine = ScatterOnceParallel(model, 8, TWO, graphs=graphs, verify=False)
        with engine, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                loss = engine.forward_backward(inputs, targets, criterion)
        results.append([loss, *(parameter.grad for parameter in model.parameters())])
    for eager, captured in zip(*results, strict=True):
        assert torch.equal(eager, captured)
    if is_told:  # one replica's refusal is that of all
        assert sorted(waits) in (sorted([*set(TWO)] * lost), [TWO[0]] * 2, [TWO[1]] * 2)
    else:
        assert sorted(waits) == sorted(set(TWO))
    words = "another thread waits for the device"
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == is_told, texts
    assert all(words in text for text in texts), texts


def test_garbage_collected_once_per_capture(monkeypatch):
    collections = []
    collect = gc.collect
    monkeypatch.setattr(gc, "collect", lambda: collections.append(1) or collect())
    with captured_engine(ids=(0, 0)) as engine:  # a graph per replica
        assert sum(collections) == 1
        engine.forward_backward(*batch(), LOSS)
        assert sum(collections) == 1


class Attention(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.into = nn.Linear(16, 48)
        self.out = nn.Linear(16, 5)

    def forward(self, x):
        heads = self.into(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        read = nn.functional.scaled_dot_product_attention(*heads, dropout_p=self.rate)
        return self.out(read.transpose(1, 2).flatten(2).mean(1))


@pytest.fixture
def fused_attention():
    """Its kernels have no values here, but results as on a card."""
    flags = torch.backends.cuda
    before = [
        flags.flash_sdp_enabled(),
        flags.mem_efficient_sdp_enabled(),
        flags.math_sdp_enabled(),
    ]
    switches = flags.enable_flash_sdp, flags.enable_mem_efficient_sdp
    for switch in switches:
        switch(True)
    flags.enable_math_sdp(False)
    yield
    for switch, is_on in zip((*switches, flags.enable_math_sdp), before, strict=True):
        switch(is_on)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("autocast", [False, True])
def test_fused_attention_is_captured(fused_attention, rate, autocast):
    """Eagerly, one of its kernels leaves the state of its draws on the host."""
    model = Attention(rate).to(CARD)
    inputs, targets = torch.randn(24, 8, 16), torch.arange(24) % 5
    engine = ScatterOnceParallel(model, 6, [0], graphs=True, verify=False)
    with engine, warnings.catch_warnings():
        warnings.filterwarnings("error", message="graphs=True")
        for _ in range(4):
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                engine.forward_backward(inputs, targets, LOSS)
        assert engine.last_step.graphs == "5 of 6 sub-steps replayed"


@pytest.mark.parametrize("rate", [0.0, 0.5])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_that_draw_run_eagerly(use_reentrant, rate):
    """In the backward pass they set the generator back, which no graph repeats."""

    def recomputed(model, x):
        def part(y):
            return nn.functional.dropout(model.inner(y), rate).tanh()

        return model.outer(
            checkpoint(part, model.inner(x), use_reentrant=use_reentrant)
        )

    inputs, targets = torch.randn(24, 8), torch.arange(24) % 5
    results = []
    for graphs in (True, False):
        torch.manual_seed(1)
        model = Of(recomputed, inner=nn.Linear(8, 8), outer=nn.Linear(8, 5)).to(CARD)
        engine = ScatterOnceParallel(model, 6, [0], graphs=graphs, verify=False)
        with engine, warnings.catch_warnings(action="ignore"):
            losses = [engine.forward_backward(inputs, targets, LOSS) for _ in range(3)]
            if graphs:
                has_graphs = "replayed" in engine.last_step.graphs
                assert has_graphs == (not rate)
        results.append([*losses, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))
