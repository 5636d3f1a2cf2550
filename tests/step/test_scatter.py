"""Rows arrive micro-batch by micro-batch, one ahead of the computation, every byte once."""

from __future__ import annotations

import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from faults.state import nothing_changes
from harness.models import Of
from harness.notes import note_of
from harness.oracle import (
    assert_close,
    assert_gradients,
    assert_step,
    build,
    randint,
    randn,
    whole_batch,
)
from torch import nn

from scatterpar import Replicated, Rows, ScatterOnceParallel
from scatterpar.devices.transfers import Transfers

ROWS, FEATURES, CLASSES = 37, 8, 3
VIRTUAL = ["cpu:0", "cpu:1", "cpu:2"]  # the first is not the host either: all shares have to cross
LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def room(monkeypatch):
    """How many rows a device takes at once; and in which order it was given how many."""
    room, copied = SimpleNamespace(rows=4, refused=0, log=[]), Transfers.copy

    def refusing(transfers, tensor, device, phase):
        rows = len(tensor) if tensor.ndim else 1
        if phase == "scatter" and rows > room.rows:
            room.refused += 1
            raise torch.OutOfMemoryError(f"no room for {rows} rows")
        room.log.append((phase, device.index, rows))
        return copied(transfers, tensor, device, phase)

    monkeypatch.setattr(Transfers, "copy", refusing)
    return room


def net():
    return build(lambda: nn.Sequential(nn.Linear(FEATURES, 6), nn.Tanh(), nn.Linear(6, CLASSES)))


def batch(rows=ROWS):
    return randn(rows, FEATURES), randint(CLASSES, rows)


def crossed(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("accum", [4, "auto"])
def test_shares_need_no_more_room_than_their_sub_steps(room, accum):
    """They were scattered whole, whatever a fixed accum was."""
    model = net()
    inputs, targets = batch()
    with ScatterOnceParallel(model, accum, VIRTUAL) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_step(engine, inputs, targets, LOSS)
        report = engine.last_step
        assert (report.retries > 0) == (accum == "auto")
        assert report.retries <= room.refused  # a try ends when all replicas have
        assert [len(share.micro_batches) for share in report.plan.shares] == [4, 4, 4]
        assert report.bytes["scatter"] == crossed(inputs, targets)
        assert report.messages["scatter"] == 2 * 3 * 4
        with torch.no_grad():
            torch.testing.assert_close(engine.eval()(inputs), model(inputs))


def test_the_next_rows_set_out_before_these_are_computed(room):
    seen = []

    class Watched(nn.Linear):
        def forward(self, inputs):
            seen.append(sum(1 for entry in room.log if entry[0] == "scatter"))
            return super().forward(inputs)

    model = build(lambda: Watched(FEATURES, CLASSES))
    with ScatterOnceParallel(model, 4, ["cpu:1"], verify=False) as engine:
        engine.forward_backward(randn(8, FEATURES), None, lambda output, _: output.square().mean())
    assert seen == [2, 3, 4, 4]


@pytest.mark.parametrize("whole_batch", [False, True])
@pytest.mark.parametrize("names", [["cpu"] * 2, ["cpu:0", "cpu:1"]])
def test_what_a_module_gets_is_its_own_and_begins_where_memory_does(names, whole_batch):
    """It may write there; and kernels for memory that lies otherwise may round otherwise."""
    offsets = []

    class Writes(nn.Linear):
        def forward(self, inputs):
            offsets.append(inputs.storage_offset() or inputs.data_ptr() % 64)
            inputs.mul_(2)
            return super().forward(inputs)

    model = build(lambda: Writes(FEATURES, CLASSES))
    inputs, targets = batch(21)
    before = inputs.clone()
    with ScatterOnceParallel(model, 3, names, verify=False) as engine:
        plain = inputs.clone(), targets
        assert_step(engine, inputs, targets, LOSS, plain=plain, whole_batch=whole_batch)
    assert torch.equal(inputs, before)
    assert set(offsets) == {0}


def mixed(model, rows, *, table, scale, entries, mode):
    """Takes a table, a scale without rows, a list with one entry per row, and plain rows."""
    assert mode == "sum"
    assert len(entries) == len(rows)
    sums = torch.stack([entry.sum() for entry in entries])
    return model.layer(rows @ table * scale) + sums[:, None]


def test_what_has_no_rows_arrives_once(room):
    model = build(lambda: Of(mixed, layer=nn.Linear(FEATURES, CLASSES)))
    rows, targets = batch(24)
    table, scale = randn(FEATURES, FEATURES, seed=5), torch.tensor(0.5, dtype=torch.float64)
    entries = [randn(1 + i % 3, seed=i) for i in range(24)]
    inputs = {"rows": rows, "table": table, "scale": scale, "entries": entries, "mode": "sum"}
    marked = inputs | {"table": Replicated(table), "entries": Rows(entries)}
    room.rows = 12  # numbers, where entries travel together
    with ScatterOnceParallel(model, 2, ["cpu:1", "cpu:2"]) as engine:
        assert_step(engine, marked, targets, LOSS, plain=(inputs, targets))
        everything = crossed(rows, targets, *entries) + 2 * crossed(table, scale)
        assert engine.last_step.bytes["scatter"] == everything


def of_pairs(outputs, _):
    return torch.cdist(outputs, outputs).square().mean()


def test_a_loss_of_the_whole_batch_keeps_what_has_arrived(room):
    """Its second pass needs most of the rows again."""
    inputs, _ = batch(24)
    with ScatterOnceParallel(net(), 4, VIRTUAL) as engine:
        assert_step(engine, inputs, None, of_pairs, whole_batch=True)
        assert engine.last_step.bytes["scatter"] == crossed(inputs)


def test_targets_of_a_whole_batch_need_smaller_graphs_not_smaller_shares(monkeypatch):
    """They come to the master beside the graphs that were kept. When they did not fit there, that
    was taken for a share that does not fit: more sub-steps were not tried, and the step failed."""
    copied, graphs = Transfers.copy, []

    class Wide(nn.Linear):
        def forward(self, inputs):
            graphs.append(len(inputs))
            return super().forward(inputs)

    def refusing(transfers, tensor, device, phase):
        if tensor.dtype == torch.int64 and graphs[-1] > 6:
            raise torch.OutOfMemoryError(f"no room beside a graph of {graphs[-1]} rows")
        return copied(transfers, tensor, device, phase)

    monkeypatch.setattr(Transfers, "copy", refusing)
    model = build(lambda: Wide(FEATURES, CLASSES))
    inputs, targets = batch(24)
    with ScatterOnceParallel(model, "auto", ["cpu:1"]) as engine:
        with pytest.warns(UserWarning, match="accum=4 is the smallest that fits, and is kept"):
            assert_step(engine, inputs, targets, LOSS, whole_batch=True)
        assert engine.last_step.retries > 0


@pytest.fixture
def rows_there(monkeypatch):
    """How many rows of the batch the devices hold as copies, right now."""
    copied, copies = Transfers.copy, []

    def remembering(transfers, tensor, device, phase):
        made = copied(transfers, tensor, device, phase)
        if phase == "scatter":
            copies.append(weakref.ref(made))
        return made

    monkeypatch.setattr(Transfers, "copy", remembering)
    return lambda: sum(len(made()) for made in copies if made() is not None)


@pytest.mark.parametrize("of", ["the criterion", "the second pass"])
def test_what_has_arrived_is_kept_for_the_second_pass_where_it_fits(rows_there, of):
    """Where it does not, it crosses twice, and is counted twice; later steps begin so."""

    class Narrow(nn.Linear):
        def forward(self, inputs):
            if len(inputs) > 6 and not plain_now:
                raise torch.OutOfMemoryError("no room")
            return super().forward(inputs)

    plain_now = True
    model = build(lambda: Narrow(FEATURES, CLASSES))
    inputs, _ = batch(24)
    loss, expected = whole_batch(model, inputs, None, of_pairs)
    plain_now = False

    def no_room(*_):
        if rows_there() > 12:
            raise torch.OutOfMemoryError("no room")

    def criterion(outputs, _):
        no_room() if of == "the criterion" else outputs.register_hook(no_room)
        return of_pairs(outputs, _)

    with ScatterOnceParallel(model, "auto", ["cpu:1"]) as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tries in (4, 0):  # 1, 2 and 3 sub-steps, and 4 with all rows kept
            found = engine.forward_backward(inputs, None, criterion, whole_batch=True)
            assert engine.last_step.retries == tries
            assert len(engine.last_step.plan.shares[0].micro_batches) == 4
            sent = engine.last_step.bytes["scatter"]
            assert 18 * FEATURES * 8 <= sent - crossed(inputs) <= 24 * FEATURES * 8
    assert_close(found, loss, "loss")
    assert_gradients(model, {name: 2 * g for name, g in expected.items()})


def test_one_row_that_does_not_fit_changes_nothing(room):
    model = net()
    room.rows = 0
    with ScatterOnceParallel(model, "auto", VIRTUAL) as engine:
        wanted = pytest.raises(torch.OutOfMemoryError, match="no room for 1 rows")
        with nothing_changes(model), wanted as caught:
            engine.forward_backward(*batch(), LOSS)
        notes = "\n".join(caught.value.__notes__)
        assert note_of(0, "cpu:0", 0, of=13) in notes
        assert "a sub-step is one row, and that does not fit" in notes
        room.rows = 10**9
        engine.forward_backward(*batch(), LOSS)
        assert engine.last_step.retries == 0
        assert engine.last_step.messages["scatter"] == 2 * len(VIRTUAL)


def test_what_compiled_replicas_rehearse_with_does_not_cross_again(room):
    model = net()
    inputs, targets = batch(22)
    with ScatterOnceParallel(model, 2, VIRTUAL, compile={"backend": "eager"}) as engine:
        for _ in range(2):
            assert_step(engine, inputs, targets, LOSS)
            assert engine.last_step.bytes["scatter"] == crossed(inputs, targets)
