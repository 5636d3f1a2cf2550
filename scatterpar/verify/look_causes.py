"""The questions that a look can answer of its results, in the order of the causes.

A yes shows the cause. The list of all causes is ``causes/evidence.py``; the words of
those that are found are in ``verdicts.py``. Most answers cost a run or two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from scatterpar.batch import nested
from scatterpar.causes.cause_list import other_weights
from scatterpar.causes.evidence import CauseKind, Finding, Question
from scatterpar.devices.bits import same_bits
from scatterpar.numerics.comparison import Inconclusive, relative_difference
from scatterpar.verify.look_results import LookResults
from scatterpar.verify.measurements import losses_of_parts
from scatterpar.verify.output_differences import difference_by_rows
from scatterpar.verify.results import weighted_sum


def is_unrepeatable(results: LookResults) -> bool:
    """Whether the user's own module gives another result for the same rows.

    Raises:
        Inconclusive: it does, and losses do not combine either.
    """
    repeated = results.runs.at_once(results.rows, results.runs.own_task)
    if repeated.difference_from(results.expected) <= results.tolerance:
        return False
    if not do_losses_combine(results):
        raise Inconclusive("it gives another result each time", 2)
    return True


def has_gradient_of_no_loss(results: LookResults) -> Finding | None:
    """The difference of gradients that a backward pass adds whatever the loss is.

    They are those of a loss times zero, in parts and at once. A Function that adds the
    gradient of a balance loss in its backward pass gives such a gradient.
    """
    runs = results.runs
    of_parts = results.in_parts(runs.user_code.restart, scale=0.0)
    # NaN is no answer: a zero may have met an infinity.
    if not (of_parts.has_gradient and of_parts.is_finite):
        return None
    at_once = runs.at_once(results.rows, scale=0.0)
    if not at_once.is_finite:
        return None
    difference = relative_difference(of_parts.gradients, at_once.gradients)
    if difference <= results.tolerance:
        return None
    return Finding(CauseKind.GRADIENT_OF_NO_LOSS, difference=difference)


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


def do_rows_meet(results: LookResults) -> Finding | None:
    """Measure how far entries of the outputs depend on the other rows, relatively."""
    whole, *pieces = results.outputs
    dim = results.request.dim
    difference = difference_by_rows(whole, pieces, results.parts, dim)
    if difference <= results.limit:
        return None
    # If losses do not combine either, that is the reason with a remedy.
    if results.request.whole_batch or do_losses_combine(results):
        return Finding(CauseKind.ROWS_ARE_COMPARED, difference=difference)
    return None


def do_losses_combine(results: LookResults) -> bool:
    """Whether the losses of parts of one output combine to that of all its rows."""
    whole = results.loss_of_output
    if results.request.whole_batch or whole is None:
        return False
    if not (whole.loss or whole.has_gradient):  # zeros combine in every way
        return False
    of_parts = losses_of_parts(results.runs, results.outputs[0], results.parts)
    combined = weighted_sum(of_parts, results.step_weights)
    return combined.difference_from(whole) <= results.tolerance


def uses_outputs_of_a_part(results: LookResults) -> bool:
    """With ``whole_batch`` the criterion reads more than outputs of all rows."""
    return results.request.whole_batch


def do_shapes_broadcast(results: LookResults) -> bool:
    """Whether outputs and targets broadcast to all pairs of rows."""
    shapes = shapes_of(results)
    dimensions = {len(shape) for shape in shapes}
    sizes = {math.prod(shape) for shape in shapes}
    # (n,) beside (n, 1) broadcasts to (n, n), which torch only warns of.
    is_pair = len(shapes) == 2 and len(sizes) == 1
    return is_pair and dimensions == {1, 2} and not results.request.whole_batch


def shapes_of(results: LookResults) -> Sequence[tuple[int, ...]]:
    """The shapes of output and targets that are tensors."""
    compared = results.outputs[0], results.runs.targets_of(results.rows)
    return [tuple(value.shape) for value in compared if isinstance(value, Tensor)]


def uses_number(results: LookResults) -> bool:
    """Whether the loss depends on a 0-dim output that differs between parts, such as a
    balance loss, and not a learned temperature.

    No cause by itself: the remedy of others depends on it.
    """
    if results.loss_of_output is None:
        return False
    whole, *of_parts = [nested.tensors(output) for output in results.outputs]
    # The gradients are those of tensors that require grad, in this order.
    gradients = iter(results.loss_of_output.gradients)
    for position, tensor in enumerate(whole):
        if not tensor.requires_grad:
            continue
        is_used = bool(next(gradients).any())
        if tensor.ndim or not is_used:
            continue
        if not all(same_bits(tensor, tensors[position]) for tensors in of_parts):
            return True
    return False


QUESTIONS: Mapping[CauseKind, Question] = {
    CauseKind.UNREPEATABLE: is_unrepeatable,
    CauseKind.GRADIENT_OF_NO_LOSS: has_gradient_of_no_loss,
    CauseKind.ROUNDING: is_rounding,
    CauseKind.WRONG_WITH_ONE_PART: is_wrong_with_one_part,
    CauseKind.NUMBERS_PER_PART: draws_per_part,
    # Any other weights: the finding says whether they are a constant factor.
    CauseKind.CONSTANT_FACTOR: has_other_weights,
    CauseKind.STATE_BETWEEN_PARTS: depends_on_earlier_parts,
    CauseKind.ROWS_ARE_COMPARED: do_rows_meet,
    CauseKind.OUTPUTS_OF_A_PART: uses_outputs_of_a_part,
    CauseKind.SHAPES_BROADCAST: do_shapes_broadcast,
}
