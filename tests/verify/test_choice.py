"""A loop's candidates: which one a step takes, and what is told of the choice."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from harness.looks import INPUTS, LABELS, ROWS
from harness.models import Of, mlp
from harness.oracle import assert_gradients, whole_batch
from harness.weighted import padded
from torch import nn
from torch.nn import functional as F

from scatterpar import Rows, ScatterOnceParallel, count_labels
from scatterpar.batch.batch import batch_of
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.step.loop_options import LoopOptions
from scatterpar.step.request import LossCandidate, Request
from scatterpar.verify.choice import weighted_parts

BY_LABELS = LossCandidate("a mean over labels", count=count_labels(key="targets"))
BY_ROWS = LossCandidate("a mean over rows")
A_SUM = LossCandidate("a sum", "sum")
ALL = [BY_LABELS, BY_ROWS, A_SUM]


class Loss(nn.Module):
    """Computes its loss by ``function(logits, targets)``."""

    def __init__(self, function):
        super().__init__()
        self.body = mlp()
        self.function = function

    def forward(self, inputs, targets):
        return self.function(self.body(inputs), targets)


def mean(logits, targets):
    return F.cross_entropy(logits, targets)


def mean_of_rows(logits, targets):
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.mean()


def added_up(logits, targets):
    return F.cross_entropy(logits, targets, reduction="sum")


def spread(logits, _):
    return logits.std(0).sum()


def batch(targets, inputs=INPUTS):
    return {"inputs": inputs, "targets": targets}


def loop(function, device_ids, candidates=ALL, accum=2):
    engine = ScatterOnceParallel(Loss(function), accum, device_ids)
    engine.loop = LoopOptions(
        candidates=candidates, remedies="Pass count= to the Loop."
    )
    return engine


def assert_exact(engine, targets):
    engine.module.zero_grad()
    oracle = whole_batch(engine.module, batch(targets), None, lambda loss, _: loss)
    engine.module.zero_grad()
    engine.forward_backward(batch(targets))
    assert_gradients(engine.module, oracle[1])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("function", "chosen"),
    [(mean, BY_LABELS), (mean_of_rows, BY_ROWS), (added_up, A_SUM)],
)
def test_fitting_candidate_is_taken_in_step_1(devices, function, chosen):
    """In the step itself, also if it was not the first one."""
    with loop(function, devices(2)) as engine:
        for _ in range(3):
            assert_exact(engine, padded(ROWS))
            assert engine.chosen is chosen


def test_without_looks_first_candidate_is_taken():
    engine = ScatterOnceParallel(Loss(mean), 2, ["cpu"] * 2, verify=False)
    engine.loop = LoopOptions(candidates=ALL)
    with engine:
        assert_exact(engine, padded(ROWS))


@pytest.mark.filterwarnings("ignore:.*ran out of memory")
def test_choice_holds_for_tries_out_of_memory(devices):
    """The step after a try that failed took what had been assumed before the look."""

    def hungry(logits, targets):
        if len(logits) > ROWS // 4:
            raise torch.OutOfMemoryError("out of memory")
        return mean_of_rows(logits, targets)

    targets = padded(ROWS)
    with loop(hungry, devices(2), accum="auto") as engine:
        engine.forward_backward(batch(targets))
        assert engine.chosen is BY_ROWS
        plain = Loss(mean_of_rows)
        plain.load_state_dict(engine.module.state_dict())
        _, expected = whole_batch(plain, batch(targets), None, lambda loss, _: loss)
        assert_gradients(engine.module, expected)


def test_nothing_fits_refused_each_time(devices):
    with loop(spread, devices(2)) as engine:
        for _ in range(3):
            with pytest.raises(ValueError, match="Pass count= to the Loop"):
                engine.forward_backward(batch(LABELS))
            assert all(p.grad is None for p in engine.module.parameters())


@pytest.mark.filterwarnings("error")
def test_equal_rows_ask_again_in_the_next_step(devices):
    """Labels and rows weigh the first batches alike: nothing is chosen, or told."""
    with loop(mean_of_rows, devices(2)) as engine:
        for _ in range(3):
            assert_exact(engine, LABELS)
        assert engine.chosen is BY_LABELS
        with pytest.warns(UserWarning, match="Earlier steps took it for a mean over l"):
            assert_exact(engine, padded(ROWS))
        assert engine.chosen is BY_ROWS
        assert_exact(engine, padded(ROWS))


def test_choice_stays_and_is_refused_if_refuted(devices):
    """It is another loss from the third step on: no silent change."""
    with loop(mean, devices(2)) as engine:
        for _ in range(3):
            assert_exact(engine, padded(ROWS))
        engine.module.function = mean_of_rows
        with pytest.raises(ValueError, match="is not the mean of the losses"):
            engine.forward_backward(batch(padded(ROWS)))  # the fourth step


class First:
    """Rows that are whole batches: a micro-batch has one."""

    def __call__(self, entries):
        return entries[0]


def largest(inputs):
    (batches,) = inputs.values()
    return max(batches.entries, key=lambda entry: len(entry["inputs"]))


def step_of_batches(targets):
    cuts = [slice(0, 5), slice(5, 6), slice(6, 15), slice(15, ROWS)]
    entries = [batch(targets[cut], INPUTS[cut]) for cut in cuts]
    return {"batch": Rows(entries, First())}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("function", [mean, mean_of_rows])
def test_rows_of_one_whole_batch_are_looked_at(devices, function):
    model = Loss(function)
    module = Of(lambda of, batch=None, **rest: of.model(**(batch or rest)), model=model)
    targets = padded(ROWS)
    _, expected = whole_batch(model, batch(targets), None, lambda loss, _: loss)
    model.zero_grad()
    engine = ScatterOnceParallel(module, 4, devices(2))

    def count(inputs, _):
        return inputs.get("batch", inputs)["targets"].ne(-100).sum()

    def rows(inputs, _):
        return len(inputs.get("batch", inputs)["targets"])

    candidates = [
        LossCandidate("a mean over rows", count=rows),
        LossCandidate("a mean over labels", count=count),
    ]
    engine.loop = LoopOptions(candidates=candidates, divided=largest)
    with engine:
        engine.forward_backward(step_of_batches(targets))
    assert_gradients(model, expected)


def test_undividable_rows_are_assumed_and_told(devices):
    def refuses(_):
        raise ValueError("5 images of 4 rows")

    with loop(mean, devices(2)) as engine:
        engine.loop = replace(engine.loop, divided=refuses)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(9):
                engine.forward_backward(batch(padded(ROWS)))
    (told,) = [str(warning.message) for warning in caught]
    assert "5 images of 4 rows" in told
    assert "It is taken for a mean over labels. Pass count=" in told


class Divides(nn.Module):
    """Divides its sum by the items of all rows, if it gets them: transformers' way."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, inputs, targets, items):
        total = F.cross_entropy(self.body(inputs), targets, reduction="sum")
        return total / (targets.ne(-100).sum() if items is None else items)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("first", [0, 1])
def test_entries_of_the_candidate_reach_the_module(devices, first):
    targets = padded(ROWS)
    items = targets.ne(-100).sum()
    candidates = [
        LossCandidate("a mean over labels", "mean", BY_ROWS.count, {"items": None}),
        LossCandidate("a sum over all items", "sum", None, {"items": items}),
    ]
    model = Divides()
    everything = {**batch(targets), "items": items}
    _, expected = whole_batch(model, everything, None, lambda loss, _: loss)
    model.zero_grad()
    engine = ScatterOnceParallel(model, 2, devices(2))
    engine.loop = LoopOptions(candidates=candidates[first:])
    with engine:
        engine.forward_backward({**batch(targets), "items": None})
    assert_gradients(model, expected)
    assert engine.chosen is candidates[1]
    assert torch.equal(engine.chosen.entries["items"], items)


# --- weights of parts ---

MIXED = torch.tensor([0, -100, 1, -100, 1])


def request(criterion=None, **options):
    return Request([batch_of(MIXED, MIXED, 5, 0)], 0, criterion, **options)


def num_labels(inputs, targets):
    return (targets != -100).sum()


def test_parts_of_mean_weighted_by_rows():
    parts = [[0, 1, 2], [3, 4]]
    assert weighted_parts(request(), parts) == (parts, [3 / 5, 2 / 5])
    assert weighted_parts(request(reduction="sum"), parts) == (parts, [1.0, 1.0])


def test_cross_entropy_counts_its_labels():
    parts = [[0, 1, 2], [3, 4]]
    assert weighted_parts(request(nn.CrossEntropyLoss()), parts) == (
        parts,
        [2 / 3, 1 / 3],
    )


def test_count_gets_copies_of_the_rows_of_parts():
    pieces = []

    def count(inputs, targets):
        pieces.append((inputs, targets))
        return len(targets)

    parts = [[0, 2], [4]]
    assert weighted_parts(request(count=count), parts) == (parts, [2 / 3, 1 / 3])
    assert [targets.tolist() for _, targets in pieces] == [[0, 1], [1]]
    pieces[0][0].zero_()
    assert MIXED.tolist() == [0, -100, 1, -100, 1]


def test_rows_without_labels_inconclusive():
    with pytest.raises(Inconclusive, match="none of the rows adds anything"):
        weighted_parts(request(count=num_labels), [[1], [3]])
