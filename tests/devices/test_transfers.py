"""last_step: what crossed from one memory to another, counted where it was copied."""

from __future__ import annotations

import threading

import pytest
import torch
from harness.isolation import guarded
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import assert_step, build, randint, randn
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from scatterpar import Replicated, Rows, ScatterOnceParallel, StepReport
from scatterpar.devices.transfers import Transfers

VIRTUAL = [f"cpu:{i}" for i in range(4)]
PHASES = {"scatter", "replicate", "compute", "reduce"}


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def with_batch_norm():
    return build(
        lambda: nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)
        )
    )


CRITERION = nn.CrossEntropyLoss()
NINE = randn(9, FEATURES), randint(CLASSES, 9)


def step(model, device_ids, rows=64, accum=3, **options):
    batch = randn(rows, FEATURES), randint(CLASSES, rows)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ScatterOnceParallel(model, accum, device_ids, **options) as engine:
        for _ in range(2):  # the first step builds the replicas; both cost the same
            optimizer.zero_grad()
            engine.forward_backward(*batch, CRITERION)
            yield engine.last_step, size(batch)
            optimizer.step()


@pytest.mark.contract
@pytest.mark.parametrize("accum", [1, 3, 8])
@pytest.mark.parametrize("factory", [mlp, with_batch_norm])
def test_every_byte_once(factory, accum):
    model = factory()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    for report, batch in step(model, VIRTUAL, accum=accum):
        assert report.bytes == {
            "scatter": batch,
            "replicate": 3 * size([*parameters, *buffers]),
            "compute": 0,
            "reduce": 3 * size(parameters),
        }


def test_few_messages_whatever_the_number_of_parameters():
    deep = build(lambda: nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(30)]))
    for report, _ in step(deep, VIRTUAL):
        assert report.messages == {"scatter": 4 * 3 * 2, "replicate": 3, "compute": 0, "reduce": 3}
    for report, _ in step(with_batch_norm(), VIRTUAL):  # one more dtype: a count of batches
        assert report.messages["replicate"] == 3 * 2
        assert report.messages["reduce"] == 3


@pytest.mark.contract
def test_replicas_in_one_memory_move_nothing():
    for report, _ in step(with_batch_norm(), ["cpu"] * 4, buffers="batch"):
        assert report.bytes == dict.fromkeys(PHASES, 0)
        assert report.messages == dict.fromkeys(PHASES, 0)


@pytest.mark.parametrize(
    ("device_ids", "rows", "refreshed", "reduced"),
    [
        (["cpu:0", "cpu:1", "cpu:1", "cpu:0"], 64, 1, 3),  # pairs: 0 + 1, 2 + 3, 0 + 2
        (["cpu:0", "cpu:0", "cpu:1", "cpu:1"], 64, 1, 1),
        (VIRTUAL, 2, 3, 1),  # devices without rows send nothing back
    ],
)
def test_parameters_go_out_to_each_other_device_once(device_ids, rows, refreshed, reduced):
    model = mlp()
    for report, batch in step(model, device_ids, rows=rows):
        assert report.bytes["replicate"] == refreshed * size(model.parameters())
        assert report.bytes["scatter"] == batch
        assert report.bytes["reduce"] == reduced * size(model.parameters())


@pytest.mark.contract
def test_frozen_parameters_go_out_once_and_do_not_come_back():
    """With most parameters frozen (adapters), each step sent 200 times what it trained."""
    model = mlp()
    model[0].requires_grad_(False)
    everything, trained = size(model.parameters()), size(model[2].parameters())
    sent = []
    for report, _ in step(model, VIRTUAL):
        sent.append(report.bytes["replicate"])
        assert report.bytes["reduce"] == 3 * trained
        assert report.messages["replicate"] == 3
    assert sent == [3 * everything, 3 * trained]


def test_what_has_not_changed_does_not_travel_again():
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


def no_version(model):
    model[0].weight.data.mul_(2)


def swapped_away_and_back(model):
    """As an exponential moving average is swapped in for an evaluation."""
    kept = model[0].weight.data
    model[0].weight.data = kept * 2
    model[0].weight.data = kept
    kept.mul_(2)


def another_thread(model):
    thread = threading.Thread(target=no_version, args=(model,))
    thread.start()
    thread.join()


def write(*numbers):
    """Of one element of a weight, one after the other."""

    def edit(model):
        for number in numbers:
            model[0].weight.data[0, 0] = number

    return edit


EDITS = {
    "no version": no_version,
    "numpy": lambda model: model[0].weight.detach().numpy().__setitem__((0, 0), 1.0),
    "inference mode": torch.inference_mode()(lambda model: model[0].weight.mul_(2)),
    "another storage": lambda model: setattr(model[0].weight, "data", model[0].weight * 2),
    "swapped away and back": swapped_away_and_back,
    "another thread": another_thread,
    "minus zero": write(0.0, -0.0),
    "not a number": write(float("nan")),
}


@pytest.mark.contract
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("training", [True, False])
def test_edits_that_leave_no_version_travel(edit, training):
    """A frozen parameter's version says nothing about them: its bits do."""
    model = mlp().requires_grad_(False)
    model[2].requires_grad_(True)
    model.train(training)
    with ScatterOnceParallel(model, 1, VIRTUAL) as engine:
        for _ in range(2):
            engine.forward_backward(*NINE, CRITERION)
        edit(model)
        engine.forward_backward(*NINE, CRITERION)
        assert engine.last_step.bytes["replicate"] == 3 * size([model[0].weight])
        for replica in engine.replicas:
            ours, theirs = (m[0].weight.detach().view(torch.int64) for m in (model, replica))
            assert torch.equal(ours, theirs)


def test_dtypes_travel_bit_by_bit():
    """What is compared are bits, whatever the dtype; what is equal does not travel."""
    dtypes = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.complex64, torch.complex128, torch.float8_e4m3fn]
    model = mlp()
    for number, dtype in enumerate(dtypes):
        model.register_buffer(f"extra{number}", torch.zeros(3, 2).to(dtype))
    model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
    with ScatterOnceParallel(model, 1, VIRTUAL) as engine:
        engine.forward_backward(*NINE, CRITERION)
        for number in range(len(dtypes)):
            buffer = getattr(model, f"extra{number}")
            buffer.data[1, 1] = 1
            engine.forward_backward(*NINE, CRITERION)
            assert engine.last_step.bytes["replicate"] == 3 * size([buffer])
            for replica in engine.replicas:
                there = getattr(replica, f"extra{number}")
                assert there.view(torch.uint8).tolist() == buffer.view(torch.uint8).tolist()


def test_a_failed_refresh_is_made_good(monkeypatch):
    """What did not arrive everywhere counts as not sent."""
    model = mlp()
    with ScatterOnceParallel(model, 1, VIRTUAL) as engine:
        engine.forward_backward(*NINE, CRITERION)
        with torch.no_grad():
            model[0].weight.mul_(2)
        honest, calls = Transfers.copy_into, []

        def copy_into(self, target, source, phase):
            calls.append(phase)
            if calls.count("replicate") == 2:
                raise MemoryError
            honest(self, target, source, phase)

        monkeypatch.setattr(Transfers, "copy_into", copy_into)
        with pytest.raises(MemoryError):
            engine.forward_backward(*NINE, CRITERION)
        monkeypatch.undo()
        engine.forward_backward(*NINE, CRITERION)
        for replica in engine.replicas:
            assert torch.equal(replica[0].weight, model[0].weight)


def test_sparse_gradients_travel_as_indices_and_values():
    model = build(lambda: nn.EmbeddingBag(1000, 3, sparse=True, mode="sum"))
    ids = torch.tensor([[1, 2], [1, 3], [5, 5], [7, 8]])
    with ScatterOnceParallel(model, 1, ["cpu:0", "cpu:1"]) as engine:
        engine.forward_backward(ids, None, lambda output, _: output.pow(2).mean())
        report = engine.last_step
    assert 0 < report.bytes["reduce"] < 1000
    assert report.bytes["replicate"] == 1000 * 3 * 8


class Bag(nn.EmbeddingBag):
    """The mean of a sentence's words, padding left out."""

    def __init__(self):
        super().__init__(10, CLASSES, padding_idx=9)


def padded(sentences):
    return pad_sequence(sentences, batch_first=True, padding_value=9)


def test_entries_cross_without_padding_and_together(monkeypatch):
    lengths, model = [3, 5, 1, 4, 2, 5, 3], build(Bag)
    sentences = Rows([randint(9, length) for length in lengths], padded)
    with guarded(monkeypatch, model), ScatterOnceParallel(model, 2, VIRTUAL[:2]) as engine:
        engine.forward_backward(sentences, randint(CLASSES, 7), CRITERION)
        assert engine.last_step.bytes["scatter"] == (sum(lengths) + 7) * 8
        assert engine.last_step.messages["scatter"] == 8  # sentences and labels, four micro-batches


def test_large_entries_travel_by_themselves():
    images, labels = [randn(3, 60 + n, 60) for n in range(4)], randint(CLASSES, 4)

    def collate(few):
        return torch.stack([image.mean((1, 2)) for image in few])

    with ScatterOnceParallel(build(lambda: nn.Linear(3, CLASSES)), 1, VIRTUAL[:2]) as engine:
        plain = collate(images), labels
        assert_step(engine, Rows(images, collate), labels, CRITERION, plain=plain)
        assert engine.last_step.messages["scatter"] == 6


def test_a_window_of_batches_is_scattered_once(monkeypatch):
    sizes, model = [(4, 5), (3, 2), (1, 3)], build(Bag)
    batches, labels = [randint(9, *size) for size in sizes], [randint(CLASSES, n) for n, _ in sizes]
    window = Rows.from_batches(batches), Rows.from_batches(labels)
    with guarded(monkeypatch, model), ScatterOnceParallel(model, 1, VIRTUAL[:3]) as engine:
        engine.forward_backward(*window, CRITERION)
        assert engine.last_step.bytes["scatter"] == size([*batches, *labels])
        assert engine.last_step.bytes["replicate"] == 2 * size(model.parameters())


class Times(nn.Linear):
    def forward(self, rows, table):
        return super().forward((table @ rows.T).T)


def test_what_is_replicated_goes_once_to_every_memory(monkeypatch):
    """Two replicas in one memory share what came; on the master's own memory nothing moves."""
    model, rows, table = build(lambda: Times(FEATURES, 3)), randn(7, FEATURES), randn(5, FEATURES)
    devices = ["cpu:0", "cpu:0", "cpu:1"]
    with guarded(monkeypatch, model), ScatterOnceParallel(model, 2, devices) as engine:
        # In the inputs and in the targets it is one tensor still.
        engine.forward_backward((rows, Replicated(table)), Replicated(table), lambda o, t: o.mean())
        assert engine.last_step.bytes["scatter"] == size([rows, table, table])


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_each_byte_of_a_sparse_tensor_counts(layout):
    """As many as its indices and values have; those of compressed ones were counted as dense."""
    model, rows = build(lambda: Times(FEATURES, 3)), randn(7, FEATURES)
    table = torch.eye(FEATURES, dtype=torch.float64).to_sparse(layout=layout)
    pieces = 8 * (3 * FEATURES + (layout != torch.sparse_coo))  # compressed: one more end of rows
    with ScatterOnceParallel(model, 2, VIRTUAL[:2]) as engine:
        engine.forward_backward((rows, Replicated(table)), None, lambda o, _: o.mean())
        assert engine.last_step.bytes["scatter"] == size([rows]) + 2 * pieces


def test_moments_of_the_whole_batch_cross_once():
    model = build(lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(100, CLASSES)))
    batch = randn(23, 4, 5, 5), randint(CLASSES, 23)
    with ScatterOnceParallel(model, 2, VIRTUAL[:3], buffers="batch") as engine:
        engine.forward_backward(*batch, CRITERION)
        assert engine.last_step.bytes["reduce"] == 2 * (size(model.parameters()) + 2 * 4 * 8)
        assert engine.last_step.messages["reduce"] == 2 * 2


def test_outputs_of_the_whole_batch_cross_once_and_their_gradients_once():
    class Two(nn.Linear):
        def forward(self, inputs):
            z = super().forward(inputs)
            return {"z": z, "classes": z.argmax(1)}

    class Pairs(nn.Linear):
        """On the master alone: its parameters do not cross."""

        def forward(self, outputs, labels):
            z = super().forward(outputs["z"])  # and none of the others
            return (z @ z.T).exp().mean()

    rows, away = 12, 8  # of three replicas on two other devices
    model, criterion = build(lambda: Two(FEATURES, 4)), build(lambda: Pairs(4, 4))
    batch = randn(rows, FEATURES), randint(3, rows)
    with ScatterOnceParallel(model, 2, VIRTUAL[:3]) as engine:
        engine.forward_backward(*batch, criterion, whole_batch=True)
        moved, messages = engine.last_step.bytes, engine.last_step.messages
    assert moved["compute"] == away * (4 * 8 + 8) + away * 4 * 8
    assert messages["compute"] == 2 * 2 * (2 + 1)  # two outputs of each micro-batch, a gradient
    assert moved["scatter"] == size(batch)  # targets go to the master alone
    assert moved["replicate"] == moved["reduce"] == 2 * size(model.parameters())


def test_the_report():
    """Of the last step that did not fail."""
    with ScatterOnceParallel(mlp(), 2, VIRTUAL) as engine:
        assert engine.last_step is None
        loss = engine.forward_backward(*NINE, CRITERION)
        report = engine.last_step
        assert isinstance(report, StepReport)
        assert report.plan == engine.plan(9)
        assert report.loss == loss.item()
        assert report.seconds.keys() == report.bytes.keys() == report.messages.keys() == PHASES
        assert all(seconds > 0 for seconds in report.seconds.values())
        assert report.retries == 0
        title, head, *phases = str(report).splitlines()
        assert title == f"loss {loss.item():.6g}, 9 rows on {len(VIRTUAL)} replicas"
        assert head.split() == ["phase", "ms", "bytes", "copies"]
        assert [line.split()[0] for line in phases] == [*report.bytes]
        assert f"{report.bytes['reduce']:,}" in phases[-1].split()
        with pytest.raises(RuntimeError):
            engine.forward_backward(randn(9, 3), NINE[1], CRITERION)
        assert engine.last_step is report
