"""The verdict on a step for each cause: the words, and what becomes of the step.

The causes and their order are those of ``causes/evidence.py``. The page
``docs/check.md`` has an outcome for each.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from scatterpar.causes.cause_list import first_finding
from scatterpar.causes.counts import IGNORED, Count
from scatterpar.causes.evidence import CauseKind, Finding, Weights
from scatterpar.step.request import Request
from scatterpar.step.turns import Scope
from scatterpar.verify.look_causes import QUESTIONS, shapes_of, uses_number
from scatterpar.verify.look_results import NUMBER_REMEDY, LookResults, name_of_loss
from scatterpar.verify.row_broadcasts import RowBroadcast
from scatterpar.verify.rows import Parts

_MAX_SIZES = 6  # of parts, in a text
# Only these keys can be told to count_labels(key=…).
_KEY = re.compile(r'(?:inputs|targets)\["(\w+)"\]')
_SEEMS = "It seems to be"
_BATCH = 'inputs["batch"]'  # that of a loop, whose count= takes a batch
_ENTRIES = {"": "", "first": "[:, 1:]", "last": "[:, :-1]"}


class Action(enum.Enum):
    """The action of the engine after a look. Values are words of the log."""

    PROCEED = "right"
    WARN = "warned"
    REFUSE = "refused"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a step: an action, and the words.

    Attributes:
        action: what becomes of the step.
        text: of the warning or the error.
        error: the replica's error that the text shows.
        problem: the first line of the text, if losses do not combine.
        cause: why not, if something explains it. A sentence without its full stop.
        argument: what to pass then, where losses have arguments.
        rests_on_rows: whether rows alone say that a difference is rounding.
        is_measured: whether the difference is small or rounding, so that it says how
            well losses combine. State or random numbers may be another reason.
        subject: what a warning is about; it is given once per subject.
        compares_rows: whether the module compares rows.
    """

    action: Action
    text: str = ""
    error: Exception | None = None
    problem: str = ""
    cause: str = ""
    argument: str = ""
    rests_on_rows: bool = False
    is_measured: bool = False
    subject: str = ""
    compares_rows: bool = False

    @property
    def may_be_rounding(self) -> bool:
        """Whether float64 may say otherwise: a difference is refused, or called
        rounding because of rows alone.
        """
        is_refused = self.action is Action.REFUSE and self.error is None
        return is_refused or self.rests_on_rows


@dataclass(frozen=True)
class CallEffects:
    """The side effects of calls of user code.

    Attributes:
        moved: the names of state that each part moves.
        lost: the shapes of large tensors that they write.
        scope: the part of a sub-step that one replica at a time must run.
    """

    moved: Sequence[str] = ()
    lost: Sequence[tuple[int, ...]] = ()
    scope: Scope = Scope.NOTHING

    def beside(self, other: CallEffects) -> CallEffects:
        """The effects of the calls of both, each named once."""
        return CallEffects(
            [*dict.fromkeys([*self.moved, *other.moved])],
            [*dict.fromkeys([*self.lost, *other.lost])],
            max(self.scope, other.scope),
        )


@dataclass(frozen=True)
class LookReport:
    """The result of a look.

    Attributes:
        verdict: what becomes of the step.
        effects: what calls do beside their results; nothing if they were not compared.
        compared: the parts of rows that were compared, once or twice.
        difference: the relative difference between the results, which the GPUs' page
            shows, with the ``tolerance`` that it stayed within.
        eps: that of the coarsest format that the runs have shown.
        sizes_without_rows: those of outputs that a step with micro-batches of this size
            would join.
    """

    verdict: Verdict
    effects: CallEffects = CallEffects()
    compared: Sequence[Parts] = ()
    difference: float = math.inf
    tolerance: float = 0.0
    eps: float = 0.0
    sizes_without_rows: Collection[int] = ()

    @property
    def misfit(self) -> float:
        """How far the losses are from combining; infinite if nothing measures it."""
        return self.difference if self.verdict.is_measured else math.inf

    def beside(self, other: LookReport) -> LookReport:
        """The report on the parts of both. The verdict that says more counts: of two
        that let a step go on, that of the parts that fit worse.
        """
        order = [*Action]
        severity = order.index(self.verdict.action), self.misfit
        severity_of_other = order.index(other.verdict.action), other.misfit
        first, second = self, other
        if severity_of_other > severity:
            first, second = other, self
        return replace(
            first,
            effects=self.effects.beside(other.effects),
            compared=[*self.compared, *other.compared],
            eps=max(first.eps, second.eps),
        )


RIGHT = Verdict(Action.PROCEED, is_measured=True)

RETURN = "return this value from forward, and let the criterion read it from the output"
_NOTHING_CHANGED = "Nothing was changed; verify=False does not check."


def in_lines(problem: str, remedy: str, *notes: str) -> str:
    """The text of a warning or error: problem, remedy, an empty line, the rest."""
    text = f"{problem}\n{remedy}"
    return f"{text}\n\n{' '.join(notes)}" if notes else text


def _refused(problem: str, remedy: str, *notes: str) -> Verdict:
    text = in_lines(problem, remedy, *notes, _NOTHING_CHANGED)
    return Verdict(Action.REFUSE, text)


def _told(subject: str, problem: str, remedy: str, *notes: str) -> Verdict:
    text = in_lines(problem, remedy, *notes)
    return Verdict(Action.WARN, text, subject=subject)


def _size_of(difference: float) -> str:
    if difference == math.inf:
        return "NaN or infinite"
    return f"off by {100 * difference:,.3g} %"


def refused_injection(name: str, size: str = "") -> Verdict:
    """The verdict on a module that adds a gradient which no loss has."""
    return _refused(
        f"an autograd.Function or a hook of {name} adds a gradient that is not the "
        f"gradient of the loss{size}.",
        "If it is the gradient of an auxiliary loss (such as the balance loss of a "
        "router), return the inputs of the auxiliary loss from forward, and add this "
        "loss in the criterion. Otherwise, add the gradient to .grad after the "
        "backward pass.",
        "Such a gradient is added in full by each part of the batch, however few rows "
        "it has. No count=, reduction= or whole_batch= says that.",
    )


def error_of_replica(
    name: str, num_rows: int, loss: float, error: Exception
) -> Verdict:
    """A replica raises an error, and the user's own module computes the same rows."""
    verdict = _refused(
        f"{name}: the loss of {num_rows} rows is {loss:.4g} with your own module in "
        f"plain torch. Computing it on a replica raised {type(error).__name__}: "
        f"{error}",
        f"If the loss reads a value that forward sets on the module, {RETURN}. "
        f"{_NO_GLOBAL} If the loss passes your module's parameters to autograd.grad, "
        "read docs/losses.md, Two losses with an adaptive weight.",
        "No count=, reduction= or whole_batch= says that.",
    )
    return replace(verdict, error=error)


def taken_for_rows(shape: Sequence[int] | int, dim: int) -> Verdict:
    """The verdict on an output that a join would take for rows.

    ``shape`` is that of a tensor, or the length of a list.
    """
    if isinstance(shape, int):
        num_values = shape
        return _refused(
            f"an output that is a list of {num_values} values does not have one value "
            "per row. Its length is the size of a micro-batch by coincidence: the "
            "lists of all micro-batches would be concatenated.",
            "Return a tuple in the place of the list, or pass another accum=.",
        )
    return _refused(
        f"dimension {dim} of an output of shape {tuple(shape)} is not the batch "
        f"dimension. Its size is the size of a micro-batch by coincidence: the outputs "
        f"of all micro-batches would be concatenated along it.",
        f"Return output.unsqueeze({dim}): its size along dimension {dim} is 1. Or pass "
        f"another accum=.",
    )


def pairs_of_rows(shape: Sequence[int]) -> Verdict:
    """The verdict on an output with an entry for each pair of rows."""
    return _refused(
        f"an output of shape {tuple(shape)} has an entry for each pair of rows, but a "
        f"micro-batch has only the pairs of its own rows.",
        "Return one entry per row from forward, such as the features of images and "
        "texts, and compute the pairs in the criterion.",
    )


def rows_broadcast(name: str, broadcast: RowBroadcast) -> Verdict:
    """The verdict on rows that broadcast in a micro-batch, and not in all rows."""
    shapes = " and ".join(str(tuple(shape)) for shape in broadcast.beyond)
    part_shapes = " and ".join(str(tuple(shape)) for shape in broadcast.within)
    return _refused(
        f"{name}: for {broadcast.more_rows} rows the shapes {shapes} do not "
        f"broadcast, so plain torch raises an error. For {broadcast.num_rows} rows, as "
        f"in a micro-batch, {part_shapes} do broadcast, but by chance: values of "
        f"different rows would be combined.",
        "Pass targets, weights and masks with as many dimensions as the output has, "
        "such as weights[:, None].",
    )


_NO_GLOBAL = (
    "If the loss uses your module through a global variable, move this part of the "
    "loss into forward, with self in place of the variable."
)
NUMBER_PROBLEM = (
    "the module returns a number that differs between micro-batches, and the loss "
    "uses this number"
)


# --- the words of causes of which a replica is needed ---


def gradient_of_no_loss(results: LookResults, finding: Finding) -> Verdict:
    """The verdict on a backward pass that adds a gradient of its own."""
    size = _size_of(finding.difference)
    text = f": in parts of {results.num_rows} rows it is {size}"
    return refused_injection(_module_name(results), text)


def _module_name(results: LookResults) -> str:
    """The class of the module that is trained."""
    return type(results.runs.replica_task.module).__name__


def _wrong_on_the_replica(results: LookResults, _: Finding) -> Verdict:
    number = results.expected.loss
    another_number = results.of_replica.loss
    return _refused(
        f"{name_of_loss(results.request)}: the loss of {results.num_rows} rows is "
        f"{number:.4g} with your own module in plain torch, but {another_number:.4g} "
        f"on a replica (the gradient is {_size_of(results.difference)}).",
        "If the loss reads a value that forward sets on the module, such as an "
        f"auxiliary loss, {RETURN}. If the module holds a tensor that is computed from "
        f"parameters, compute this tensor in forward. {_NO_GLOBAL} If the loss passes "
        "your module's parameters to autograd.grad, read docs/losses.md, Two losses "
        "with an adaptive weight.",
        "No count=, reduction= or whole_batch= says that.",
    )


def _state_between_parts(results: LookResults, _: Finding) -> Verdict:
    if results.moved:  # a warning of its own names the state
        return replace(RIGHT, is_measured=False)
    module = _module_name(results)
    loss = name_of_loss(results.request)
    return _told(
        f"state of {module} or {loss}",
        f"{module} or {loss} gives another result when it is called again with the "
        "same rows.",
        "If the module keeps state from call to call, return the state from forward, "
        "and pass it as an input. If the criterion keeps state, change the state once "
        "per step, or pass whole_batch=True. With the pair, call the criterion on "
        "gather(outputs, device).",
        "docs/limits.md, State in modules.",
    )


def _module_compares_rows(results: LookResults, finding: Finding) -> Verdict:
    module = _module_name(results)
    verdict = _told(
        f"{module} compares rows",
        f"{module} gives other outputs for a few rows if it gets them in parts: the "
        f"outputs for {results.num_rows} rows are {_size_of(finding.difference)}.",
        "If rows are padded, mask the padding. If a layer, such as an LSTM, expects "
        "rows in dimension 1, pass batch_first=True to the layer. If all tensors of "
        "the batch have their rows in dimension 1, pass dim=1 to the engine. If the "
        "batch has a value without rows, pass Replicated(value). If the batch has a "
        "list with one entry per row, pass Rows(list). If the module compares rows "
        "with each other, do that in the criterion, with whole_batch=True.",
        "A batch normalisation of your own has such differences.",
    )
    return replace(verdict, compares_rows=True)


def _outputs_of_a_part(results: LookResults, _: Finding) -> Verdict:
    if uses_number(results):
        remedy = f"{NUMBER_REMEDY}, which gets all rows."
        return _refused(f"{NUMBER_PROBLEM}.", remedy.capitalize())
    return _refused(
        f"{name_of_loss(results.request)}: with whole_batch=True the gradient would be "
        f"{_size_of(results.difference)}.",
        "If a hook keeps a tensor for the criterion, return this tensor from forward, "
        "with one entry per row. If an output has no batch dimension, but a dimension "
        "with the size of a micro-batch by coincidence, return "
        f"output.unsqueeze({results.request.dim}).",
        "No count= or reduction= says that.",
    )


# --- losses do not combine ---


def other_remedies(results: LookResults, remedy: str) -> list[str]:
    """Sentences with what else could be passed, beside ``remedy``, and was not."""
    ways = []
    if "count=" not in remedy or "without count=" in remedy:
        another = "" if results.request.count is None else "another "
        ways.append(
            f"{another}count= for a mean over other terms, a function of (inputs, "
            f"targets) that gives their number, such as scatterpar.count_labels()"
        )
    if results.request.is_mean and 'reduction="sum"' not in remedy:
        ways.append('reduction="sum" for a sum')
    sentences = [f"Otherwise pass {', or '.join(ways)}."] if ways else []
    comparing = remedy_of_compared_rows(results)
    if comparing not in remedy:
        sentences.append(f"If the loss compares rows with each other, {comparing}.")
    sentences.append(
        "Or make it a mean of one loss per row; docs/losses.md has sums of means."
    )
    return sentences


def remedy_of_compared_rows(results: LookResults) -> str:
    """The remedy for a loss that compares rows."""
    if results.request.criterion is None:  # whole_batch=True needs one
        return (
            "return the inputs of the loss from forward, one entry per row, compute "
            "the loss in a criterion, and pass criterion= and whole_batch=True"
        )
    if results.loss_of_output is None:
        return (
            "take no gradients in the criterion: call engine.loss for each loss, and "
            "combine their gradients (docs/losses.md, Two losses with an adaptive "
            "weight)"
        )
    if uses_number(results):  # which whole_batch=True alone would refuse
        return (
            "pass whole_batch=True, return outputs with one entry per row from forward "
            "in place of the number, and compute the number in the criterion"
        )
    return "pass whole_batch=True"


def _refused_as(results: LookResults, cause: str, argument: str) -> Verdict:
    """Losses are combined in another way than ``cause`` says."""
    verdict = _refused_combination(results, f"{cause}: pass {argument}.")
    return replace(verdict, cause=cause, argument=argument)


def _refused_combination(results: LookResults, remedy: str) -> Verdict:
    sizes_of_parts = " + ".join(str(len(part)) for part in results.parts[:_MAX_SIZES])
    if len(results.parts) > _MAX_SIZES:
        sizes_of_parts += " + …"
    problem = (
        f"{name_of_loss(results.request)}: your loss of {results.num_rows} rows is not "
        f"the {results.request.reduction} of the losses of "
        f"{sizes_of_parts} rows (the same rows, in parts): the gradient would be "
        f"{_size_of(results.difference)}."
    )
    verdict = _refused(problem, remedy, *other_remedies(results, remedy))
    # Calls, and the pair, show it with remedies of their own.
    return replace(verdict, problem=problem)


def _other_weights(results: LookResults, weights: Weights) -> Verdict:
    """The loss is a mean or sum of other terms than the engine takes it for."""
    # A sum first: its equal weights are in proportion to rows of equal parts.
    if bool((weights.right == 1).all()):
        return _refused_as(results, f"{_SEEMS} a sum", 'reduction="sum"')
    count = results.counted_as(weights.right)
    assert count is not None  # the weights are those of a count
    request = results.request
    # Rows have no expression of their own.
    if count.path:
        # A mean is what the engine takes a loss for, unless it was called a sum.
        reduction = "" if request.is_mean else 'reduction="mean" and '
        return _refused_as(
            results,
            f"{_SEEMS} a mean over the {count.words}",
            f"{reduction}count={_expression(results, count)}",
        )
    if request.is_mean and request.count is None:
        return _refused_as(
            results,
            f"{_SEEMS} a mean over all rows, but the engine counts labels",
            "count=lambda inputs, targets: len(targets)",
        )
    argument = 'reduction="mean", without count='
    return _refused_as(results, f"{_SEEMS} a mean over rows", argument)


def _expression(results: LookResults, count: Count) -> str:
    """An expression for ``count=``."""
    path = count.path
    arguments = "inputs, targets"
    key = _KEY.fullmatch(path)
    is_of_labels = count.ignored is not None and count.without in ("", "first")
    is_of_loop = results.request.loss_name != Request.loss_name
    if is_of_loop and path.startswith(_BATCH):
        arguments = "batch"
        path = f"batch{path.removeprefix(_BATCH)}"
    elif is_of_labels and (path == "targets" or key):
        return _call_of_count_labels(count, key[1] if key else "labels")
    entries = path + _ENTRIES[count.without]
    if count.ignored is not None:
        entries += f".ne({count.ignored})"
    return f"lambda {arguments}: {entries}.sum()"


def _call_of_count_labels(count: Count, key: str) -> str:
    """A call of ``count_labels``, without arguments that are its defaults."""
    arguments = []
    if count.ignored != IGNORED[0]:
        arguments.append(str(count.ignored))
    if count.without:
        arguments.append("shifted=True")
    if key != "labels":
        arguments.append(f"key={key!r}")
    return f"scatterpar.count_labels({', '.join(arguments)})"


def _shapes_broadcast(results: LookResults, _: Finding) -> Verdict:
    output, targets = shapes_of(results)
    return _refused_as(
        results,
        f"The output has shape {output} and the targets {targets}, which broadcast to "
        "a matrix of all pairs of rows",
        "targets of the output's shape",
    )


def _unknown(results: LookResults, _: Finding) -> Verdict:
    """The loss compares rows, is a mean over something else, or has a penalty."""
    # In a mean a penalty is right, because the weights of the parts add up to 1.
    if not results.request.is_mean:
        cause = (
            "If the loss adds something that does not depend on the rows, such as a "
            "penalty on weights, add it after the call"
        )
        example = "(engine.loss(…) + penalty(model)).backward()"
        verdict = _refused_combination(results, f"{cause}: {example}.")
        return replace(verdict, cause=cause)
    return _refused_combination(
        results,
        "If the loss compares rows with each other, or is a ratio of sums, "
        f"{remedy_of_compared_rows(results)}.",
    )


# Results that may differ: the program is right.
_CAUSES_OF_RIGHT_STEPS = CauseKind.UNREPEATABLE, CauseKind.NUMBERS_PER_PART
_WORDS = {
    CauseKind.GRADIENT_OF_NO_LOSS: gradient_of_no_loss,
    CauseKind.WRONG_WITH_ONE_PART: _wrong_on_the_replica,
    CauseKind.STATE_BETWEEN_PARTS: _state_between_parts,
    CauseKind.ROWS_ARE_COMPARED: _module_compares_rows,
    CauseKind.OUTPUTS_OF_A_PART: _outputs_of_a_part,
    CauseKind.SHAPES_BROADCAST: _shapes_broadcast,
}


def verdict_of(results: LookResults) -> Verdict:
    """The verdict on results that differ."""
    finding, _ = first_finding(results, QUESTIONS)
    if finding.weights is not None:
        return _other_weights(results, finding.weights)
    if finding.kind is CauseKind.ROUNDING:
        return replace(RIGHT, rests_on_rows=results.rests_on_rows)
    if finding.kind in _CAUSES_OF_RIGHT_STEPS:
        return replace(RIGHT, is_measured=False)
    words = _WORDS.get(finding.kind, _unknown)
    return words(results, finding)
