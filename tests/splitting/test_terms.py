"""Terms of a loss that are compared one by one."""

from __future__ import annotations

import pytest
import torch
from splitting.loop_models import Net, Tagger, images, new, num_labels, tokens
from torch import nn
from torch.nn.functional import cross_entropy

from scatterpar import splitcheck
from scatterpar.splitting import term


class Scored(nn.Module):
    """Logits of tokens and a score of the row, from one body."""

    def __init__(self):
        super().__init__()
        self.tagger = Tagger()
        self.score = nn.Linear(16, 1)

    def forward(self, ids):
        return self.tagger(ids), self.score(self.tagger.embedding(ids).mean(1))


def losses(model, batch, count=None):
    ids, labels = batch
    logits, scores = model(ids)
    reduction = "mean" if count is None else "sum"
    of_tokens = cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction=reduction
    )
    return of_tokens if count is None else of_tokens / count, scores.square().mean()


def named(model, batches):
    for batch in batches:
        of_tokens, of_rows = losses(model, batch)
        loss = term("sft", of_tokens) + 0.5 * term("dpo", of_rows)
        (loss / len(batches)).backward()


def returned(model, batches):
    sums = {"sft": 0, "dpo": 0}
    for batch in batches:
        of_tokens, of_rows = losses(model, batch)
        sums["sft"] = sums["sft"] + of_tokens / len(batches)
        sums["dpo"] = sums["dpo"] + of_rows / len(batches)
    return sums


def alone(model, batches):
    for batch in batches:
        of_tokens, of_rows = losses(model, batch)
        (term("sft", of_tokens) / len(batches)).backward(retain_graph=True)
        (term("dpo", of_rows) / len(batches)).backward()


@pytest.mark.parametrize("step", [named, returned, alone])
def test_each_term_has_its_cause(step):
    report = splitcheck(step, new(Scored), tokens(), equal=True)
    assert report.terms == {"sft": "mean of means", "dpo": "exact"}
    assert "sft: mean of means; dpo: exact" in str(report)
    assert report.cause == "mean of means"
    assert len(str(report).splitlines()) == 4


def test_right_terms_pass():
    def step(model, batches):
        count = num_labels(batches)
        for batch in batches:
            of_tokens, of_rows = losses(model, batch, count)
            (term("sft", of_tokens) + term("dpo", of_rows / len(batches))).backward()

    report = splitcheck(step, new(Scored), tokens(), equal=True)
    report.assert_passed()
    assert report.terms == {}


def test_penalty_is_found_among_three_terms():
    def step(model, batches):
        for pixels, classes in batches:
            outputs = model(pixels)
            loss = term("classes", cross_entropy(outputs, classes) / len(batches))
            penalty = sum(parameter.square().sum() for parameter in model.parameters())
            size = outputs.square().mean() / len(batches)
            (loss + term("decay", 1e-3 * penalty) + term("size", size)).backward()

    report = splitcheck(step, new(Net), images(), equal=True)
    terms = {"classes": "exact", "decay": "constant factor", "size": "exact"}
    assert report.terms == terms


def test_term_outside_of_a_check_is_the_loss():
    loss = torch.ones((), requires_grad=True)
    assert term("sft", loss) is loss


def test_loss_dict_after_backward_is_no_term():
    def step(model, batches):
        for pixels, classes in batches:
            loss = cross_entropy(model(pixels), classes) / len(batches)
            loss.backward()
        return {"loss": loss}

    splitcheck(step, new(Net), images(), equal=True).assert_passed()
