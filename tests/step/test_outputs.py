"""``return_outputs=``: each replica's outputs, joined; and outputs that are no rows."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from harness.batches import LABELS, Quantizer
from harness.models import CLASSES, FEATURES, Classifier, Of, Returns, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    randint,
    randn,
    whole_batch,
)
from torch import nn

from scatterpar import ScatterOnceParallel

INPUTS = randn(11, FEATURES)
ROWS, SEVEN, LOSS = randn(7, FEATURES), LABELS[:7], nn.CrossEntropyLoss()


def test_returned_outputs_have_one_for_each_replica(devices):
    model, batch = (
        build(Quantizer),
        (randn(16, FEATURES), None, lambda o, _: o["codes"].square().mean()),
    )
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        _, found = engine.forward_backward(*batch, return_outputs=lambda o: o["codebook"])
    for codebook in found:
        assert_close(codebook, model.codebook.detach(), "codebook")


class Ragged(nn.Module):
    """As many entries as some rule of its own says, which sizes of micro-batches divide."""

    def forward(self, rows):
        return rows.new_full((len(rows) * (2 if len(rows) > 4 else 1),), float(len(rows)))


def test_one_ratio_holds_for_all_micro_batches(devices):
    """Rows that have two entries each were joined with rows that have one."""
    with (
        ScatterOnceParallel(Ragged(), 1, devices(2)).eval() as engine,
        pytest.raises(ValueError, match=r"those of 5 and 4 rows, cannot be joined along dim=0"),
    ):
        engine(randn(9, FEATURES))


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


def test_outputs_without_rows_are_not_joined(devices):
    """They were, in the order of the pieces: which is that of no row."""
    # A word model that flattens time and rows into one dimension.
    rows, make = randn(4, 6, FEATURES), partial(nn.RNN, FEATURES, CLASSES)
    model = build(lambda: Of(lambda m, rows: m.rnn(rows)[0].flatten(0, 1), rnn=make()))
    targets = randint(CLASSES, 4, 6)

    def criterion(output, targets):
        return nn.functional.cross_entropy(output, targets.flatten())

    with ScatterOnceParallel(model, 2, devices(2), dim=1) as engine:
        words = r"outputs of shapes \(8, 4\).* of 2 .*rows, cannot be joined along dim=1.*"
        with pytest.raises(ValueError, match=words + "return_outputs=function"):
            engine.forward_backward(rows, targets, criterion, return_outputs=True)
        assert all(p.grad is None for p in model.parameters())
        _, kept = engine.forward_backward(
            rows, targets, criterion, return_outputs=lambda o: o.unflatten(0, (4, -1)).argmax(-1)
        )
        with torch.no_grad():
            expected = copy.deepcopy(model)(rows).unflatten(0, (4, -1)).argmax(-1)
        assert torch.equal(torch.cat(kept, 1), expected)
        refused = pytest.raises(ValueError, match=r"joined along dim=1.*engine\.map")
        with refused, torch.no_grad():
            engine(rows)


def test_return_outputs_keeps_what_a_function_makes_of_them(devices):
    model, graphs = build(mlp), []

    def keep(output):
        graphs.append((output.requires_grad, torch.is_grad_enabled()))
        return {"right": output.argmax(1), "largest": output.max()}

    _, expected = whole_batch(model, ROWS, SEVEN, LOSS)
    with ScatterOnceParallel(model, 2, devices(2)) as engine:
        _, kept = engine.forward_backward(ROWS, SEVEN, LOSS, return_outputs=keep)
    assert_gradients(model, expected)
    assert torch.equal(torch.cat([k["right"] for k in kept]), model(ROWS).argmax(1))
    assert kept[0]["largest"].shape == ()
    assert graphs == [(False, False)] * 4
