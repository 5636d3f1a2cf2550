"""last_step: what crossed from one memory to another, counted where it was copied."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
from harness.models import CLASSES, FEATURES, Of, mlp
from harness.oracle import build, randint, randn
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from scatterpar import Replicated, Rows, ScatterOnceParallel, StepReport
from scatterpar.devices.transfers import Transfers

VIRTUAL = [f"cpu:{i}" for i in range(4)]
PHASES = {"scatter", "replicate", "compute", "reduce"}


def size(tensors):
    return sum(tensor.nbytes for tensor in tensors)


def with_batch_norm():
    return build(
        lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, CLASSES))
    )


def deep():
    return build(
        lambda: nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(30)])
    )


CRITERION = nn.CrossEntropyLoss()
NINE = randn(9, FEATURES), randint(CLASSES, 9)


def step(model, device_ids, rows=64, accum=3):
    batch = randn(rows, FEATURES), randint(CLASSES, rows)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ScatterOnceParallel(model, accum, device_ids) as engine:
        for _ in range(2):  # the first step builds the replicas; both cost the same
            optimizer.zero_grad()
            engine.forward_backward(*batch, CRITERION)
            yield engine.last_step, size(batch)
            optimizer.step()


LAYOUTS = [  # devices, rows, and how often a model has to cross, out and back
    (VIRTUAL, 64, 3, 3),
    (["cpu:0", "cpu:1", "cpu:1", "cpu:0"], 64, 1, 3),  # pairs: 0 + 1, 2 + 3, 0 + 2
    (["cpu:0", "cpu:0", "cpu:1", "cpu:1"], 64, 1, 1),
    (["cpu"] * 4, 64, 0, 0),
]


@pytest.mark.contract
@pytest.mark.parametrize("accum", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("factory", "device_ids", "rows", "refreshed", "reduced"),
    [
        *((deep, *layout) for layout in LAYOUTS),
        (with_batch_norm, *LAYOUTS[1]),
        (mlp, VIRTUAL, 2, 3, 1),  # devices without rows send nothing back
    ],
)
def test_every_byte_crosses_once(factory, device_ids, rows, refreshed, reduced, accum):
    """In few messages, whatever the number of parameters: one for each dtype."""
    model = factory()
    parameters = list(model.parameters())
    sent = [*parameters, *model.buffers()]
    for report, batch in step(model, device_ids, rows, accum):
        pieces = sum(len(share.micro_batches) for share in report.plan.shares)
        crosses = bool(refreshed)
        assert report.bytes == {
            "scatter": crosses * batch,
            "replicate": refreshed * size(sent),
            "compute": 0,
            "reduce": reduced * size(parameters),
        }
        assert report.messages == {
            "scatter": crosses * 2 * pieces,
            "replicate": refreshed * len({tensor.dtype for tensor in sent}),
            "compute": 0,
            "reduce": reduced,
        }


@pytest.mark.contract
def test_frozen_parameters_sent_once():
    """With most parameters frozen (adapters), each step sent 200 times
    what it trained.
    """
    model = mlp()
    model[0].requires_grad_(False)
    everything, trained = size(model.parameters()), size(model[2].parameters())
    sent = []
    for report, _ in step(model, VIRTUAL):
        sent.append(report.bytes["replicate"])
        assert report.bytes["reduce"] == 3 * trained
        assert report.messages["replicate"] == 3
    assert sent == [3 * everything, 3 * trained]


def test_unchanged_tensors_not_sent_again():
    model = with_batch_norm()
    buffers = size(model.buffers())
    batch = randn(64, FEATURES), randint(CLASSES, 64)
    with ScatterOnceParallel(model, 2, VIRTUAL) as engine:

        def sent():
            engine.forward_backward(*batch, CRITERION)
            return engine.last_step.bytes["replicate"]

        assert sent() == 3 * (size(model.parameters()) + buffers)
        assert sent() == 3 * buffers  # no optimizer has stepped
        engine.eval()
        with torch.no_grad():
            engine(batch[0])
        assert sent() == 0  # the evaluation's refresh counts
        model[0].bias.data[0] += 1.0
        assert sent() == 3 * size([model[0].bias])
        model.load_state_dict(model.state_dict())
        assert sent() == 3 * size(model.parameters())  # written, and that is enough
        assert sent() == 0


def swapped_away_and_back(model):
    """As an exponential moving average is swapped in for an evaluation."""
    kept = model[0].weight.data
    model[0].weight.data = kept * 2
    model[0].weight.data = kept
    kept.mul_(2)


EDITS = {
    "no version": lambda model: model[0].weight.data.mul_(2),
    "inference mode": torch.inference_mode()(lambda model: model[0].weight.mul_(2)),
    "another storage": lambda model: setattr(
        model[0].weight, "data", model[0].weight * 2
    ),
    "swapped away and back": swapped_away_and_back,
    "not a number": lambda model: model[0].weight.data.fill_(torch.nan),
}


@pytest.mark.contract
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_edits_without_version_are_sent(edit):
    """A frozen parameter's version says nothing about them: its bits do."""
    model = mlp().requires_grad_(False)
    model[2].requires_grad_(True)
    with ScatterOnceParallel(model, 1, VIRTUAL) as engine:
        for _ in range(2):
            engine.forward_backward(*NINE, CRITERION)
        edit(model)
        engine.forward_backward(*NINE, CRITERION)
        assert engine.last_step.bytes["replicate"] == 3 * size([model[0].weight])
        ours, *others = (
            m[0].weight.view(torch.int64) for m in (model, *engine.replicas)
        )
        assert all(ours.equal(theirs) for theirs in others)


@pytest.mark.contract
def test_earlier_values_sent_again():
    """The optimizer has updated all in between: fingerprints of the earlier values say
    nothing.
    """
    model = mlp()
    earlier = [parameter.detach().clone() for parameter in model.parameters()]
    with ScatterOnceParallel(model, 1, VIRTUAL) as engine:
        for _ in range(2):
            engine.forward_backward(*NINE, CRITERION)
        torch.optim.SGD(model.parameters(), 0.1).step()
        engine.forward_backward(*NINE, CRITERION)
        for parameter, values in zip(model.parameters(), earlier, strict=True):
            parameter.data.copy_(values)
        assert all(r[0].weight.equal(model[0].weight) for r in engine.replicas)


def test_failed_refresh_is_sent_again():
    """What did not arrive everywhere counts as not sent."""
    model = mlp()
    with ScatterOnceParallel(model, 1, VIRTUAL) as engine:
        engine.forward_backward(*NINE, CRITERION)
        with torch.no_grad():
            model[0].weight.mul_(2)
        # All but the last device: fingerprints are compared with those of the second
        # one's copies.
        copies = iter([Transfers.copy_into] * (len(VIRTUAL) - 2))
        copy = lambda *args: next(copies)(*args)  # noqa: E731
        with (
            mock.patch.object(Transfers, "copy_into", copy),
            pytest.raises(StopIteration),
        ):
            engine.forward_backward(*NINE, CRITERION)
        engine.forward_backward(*NINE, CRITERION)
        assert all(r[0].weight.equal(model[0].weight) for r in engine.replicas)


def scattered(factory, device_ids, *batch):
    """How many bytes of a batch crossed, and in how many messages."""
    with ScatterOnceParallel(build(factory), 2, device_ids) as engine:
        engine.forward_backward(*batch)
        return engine.last_step.bytes["scatter"], engine.last_step.messages["scatter"]


def bag():
    """The mean of a sentence's words, padding left out."""
    return nn.EmbeddingBag(10, CLASSES, padding_idx=9)


def times():
    return Of(
        lambda m, rows, table: m.linear((table @ rows.T).T),
        linear=nn.Linear(FEATURES, 3),
    )


def mean(output, _):
    return output.mean()


def test_entries_cross_once_unpadded():
    sentences, labels = (
        [randint(9, n) for n in (3, 5, 1, 4, 2, 5, 3)],
        randint(CLASSES, 7),
    )
    padded = Rows(sentences, partial(pad_sequence, batch_first=True, padding_value=9))
    found = scattered(bag, VIRTUAL[:2], padded, labels, CRITERION)
    assert found == (size([*sentences, labels]), 4 + 4)
    images, labels = [randn(3, 60 + n, 60) for n in range(4)], randint(CLASSES, 4)
    rows = Rows(images, lambda few: torch.stack([image.mean((1, 2)) for image in few]))
    found = scattered(
        lambda: nn.Linear(3, CLASSES), VIRTUAL[:2], rows, labels, CRITERION
    )
    assert found == (size([*images, labels]), 4 + 4)


def test_replicated_sent_once_per_memory():
    """Two replicas in one memory share what came; in inputs and targets it is one
    tensor still.
    """
    rows, table = randn(7, FEATURES), randn(5, FEATURES)
    batch = (rows, Replicated(table)), Replicated(table), mean
    found, _ = scattered(times, ["cpu:0", "cpu:0", "cpu:1"], *batch)
    assert found == size([rows, table, table])


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]
)
def test_sparse_tensor_bytes_counted(layout):
    """As many as its indices and values have; those of compressed ones were counted as
    dense.
    """
    rows, table = randn(7, FEATURES), torch.eye(FEATURES, dtype=torch.float64)
    # compressed: one more end of rows
    pieces = 8 * (3 * FEATURES + (layout != torch.sparse_coo))
    inputs = rows, Replicated(table.to_sparse(layout=layout))
    assert (
        scattered(times, VIRTUAL[:2], inputs, None, mean)[0]
        == size([rows]) + 2 * pieces
    )


def test_whole_batch_outputs_cross_once():
    def two(model, inputs):
        return {"z": (z := model.linear(inputs)), "classes": z.argmax(1)}

    def pairs(model, outputs, labels):
        """On the master alone: its parameters do not cross."""
        z = model.linear(outputs["z"])  # and no gradient of the others
        return (z @ z.T).exp().mean()

    model = build(lambda: Of(two, linear=nn.Linear(FEATURES, 4)))
    criterion = build(lambda: Of(pairs, linear=nn.Linear(4, 4)))
    # rows on two of three devices
    batch, away = (randn(12, FEATURES), randint(3, 12)), 8
    with ScatterOnceParallel(model, 2, VIRTUAL[:3]) as engine:
        engine.forward_backward(*batch, criterion, whole_batch=True)
        moved, messages = engine.last_step.bytes, engine.last_step.messages
    assert moved["compute"] == away * (4 * 8 + 8) + away * 4 * 8
    # two outputs of each micro-batch, a gradient
    assert messages["compute"] == 2 * 2 * (2 + 1)
    assert moved["scatter"] == size(batch)  # targets go to the master alone
    assert moved["replicate"] == moved["reduce"] == 2 * size(model.parameters())


def test_report_of_last_good_step():
    """Of the last step that did not fail."""
    with ScatterOnceParallel(mlp(), 2, VIRTUAL) as engine:
        assert engine.last_step is None
        loss = engine.forward_backward(*NINE, CRITERION)
        report = engine.last_step
        assert isinstance(report, StepReport)
        assert (report.plan, report.loss, report.retries) == (
            engine.plan(9),
            loss.item(),
            0,
        )
        assert (
            report.seconds.keys()
            == report.bytes.keys()
            == report.messages.keys()
            == PHASES
        )
        assert all(seconds > 0 for seconds in report.seconds.values())
        summary, table, *_ = str(report).split("\n\n")
        title, _ = summary.splitlines()
        head, *phases = table.splitlines()
        assert title == f"loss {loss.item():.6g}, 9 rows on {len(VIRTUAL)} replicas"
        assert head.split() == ["phase", "ms", "bytes", "copies"]
        assert [line.split()[0] for line in phases] == [*report.bytes]
        assert f"{report.bytes['reduce']:,}" in phases[-1].split()
        with pytest.raises(RuntimeError):
            engine.forward_backward(randn(9, 3), NINE[1], CRITERION)
        assert engine.last_step is report
