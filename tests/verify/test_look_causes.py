"""What each question of a look answers, with results that are known.

In steps of an engine the causes and their order are ``guide/test_outcomes.py``.
"""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scatterpar.batch.batch import batch_of
from scatterpar.causes.counts import IGNORED
from scatterpar.causes.evidence import CauseKind
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.step.request import Request
from scatterpar.verify import look_causes
from scatterpar.verify.look_results import LookResults
from scatterpar.verify.results import Result

ROWS = torch.arange(4.0)
RIGHT = Result(1.0, [torch.tensor([1.0])])
WRONG = Result(2.0, [torch.tensor([2.0])])


def results_with(request=None, moved=(), draws_steadily=True, **known):
    """Results in which the loss in parts is twice that at once; ``known`` are further
    ones.
    """

    @contextlib.contextmanager
    def in_evaluation():
        modes.append("evaluation")
        yield
        modes.pop()

    def in_parts(prepare, scale=1.0):
        return known["in_parts"][modes[-1], prepare, scale]

    modes = ["training"]
    user_code = SimpleNamespace(
        restart="restart",
        restore_generators="restore generators",
        in_evaluation=in_evaluation,
    )
    runs = SimpleNamespace(
        user_code=user_code,
        own_task="own task",
        at_once=lambda rows, task=None, scale=1.0: known["at_once"][
            modes[-1], task, scale
        ],
        targets_of=lambda rows: known["targets"],
    )
    request = Request([batch_of(ROWS, ROWS, 4, 0)], 0, nn.MSELoss(), **request or {})
    results = LookResults(
        request,
        [[0, 1], [2, 3]],
        [0.5, 0.5],
        RIGHT,
        WRONG,
        tolerance=1e-6,
        ignored=IGNORED,
        runs=runs,
        draws_steadily=draws_steadily,
        moved=moved,
    )
    vars(results).update({"limit": 1e-3, **known})
    if "in_parts" in known:
        vars(results)["in_parts"] = in_parts
    return results


def test_questions_in_the_order_of_causes():
    kinds = list(look_causes.QUESTIONS)
    assert kinds == [kind for kind in CauseKind if kind in kinds]


@pytest.mark.parametrize("combine", [True, False])
def test_own_module_repeats_its_result(monkeypatch, combine):
    monkeypatch.setattr(look_causes, "do_losses_combine", lambda results: combine)
    same = results_with(at_once={("training", "own task", 1.0): RIGHT})
    assert not look_causes.is_unrepeatable(same)
    other = results_with(at_once={("training", "own task", 1.0): WRONG})
    if combine:
        assert look_causes.is_unrepeatable(other)
    else:
        with pytest.raises(Inconclusive, match="another result each time"):
            look_causes.is_unrepeatable(other)


@pytest.mark.parametrize(
    ("question", "known", "answer"),
    [
        ("is_rounding", {"difference": 1e-4}, True),
        ("is_rounding", {"difference": 1e-2}, False),
        ("is_wrong_with_one_part", {"of_replica": RIGHT}, False),
        ("is_wrong_with_one_part", {"of_replica": WRONG}, True),
    ],
)
def test_difference_beside_its_limit(question, known, answer):
    assert getattr(look_causes, question)(results_with(**known)) == answer


@pytest.mark.parametrize(
    ("of_parts", "at_once", "difference"),
    [
        ([4.0], [4.0], None),
        ([4.0], [4.000001], None),
        ([4.0], [2.0], 1.0),
        ([0.0], [2.0], None),
        ([math.nan], [2.0], None),
    ],
)
def test_gradient_of_a_loss_times_zero(of_parts, at_once, difference):
    results = results_with(
        in_parts={("training", "restart", 0.0): Result(0.0, [torch.tensor(of_parts)])},
        at_once={("training", None, 0.0): Result(0.0, [torch.tensor(at_once)])},
    )
    finding = look_causes.has_gradient_of_no_loss(results)
    if difference is None:
        assert finding is None
    else:
        assert finding.kind is CauseKind.GRADIENT_OF_NO_LOSS
        assert finding.difference == pytest.approx(difference)


def test_parts_draw_the_same_numbers():
    for result, answer in ((RIGHT, True), (WRONG, False)):
        in_parts = {("training", "restore generators", 1.0): result}
        assert look_causes.draws_per_part(results_with(in_parts=in_parts)) == answer
    with pytest.raises(Inconclusive, match="drawn depends on the rows"):
        look_causes.draws_per_part(results_with(draws_steadily=False))


@pytest.mark.parametrize("moved", [(), ("steps",)])
@pytest.mark.parametrize("in_training", [RIGHT, WRONG])
@pytest.mark.parametrize("in_evaluation", [RIGHT, WRONG])
def test_state_of_earlier_parts(moved, in_training, in_evaluation):
    results = results_with(
        moved=moved,
        in_parts={
            ("training", "restart", 1.0): in_training,
            ("evaluation", "restart", 1.0): in_evaluation,
        },
        at_once={("evaluation", "own task", 1.0): RIGHT},
    )
    explains = in_training is RIGHT or (bool(moved) and in_evaluation is RIGHT)
    assert look_causes.depends_on_earlier_parts(results) == explains


@pytest.mark.parametrize("whole_batch", [True, False])
@pytest.mark.parametrize("combine", [True, False])
@pytest.mark.parametrize("difference", [1e-4, 1e-2])
def test_rows_meet_in_the_module(monkeypatch, difference, combine, whole_batch):
    monkeypatch.setattr(look_causes, "do_losses_combine", lambda results: combine)
    part = torch.tensor([1.0, 1.0])
    whole = torch.tensor([1.0, 1.0, 1.0, 1.0 - difference])
    results = results_with({"whole_batch": whole_batch}, outputs=[whole, part, part])
    finding = look_causes.do_rows_meet(results)
    if difference == 1e-2 and (combine or whole_batch):
        assert finding.difference == pytest.approx(difference, rel=1e-3)
    else:
        assert finding is None
    assert look_causes.uses_outputs_of_a_part(results) == whole_batch


@pytest.mark.parametrize(
    ("shapes", "do_broadcast"),
    [
        ([(4, 1), (4,)], True),
        ([(4,), (4, 1)], True),
        ([(4,), None], False),
        ([(4,), (4,)], False),
        ([(4, 2), (4,)], False),
        ([(4, 1), (1, 4)], False),
    ],
)
def test_shapes_that_broadcast_to_pairs(shapes, do_broadcast):
    output, targets = [shape and torch.zeros(shape) for shape in shapes]
    known = {"outputs": [output], "targets": targets}
    assert look_causes.do_shapes_broadcast(results_with(**known)) == do_broadcast
    whole = results_with({"whole_batch": True}, **known)
    assert not look_causes.do_shapes_broadcast(whole)
