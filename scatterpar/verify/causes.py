"""Why the results of a few rows, in parts and at once, differ: an ordered list of
causes.

Each cause is a function of the evidence. It makes the run that decides, and returns a
verdict, or ``None`` if the cause is another one. A look asks them in the order of
``CAUSES``, and the first verdict counts. The table *Refused, told, silent* of
``docs/limits.md`` has the same order.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scatterpar.causes.counts import IGNORED, Count
from scatterpar.step.request import Request
from scatterpar.verify.comparison import Inconclusive, weighted_sum
from scatterpar.verify.evidence import NUMBER_REMEDY, Evidence, Losses

_MAX_SIZES = 6  # of parts, in a text
_KEY = re.compile(r'(?:inputs|targets)\["(\w+)"\]')
_SEEMS = "It seems to be"
_BATCH = 'inputs["batch"]'  # that of a loop, whose count= takes a batch
_ENTRIES = {"": "", "first": "[:, 1:]", "last": "[:, :-1]"}


class Action(enum.Enum):
    """What the engine does with a step after a look. Values are words of the log."""

    PROCEED = "right"
    WARN = "told"
    REFUSE = "refused"


@dataclass(frozen=True)
class Verdict:
    """The result of a look.

    Attributes:
        action: what becomes of the step.
        text: of the warning or the error.
        error: the replica's error that the text shows.
        problem: the first line of the text, if losses do not combine.
        cause: why not, and what to pass, if one count or reduction explains it.
    """

    action: Action
    text: str = ""
    error: Exception | None = None
    problem: str = ""
    cause: str = ""


RIGHT = Verdict(Action.PROCEED)

RETURN = "return it from forward, and take it from the output that the criterion gets"
_NOTHING_CHANGED = "Nothing was changed; verify=False does not check."


def in_lines(problem: str, remedy: str, *notes: str) -> str:
    """The text of a warning or error: problem, remedy, an empty line, the rest."""
    text = f"{problem}\n{remedy}"
    return f"{text}\n\n{' '.join(notes)}" if notes else text


def _refused(problem: str, remedy: str, *notes: str) -> Verdict:
    text = in_lines(problem, remedy, *notes, _NOTHING_CHANGED)
    return Verdict(Action.REFUSE, text)


def _told(problem: str, remedy: str, *notes: str) -> Verdict:
    return Verdict(Action.WARN, in_lines(problem, remedy, *notes))


def _size_of(difference: float) -> str:
    if difference == math.inf:
        return "NaN or infinite"
    return f"off by {100 * difference:,.3g} %"


# --- a gradient of no loss ---


def injected_gradient(evidence: Evidence) -> Verdict | None:
    """A backward pass adds a gradient that no loss has, once per micro-batch.

    Before rounding is asked: however small it is beside the loss's, it is told exactly.
    """
    difference = evidence.injected_difference
    if difference <= evidence.runs.rounding.tolerance:
        return None
    size = f": in parts of {evidence.num_rows} rows it is {_size_of(difference)}"
    return refused_injection(evidence.module_name, size)


def refused_injection(name: str, size: str = "") -> Verdict:
    """The verdict on a module that adds a gradient which no loss has."""
    return _refused(
        f"{name} adds a gradient that is not that of the loss, in the backward pass of "
        f"an autograd.Function or a hook{size}.",
        "Return the auxiliary loss from forward, and add it to the loss in the "
        "criterion, where it is weighted by the number of rows.",
        "Such a gradient is added in full by each part of the batch, however few rows "
        "it has. No count=, reduction= or whole_batch= says that.",
    )


# --- the program is right ---


def unrepeatable(evidence: Evidence) -> Verdict | None:
    """The module gives another result for the same rows each time; losses combine."""
    # First, because every later cause compares results that must be repeatable.
    if evidence.repeated.difference_from(evidence.expected) <= evidence.limit:
        return None
    if not evidence.losses_combine:
        raise Inconclusive("it gives another result each time", 2)
    return RIGHT


def rounding_alone(evidence: Evidence) -> Verdict | None:
    """Rounding makes the difference. If not, later causes have its limit."""
    # The cheap bound first: a nudge of the inputs costs a run.
    evidence.limit = evidence.difference_by_summands()
    if evidence.difference > evidence.limit:
        evidence.limit = max(evidence.limit, evidence.difference_by_rounding())
    return RIGHT if evidence.difference <= evidence.limit else None


def numbers_per_call(evidence: Evidence) -> Verdict | None:
    """Python or NumPy draw numbers once per call."""
    if not evidence.draws_steadily:
        raise Inconclusive("what is drawn depends on the rows", 2)
    difference = evidence.with_same_numbers.difference_from(evidence.expected)
    return RIGHT if difference <= evidence.limit else None


# --- the replica does not compute what the user's own module computes ---


def replica_alone(evidence: Evidence) -> Verdict | None:
    """The replica gives another result for the same rows at once."""
    # Before the causes of parts: a replica that is wrong at once explains these too.
    if evidence.of_replica.difference_from(evidence.expected) <= evidence.limit:
        return None
    return _refused(
        f"{evidence.name} leads to the module that is trained, or the module has a "
        f"tensor computed from parameters: the loss of {evidence.num_rows} rows is "
        f"{evidence.expected.loss:.4g} with your own module in plain torch, but "
        f"{evidence.of_replica.loss:.4g} on a replica (the gradient is "
        f"{_size_of(evidence.difference)}).",
        f"Return it: {RETURN}; compute tensors from parameters in forward.",
        "It reads what forward leaves on the module, such as an auxiliary loss, or "
        "asks for gradients by your own parameters. No count=, reduction= or "
        "whole_batch= says that.",
    )


def error_of_replica(
    name: str, num_rows: int, loss: float, error: Exception
) -> Verdict:
    """A replica raises an error, and the user's own module computes the same rows."""
    verdict = _refused(
        f"{name}: the loss of {num_rows} rows is {loss:.4g} with your own module in "
        f"plain torch, but an error on a replica: {type(error).__name__}: {error}",
        "A replica is a copy of the module: what refers to your own module, such as a "
        "global variable or gradients by your own parameters, does not lead to it. If "
        f"it reads what forward leaves on the module, {RETURN}.",
        "No count=, reduction= or whole_batch= says that.",
    )
    return replace(verdict, error=error)


# --- calls or rows influence each other ---


def state_of_calls(evidence: Evidence) -> Verdict | None:
    """Each part gives the expected result if it starts from the same state."""
    # A criterion of all rows has one loss, which needs no weights.
    weights = () if evidence.request.whole_batch else evidence.weights
    combined = weighted_sum(evidence.results_of_parts(), weights)
    if combined.difference_from(evidence.expected) > evidence.limit:
        return None
    if evidence.moved:  # a warning of its own names it
        return RIGHT
    return _told(
        f"{evidence.module_name} or {evidence.name} gives another result when it is "
        f"called again with the same rows.",
        "Return a module's state from forward, and pass it as an input; change a "
        "criterion's once per step, or pass whole_batch=True.",
        "docs/limits.md, State in modules.",
    )


def state_ties_rows(evidence: Evidence) -> Verdict | None:
    """A module of the user's moves state by its rows, as batch normalisation does.

    In evaluation mode, in which it moves none, the results agree.
    """
    if not evidence.moved or not evidence.combines_in_evaluation():
        return None
    return RIGHT  # a warning of its own names the state


def entries_in_another_order(evidence: Evidence) -> Verdict | None:
    """With ``whole_batch`` an output has several entries per row, not row by row."""
    misplaced = evidence.output_differences.misplaced
    if not (evidence.request.whole_batch and misplaced):
        return None
    return refused_order(misplaced, evidence.num_rows)


def refused_order(misplaced: int, num_rows: int) -> Verdict:
    """The verdict on entries that cannot be joined."""
    return _refused(
        f"the module's output has {misplaced} entries for {num_rows} rows, not in the "
        f"order of the rows, so those of micro-batches cannot be joined.",
        "Return one entry per row, such as torch.stack([a, b], 1) in the place of "
        "torch.cat([a, b]), or .view(rows, k, -1) of k samples.",
    )


def rows_mix(evidence: Evidence) -> Verdict | None:
    """The module's output for a row depends on the other rows."""
    difference = evidence.output_differences.of_rows
    if difference <= evidence.limit:
        return None
    # If losses do not combine either, that is the reason with a remedy.
    if not (evidence.request.whole_batch or evidence.losses_combine):
        return None
    return _told(
        f"{evidence.module_name} gives other outputs for a few rows than for parts of "
        f"them: they differ by {difference:.2g} of the largest entry (of "
        f"{evidence.num_rows} rows).",
        "Mask padding; check batch_first= and dim=; pass a value without rows as "
        "Replicated(value), a list with one entry per row as Rows(list).",
        "Compute what compares rows in the criterion, with whole_batch=True. A "
        "home-made batch normalisation may ignore this.",
    )


def number_per_call(evidence: Evidence) -> Verdict | None:
    """With ``whole_batch`` the loss uses a 0-dim output, of which each part has one."""
    if not (evidence.request.whole_batch and evidence.uses_number):
        return None
    remedy = f"{NUMBER_REMEDY}, which sees all rows."
    return _refused(f"{NUMBER_PROBLEM}.", remedy.capitalize())


NUMBER_PROBLEM = (
    "the module returns a number that is another one for each micro-batch, and the "
    "loss uses it"
)


def left_by_last_call(evidence: Evidence) -> Verdict | None:
    """With ``whole_batch`` the criterion reads more than the outputs of all rows."""
    if not evidence.request.whole_batch:
        return None
    return _refused(
        f"{evidence.name}: with whole_batch=True the gradient would be "
        f"{_size_of(evidence.difference)}.",
        "It reads what the last micro-batch left (a hook?), or an output that has as "
        f"many entries as a micro-batch has rows; {RETURN}, with one entry per row.",
        "No count= or reduction= says that.",
    )


# --- losses do not combine ---


def _refused_combination(losses: Losses, remedy: str) -> Verdict:
    sizes = " + ".join(str(len(part)) for part in losses.parts[:_MAX_SIZES])
    if len(losses.parts) > _MAX_SIZES:
        sizes += " + …"
    problem = (
        f"{losses.name}: your loss of {losses.num_rows} rows is not the "
        f"{losses.request.reduction} of the losses of {sizes} rows: the gradient would "
        f"be {_size_of(losses.difference)}."
    )
    verdict = _refused(problem, remedy, *losses.other_remedies(remedy))
    cause = remedy if remedy.startswith(_SEEMS) else ""
    return replace(verdict, problem=problem, cause=cause)


def mean_over_rows(losses: Losses) -> Verdict | None:
    """The loss is a mean over rows, and the engine takes it for something else."""
    sizes = [len(part) for part in losses.parts]
    if not losses.fits([size / losses.num_rows for size in sizes]):
        return None
    remedy = f'{_SEEMS} a mean over rows: pass reduction="mean", without count=.'
    if losses.request.is_mean and losses.request.count is None:
        remedy = (
            f"{_SEEMS} a mean over rows, whatever the labels: pass "
            "count=lambda inputs, targets: len(targets)."
        )
    return _refused_combination(losses, remedy)


def sum_of_terms(losses: Losses) -> Verdict | None:
    """The loss is a sum."""
    if not losses.fits([1.0] * len(losses.parts)):
        return None
    remedy = f'{_SEEMS} a sum: pass reduction="sum".'
    return _refused_combination(losses, remedy)


def mean_over_terms(losses: Losses) -> Verdict | None:
    """The loss is a mean over labels that are not ignored, a mask, lengths, weights."""
    for count in losses.counts:
        terms = losses.terms_of(count)
        # With equally many terms in each row it is a mean over rows, asked before.
        if count.is_constant or not sum(terms):
            continue
        if losses.fits([number / sum(terms) for number in terms]):
            return _refused_combination(
                losses,
                f"{_SEEMS} a mean over the {count.words}: pass "
                f'reduction="mean" and count={_expression(losses, count)}.',
            )
    return None


def _expression(losses: Losses, count: Count) -> str:
    """An expression for ``count=``."""
    if losses.request.loss_name != Request.loss_name and count.path.startswith(_BATCH):
        path = count.path.removeprefix(_BATCH)
        return f"lambda batch: {_number_of_entries(count, f'batch{path}')}"
    is_of_labels = count.ignored is not None and count.without in ("", "first")
    key = _KEY.fullmatch(count.path)
    if is_of_labels and count.path == "inputs" and not losses.has_targets:  # tokens
        counted = _count_labels(count, "labels")
        return f"lambda ids, _: {counted}(None, ids)"
    if is_of_labels and (count.path == "targets" or key):
        return _count_labels(count, key[1] if key else "labels")
    return f"lambda inputs, targets: {_number_of_entries(count, count.path)}"


def _number_of_entries(count: Count, path: str) -> str:
    entries = path + _ENTRIES[count.without]
    if count.ignored is not None:
        entries += f".ne({count.ignored})"
    return f"{entries}.sum()"


def _count_labels(count: Count, key: str) -> str:
    """A call of ``count_labels``, without arguments that are its defaults."""
    arguments = []
    if count.ignored != IGNORED[0]:
        arguments.append(str(count.ignored))
    if count.without:
        arguments.append("shifted=True")
    if key != "labels":
        arguments.append(f"key={key!r}")
    return f"scatterpar.count_labels({', '.join(arguments)})"


def broadcast(losses: Losses) -> Verdict | None:
    """Output and targets have shapes that broadcast to all pairs of rows."""
    shapes = losses.shapes
    dimensions = {len(shape) for shape in shapes}
    sizes = {math.prod(shape) for shape in shapes}
    # (n,) beside (n, 1) broadcasts to (n, n), which torch only warns of.
    if len(shapes) < 2 or dimensions != {1, 2} or len(sizes) > 1:
        return None
    return _refused_combination(
        losses,
        f"The output has shape {shapes[0]} and the targets {shapes[1]}, which "
        f"broadcast to a matrix of all pairs of rows: pass targets of the output's "
        f"shape.",
    )


def penalty(losses: Losses) -> Verdict | None:
    """A sum has a term that does not depend on the rows, perhaps."""
    if losses.request.is_mean:
        return None
    return _refused_combination(
        losses,
        "If it seems to add something that does not depend on the rows, such as a "
        "penalty on weights: multiply that by len(output) / the number of all rows.",
    )


def unknown(losses: Losses) -> Verdict:
    """The loss compares rows, or is a mean over something else."""
    return _refused_combination(
        losses,
        "If it compares rows with each other, or is a ratio of sums, "
        f"{losses.compares_rows}.",
    )


CauseFunction = Callable[[Evidence], Verdict | None]
CombinationCause = Callable[[Losses], Verdict | None]

# How losses combine: the pair asks these alone.
COMBINATIONS: Sequence[CombinationCause] = (
    mean_over_rows,
    sum_of_terms,
    mean_over_terms,
    broadcast,
    penalty,
    unknown,
)
CAUSES: Sequence[CauseFunction] = (
    unrepeatable,
    injected_gradient,
    rounding_alone,
    replica_alone,
    numbers_per_call,
    state_of_calls,
    state_ties_rows,
    entries_in_another_order,
    rows_mix,
    number_per_call,
    left_by_last_call,
    *COMBINATIONS,
)


def verdict_of_combination(losses: Losses) -> Verdict:
    """The verdict on losses that do not combine."""
    for cause in COMBINATIONS:
        verdict = cause(losses)
        if verdict is not None:
            return verdict
    raise AssertionError("the last cause explains everything")


def verdict_of(evidence: Evidence) -> Verdict:
    """The verdict on results that differ."""
    for cause in CAUSES:
        verdict = cause(evidence)
        if verdict is not None:
            return verdict
    raise AssertionError("the last cause explains everything")
