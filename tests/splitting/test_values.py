"""Numbers of evaluations that depend on the split, and that do not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from splitting.loop_models import (
    Net,
    Tagger,
    class_loss,
    images,
    new,
    token_loss,
    tokens,
)

from scatterpar.splitting import valuecheck


def num_labels(batch):
    return int((batch[1] != -100).sum())


@torch.no_grad()
def sums(model, batches):
    total = sum(float(token_loss(model, batch, "sum")) for batch in batches)
    return total / sum(map(num_labels, batches))


@torch.no_grad()
def rows_weigh(model, batches):
    total = sum(float(token_loss(model, batch)) * len(batch[0]) for batch in batches)
    return {"loss": total / sum(len(batch[0]) for batch in batches)}


@torch.no_grad()
def mean_of_means(model, batches):
    losses = [token_loss(model, batch) for batch in batches]
    return {"count": 3, "loss": torch.stack(losses).mean()}


@torch.no_grad()
def mean_of_perplexities(model, batches):
    perplexities = [math.exp(sums(model, [batch])) for batch in batches]
    return {"perplexity": sum(perplexities) / len(perplexities)}


@torch.no_grad()
def last_batch_dropped(model, batches):
    return sums(model, batches[:-1] or batches)


@torch.no_grad()
def last_alone(model, batches):
    return {"loss": sums(model, batches[-1:]), "rows": 24.0}


@torch.no_grad()
def moving_average(model, batches):
    average = sums(model, batches[:1])
    for batch in batches[1:]:
        average = 0.7 * average + 0.3 * sums(model, [batch])
    return average


@torch.no_grad()
def summed(model, batches):
    return sum(float(token_loss(model, batch)) for batch in batches)


@pytest.mark.parametrize(
    ("evaluate", "cause", "words"),
    [
        (
            rows_weigh,
            "other weights",
            "In loss the evaluation takes the parts, weighted by their rows",
        ),
        (mean_of_means, "mean of means", "the whole batch by their labels"),
        (mean_of_perplexities, "mean of ratios", "once, from sums over all parts"),
        (last_batch_dropped, "only some parts", "drop_last"),
        (summed, "sum of means", "equally (1, 1, 1, 1)"),
        (last_alone, "only some parts", "equally (0, 0, 0, 1)"),
        (moving_average, "state between parts", "in reverse order"),
    ],
)
def test_wrong_value_is_found_and_named(evaluate, cause, words):
    report = valuecheck(evaluate, new(Tagger), tokens())
    assert not report.passed
    assert report.cause == cause, report
    assert words in f"{report.why} {report.remedy}"
    assert len(str(report).splitlines()) == 4
    with pytest.raises(AssertionError, match="NOT the same"):
        report.assert_passed()


def test_right_value_passes():
    report = valuecheck(sums, new(Tagger), tokens())
    report.assert_passed()
    assert report.cause == ""
    assert report.whole["value"] == pytest.approx(report.in_parts["value"])


def test_numbers_on_the_function_are_put_back():
    @torch.no_grad()
    def evaluate(model, batches):
        evaluate.calls += 1
        return sums(model, batches)

    evaluate.calls = 0
    valuecheck(evaluate, new(Tagger), tokens()).assert_passed()
    assert evaluate.calls == 0


def test_accuracy_of_rows_passes():
    @torch.no_grad()
    def accuracy(model, batches):
        hits = [(model(pixels).argmax(1) == classes) for pixels, classes in batches]
        return {"accuracy": float(torch.cat(hits).double().mean())}

    valuecheck(accuracy, new(Net), images()).assert_passed()


def test_other_results_refused():
    with pytest.raises(TypeError, match="a number or a dict of numbers, got None"):
        valuecheck(lambda model, batches: None, new(Net), images())


@pytest.mark.slow
def test_value_of_one_rank_is_found():
    def of_rank(model, batches):
        with torch.no_grad():
            return float(class_loss(model, batches[0]))

    def of_all(model, batches):
        loss = torch.tensor(of_rank(model, batches))
        dist.all_reduce(loss)
        return loss / dist.get_world_size()

    report = valuecheck(of_rank, new(Net), images(), parts=1, ranks=2)
    assert report.cause == "ranks differ"
    valuecheck(of_all, new(Net), images(), parts=1, ranks=2).assert_passed()
