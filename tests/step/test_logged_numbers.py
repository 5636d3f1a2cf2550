"""Numbers that a criterion returns beside its loss: of the whole batch, as the loss is."""

from __future__ import annotations

import pytest
import torch
from harness.models import CLASSES, FEATURES, mlp
from harness.oracle import (
    assert_close,
    assert_gradients,
    build,
    gradients,
    randint,
    randn,
)
from torch import nn

import scatterpar
from scatterpar import ScatterOnceParallel

ROWS = 23
INPUTS = randn(ROWS, FEATURES)
LABELS = randint(CLASSES, ROWS)
WITH_IGNORED = LABELS.masked_fill(torch.arange(ROWS) % 3 == 0, -100)
BEFORE_LOG = torch.zeros((), dtype=torch.float64)


def entropy(logits):
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def classify(logits, labels):
    """A mean over the rows, and means over the rows to log."""
    right = (logits.argmax(1) == labels).float()
    numbers = {"entropy": entropy(logits).mean(), "accuracy": right.mean()}
    return nn.functional.cross_entropy(logits, labels), numbers


def classify_labels(logits, labels):
    """A mean over the labels that are not ignored."""
    kept = labels != -100
    right = (logits.argmax(1) == labels)[kept].double().mean()
    return nn.functional.cross_entropy(logits, labels), {"accuracy": right, "one": 1}


def add_up(logits, labels):
    """A sum over the rows; a count to log, and a float."""
    right = (logits.argmax(1) == labels).sum()
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return loss, {"right": right, "rows": float(len(labels))}


PROGRAMS = {
    "mean": (classify, LABELS, {}),
    "labels": (
        classify_labels,
        WITH_IGNORED,
        {"count": scatterpar.count_labels()},
    ),
    "sum": (add_up, LABELS, {"reduction": "sum"}),
    "whole batch": (classify, LABELS, {"whole_batch": True}),
}


def expected_of(model, criterion, targets):
    loss, numbers = criterion(model(INPUTS), targets)
    loss.backward()
    found = gradients(model)
    model.zero_grad()
    return (
        loss.detach(),
        {name: torch.as_tensor(value).item() for name, value in numbers.items()},
        found,
    )


@pytest.mark.parametrize("deferred", [False, True], ids=["step", "loss"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_of_the_whole_batch(name, deferred, devices):
    criterion, targets, options = PROGRAMS[name]
    model = build(mlp)
    loss, numbers, grads = expected_of(model, criterion, targets)
    with ScatterOnceParallel(model, 3, devices(2)) as engine:
        if deferred:
            found = engine.loss(INPUTS, targets, criterion, **options)
            logged = engine.last_step.logged
            found.backward()
        else:
            found = engine.forward_backward(INPUTS, targets, criterion, **options)
            logged = engine.last_step.logged
        assert_close(found.detach(), loss, "loss")
        assert_gradients(model, grads)
    assert logged == pytest.approx(numbers, rel=1e-6)
    assert all(type(number) is float for number in logged.values())


def test_numbers_of_rows_that_do_not_count():
    """A micro-batch without labels has a mean of none, which is NaN."""
    model = build(mlp)
    labels = LABELS.clone()
    labels[:12] = -100
    options = {"count": scatterpar.count_labels()}
    _, numbers, _ = expected_of(model, classify_labels, labels)
    with ScatterOnceParallel(model, 6, ["cpu"]) as engine:
        engine.forward_backward(INPUTS, labels, classify_labels, **options)
        assert engine.last_step.logged == pytest.approx(numbers)


def test_other_criteria_log_nothing():
    with ScatterOnceParallel(build(mlp), 2, ["cpu"]) as engine:
        engine.forward_backward(INPUTS, LABELS, classify)
        assert engine.last_step.logged
        engine.forward_backward(INPUTS, LABELS, nn.CrossEntropyLoss())
        assert engine.last_step.logged == {}


@pytest.mark.parametrize(
    "value",
    [torch.finfo(torch.float16).max * 2, torch.tensor(70_000), torch.tensor(0.1)],
    ids=["number", "count", "float32"],
)
def test_numbers_beside_a_half_precision_loss(value):
    def criterion(outputs, targets):
        return outputs.float().square().mean().half(), {"value": value}

    with ScatterOnceParallel(build(mlp), 1, ["cpu"], verify=False) as engine:
        engine.forward_backward(INPUTS, LABELS, criterion)
        assert engine.last_step.logged["value"] == pytest.approx(float(value), rel=1e-7)


def test_number_that_is_written_later():
    model = build(mlp)
    total = torch.zeros((), dtype=torch.float64)

    def criterion(logits, labels):
        total.copy_(logits.detach().sum())
        return nn.functional.cross_entropy(logits, labels), {"total": total}

    with ScatterOnceParallel(model, 2, ["cpu"], verify=False) as engine:
        engine.forward_backward(INPUTS, LABELS, criterion, reduction="sum")
        logged = engine.last_step.logged
    assert logged["total"] == pytest.approx(float(model(INPUTS).detach().sum()))


def with_number(value):
    def criterion(logits, labels):
        return nn.functional.cross_entropy(logits, labels), {"x": value}

    return criterion


def with_names_by_rows(logits, labels):
    numbers = {"first": 1.0} if logits.shape[0] % 2 else {"second": 1.0}
    return nn.functional.cross_entropy(logits, labels), numbers


def with_named_by_number(logits, labels):
    return nn.functional.cross_entropy(logits, labels), {3: 1.0}


@pytest.mark.parametrize(
    ("criterion", "error", "words"),
    [
        (with_number(torch.ones(3)), ValueError, r"'x' is a tensor of shape \(3,\)"),
        (with_number(torch.tensor(1j)), ValueError, "it must be real"),
        (with_number("high"), TypeError, "'x' is a str"),
        (with_named_by_number, TypeError, "the name 3, a int"),
        (with_names_by_rows, ValueError, "return the same keys for all rows"),
    ],
)
def test_what_is_no_number_refused(criterion, error, words):
    with (
        ScatterOnceParallel(build(mlp), 2, ["cpu"], verify=False) as engine,
        pytest.raises(error, match=words),
    ):
        engine.forward_backward(INPUTS, LABELS, criterion)


def test_shares_with_other_names_refused():
    with (
        ScatterOnceParallel(build(mlp), 1, ["cpu"] * 2, verify=False) as engine,
        pytest.raises(
            ValueError, match="'first' for some rows, and 'second' for others"
        ),
    ):
        engine.forward_backward(INPUTS[:5], LABELS[:5], with_names_by_rows)


def test_wrong_loss_beside_numbers_is_refused():
    """The check before a step compares the loss alone, and compares it."""
    with (
        ScatterOnceParallel(build(mlp), 2, ["cpu"]) as engine,
        pytest.raises(ValueError, match="not the mean of the losses"),
    ):
        engine.forward_backward(INPUTS, WITH_IGNORED, classify_labels)


def test_numbers_do_not_matter_to_the_check():
    """A number that is no mean over rows, such as a maximum, is logged as it combines."""

    def criterion(logits, labels):
        return nn.functional.cross_entropy(logits, labels), {"largest": logits.max()}

    with ScatterOnceParallel(build(mlp), 2, ["cpu"]) as engine:
        engine.forward_backward(INPUTS, LABELS, criterion)
        assert engine.last_step.logged.keys() == {"largest"}


def test_captured_steps_log():
    """Sub-steps whose criterion logs run without CUDA graphs, and say so."""
    model = build(mlp)
    with ScatterOnceParallel(model, 8, ["cpu"], graphs=True) as engine:
        _, numbers, grads = expected_of(model, classify, LABELS)
        with pytest.warns(UserWarning, match="returns numbers to log"):
            engine.forward_backward(INPUTS, LABELS, classify)
        for _ in range(3):
            model.zero_grad()
            engine.forward_backward(INPUTS, LABELS, classify)
            assert_gradients(model, grads)
            assert engine.last_step.logged == pytest.approx(numbers, rel=1e-6)
            assert "returns numbers to log" in engine.last_step.graphs


def test_numbers_that_begin_after_the_capture():
    model = build(mlp)
    logs = []

    def criterion(logits, labels):
        loss, numbers = classify(logits, labels)
        return (loss, numbers) if logs else loss

    inputs, labels = INPUTS[:16], LABELS[:16]
    with ScatterOnceParallel(model, 8, ["cpu"], graphs=True) as engine:
        for _ in range(3):
            engine.forward_backward(inputs, labels, criterion)
        assert "sub-steps replayed" in engine.last_step.graphs
        logs.append(True)
        engine.forward_backward(inputs, labels, criterion)
        right = (model(inputs).argmax(1) == labels).double().mean().item()
        assert engine.last_step.logged["accuracy"] == pytest.approx(right)
