"""Calling the engine: one forward pass of the whole batch, in the module's own types."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.models import CLASSES, FEATURES, Classifier, Of, Returns, mlp
from harness.notes import note_of
from harness.oracle import assert_close, build, randint, randn
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from scatterpar import DataParallelModel, Rows, ScatterOnceParallel, gather

pytestmark = pytest.mark.core

INPUTS = randn(11, FEATURES)


@pytest.mark.contract
def test_positional_and_keyword_inputs(devices):
    def takes(_, first, second, *, scale, mode="plain", extra=None):
        assert mode == "fancy"
        assert extra == {"k": 1}
        return first + scale * second["x"]

    second, scale = {"x": randn(11, FEATURES, seed=4)}, torch.tensor(2.0)
    with ScatterOnceParallel(Of(takes).eval(), 2, devices(3)) as engine:
        output = engine(INPUTS, second, scale=scale, mode="fancy", extra={"k": 1})
    assert_close(output, INPUTS + 2 * second["x"], "output")


def test_rows_along_another_dimension(devices):
    doubles = Of(lambda _, columns: columns * 2).eval()
    with ScatterOnceParallel(doubles, 2, devices(3), dim=1) as engine:
        assert_close(engine(INPUTS.T), INPUTS.T * 2, "output")


@pytest.mark.contract
def test_numbers_without_rows_are_averaged_over_the_rows(devices):
    """Micro-batches have two rows, and one has one."""
    means = Of(lambda _, inputs: {"mean": inputs.mean()}).eval()
    with ScatterOnceParallel(means, 2, devices(3)) as engine:
        assert_close(engine(INPUTS)["mean"], INPUTS.mean(), "mean")


@pytest.mark.contract
def test_in_place_layers_do_not_write_the_caller_s_tensors(devices):
    writes = Of(lambda _, inputs, number: inputs.add_(number.mul_(2)))
    inputs, number = INPUTS.clone(), torch.tensor(1.0).double()
    with ScatterOnceParallel(writes.eval(), 2, devices(3)) as engine:
        engine(inputs, number)
    DataParallelModel(writes, devices(3))(inputs, number)
    assert torch.equal(inputs, INPUTS)
    assert number == 1


@pytest.mark.contract
@pytest.mark.parametrize("rows", [[4, 4, 3], [1, 1]], ids=str)
def test_return_outputs(devices, rows):
    """One entry per replica that had rows, on its device: detached, in the module's types."""
    model = build(lambda: Returns(lambda y, x: {"logits": y, "mean": y.mean(), "tag": "t"}))
    inputs, targets = INPUTS[: sum(rows)], randint(CLASSES, sum(rows))

    def criterion(output, targets):
        return nn.functional.cross_entropy(output["logits"], targets)

    with torch.no_grad():
        expected = copy.deepcopy(model)(inputs)["logits"]
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        loss, outputs = engine.forward_backward(inputs, targets, criterion, return_outputs=True)
    assert loss.shape == ()
    assert isinstance(outputs, tuple)
    assert [len(output["logits"]) for output in outputs] == rows
    assert_close(torch.cat([output["logits"] for output in outputs]), expected, "logits")
    for output, part in zip(outputs, expected.split(rows), strict=True):
        assert output["tag"] == "t"
        assert not output["logits"].requires_grad
        assert_close(output["mean"], part.mean(), "0-dim, averaged with the rows as weights")


def test_outputs_of_a_module_that_returns_its_loss(devices):
    class OwnLoss(Classifier):
        def forward(self, inputs, labels):
            logits = self.linear(inputs)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    batch = {"inputs": INPUTS, "labels": randint(CLASSES, 11)}
    with ScatterOnceParallel(build(OwnLoss), 2, devices(3)) as engine:
        loss, outputs = engine.forward_backward(batch, return_outputs=True)
    weighted = sum(output["loss"] * len(output["logits"]) for output in outputs) / 11
    assert_close(loss, weighted, "loss")


def test_outputs_hold_no_graph_and_no_replica_memory_is_reused(devices):
    with ScatterOnceParallel(mlp(), 1, devices(2)) as engine:
        _, outputs = engine.forward_backward(
            INPUTS, randint(CLASSES, 11), nn.CrossEntropyLoss(), return_outputs=True
        )
        kept = [output.clone() for output in outputs]
        engine.forward_backward(INPUTS * 2, randint(CLASSES, 11), nn.CrossEntropyLoss())
    for output, before in zip(outputs, kept, strict=True):
        assert output.grad_fn is None
        assert torch.equal(output, before)


class FailsOn(nn.Linear):
    row, error = None, None

    def forward(self, inputs):
        if self.row is not None and (inputs == self.row).all(1).any():
            raise self.error
        return super().forward(inputs)


def test_errors_arrive_as_they_are(devices):
    model = build(lambda: FailsOn(FEATURES, CLASSES)).eval()
    model.row, model.error = INPUTS[10], KeyError("mine")
    with ScatterOnceParallel(model, 2, devices(3)) as engine:
        with pytest.raises(KeyError) as caught:
            engine(INPUTS)
        assert caught.value is model.error
        (note,) = caught.value.__notes__
        assert note == note_of(2, devices(3)[2], 1, of=2, rows=(10,))
        model.row = None
        assert_close(engine(INPUTS), model(INPUTS).detach(), "output")


@pytest.mark.parametrize("accum", [1, 2, 5])
def test_lists_of_rows_anywhere_in_an_output(devices, accum):
    """Where the inputs have ``Rows``; a list of tensors that hold the rows is joined as ever."""

    def finds(_, images):
        whole = torch.stack([image.sum() for image in images])
        scores, names = [image.sum() for image in images], [str(len(i)) for i in images]
        found = [{"box": image[: len(image) // 2]} for image in images]
        return {"scores": scores, "more": (names, [whole, whole * 2]), "boxes": images}, found

    images = [randn(1 + n % 4, seed=n) for n in range(11)]
    expected, found = finds(None, images)
    with ScatterOnceParallel(Of(finds).eval(), accum, devices(3)) as engine:
        output, boxes = engine(Rows(images))
    assert [one["box"].tolist() for one in boxes] == [one["box"].tolist() for one in found]
    assert output["more"][0] == expected["more"][0]
    for key in ("scores", "boxes"):
        for mine, its in zip(output[key], expected[key], strict=True):
            assert_close(mine, its, key)
    for mine, its in zip(output["more"][1], expected["more"][1], strict=True):
        assert_close(mine, its, "whole")


def test_outputs_that_know_how_many_rows_they_are_of(devices):
    def packs(output, _):
        return pack_sequence([*output.unsqueeze(1)])

    model = build(lambda: Returns(packs)).eval()
    told = pytest.raises(ValueError, match="return what pad_packed_sequence")
    with ScatterOnceParallel(model, 2, devices(2)) as engine, told:
        engine(INPUTS)
    pair = DataParallelModel(model, devices(2))
    with pytest.raises(ValueError, match="return what pad_packed_sequence"):
        gather(pair(INPUTS), "cpu")
    shapes = build(lambda: Returns(lambda y, _: (y, y.shape, y.shape[1:])))
    with ScatterOnceParallel(shapes.eval(), 1, devices(3)) as engine:
        _, each, same = engine(INPUTS)
    assert each == [(4, CLASSES), (4, CLASSES), (3, CLASSES)]
    assert same == (CLASSES,)
