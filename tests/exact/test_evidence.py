"""A yes needs evidence: who says right, equal or rounding says no to NaN, infinity and
nothing.

A comparison with NaN is false. So ``error <= bound`` is a yes that NaN does not get,
and ``not error > bound`` is one that it gets.
"""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness.oracle import build
from torch import nn

import scatterpar
from scatterpar import ScatterOnceParallel, splitcheck
from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import Growth, SplitEvidence
from scatterpar.causes.vectors import factor_between, is_close, weights_of_parts
from scatterpar.numerics.comparison import relative_difference
from scatterpar.numerics.nudges import rounding_limit
from scatterpar.splitting.grid import SplitGrid
from scatterpar.splitting.trial import Trial
from scatterpar.verify.gradient_check import GradientCheck
from scatterpar.verify.look_rounding import _is_rounding_of
from scatterpar.verify.output_differences import difference_by_rows
from scatterpar.verify.results import NOTHING, Result

# --- by the syntax: no measured number is on the larger side of a question ---

PACKAGE = Path(scatterpar.__file__).parent
FOLDERS = ("verify", "numerics", "causes", "splitting", "checkup")
FILES = [path for folder in FOLDERS for path in sorted((PACKAGE / folder).glob("*.py"))]
FILES += sorted((PACKAGE / "options" / "graphs").glob("*.py"))
# Words of names that hold a measured number, which may be NaN or infinite.
MEASURED = {
    "cosine", "difference", "effect", "effects", "error", "errors", "factor", "growth",
    "limit", "loss", "norm", "rounding", "own", "ratio", "scale", "size", "sizes", "spread",
    "spreads", "tolerance", "worst",
}  # fmt: skip
# Functions with comparisons that may ask for the larger one, and why NaN gets no yes.
MAY_BE_LARGER = {
    "verify/gradient_check.py may_be_rounding": "of a constant",
    "verify/gradient_check.py beside": "infinity gets a no",
    "verify/gradient_check.py in_double": "bytes",
    "verify/look_rounding.py _limit_of_nudges": "nudges explain nothing infinite",
    "verify/look_rounding.py _difference_by_nudges": "of finite effects",
    "verify/schedule.py _is_as_small_as_a_mask": "a number of entries",
    "options/graphs/replay.py _has_room": "bytes",
    "verify/user_code.py __init__": "bytes",
    "causes/cause_list.py kind_of_weights": "a number of parts",
    "causes/evidence.py is_of_a_term": "NaN gets a no",
    "causes/vectors.py weights_of_parts": "of finite numbers",
    "checkup/small_step.py graphs_are_faster": "what was not measured is not faster",
    "splitting/gradients.py relative_errors": "a constant",
    "splitting/gradients.py largest_error": "the name of the largest error",
    "splitting/rank_processes.py _results": "a number of ranks",
    "splitting/row_parts.py orders_of_rows": "of counts",
    "splitting/steady_numbers.py _vanished": "NaN is asked for beside it",
    "splitting/trial.py compare": "a note on what has passed",
}
ORDERS = ast.Gt | ast.GtE | ast.Lt


def asks_for_the_larger(node):
    """Whether a comparison of a measured number is one by ``>``, ``>=`` or ``<``."""
    if not isinstance(node, ast.Compare):
        return False
    if not any(isinstance(operator, ORDERS) for operator in node.ops):
        return False
    names = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    names |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
    return bool(MEASURED & {*itertools.chain(*(name.split("_") for name in names))})


def places():
    """The functions with such comparisons."""
    found = set()
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        for function in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_function = isinstance(function, ast.FunctionDef)
            if is_function and any(map(asks_for_the_larger, ast.walk(function))):
                found.add(f"{file} {function.name}")
    return found


def test_no_measured_number_is_to_be_larger():
    """Write ``error <= bound``, or name the function with the reason why NaN, which is
    neither larger nor smaller, gets no yes.
    """
    assert places() <= MAY_BE_LARGER.keys()


def test_table_has_only_what_is_in_the_code():
    assert MAY_BE_LARGER.keys() <= places()


@pytest.mark.parametrize(
    ("text", "is_asked"),
    [
        ("error > max(rounding * size, bound)", True),
        ("not difference <= results.tolerance", False),
        ("results.difference > results.tolerance", True),
        ("len(parts) > 1", False),
    ],
)
def test_comparisons_that_are_found(text, is_asked):
    nodes = ast.walk(ast.parse(text))
    assert any(map(asks_for_the_larger, nodes)) == is_asked


# --- by what they are given ---

NAN, INF = math.nan, math.inf
NOT_FINITE = [NAN, INF, -INF]


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def result(loss=1.0, gradient=1.0):
    return Result(loss, [numbers(gradient)])


def check_with(worst):
    return GradientCheck(8, worst, "weight", 1e-10, "")


def results_differ_little(actual, expected):
    return result(gradient=actual).difference_from(result(gradient=expected)) <= 1.0


def losses_differ_little(actual, expected):
    return result(actual).difference_from(result(expected)) <= 1.0


def gradients_are_alike(actual, expected):
    return relative_difference([numbers(actual)], [numbers(expected)]) <= 1.0


def outputs_are_alike(actual, expected):
    piece, whole = numbers(actual, 1.0), numbers(expected, 1.0)
    pieces = [piece[:1], piece[1:]]
    return difference_by_rows(whole, pieces, [[0], [1]], 0) <= 1.0


def vectors_are_close(actual, expected):
    return is_close(numbers(actual, 1.0), numbers(expected, 1.0), 1.0)


def one_factor_explains(actual, expected):
    vector = numbers(actual, 2.0, 3.0)
    return factor_between(vector, numbers(expected, 2.0, 3.0), 0.5) is not None


def weights_explain(actual, expected):
    parts = [numbers(actual, 1, 0, 0), numbers(0, 0, expected, 1)]
    return weights_of_parts(parts, numbers(actual, 1, expected, 1), 1e-6) is not None


def rows_explain(actual, expected):
    summands = [result(), result(gradient=-1.0)]
    return _is_rounding_of(
        summands, result(gradient=actual), result(gradient=expected), 1.0, 1.0
    )


def losses_of_rows_explain(actual, expected):
    summands = [result(2.0), result(-1.0)]
    return _is_rounding_of(summands, result(actual), result(expected), 1.0, 1.0)


def summands_are_finite(actual, expected):
    summands = [result(gradient=actual), result(gradient=expected)]
    return _is_rounding_of(summands, result(), result(), 1.0, 1.0)


def parameters_do_not_differ(actual, expected):
    trial = Trial.__new__(Trial)
    trial.limit = 1.0
    trial.arguments = SimpleNamespace(returns_values=False)
    return not trial.differing({"a": numbers(actual)}, {"a": numbers(expected)})


def values_do_not_differ(actual, expected):
    trial = Trial.__new__(Trial)
    trial.limit = 1.0
    trial.arguments = SimpleNamespace(returns_values=True)
    return not trial.differing({"a": numbers(actual)}, {"a": numbers(expected)})


def growth_is_of_a_term(actual, expected):
    return Growth("part", 1 + actual, 1 + expected, cosine=1.0).is_of_a_term


def counts_have_proportions(actual, expected):
    evidence = SplitEvidence()
    evidence.parts = [[0], [1]]
    count = Count("weights", "weights", (expected, 1.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SplitEvidence, "counts", [count])
        return evidence.counted_as(numbers(actual, 1.0)) is not None


QUESTIONS = (
    results_differ_little,
    losses_differ_little,
    gradients_are_alike,
    outputs_are_alike,
    vectors_are_close,
    one_factor_explains,
    weights_explain,
    rows_explain,
    losses_of_rows_explain,
    summands_are_finite,
    parameters_do_not_differ,
    values_do_not_differ,
    growth_is_of_a_term,
    counts_have_proportions,
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_equal_numbers_get_a_yes(question):
    assert question(1.0, 1.0)


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_not_finite_gets_a_no(question, value):
    assert not question(value, 1.0)
    assert not question(1.0, value)
    if question is not outputs_are_alike:  # a row without a term is NaN in both
        assert not question(value, value)


def test_nothing_gets_a_no():
    empty = numbers()
    assert not is_close(empty, empty, 1.0)
    assert factor_between(empty, empty, 1.0) is None
    assert weights_of_parts([], empty, 1.0) is None
    assert rounding_limit([], 0.1) == 0.0
    assert not _is_rounding_of([], result(), result(), 1.0, 1.0)
    assert not SplitGrid([]).passed


@pytest.mark.parametrize("effects", [[NAN], [INF], [INF, NAN]])
def test_nudge_that_is_not_finite_explains_nothing(effects):
    assert rounding_limit(effects, 0.1) == 0.0


@pytest.mark.parametrize("worst", [NAN, INF])
def test_check_does_not_pass_what_is_not_finite(worst):
    assert not check_with(worst).passed
    assert check_with(0.0).passed


def test_result_of_nothing_has_no_gradient():
    assert not NOTHING.has_gradient


def unfinished(value):
    """Multiplies the loss of one row in the batch by what is not finite."""

    def loss(output, targets):
        factors = torch.where(targets[:, :1] > 0.5, value, 1.0)
        return (output * factors).mean()

    return loss


INPUTS = torch.linspace(-1, 1, 24, dtype=torch.float64).view(12, 2)
TARGETS = torch.zeros(12, 2, dtype=torch.float64)
TARGETS[5] = 1


def network():
    return build(lambda: nn.Linear(2, 2))


@pytest.mark.parametrize("value", NOT_FINITE)
def test_engine_check_does_not_pass_it(value):
    with ScatterOnceParallel(network(), 2, ["cpu"] * 2) as engine:
        assert not engine.check(INPUTS, TARGETS, unfinished(value)).passed


@pytest.mark.parametrize("value", NOT_FINITE)
def test_splitcheck_does_not_pass_it(value):
    loss = unfinished(value)

    def step(model, batches):
        for inputs, targets in batches:
            (loss(model(inputs), targets) * len(inputs) / len(INPUTS)).backward()

    assert not splitcheck(step, network(), (INPUTS, TARGETS)).passed


HIDDEN = torch.zeros(40, 3, 2, 2, dtype=torch.float64)
HIDDEN += torch.linspace(0, 0.5, 40, dtype=torch.float64)[:, None, None, None]
HIDDEN[[13, 30, 31]] += 1  # none of them is among the nine that the first look takes


class OfImages(nn.Module):
    """A mean over images of which few are terms, which only ``forward`` sees."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 2)

    def forward(self, images):
        rows = images.flatten(1)
        return self.linear(rows), rows[:, :1] >= 1


def ratio_of_images(output, _):
    values, is_term = output
    return (values.square() * is_term).sum() / is_term.sum()


def test_rows_that_say_nothing_are_no_yes():
    """No row of the look is a term: the whole batch is asked, in its own parts."""
    refusal = pytest.raises(ValueError, match="is not the mean of the losses")
    with ScatterOnceParallel(build(OfImages), 5, ["cpu"] * 2) as engine, refusal:
        engine.forward_backward(HIDDEN, None, ratio_of_images)


def test_zero_is_no_evidence():
    """All gradients are zero in the parts and at once: four times, then it is told."""

    def loss(output, targets):
        return (output * 0).sum() / targets.sum()

    told = pytest.warns(UserWarning, match="could not check.*zero")
    with ScatterOnceParallel(network(), 2, ["cpu"] * 2) as engine, told:
        for _ in range(8):
            engine.forward_backward(INPUTS, TARGETS + 1, loss)


@pytest.mark.parametrize("value", NOT_FINITE)
def test_look_says_that_it_knows_nothing(value):
    told = pytest.warns(UserWarning, match="could not check.*NaN or infinite")
    with ScatterOnceParallel(network(), 2, ["cpu"] * 2) as engine, told:
        for _ in range(8):
            engine.forward_backward(INPUTS, TARGETS, unfinished(value))
