"""Which of the usual mistakes explains a wrong gradient: an ordered list of hypotheses.

The verdict that a gradient is wrong does not depend on it. A cause is a hint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scatterpar.splitting.evidence import GradientEvidence
from scatterpar.splitting.gradients import (
    Gradients,
    differing,
    factor_between,
    is_close,
    joined,
    largest_error,
)
from scatterpar.splitting.step_run import StepResult, layers_with_batch_statistics
from scatterpar.splitting.trial import Trial

_CLOSE = 1e-3  # how far weights may be from those of a hypothesis
_ALIKE = 0.9  # the cosine of two differences that have one reason
_ROUGHLY = 0.3  # how far a growth may be from that of a term per part


@dataclass(frozen=True)
class Cause:
    """A mistake, the numbers that show it, and what to write instead."""

    name: str = ""
    why: str = ""
    remedy: str = ""


def explain(trial: Trial, expected: Gradients, results: list[StepResult]) -> Cause:
    """The first hypothesis that fits.

    A hypothesis runs the step in other ways. If that fails, as with a part without
    labels, the next hypothesis is tested.
    """
    failures = []
    prefix = ""
    if layers_with_batch_statistics(trial.model):
        trial.settings = replace(trial.settings, running_statistics=True)
        try:
            expected = trial.reference(trial.rows).gradients
            results = trial.results(trial.split())
        except Exception as error:
            trial.settings = replace(trial.settings, running_statistics=False)
            failures.append(error)
        else:
            errors = []
            for result in results:
                size, _ = largest_error(result.gradients, expected)
                errors.append(size)
            if max(errors) <= trial.limit:
                return _BATCH_NORM
            prefix = "Also with the running statistics of batch normalisation: "
    evidence = GradientEvidence(trial, expected, results)
    for hypothesis in _HYPOTHESES:
        try:
            cause = hypothesis(evidence)
        except Exception as error:
            failures.append(error)
            continue
        if cause is not None:
            return replace(cause, why=prefix + cause.why)
    why = prefix + _UNKNOWN.why
    if failures:
        problem = f"{type(failures[0]).__name__}: {failures[0]}".splitlines()[0]
        why += f" Some causes could not be tested: step raised {problem}"
    return replace(_UNKNOWN, why=why)


# --- hypotheses, in the order in which they are tested ---


def _not_finite(evidence: GradientEvidence) -> Cause | None:
    if not joined(evidence.expected).isfinite().all():
        why = "The gradient of the whole batch has NaN or infinite entries."
        return Cause("not finite", why, "check the step with one batch first.")
    if not joined(evidence.actual).isfinite().all():
        why = "Only in parts, the gradient has NaN or infinite entries."
        remedy = "skip the mean of a part without labels: it divides by zero."
        return Cause("not finite", why, remedy)
    return None


def _wrong_with_one_part(evidence: GradientEvidence) -> Cause | None:
    """With ``loss=``: the step is wrong for a single part, too."""
    if not evidence.trial.has_loss:
        return None
    if evidence.error_with_one_part() <= evidence.trial.limit:
        return None
    actual = joined(evidence.with_one_part)
    factor = factor_between(actual, joined(evidence.expected), evidence.tolerance)
    size = "not" if factor is None else f"{factor:.4g} times"
    return Cause(
        "wrong with one part",
        f"Already with the whole batch as one part, the gradient is {size} that of "
        f"loss=.",
        "compare the two losses; write len(batches) for a constant in the loop.",
    )


def _ranks_differ(evidence: GradientEvidence) -> Cause | None:
    unequal: dict[str, None] = {}
    for gradients in evidence.others:
        names = differing(gradients, evidence.actual, evidence.trial.limit)
        unequal.update(dict.fromkeys(names))
    if not unequal:
        return None
    place = "any parameter"
    if not evidence.is_everything(list(unequal)):
        place = _listed(list(unequal))
    return Cause(
        "ranks differ",
        f"The ranks end with different gradients of {place}: they were not averaged.",
        "call the DDP module, not model.module or parameters outside of it, and keep "
        "the last backward() out of no_sync().",
    )


def _factor_or_weights(evidence: GradientEvidence) -> Cause | None:
    """In all parameters, or in all that are wrong."""
    scopes = [evidence.names]
    if len(evidence.wrong) < len(evidence.names):
        scopes.append(evidence.wrong)
    for names in scopes:
        cause = _constant_factor(evidence, names) or _other_weights(evidence, names)
        if cause is not None:
            return cause
    return None


def _state_between_parts(evidence: GradientEvidence) -> Cause | None:
    """A part changes what the next one computes: a running mean, a counter."""
    if not evidence.order_matters():
        return None
    return Cause(
        "state between parts",
        "The same parts in reverse order give another gradient.",
        "update buffers, attributes and counters once per step, not once per part.",
    )


def _once_per_part(evidence: GradientEvidence) -> Cause | None:
    """A term of the loss counts in each part."""
    measured = evidence.growth_per_part()
    if measured is None:
        return None
    growth, cosine = measured
    if cosine < _ALIKE or abs(growth - 2) > _ROUGHLY:
        return None
    unit = evidence.unit
    return Cause(
        "once per part",
        f"A term of the loss counts once for each {unit}: from 2 to 3 {unit}s, the "
        f"difference grows {growth:.3g}-fold.{_shows_in(evidence)}",
        f"divide a penalty or a balance loss by the number of {unit}s, or add it once.",
    )


def _one_parameter(evidence: GradientEvidence) -> Cause | None:
    """One of several losses is wrong: it shows in the parameters that only it sees."""
    for name in evidence.wrong:
        cause = _constant_factor(evidence, [name]) or _other_weights(evidence, [name])
        if cause is not None:
            return cause
    return None


def _rows_are_compared(evidence: GradientEvidence) -> Cause | None:
    """No weights of the parts' gradients make up that of the batch."""
    if evidence.weights_of_batch(evidence.names) is not None:
        return None
    expected = joined(evidence.expected)
    if evidence.is_undefined or len(expected) < 2 * len(evidence.parts):
        return None
    ranks = evidence.trial.ranks
    ratio = float(joined(evidence.actual).norm() / expected.norm())
    also = ""
    if ranks > 1 and math.isclose(ratio, 1 / ranks, rel_tol=0.1):
        also = " By its norm, it is also divided by the number of ranks once too often."
    return Cause(
        "rows are compared",
        "No weights of the gradients of the parts give that of the batch: the loss or "
        f"the module ties rows to each other.{_shows_in(evidence)}{also}",
        "compute a contrastive loss, a product of means, or batch statistics for all "
        "rows at once, from outputs gathered with their gradient or cached "
        "(GradCache); mask padding.",
    )


_HYPOTHESES: tuple[Callable[[GradientEvidence], Cause | None], ...] = (
    _not_finite,
    _wrong_with_one_part,
    _ranks_differ,
    _factor_or_weights,
    _state_between_parts,
    _once_per_part,
    _one_parameter,
    _rows_are_compared,
)

_BATCH_NORM = Cause(
    "batch normalisation",
    "It normalises each part by itself. With its running statistics only rounding "
    "differs: the rest of the loop is right.",
    "call model.eval() before splitcheck; to be exact in training, use GroupNorm, or "
    "over ranks nn.SyncBatchNorm.",
)
_UNKNOWN = Cause(
    "unknown",
    "It is no constant factor, no other weights of the parts, and no term that counts "
    "once per part.",
    "compare the parameters one by one, and look for state that one part changes for "
    "the next.",
)


# --- a constant factor ---

_CONSTANT = (
    "if the loop divides by a constant, write len(batches), or pass loss=, the loss "
    "of the whole batch in plain torch"
)
_DIVIDED_BY_RANKS = (
    "multiply a loss that is divided by a count of all ranks, or computed from "
    "gathered outputs, by the number of ranks: DDP averages."
)
_ADDED_OVER_RANKS = (
    "divide by the number of ranks, or let DDP average; do not multiply by it as well."
)
_DIVIDED = (
    "do not divide by len(batches) a loss that is divided by a count of all parts; "
    f"{_CONSTANT}."
)
_ADDED = f"divide each loss by len(batches); {_CONSTANT}."


def _constant_factor(evidence: GradientEvidence, names: Sequence[str]) -> Cause | None:
    factor = evidence.factor(names)
    if factor is None or math.isclose(factor, 1, rel_tol=evidence.tolerance):
        return None
    place = _place(evidence, names)
    if not factor:
        why = f"{place} no gradient arrives in parts."
        remedy = "do not leave out or detach in parts what these parameters compute."
        return Cause("no gradient", why, remedy)
    meaning, remedy = _meaning(factor, evidence.trial.ranks, evidence.trial.parts)
    why = f"{place} the gradient is {factor:.4g} times the right one{meaning}."
    return Cause("constant factor", why, remedy)


def _meaning(factor: float, ranks: int, parts: int) -> tuple[str, str]:
    """What a factor may come from, and what to do."""
    all_parts = ranks * parts
    divided = _DIVIDED_BY_RANKS
    added = _ADDED_OVER_RANKS
    known = (
        (ranks, 1 / ranks, "divided by the number of ranks once too often", divided),
        (
            ranks,
            1 / ranks**2,
            "divided by the number of ranks twice too often",
            divided,
        ),
        (ranks, ranks, "added over the ranks, not averaged", added),
        (parts, 1 / parts, "divided by the number of parts once too often", _DIVIDED),
        (parts, parts, "not divided by the number of parts", _ADDED),
        (
            all_parts,
            1 / all_parts,
            "divided by ranks and parts once too often",
            divided,
        ),
        (all_parts, all_parts, "divided by neither ranks nor parts", added),
    )
    for number, value, meaning, remedy in known:
        if number > 1 and math.isclose(factor, value, rel_tol=_CLOSE):
            return f": {meaning}", remedy
    return "", f"look for a division or a second backward(); {_CONSTANT}."


# --- other weights of the parts ---

_BY_TERMS = "divide the sum of the losses by the number of terms in all parts"
_REMEDIES = {
    "mean of means": f"{_BY_TERMS}.",
    "sum of means": f"multiply each loss by its part of all terms; {_CONSTANT}.",
    "only some parts": "call zero_grad() before the first part only, backward() for "
    "each part, and optimizer.step() after the last one.",
    "running sum": "call backward() on the loss of each part, not on a running sum.",
    "other weights": f"{_BY_TERMS}.",
}
_ALL_RANKS = "give each rank's loss its weight, and average the gradients of all ranks."
_NOT_A_MEAN = (
    "compute a root, an exponential or a ratio of means once, from sums over all "
    "parts: the loss is no mean over terms."
)
_REPEATED = (
    "clip, divide or all-reduce the gradient once, after the last backward(), not "
    "after each part."
)


def _other_weights(evidence: GradientEvidence, names: Sequence[str]) -> Cause | None:
    """The gradient is a sum of those of the parts, with other weights than right."""
    actual = evidence.weights_of_loop(names)
    expected = evidence.weights_of_batch(names)
    if (
        actual is None
        or expected is None
        or is_close(actual, expected, evidence.tolerance)
    ):
        return None
    has_terms = (
        expected.abs() > _CLOSE * expected.abs().max()
    )  # not a part without labels
    name = _name_of_weights(actual[has_terms], expected[has_terms], len(evidence.parts))
    remedy = _REMEDIES[name]
    ratio = _ratio_of_neighbours(actual / expected, evidence.trial.ranks)
    ratio = ratio or _ratio_of_neighbours(actual, evidence.trial.ranks)
    repeated = ""
    if name == "other weights" and ratio is not None:
        repeated = f" Each part multiplies the sum of those before it by {ratio:.4g}."
        remedy = _REPEATED
    elif not evidence.counted_as(expected):
        remedy = _NOT_A_MEAN
    elif name == "only some parts" and evidence.trial.ranks > 1:
        remedy = _ALL_RANKS
    elif evidence.trial.ranks > 1:
        remedy += (
            " Add that number over the ranks, and undo DDP's division by their number."
        )
    elif name == "mean of means" and evidence.counted_as(expected) == "rows":
        remedy += " If your loader gives equal parts only (drop_last), pass equal=True."
    why = (
        f"{_place(evidence, names)} the loop weighs the parts "
        f"{_weights_in_words(evidence, actual)}, the whole batch "
        f"{_weights_in_words(evidence, expected)}.{repeated}"
    )
    return Cause(name, why, remedy)


def _name_of_weights(actual: Tensor, expected: Tensor, num_parts: int) -> str:
    """The name of the loop's weights for parts with terms, among ``num_parts``."""
    count = len(actual)
    if actual.abs().min() < _CLOSE * actual.abs().max():
        return "only some parts"
    for divisor in (count, num_parts):
        if is_close(actual, torch.full_like(actual, 1 / divisor), _CLOSE):
            return "mean of means"
    if is_close(actual, torch.ones_like(actual), _CLOSE):
        return "sum of means"
    times = torch.arange(count, 0, -1, dtype=actual.dtype)  # that a part is added
    for weights in (actual, actual / expected):
        if count > 1 and is_close(weights / weights[-1], times, _CLOSE):
            return "running sum"
    return "other weights"


def _ratio_of_neighbours(weights: Tensor, ranks: int) -> float | None:
    """The number that turns each weight of a rank into the one before it."""
    by_rank = weights.reshape(ranks, -1)
    ratios = (by_rank[:, :-1] / by_rank[:, 1:]).flatten()
    if len(ratios) < 2:
        return None
    ratio = float(ratios[0])
    is_one = math.isclose(ratio, 1, rel_tol=_CLOSE)
    return None if is_one or not is_close(ratios, ratios[:1], _CLOSE) else ratio


def _weights_in_words(evidence: GradientEvidence, weights: Tensor) -> str:
    numbers = ", ".join(f"{float(weight):.3g}" for weight in weights)
    used = weights[weights != 0]
    if is_close(used, used[:1], _CLOSE):
        return f"equally ({numbers})"
    counted = evidence.counted_as(weights)
    return f"by their {counted} ({numbers})" if counted else f"({numbers})"


# --- names of parameters ---

_LISTED = 3  # the most names in a text


def _place(evidence: GradientEvidence, names: Sequence[str]) -> str:
    is_all = evidence.is_everything(names)
    return "In all parameters" if is_all else f"In {_listed(names)}"


def _shows_in(evidence: GradientEvidence) -> str:
    """A sentence about which parameters are wrong, if others are right."""
    names = evidence.shows_in()
    return f" It shows in {_listed(names)} alone: an auxiliary loss." if names else ""


def _listed(names: Sequence[str]) -> str:
    """The first names."""
    text = ", ".join(names[:_LISTED])
    if len(names) > _LISTED:
        text += f" and {len(names) - _LISTED} more"
    return text
