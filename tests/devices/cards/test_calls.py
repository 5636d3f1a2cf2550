"""Calls of the engine and of the pair on accelerators: streams, copies, gradients.

Where there is none, ``test_simulated.py`` runs these on a simulated one.
"""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from calls.programs import PROGRAMS, SELECTING, Own, Program, cross_entropy, mlp
from devices.cards.test_accelerator import kind, moved, streams_of_the_users
from harness.oracle import assert_gradients, build, gradients, randint, randn
from torch import nn

from scatterpar import (
    DataParallelCriterion,
    DataParallelModel,
    ScatterOnceParallel,
    gather,
)

pytestmark = [
    pytest.mark.nullcuda,
    pytest.mark.cuda,
    # Checkpoints inside of replicas exchange the host's generator at the same time.
    pytest.mark.draws,
    pytest.mark.skipif(
        not torch.accelerator.is_available(), reason="no accelerator is here"
    ),
]
PLACES = [[0, 1], [0, 0, 1], [0, 1, 2, 3]]
ROWS, LABELS = randn(13, 6), randint(3, 13)


def _reads_logits(call, net, rows, labels):
    output = call(rows, labels)
    return output["loss"] + output["logits"].square().mean()


CHOSEN = {
    name: (PROGRAMS | SELECTING)[name]
    for name in (
        "mlp",
        "images",
        "tied weights",
        "a layer that some rows use",
        "checkpoint inside",
        "reentrant checkpoint inside",
        "checkpoint around",
        "reentrant checkpoint around",
        "gradient penalty",
        "two calls in one loss",
        "two losses of one call",
        "a call of an output",
        "a number that needs a gradient",
        "contrastive",
        "written in place",
        "mean loss inside",
        "mean loss of labels inside",
        "left in an attribute",
        "left in a list",
        "a mask that the first call makes",
        "tables that the first call makes",
        "Hessian times vector",
        "gradient of one weight",
    )
} | {
    "logits beside a loss": Program(
        PROGRAMS["mean loss inside"].make, _reads_logits, "needs one output"
    ),
}
OF_THE_PAIR = [n for n, program in CHOSEN.items() if not program.engine_alone]


def with_calls(names):
    """Each name with numbers of calls, all except the last in ``no_sync``.

    There ``autograd.grad`` of parameters is refused.
    """
    for name in names:
        yield name, 1
        if name not in SELECTING:
            yield name, 3


@pytest.fixture(params=PLACES, ids=str)
def device_ids(request):
    if max(request.param) >= torch.accelerator.device_count():
        pytest.skip(f"needs {max(request.param) + 1} accelerators")
    return request.param


def run(program, call, net, no_sync, calls, place="device"):
    """The losses of some calls, whose gradients are accumulated."""
    losses = []
    labels, rows = LABELS.to(kind()), *moved(place, ROWS)
    for number in range(calls):
        some = slice(number, 9 + 2 * number)
        part = rows[some].clone()
        part = part.pin_memory() if place == "pinned" else part
        is_last = number + 1 == calls
        with contextlib.nullcontext() if is_last else no_sync():
            loss = program.loss(call, net, part, labels[some])
            loss.backward()
        if place != "device":
            part.fill_(torch.nan)
        losses.append(loss.detach())
    return losses


def on_card(program):
    return build(program.make).to(kind())


def assert_same(net, found, plain, expected):
    torch.accelerator.synchronize()
    found, expected = ([x.cpu() for x in losses] for losses in (found, expected))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert_gradients(net, gradients(plain))


@pytest.mark.parametrize(("name", "calls"), [*with_calls(CHOSEN)])
def test_call_on_accelerators_is_exact(name, calls, device_ids):
    program = CHOSEN[name]
    net, plain = on_card(program), on_card(program)
    expected = run(program, plain, plain, contextlib.nullcontext, calls)
    torch.accelerator.synchronize()
    engine = ScatterOnceParallel(net, device_ids=device_ids)
    with engine, streams_of_the_users(), warnings.catch_warnings(action="ignore"):
        found = run(program, engine, net, engine.no_sync, calls)
    assert_same(net, found, plain, expected)


def check_pair(program, calls, device_ids):
    net, plain = on_card(program), on_card(program)
    expected = run(program, plain, plain, contextlib.nullcontext, calls)
    torch.accelerator.synchronize()
    pair = DataParallelModel(net, device_ids)

    def call(*args, **kwargs):
        return gather(pair(*args, **kwargs), f"{kind()}:0")

    with streams_of_the_users():
        found = run(program, call, net, pair.no_sync, calls)
    assert_same(net, found, plain, expected)


@pytest.mark.parametrize(("name", "calls"), [*with_calls(OF_THE_PAIR)])
def test_pair_on_accelerators_is_exact(name, calls, device_ids):
    check_pair(CHOSEN[name], calls, device_ids)


def test_outputs_of_a_checkpointed_pair_are_waited_for(device_ids):
    """The pass that computes them again runs in a thread of autograd's."""
    check_pair(CHOSEN["reentrant checkpoint around"], 1, device_ids)


@pytest.mark.parametrize("place", ["host", "pinned", "device"])
@pytest.mark.parametrize("calls", [1, 3])
def test_pair_with_criterion_equals_plain_torch(calls, place, device_ids):
    net, plain = on_card(Program()), on_card(Program())
    expected = run(Program(), plain, plain, contextlib.nullcontext, calls)
    torch.accelerator.synchronize()
    pair = DataParallelModel(net, device_ids)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss())
    program = Program(
        loss=lambda call, net, rows, labels: criterion(pair(rows), labels)
    )
    with streams_of_the_users():
        found = run(program, pair, net, pair.no_sync, calls, place)
    assert_same(net, found, plain, expected)


@pytest.mark.parametrize("place", ["host", "pinned"])
def test_rows_of_the_host_are_sent(place, device_ids):
    net, plain = on_card(Program()), on_card(Program())
    expected = run(Program(), plain, plain, contextlib.nullcontext, 3)
    torch.accelerator.synchronize()
    engine = ScatterOnceParallel(net, device_ids=device_ids)
    with engine, streams_of_the_users():
        found = run(Program(), engine, net, engine.no_sync, 3, place)
    assert_same(net, found, plain, expected)


def _normalised():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_batch_normalisation_is_that_of_each_replica(device_ids):
    net, plain = build(_normalised).to(kind()), build(_normalised).to(kind())
    engine = ScatterOnceParallel(net, device_ids=device_ids)
    rows, labels = ROWS.to(kind()), LABELS.to(kind())
    with engine, streams_of_the_users(), warnings.catch_warnings(action="ignore"):
        for number in range(2):
            with engine.no_sync() if not number else contextlib.nullcontext():
                cross_entropy(engine, net, rows, labels).backward()
        spans = [slice(s.start, s.stop) for s in engine.plan(len(rows)).shares]
    torch.accelerator.synchronize()
    for _ in range(2):
        others = [copy.deepcopy(plain[1]) for _ in spans[1:]]
        parts = []
        for part, norm in zip(spans, [plain[1], *others], strict=True):
            hidden = F.batch_norm(
                plain[0](rows[part]), None, None, plain[1].weight, plain[1].bias, True
            )
            norm(plain[0](rows[part]).detach())  # for its running statistics
            parts.append(plain[2](hidden))
        F.cross_entropy(torch.cat(parts), labels).backward()
    assert_gradients(net, gradients(plain))
    torch.testing.assert_close(net[1].running_var.cpu(), plain[1].running_var.cpu())


class OfUser:
    """The user's own part: the master's tensors go from stream to stream."""

    def __init__(self):
        self._master = f"{kind()}:0"
        self._stream = torch.accelerator.current_stream(self._master)

    def follow(self):
        """The current stream waits for the one that was current in the last call."""
        before = self._stream
        self._stream = torch.accelerator.current_stream(self._master)
        self._stream.wait_stream(before)


@pytest.fixture
def trained_plain():
    """A network, and its twin with the gradients of four calls."""
    net, plain = on_card(Program()), on_card(Program())
    rows, labels = ROWS.to(kind()), LABELS.to(kind())
    for _ in range(4):
        cross_entropy(plain, plain, rows, labels).backward()
    torch.accelerator.synchronize()
    return net, plain, (rows, labels)


def test_calls_on_other_streams_each_time(device_ids, trained_plain):
    """What waits at replicas is added on streams that have waited for it."""
    net, plain, batch = trained_plain
    with ScatterOnceParallel(net, device_ids=device_ids) as engine:
        user = OfUser()
        for number in range(4):
            with contextlib.ExitStack() as stack:
                if number < 3:
                    stack.enter_context(engine.no_sync())
                stack.enter_context(streams_of_the_users())
                user.follow()
                loss = cross_entropy(engine, net, *batch)
                if number == 1:
                    stack.enter_context(streams_of_the_users())
                    user.follow()
                loss.backward()
        user.follow()
    assert_same(net, [], plain, [])


def test_calls_on_other_streams_in_one_loss(device_ids, trained_plain):
    """Gradients of both calls arrive in one pass, each on the streams of its call."""
    net, plain, batch = trained_plain
    with ScatterOnceParallel(net, device_ids=device_ids) as engine:
        user = OfUser()
        for number in range(2):
            with contextlib.ExitStack() as stack:
                if number < 1:
                    stack.enter_context(engine.no_sync())
                losses = []
                for _ in range(2):
                    stack.enter_context(streams_of_the_users())
                    user.follow()
                    losses.append(cross_entropy(engine, net, *batch))
                sum(losses).backward()
        user.follow()
    assert_same(net, [], plain, [])


def test_constant_of_each_replica_is_not_told(device_ids):
    """It has the same values on another accelerator."""

    def forward(self, rows):
        self.scale = rows.new_ones(6) * 2
        return self.net(rows * self.scale)

    net = build(lambda: Own(forward, net=mlp(), scale=None)).to(kind())
    engine = ScatterOnceParallel(net, device_ids=device_ids)
    with engine, warnings.catch_warnings(action="error"):
        engine(ROWS.to(kind()))


class Vocabulary(nn.Module):
    """Its logits take all the memory."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 50_000)

    def forward(self, rows, labels):
        logits = self.head(rows)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("device_ids", [[0, 1], [0, 1, 2, 3]], indirect=True, ids=str)
def test_logits_that_nobody_reads_stay(is_read, device_ids):
    """In multiples of the logits of one replica's rows: at most 4.4 where they stay,
    and where they are read 5.4 on the first of two accelerators, 7.4 of four.
    """
    try:
        torch.accelerator.reset_peak_memory_stats(0)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"memory is not counted here: {error}")
    count, rows = len(device_ids), 64
    size = rows * 50_000 * 4
    net = Vocabulary().to(kind())
    inputs = torch.zeros(count * rows, 2, device=kind())
    labels = torch.zeros(count * rows, dtype=torch.int64, device=kind())
    with ScatterOnceParallel(net, device_ids=device_ids, verify=False) as engine:
        engine(inputs, labels)["loss"].backward()
        net.zero_grad()
        torch.accelerator.synchronize()
        before = [torch.accelerator.memory_allocated(i) for i in device_ids]
        for device in device_ids:
            torch.accelerator.reset_peak_memory_stats(device)
        output = engine(inputs, labels)
        logits = output["logits"] if is_read else None
        output["loss"].backward()
        torch.accelerator.synchronize()
        peaks = [torch.accelerator.max_memory_allocated(i) for i in device_ids]
    sizes = [(p - b) / size for p, b in zip(peaks, before, strict=True)]
    assert max(sizes[1:]) <= 4.4
    assert sizes[0] <= (3.4 + count if is_read else 4.4)
    assert is_read == (logits is not None)
