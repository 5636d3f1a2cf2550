"""Shares that do not fit as a whole arrive micro-batch by micro-batch, every byte once.

The virtual devices here refuse to take more than ``room`` rows in one copy.
"""

from __future__ import annotations

import copy
import warnings
import weakref

import pytest
import torch
from faults.state import capture, differences, values_differ
from helpers.oracle import build, randint, randn
from torch import nn

from scatterpar import Replicated, Rows, ScatterOnceParallel
from scatterpar.devices.ledger import Ledger

ROWS, FEATURES, CLASSES = 37, 8, 3
VIRTUAL = ["cpu:0", "cpu:1", "cpu:2"]  # the first is not the host either: all shares have to cross
LOSS = nn.CrossEntropyLoss()


class Room:
    """How many rows a device takes at once; and in which order it was given how many."""

    def __init__(self):
        self.rows = 4
        self.refused = 0
        self.log = []


@pytest.fixture
def room(monkeypatch):
    room, copied = Room(), Ledger.copy

    def refusing(ledger, tensor, device, phase):
        rows = len(tensor) if tensor.ndim else 1
        if phase == "scatter" and rows > room.rows:
            room.refused += 1
            raise torch.OutOfMemoryError(f"no room for {rows} rows")
        room.log.append((phase, device.index, rows))
        return copied(ledger, tensor, device, phase)

    monkeypatch.setattr(Ledger, "copy", refusing)
    return room


def net():
    return build(lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)))


def batch(rows=ROWS):
    return randn(rows, FEATURES), randint(CLASSES, rows)


def plain(model, inputs, targets, criterion=LOSS):
    twin = copy.deepcopy(model)
    loss = criterion(twin(inputs), targets)
    loss.backward()
    return loss.detach(), [p.grad for p in twin.parameters()]


def assert_gradients(model, expected):
    found = [p.grad for p in model.parameters()]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def crossed(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def test_a_share_that_does_not_fit_arrives_in_parts(room):
    """It was scattered whole, whatever accum was: more sub-steps were no cure."""
    model = net()
    inputs, targets = batch()
    loss, expected = plain(model, inputs, targets)
    with ScatterOnceParallel(model, "auto", VIRTUAL) as engine:
        with pytest.warns(UserWarning, match="arrive micro-batch by micro-batch") as caught:
            found = engine.forward_backward(inputs, targets, LOSS)
        assert str(caught[0].message) == (
            'accum="auto": 37 rows with accum=1 ran out of memory; accum=4 is the smallest that '
            "fits, with shares that arrive micro-batch by micro-batch, and is kept"
        )
        torch.testing.assert_close(found, loss)
        assert_gradients(model, expected)
        report = engine.last_step
        assert 0 < report.retries <= room.refused  # a try ends when all replicas have
        assert report.bytes["scatter"] == crossed(inputs, targets)
        assert report.messages["scatter"] == 2 * sum(
            len(s.micro_batches) for s in report.plan.shares
        )


def test_later_steps_and_inference_begin_with_it(room):
    model = net()
    inputs, targets = batch()
    _, expected = plain(model, inputs, targets)
    with ScatterOnceParallel(model, "auto", VIRTUAL) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine.forward_backward(inputs, targets, LOSS)
        warnings.simplefilter("error")
        refused = room.refused
        engine.forward_backward(inputs, targets, LOSS)
        assert engine.last_step.retries == 0
        assert engine.last_step.bytes["scatter"] == crossed(inputs, targets)
        assert_gradients(model, [2 * g for g in expected])
        with torch.no_grad():
            torch.testing.assert_close(engine.eval()(inputs), model(inputs))
        assert room.refused == refused


@pytest.mark.draws
def test_the_bits_are_those_of_the_same_accum_with_whole_shares(room):
    model, twin = net(), net()
    model.insert(1, nn.Dropout(0.3))
    twin.insert(1, nn.Dropout(0.3))
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for accum, which in (("auto", model), (4, twin)):
            with ScatterOnceParallel(which, accum, VIRTUAL) as engine:
                torch.manual_seed(3)
                found.append(engine.forward_backward(*batch(), LOSS))
            room.rows = 10**9
    assert torch.equal(*found)
    assert values_differ(twin, model) == []


def test_the_next_rows_set_out_before_these_are_computed(room):
    """One ahead of the computation, and no more than one."""
    seen = []

    class Watched(nn.Linear):
        def forward(self, inputs):
            seen.append(sum(1 for entry in room.log if entry[0] == "scatter"))
            return super().forward(inputs)

    model = build(lambda: Watched(FEATURES, CLASSES))
    inputs = randn(8, FEATURES)
    room.rows = 2
    with ScatterOnceParallel(model, "auto", ["cpu:1"], verify=False) as engine:
        with pytest.warns(UserWarning, match="accum=4"):
            engine.forward_backward(inputs, None, lambda output, _: output.square().mean())
        room.log.clear(), seen.clear()
        engine.forward_backward(inputs, None, lambda output, _: output.square().mean())
    assert seen == [2, 3, 4, 4]


class Mixed(nn.Module):
    """Takes a table, a scale without rows, a list with one entry per row, and plain rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, rows, *, table, scale, entries, mode):
        assert mode == "sum"
        assert len(entries) == len(rows)
        sums = torch.stack([entry.sum() for entry in entries])
        return self.layer(rows @ table * scale) + sums[:, None]


def test_what_has_no_rows_arrives_once(room):
    model = build(Mixed)
    rows, targets = batch(24)
    table, scale = randn(FEATURES, FEATURES, seed=5), torch.tensor(0.5, dtype=torch.float64)
    entries = [randn(1 + i % 3, seed=i) for i in range(24)]
    inputs = {"rows": rows, "table": table, "scale": scale, "entries": entries, "mode": "sum"}
    loss = LOSS(model(**inputs), targets)
    expected = list(torch.autograd.grad(loss, list(model.parameters())))
    marked = inputs | {"table": Replicated(table), "entries": Rows(entries)}
    room.rows = 8  # of the table's rows too
    with ScatterOnceParallel(model, "auto", ["cpu:1", "cpu:2"]) as engine:
        with pytest.warns(UserWarning, match="arrive micro-batch by micro-batch"):
            engine.forward_backward(marked, targets, LOSS)
        assert_gradients(model, expected)
        everything = crossed(rows, targets, *entries) + 2 * crossed(table, scale)
        assert engine.last_step.bytes["scatter"] == everything


def test_several_batches_in_one(room):
    model = net()
    batches = [batch(7), batch(12)]
    total = sum(len(labels) for _, labels in batches)
    for inputs, labels in batches:
        (LOSS(model(inputs), labels) * len(labels) / total).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with ScatterOnceParallel(model, "auto", VIRTUAL) as engine:
        inputs, labels = zip(*batches, strict=True)
        room.rows = 2
        with pytest.warns(UserWarning, match="arrive micro-batch by micro-batch"):
            engine.forward_backward(Rows.from_batches(inputs), Rows.from_batches(labels), LOSS)
    assert_gradients(model, expected)


def test_a_loss_of_the_whole_batch(room):
    """Its second pass needs most of the rows again: they cross twice, and are counted twice."""

    def of_pairs(outputs, _):
        return torch.cdist(outputs, outputs).square().mean()

    model = net()
    inputs, _ = batch(24)
    loss, expected = plain(model, inputs, None, of_pairs)
    with ScatterOnceParallel(model, "auto", VIRTUAL) as engine:
        with pytest.warns(UserWarning, match="arrive micro-batch by micro-batch"):
            found = engine.forward_backward(inputs, None, of_pairs, whole_batch=True)
        shares = engine.last_step.plan.shares
        last = sum(share.micro_batches[-1][1] - share.micro_batches[-1][0] for share in shares)
        row = crossed(inputs) // 24
        assert engine.last_step.bytes["scatter"] <= (2 * 24) * row
        assert engine.last_step.bytes["scatter"] >= (2 * 24 - last) * row
    torch.testing.assert_close(found, loss)
    assert_gradients(model, expected)


def test_targets_of_a_whole_batch_need_smaller_graphs_not_smaller_shares(monkeypatch):
    """They come to the master beside the graphs that were kept. When they did not fit there, that
    was taken for a share that does not fit: more sub-steps were not tried, and the step failed."""
    copied, graphs = Ledger.copy, []

    class Wide(nn.Linear):
        def forward(self, inputs):
            graphs.append(len(inputs))
            return super().forward(inputs)

    def refusing(ledger, tensor, device, phase):
        if tensor.dtype == torch.int64 and graphs[-1] > 6:
            raise torch.OutOfMemoryError(f"no room beside a graph of {graphs[-1]} rows")
        return copied(ledger, tensor, device, phase)

    monkeypatch.setattr(Ledger, "copy", refusing)
    model = build(lambda: Wide(FEATURES, CLASSES))
    inputs, targets = batch(24)
    _, expected = plain(model, inputs, targets)
    with ScatterOnceParallel(model, "auto", ["cpu:1"]) as engine:
        with pytest.warns(UserWarning, match="accum=4 is the smallest that fits, and is kept"):
            engine.forward_backward(inputs, targets, LOSS, whole_batch=True)
        assert engine.last_step.retries > 0
    assert_gradients(model, expected)


@pytest.fixture
def rows_there(monkeypatch):
    """How many rows of the batch the devices hold as copies, right now."""
    copied, copies = Ledger.copy, []

    def remembering(ledger, tensor, device, phase):
        made = copied(ledger, tensor, device, phase)
        if phase == "scatter":
            copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Ledger, "copy", remembering)
    return lambda: sum(len(made()) for made in copies if made() is not None)


def test_a_criterion_that_fits_beside_a_few_rows_gets_its_room(rows_there):
    """It was said not to fit with nothing else in memory while whole shares were there."""

    def criterion(outputs, _):
        if rows_there() > 12:
            raise torch.OutOfMemoryError("no room for the criterion")
        return torch.cdist(outputs, outputs).square().mean()

    model = net()
    inputs, _ = batch(24)
    loss, expected = plain(model, inputs, None, lambda o, _: torch.cdist(o, o).square().mean())
    with ScatterOnceParallel(model, "auto", ["cpu:1"]) as engine:
        with pytest.warns(UserWarning, match="arrive micro-batch by micro-batch"):
            found = engine.forward_backward(inputs, None, criterion, whole_batch=True)
        engine.forward_backward(inputs, None, criterion, whole_batch=True)
        assert engine.last_step.retries == 0
    torch.testing.assert_close(found, loss)
    assert_gradients(model, [2 * g for g in expected])


@pytest.mark.parametrize("accum", [2, "auto"])
def test_with_nothing_else_means_so(rows_there, accum):
    there = []

    def criterion(outputs, _):
        there.append(rows_there())
        raise torch.OutOfMemoryError("no room for the criterion")

    model = net()
    with ScatterOnceParallel(model, accum, ["cpu:1"]) as engine:
        before = capture(model)
        with pytest.raises(torch.OutOfMemoryError, match="no room for the criterion") as caught:
            engine.forward_backward(batch(24)[0], None, criterion, whole_batch=True)
        assert differences(before, capture(model)) == []
    notes = "\n".join(caught.value.__notes__)
    if accum == "auto":
        assert "it does not fit on cpu:1 with nothing else: more sub-steps do not help" in notes
        assert there == [24, 24, 1, 0]
    else:
        assert (
            "it does not fit on cpu:1 beside the rows that were scattered there, without any "
            'graph; accum="auto" lets them arrive micro-batch by micro-batch'
        ) in notes
        assert "nothing else" not in notes
        assert there == [24, 24]


def test_one_row_that_does_not_fit_changes_nothing(room):
    model = net()
    room.rows = 0
    with ScatterOnceParallel(model, "auto", VIRTUAL) as engine:
        before = capture(model)
        with pytest.raises(torch.OutOfMemoryError, match="no room for 1 rows") as caught:
            engine.forward_backward(*batch(), LOSS)
        assert differences(before, capture(model)) == []
        assert "a sub-step is one row, and that does not fit" in "\n".join(caught.value.__notes__)
        room.rows = 10**9
        engine.forward_backward(*batch(), LOSS)
        assert engine.last_step.retries == 0
        assert engine.last_step.messages["scatter"] == 2 * len(VIRTUAL)  # whole shares again


def test_a_batch_that_is_there_already_has_nowhere_to_wait(room):
    """Nothing crosses, so nothing could arrive later: the error is the first search's."""
    calls = []

    def criterion(output, targets):
        calls.append(len(targets))
        raise torch.OutOfMemoryError("no room")

    model = net()
    engine = ScatterOnceParallel(model, "auto", ["cpu"] * 2)
    with engine, pytest.raises(torch.OutOfMemoryError, match="no room"):
        engine.forward_backward(*batch(8), criterion)
    assert min(calls) == 1
    assert calls.count(1) <= 2  # once a replica


def test_with_a_fixed_accum_the_error_says_which_share_it_was(room):
    model = net()
    engine = ScatterOnceParallel(model, 16, VIRTUAL)
    with engine, pytest.raises(torch.OutOfMemoryError, match="no room for 13 rows") as caught:
        engine.forward_backward(*batch(), LOSS)
    assert caught.value.__notes__ == [
        "the 13 rows of replica 0 on cpu:0 do not fit there when they are scattered"
    ]


def test_an_error_between_two_arrivals_leaves_no_trace(room):
    class Fails(nn.Linear):
        calls = 0

        def forward(self, inputs):
            Fails.calls += 1
            if Fails.calls == 6:
                raise KeyError("sixth")
            return super().forward(inputs)

    model = build(lambda: Fails(FEATURES, CLASSES))
    inputs, targets = batch(24)
    _, expected = plain(model, inputs, targets)
    with ScatterOnceParallel(model, "auto", ["cpu:1"], verify=False) as engine:
        Fails.calls = -(10**6)
        with pytest.warns(UserWarning, match="arrive"):
            engine.forward_backward(inputs, targets, LOSS)
        before, Fails.calls = capture(model), 1
        with pytest.raises(KeyError, match="sixth"):
            engine.forward_backward(inputs, targets, LOSS)
        assert differences(before, capture(model)) == []
        Fails.calls = -(10**6)
        model.zero_grad()
        engine.forward_backward(inputs, targets, LOSS)
        assert_gradients(model, expected)


def test_compiled_replicas(room):
    model = net()
    inputs, targets = batch(24)
    _, expected = plain(model, inputs, targets)
    with ScatterOnceParallel(model, "auto", VIRTUAL, compile={"backend": "eager"}) as engine:
        with pytest.warns(UserWarning, match="arrive"):
            engine.forward_backward(inputs, targets, LOSS)
        assert_gradients(model, expected)
        model.zero_grad()
        engine.forward_backward(inputs, targets, LOSS)
        assert_gradients(model, expected)
        assert engine.last_step.bytes["scatter"] == crossed(inputs, targets)
