"""How many rows a look may take, of which step, and when its candidates differ."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scatterpar.batch.batch import batch_of
from scatterpar.plan import make_plan
from scatterpar.step.request import LossCandidate, Request
from scatterpar.verify import look_request
from scatterpar.verify.look_request import (
    LookRequest,
    LossWays,
    choose_rows,
    is_open_between,
)

pytestmark = pytest.mark.draws
CPUS = [torch.device("cpu", number) for number in range(2)]
LABELS = torch.tensor([0, -100] * 40 + [1] * 80)
BY_LABELS = LossCandidate("labels", count=lambda _, t: (t != -100).sum())
BY_ROWS = LossCandidate("rows")


def asked(module=None, criterion=None, accum=2, features=3, devices=CPUS):
    """A request for a look at a step of 160 rows, which cost little."""
    module = nn.Linear(3, 2) if module is None else module
    batch = batch_of(torch.zeros(160, features), LABELS, 160, 0)
    request = Request([batch], 0, nn.MSELoss() if criterion is None else criterion)
    replicas = SimpleNamespace(of_model=SimpleNamespace(root=module))
    plan = make_plan(160, devices, accum)
    attempt = SimpleNamespace(plan=plan, replicas=replicas)
    return LookRequest(attempt, request, None, True, [BY_ROWS], LossWays())


def most_rows(number, **options):
    return choose_rows(asked(**options), BY_ROWS, number).most


@pytest.mark.parametrize(
    ("accum", "first", "later"), [(1, 160, 20), (2, 80, 10), (4, 40, 9), (40, 9, 9)]
)
def test_later_looks_have_fewer_rows(accum, first, later):
    """Micro-batches of 80, 40, 20 and 2 rows."""
    assert most_rows(0, accum=accum) == first
    assert most_rows(1, accum=accum) == most_rows(5, accum=accum) == later


def test_look_at_large_model_has_fewer_rows(monkeypatch):
    """An eighth of 160 rows, or as many as a micro-batch of 10 has."""
    monkeypatch.setattr(look_request, "MAX_ELEMENTS", 7)
    assert most_rows(0) == 20
    assert most_rows(0, accum=8) == 10
    monkeypatch.setattr(look_request, "MAX_ELEMENTS", 8)
    assert most_rows(0) == 80


def test_large_rows_are_few():
    """Six rows of 700 KiB fit into 4 MiB: less than the nine that are the least."""
    assert most_rows(0, features=700 * 2**8) == 5


def test_labels_that_the_loss_ignores():
    class Module(nn.Module):
        def forward(self, rows):
            return rows[rows != 77]

    def criterion(output, targets):
        return output[targets != 88].mean()

    own = asked(Module())
    own_loss = LookRequest(
        own.attempt,
        Request(own.request.batches, 0),
        None,
        True,
        own.candidates,
        own.ways,
    )
    assert 77 in choose_rows(own_loss, BY_ROWS, 0).ignored
    chosen = choose_rows(asked(Module(), criterion), BY_ROWS, 0)
    assert 88 in chosen.ignored
    assert 77 not in chosen.ignored


def test_choice_is_of_the_candidate():
    row_choice = choose_rows(asked(), BY_LABELS, 3)
    assert row_choice.request.count is BY_LABELS.count
    assert row_choice.number == 3
    assert row_choice.is_divided
    assert any(torch.equal(tensor, LABELS) for tensor in row_choice.tensors)


def test_alike_candidates_are_not_open():
    """Labels count in each second row of the first half: not in equal parts."""
    step = asked()
    of_step = step.request, step.attempt.plan
    assert is_open_between(*of_step, [BY_ROWS, BY_LABELS])
    assert not is_open_between(*of_step, [BY_ROWS])
    assert not is_open_between(*of_step, [BY_ROWS, LossCandidate("rows again")])


def test_title_counts_from_one():
    assert asked().title(0) == "check 1 of the criterion MSELoss, 160 rows"
