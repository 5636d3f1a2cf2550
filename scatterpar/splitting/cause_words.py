"""The words of each cause of a wrong gradient in a loop, and its remedy.

The verdict that a gradient is wrong does not depend on it. A cause is a hint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from scatterpar.causes.cause_list import first_finding
from scatterpar.causes.counts import Count
from scatterpar.causes.evidence import (
    CLOSE,
    CauseKind,
    Finding,
    Growth,
    SplitEvidence,
    Weights,
)
from scatterpar.causes.vectors import factor_between, is_close
from scatterpar.splitting.check_report import Cause
from scatterpar.splitting.gradients import first_names, joined, union
from scatterpar.splitting.split_causes import first_meeting, questions_of
from scatterpar.splitting.split_results import SplitResults, split_results
from scatterpar.splitting.step_run import layers_with_batch_statistics
from scatterpar.splitting.trial import Comparison, Trial


def explain(trial: Trial, comparison: Comparison) -> Cause:
    """The first cause that fits; none if only rounding differs.

    A cause is tested on runs of the step in other ways. If such a run fails, as with a
    part without labels, the next cause is tested.
    """
    # A cause costs further runs, so it is only sought if something differs.
    if comparison.worst <= trial.limit:
        return Cause()
    prefix = ""
    if layers_with_batch_statistics(trial.model):
        trial.runs.settings = replace(trial.runs.settings, running_statistics=True)
        comparison = trial.compare_again()
        if comparison.worst <= trial.limit:
            return _BATCH_NORM
        prefix = "Also with the running statistics of batch normalisation: "
    # From here on all runs of the step are those of the causes.
    results = split_results(trial, comparison)
    finding, failures = first_finding(results, questions_of(results))
    why, remedy = _words(finding, results)
    why = f"{prefix}{why}{_effect_on_optimizers(finding)}"
    if failures and finding.kind is CauseKind.UNKNOWN:
        problem = f"{type(failures[0]).__name__}: {failures[0]}".splitlines()[0]
        why += f" Some causes could not be tested: step raised {problem}"
    generators = " and ".join(comparison.reference.drawn)
    # One factor in all parameters does not come from chance.
    if generators and finding.kind is not CauseKind.CONSTANT_FACTOR:
        why += (
            f" But step draws from the generator of {generators}, whose numbers may "
            f"differ between parts: draw before splitcheck."
        )
    return Cause(finding.kind.value, why, remedy)


Words = tuple[str, str]  # why, and what to write instead


def _words(finding: Finding, results: SplitResults) -> Words:
    # A finding has one figure at most, which its words explain.
    if finding.factor is not None:
        return _factor_in_words(finding, finding.factor, results)
    if finding.weights is not None:
        return _words_of_weights(finding, finding.weights, results)
    if finding.growth is not None:
        return _once_per_part(finding.growth, results)
    if finding.count is not None:
        return _mean_of_means_in_a_term(finding.count, results)
    match finding.kind:
        case CauseKind.NOT_FINITE:
            return _not_finite(results)
        case CauseKind.WRONG_WITH_ONE_PART:
            return _wrong_with_one_part(results)
        case CauseKind.RANKS_DIFFER:
            return _ranks_differ(finding, results)
        case CauseKind.ROWS_ARE_COMPARED:
            return _rows_are_compared(results)
        case CauseKind.STATE_BETWEEN_PARTS:
            return _state_between_parts(results)
    return _MOVED if results.moves_weights else _UNKNOWN


def _not_finite(results: SplitResults) -> Words:
    if joined(results.expected).isfinite().all():
        return (
            "Only in parts, the gradient has NaN or infinite entries.",
            "skip the mean of a part without labels: it divides by zero.",
        )
    return (
        "The gradient of the whole batch has NaN or infinite entries.",
        "check the step with one batch first.",
    )


def _wrong_with_one_part(results: SplitResults) -> Words:
    actual = joined(results.with_one_part)
    factor = factor_between(actual, joined(results.expected), results.tolerance)
    size = "not" if factor is None else f"{factor:.4g} times"
    return (
        f"Already with the whole batch as one part, the gradient is {size} the "
        f"gradient of loss=.",
        "compare the two losses; write len(batches) for a constant in the loop.",
    )


def _ranks_differ(finding: Finding, results: SplitResults) -> Words:
    is_all = results.is_everything(finding.names)
    place = "any parameter" if is_all else first_names(finding.names)
    return (
        f"The ranks end with different gradients of {place}: they were not averaged.",
        "call the DDP module, not model.module or parameters outside of it, and keep "
        "the last backward() out of no_sync(); clip after the average.",
    )


def _once_per_part(growth: Growth, results: SplitResults) -> Words:
    unit = growth.unit
    number = f"number of {unit}s"
    if min(results.trial.num_parts, results.trial.ranks) > 1:
        number = "number of parts of all ranks"
    return (
        f"A summand of the loss counts once for each {unit}: with 3 {unit}s the "
        f"difference is {growth.factor:.3g} times as large as with 2."
        f"{_shows_in(results)}",
        f"divide a penalty or a balance loss by the {number}, or add it once.",
    )


def _mean_of_means_in_a_term(count: Count, results: SplitResults) -> Words:
    alike = "the same" if count.is_sum else "equally many"
    return (
        f"The gradient is right if rows have {alike} {count.words}, and else wrong: "
        f"one of several summands of the loss is a mean over these in each part."
        f"{_shows_in(results)}",
        f"{_BY_TERMS}, for each summand of the loss separately.",
    )


def _state_between_parts(results: SplitResults) -> Words:
    moved = ""
    if results.moved:
        moved = (
            f" The step moves {first_names(results.moved)}, which it does not train."
        )
    return (
        f"The same parts in reverse order give another result.{moved}",
        "update frozen weights (such as a teacher's average), buffers, attributes and "
        "counters once per step, not once per part; change accumulated gradients once "
        "per step, too.",
    )


def _rows_are_compared(results: SplitResults) -> Words:
    return (
        f"The gradient of the batch is no weighted sum of the gradients of the parts: "
        f"{_where_rows_meet(results)}.{_shows_in(results)}",
        "compute a contrastive loss, a product of means or batch statistics once, from "
        "the outputs of all rows, gathered with their gradient or cached (GradCache); "
        "mask padding.",
    )


def _where_rows_meet(results: SplitResults) -> str:
    try:
        module = first_meeting(results.trial)
    except Exception:  # raised by the step for a single part
        return "the loss or the module compares rows with each other"
    if module:
        return f"rows first meet in {module}, whose outputs depend on the other rows"
    # The loss, or a gradient that the loop uses before its last backward pass.
    return "the loss compares rows with each other (no module does)"


def _effect_on_optimizers(finding: Finding) -> str:
    """A sentence about what Adam and clipping make of the difference.

    Adam divides by the size of the gradient, so that a factor vanishes.
    """
    if finding.factor:
        return _HIDDEN_BY_ADAM
    # No optimizer mends these.
    without_effect = CauseKind.RANKS_DIFFER, CauseKind.NO_GRADIENT, CauseKind.NOT_FINITE
    if finding.kind in without_effect:
        return ""
    return " Adam does not hide the difference: the gradient has another direction."


_HIDDEN_BY_ADAM = (
    " Adam hides this factor, and so does clipping: training may look right."
)
_BATCH_NORM = Cause(
    "batch normalisation",
    "It normalises each part separately. With the running statistics (model.eval()) "
    "only rounding differs: the rest of the loop is right.",
    "call model.eval() before splitcheck; to be exact in training, use GroupNorm, or "
    "over ranks nn.SyncBatchNorm.",
)
_MOVED = (
    "The step runs a backward pass at weights that it has moved, as SAM does: the "
    "gradients of the parts, each at other weights, do not show what is wrong.",
    "move the weights once, by the gradient of all parts and ranks, and run the "
    "backward passes of all parts at the same weights.",
)
_UNKNOWN = (
    "No known cause fits: no constant factor, no other weights of the parts, and no "
    "term that counts once per part.",
    "compare the parameters one by one, and look for state that one part changes for "
    "the next part.",
)


# --- a constant factor ---

_CONSTANT = (
    "if the loop divides by a constant, write len(batches), or pass loss=, the loss "
    "of the whole batch in plain torch"
)
_BY_RANKS = (
    "if the loss is divided by a count over all ranks, or computed from gathered "
    "outputs, multiply it by the number of ranks, because DDP averages."
)
_OVER_RANKS = (
    "divide by the number of ranks, or let DDP average and do not multiply by the "
    "number of ranks."
)
_DIVIDED = (
    "if the loss is divided by a count of all parts, do not divide it by len(batches), "
    f"too; {_CONSTANT}."
)
_ADDED = f"divide each loss by len(batches); {_CONSTANT}."
_ADDED_IN_SOME = (
    "in each part these parameters get the gradient of the whole loss, the others the "
    "gradient of the part: divide the gradient of these parameters alone by "
    "len(batches), or detach them in all parts except one; dividing the loss would "
    "make the others wrong."
)


def _factor_in_words(finding: Finding, factor: float, results: SplitResults) -> Words:
    place = _place(results, finding.names)
    if not factor:
        return (
            f"{place} no gradient arrives in parts.",
            "do not leave out or detach in parts what these parameters compute.",
        )
    trial = results.trial
    meaning, remedy = _meaning(factor, trial.ranks, trial.num_parts)
    if results.gets_whole_loss(factor) and not results.is_everything(finding.names):
        remedy = _ADDED_IN_SOME
    return f"{place} the gradient is {factor:.4g} times the right one{meaning}.", remedy


def _meaning(factor: float, ranks: int, parts: int) -> tuple[str, str]:
    """All that a factor may come from, and what to do."""
    all_parts = ranks * parts
    # With one rank, or one part, the number of all parts means nothing more.
    all_parts = all_parts if min(ranks, parts) > 1 else 1
    known = (
        (1 / ranks, "divided by the number of ranks once too often", _BY_RANKS),
        (1 / ranks**2, "divided by the number of ranks twice too often", _BY_RANKS),
        (ranks, "added over the ranks, not averaged", _OVER_RANKS),
        (1 / parts, "divided by the number of parts once too often", _DIVIDED),
        (parts, "not divided by the number of parts", _ADDED),
        (1 / all_parts, "divided by ranks and parts once too often", _BY_RANKS),
        (all_parts, "divided by neither ranks nor parts", _OVER_RANKS),
    )
    meanings: dict[str, str] = {}  # each with its remedy
    # With as many ranks as parts, several readings fit: all are listed.
    for value, meaning, remedy in known:
        if value != 1 and math.isclose(factor, value, rel_tol=CLOSE):
            meanings[meaning] = remedy
    if not meanings:
        return "", f"look for a division or a second backward(); {_CONSTANT}."
    return f": it is {', or '.join(meanings)}", " Or ".join(union([meanings.values()]))


# --- other weights of the parts ---

_BY_TERMS = "divide the sum of the losses by the number of terms in all parts"
_REMEDIES_OF_CAUSES = {
    CauseKind.SUM_OF_MEANS: (
        f"multiply each loss by its fraction of all terms; {_CONSTANT}."
    ),
    CauseKind.ONLY_SOME_PARTS: (
        "call zero_grad() before the first part only, backward() for each part, and "
        "optimizer.step() after the last one."
    ),
    CauseKind.RUNNING_SUM: (
        "call backward() on the loss of each part, not on a running sum."
    ),
}
_ALL_RANKS = "give each rank's loss its weight, and average the gradients of all ranks."
_NOT_A_MEAN = (
    "the loss is no mean over terms: add up over all parts first, and then compute, "
    "once, a root, an exponential, a ratio of means, a running divisor or the norm to "
    "clip by."
)
_UNKNOWN_TERMS = (
    f"{_BY_TERMS}; no tensor of the batch shows this number. If the loss is a ratio of "
    f"means, compute it once, from sums over all parts."
)
_REPEATED = (
    "clip, divide, rescale or all-reduce the gradient once, after the last backward(), "
    "not after each part."
)


def _words_of_weights(
    finding: Finding, weights: Weights, results: SplitResults
) -> Words:
    """The gradient is a sum of those of the parts, with other weights than right."""
    ranks = results.trial.ranks
    kind = finding.kind
    remedy = _REMEDIES_OF_CAUSES.get(kind, f"{_BY_TERMS}.")
    # Parts are multiplied again as they are, or after each has got its right weight.
    ratio = _ratio_of_neighbours(weights.computed / weights.right, ranks)
    ratio = ratio or _ratio_of_neighbours(weights.computed, ranks)
    # If no count has the right weights, the loss is no mean over terms.
    counted = results.counted_as(weights.right)
    repeated = ""
    if kind is CauseKind.OTHER_WEIGHTS and ratio is not None:
        repeated = f" Each part multiplies the sum of those before it by {ratio:.4g}."
        remedy = _REPEATED
    elif counted is None and not math.isclose(weights.right.sum(), 1, rel_tol=CLOSE):
        remedy = _NOT_A_MEAN
    elif counted is None:
        # The weights of a mean add up to 1, whatever its terms are.
        remedy = _UNKNOWN_TERMS
    elif kind is CauseKind.ONLY_SOME_PARTS and ranks > 1:
        remedy = _ALL_RANKS
    elif ranks > 1:
        remedy += (
            " Add this number up over the ranks, and multiply the loss by the number "
            "of ranks, because DDP averages."
        )
    elif kind is CauseKind.MEAN_OF_MEANS and counted.words == "rows":
        remedy += " If your loader gives equal parts only (drop_last), pass equal=True."
    return (
        f"{_place(results, finding.names)} the loop weighs the parts "
        f"{weights_in_words(results, weights.computed)}. The whole batch weighs them "
        f"{weights_in_words(results, weights.right)}.{repeated}",
        remedy,
    )


def _ratio_of_neighbours(weights: Tensor, ranks: int) -> float | None:
    """The number that turns each weight of a rank into the one before it."""
    by_rank = weights.reshape(ranks, -1)
    ratios = (by_rank[:, :-1] / by_rank[:, 1:]).flatten()
    if len(ratios) < 2:  # any two weights have a ratio
        return None
    ratio = float(ratios[0])
    is_one = math.isclose(ratio, 1, rel_tol=CLOSE)
    return None if is_one or not is_close(ratios, ratios[:1], CLOSE) else ratio


def weights_in_words(results: SplitEvidence, weights: Tensor) -> str:
    """Weights of the parts, with what they count."""
    numbers = ", ".join(f"{float(weight):.3g}" for weight in weights)
    # A part without terms weighs nothing in any loop.
    used = weights[weights != 0]
    if is_close(used, used[:1], CLOSE):
        return f"equally ({numbers})"
    count = results.counted_as(weights)
    return f"({numbers})" if count is None else f"by their {count.words} ({numbers})"


# --- names of parameters ---


def _place(results: SplitResults, names: Sequence[str]) -> str:
    is_all = results.is_everything(names)
    return "In all parameters" if is_all else f"In {first_names(names)}"


def _shows_in(results: SplitResults) -> str:
    """A sentence about which parameters are wrong, if others are right."""
    if results.is_everything(results.wrong):
        return ""
    return f" Only the gradient of {first_names(results.wrong)} is wrong."
