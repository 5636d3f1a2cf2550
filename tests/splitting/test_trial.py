"""How a step is run, and what is refused."""

import numpy
import pytest
import torch
from splitting.loop_models import (
    Net,
    backward_sums,
    class_loss,
    images,
    new,
    num_rows,
    pairs,
    token_loss,
    tokens,
)
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import splitcheck


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"parts": 0}, ValueError, "parts must be at least 1, got 0"),
        ({"ranks": -1}, ValueError, "ranks must be at least 1, got -1"),
        ({"parts": 2.0}, TypeError, "parts must be an int, got 2.0"),
        ({"parts": 1}, ValueError, "compares the step with itself"),
        ({"parts": 13}, ValueError, "24 rows, too few for 13 parts"),
        ({"parts": 5, "equal": True}, ValueError, "a multiple of 5 rows, or equal=F"),
        ({"loss": 1}, TypeError, "loss must be a function"),
        ({"timeout": 0}, ValueError, "timeout must be positive"),
    ],
)
def test_senseless_arguments_refused(options, error, words):
    with pytest.raises(error, match=words):
        splitcheck(backward_sums, new(Net), images(), **options)


def test_non_functions_and_modules_refused():
    with pytest.raises(TypeError, match="step must be a function"):
        splitcheck(1, new(Net), images())
    with pytest.raises(TypeError, match=r"model must be an nn\.Module, got"):
        splitcheck(backward_sums, backward_sums, images())
    with pytest.raises(ValueError, match=r"passed as Rows\(entries\)"):
        splitcheck(backward_sums, new(Net), ["a"] * 16)


def test_one_part_compared_with_a_loss():
    report = splitcheck(backward_sums, new(Net), images(), parts=1, loss=class_loss)
    report.assert_passed()


@pytest.mark.parametrize("step", [lambda *_: None, lambda model, _: model.zero_grad()])
def test_step_without_gradient_refused(step):
    with pytest.raises(ValueError, match="left no gradient"):
        splitcheck(step, new(Net), images())


def test_failed_diagnosis_leaves_verdict():
    """A part by itself fails, as one without labels may."""

    def step(model, batches):
        if len(batches) == 1 and num_rows(batches) < 24:
            raise ZeroDivisionError("no labels")
        for batch in batches:
            (class_loss(model, batch).exp() / len(batches)).backward()

    report = splitcheck(step, new(Net), images())
    assert not report.passed
    assert report.cause == "unknown"
    assert "ZeroDivisionError: no labels" in report.why


def test_differing_numpy_draws_are_told():
    def step(model, batches):
        for batch in batches:
            weight = numpy.random.rand()
            loss = weight * class_loss(model, batch, "sum") / num_rows(batches)
            loss.backward()

    report = splitcheck(step, new(Net), images())
    assert not report.passed
    assert "draws from the generator of NumPy" in report.why


def test_rounding_of_own_dtype_passes():
    def step(model, batches):
        for pixels, classes in batches:
            hidden = torch.relu(model.first(pixels)).float()
            outputs = nn.functional.linear(hidden, model.last.weight.float())
            loss = cross_entropy(outputs, classes, reduction="sum")
            (loss / num_rows(batches)).backward()

    report = splitcheck(step, new(Net), images())
    report.assert_passed()
    assert 0 < report.worst < 1e-5


def test_equal_label_counts_are_noted():
    ids, labels = tokens()

    def step(model, batches):
        count = sum(labels.numel() for _, labels in batches)
        for batch in batches:
            (token_loss(model, batch, "sum") / count).backward()

    model = new(lambda: nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 50)))
    report = splitcheck(step, model, (ids, ids))
    assert "give some rows labels of -100" in str(report)
    report = splitcheck(step, model, (ids, labels))
    assert report.note == ""


def test_ipython_shows_the_report():
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    report = splitcheck(backward_sums, new(Net), images())
    assert pretty(report) == str(report)
    assert str(report).startswith("gradient of 24 rows as 9 + 7 + 5 + 3, beside")


def test_ranks_need_a_model_on_the_cpu():
    with pytest.raises(ValueError, match="on meta; with ranks= pass it on the CPU"):
        splitcheck(backward_sums, new(Net).to("meta"), pairs(), ranks=2)
