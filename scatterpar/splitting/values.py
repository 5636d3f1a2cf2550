"""``valuecheck``: numbers of an evaluation in parts beside those of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from scatterpar.splitting.cause_words import explain
from scatterpar.splitting.check_report import SplitReport, report_of
from scatterpar.splitting.split_arguments import SplitArguments
from scatterpar.splitting.step_run import StepResult
from scatterpar.splitting.trial import Trial

Evaluate = Callable[[Any, list[Any]], "float | Mapping[str, Any]"]


@dataclass(frozen=True)
class ValueCheck(SplitReport):
    """Numbers of an evaluation in parts, beside those of the whole batch.

    It has the attributes of ``SplitReport``, too.

    Attributes:
        value: the name of the number with the largest difference.
        whole: the numbers of the whole batch, by name.
        in_parts: those in parts, on rank 0.
    """

    value: str
    whole: dict[str, float]
    in_parts: dict[str, float]

    def __str__(self) -> str:
        """The verdict, the numbers, the reason, and the remedy: a line each."""
        name = self.value
        numbers = (
            f"{name} (limit {self.limit:.0e}): {self.in_parts[name]:.6g}, whole batch "
            f"{self.whole[name]:.6g}"
        )
        return self._in_lines("values", numbers)


def valuecheck(
    evaluate: Evaluate,
    model: nn.Module,
    batch: Any,
    *,
    parts: int = 4,
    ranks: int = 1,
    equal: bool | None = None,
    timeout: float = 60.0,
) -> ValueCheck:
    """Check that the numbers of an evaluation do not depend on how the batch is split.

    Compares ``evaluate(model, [part, part, …])`` with ``evaluate(model, [batch])``.

    Args:
        evaluate: your evaluation of a list of batches. It returns a number, or a dict
            of numbers by name: a loss, an accuracy, a perplexity.
        model: the module, as in ``splitcheck``.
        batch: as in ``splitcheck``.
        parts: batches of each rank.
        ranks: processes that form a gloo group. Each must return the whole number.
        equal: whether all parts have equally many rows; by default the parts have not.
        timeout: seconds after which ranks are killed.
    """
    arguments = SplitArguments(
        evaluate,
        model,
        batch,
        parts=parts,
        ranks=ranks,
        equal=equal,
        timeout=timeout,
        returns_values=True,
    )
    trial = Trial(arguments)
    comparison = trial.compare()
    return ValueCheck(
        **report_of(trial, comparison, explain(trial, comparison)),
        value=comparison.name,
        whole=_numbers(comparison.reference),
        in_parts=_numbers(comparison.results[0]),
    )


def _numbers(result: StepResult) -> dict[str, float]:
    return {name: float(value) for name, value in result.gradients.items()}
