"""The questions that a look can answer of its results, in the order of the causes.

A yes shows the cause. The list of all causes is ``causes/evidence.py``; the words of
those that are found are in ``verdicts.py``. Most answers cost a run or two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from scatterpar.causes.cause_list import other_weights
from scatterpar.causes.evidence import CauseKind, Finding, Question
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.verify.look_losses import LookResults


def is_unrepeatable(results: LookResults) -> bool:
    """Whether the user's own module gives another result for the same rows.

    Raises:
        Inconclusive: it does, and losses do not combine either.
    """
    repeated = results.runs.at_once(results.rows, results.runs.own_task)
    if repeated.difference_from(results.expected) <= results.tolerance:
        return False
    if not results.losses_combine:
        raise Inconclusive("it gives another result each time", 2)
    return True


def has_gradient_of_no_loss(results: LookResults) -> bool:
    """Whether a backward pass adds a gradient that does not depend on the loss."""
    return results.injected_difference > results.tolerance


def is_rounding(results: LookResults) -> bool:
    """Whether rounding explains the difference."""
    return results.difference <= results.limit


def is_wrong_with_one_part(results: LookResults) -> bool:
    """Whether the replica gives another result for the same rows at once."""
    return not results.is_expected(results.of_replica)


def draws_per_part(results: LookResults) -> bool:
    """Whether the result is right if each part draws the same numbers.

    Raises:
        Inconclusive: how many are drawn depends on the rows.
    """
    if not results.draws_steadily:
        raise Inconclusive("what is drawn depends on the rows", 2)
    return results.is_expected(
        results.in_parts(results.runs.user_code.restore_generators)
    )


def has_other_weights(results: LookResults) -> Finding | None:
    """The weights of another mean or sum, if they give the expected result."""
    return other_weights(results, ())


def depends_on_earlier_parts(results: LookResults) -> bool:
    """Whether each part gives the expected result if it starts from the same state.

    Or in evaluation mode, if state moves by the rows, as batch normalisation does.
    """
    if results.is_expected(results.in_parts(results.runs.user_code.restart)):
        return True
    return bool(results.moved) and combines_in_evaluation(results)


def combines_in_evaluation(results: LookResults) -> bool:
    """Whether the parts give the result of all rows in evaluation mode."""
    user_code = results.runs.user_code
    with user_code.in_evaluation():
        expected = results.runs.at_once(results.rows, results.runs.own_task)
        actual = results.in_parts(user_code.restart)
    return actual.difference_from(expected) <= results.limit


def do_rows_meet(results: LookResults) -> bool:
    """Whether the module's output for a row depends on the other rows."""
    if results.difference_of_outputs <= results.limit:
        return False
    # If losses do not combine either, that is the reason with a remedy.
    return results.request.whole_batch or results.losses_combine


def uses_outputs_of_a_part(results: LookResults) -> bool:
    """With ``whole_batch`` the criterion reads more than outputs of all rows."""
    return results.request.whole_batch


def do_shapes_broadcast(results: LookResults) -> bool:
    """Whether outputs and targets broadcast to all pairs of rows."""
    dimensions = {len(shape) for shape in results.shapes}
    sizes = {math.prod(shape) for shape in results.shapes}
    # (n,) beside (n, 1) broadcasts to (n, n), which torch only warns of.
    is_pair = len(results.shapes) == 2 and len(sizes) == 1
    return is_pair and dimensions == {1, 2} and not results.request.whole_batch


QUESTIONS: Mapping[CauseKind, Question] = {
    CauseKind.UNREPEATABLE: is_unrepeatable,
    CauseKind.GRADIENT_OF_NO_LOSS: has_gradient_of_no_loss,
    CauseKind.ROUNDING: is_rounding,
    CauseKind.WRONG_WITH_ONE_PART: is_wrong_with_one_part,
    CauseKind.NUMBERS_PER_PART: draws_per_part,
    CauseKind.CONSTANT_FACTOR: has_other_weights,
    CauseKind.STATE_BETWEEN_PARTS: depends_on_earlier_parts,
    CauseKind.ROWS_ARE_COMPARED: do_rows_meet,
    CauseKind.OUTPUTS_OF_A_PART: uses_outputs_of_a_part,
    CauseKind.SHAPES_BROADCAST: do_shapes_broadcast,
}
