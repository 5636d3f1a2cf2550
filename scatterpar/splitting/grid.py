"""``splitgrid``: a check for each number of parts and of ranks, as a table for CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from torch import nn

from scatterpar.splitting.check import check
from scatterpar.splitting.check_report import SplitCheck
from scatterpar.splitting.split_arguments import Loss, SplitArguments
from scatterpar.splitting.step_run import StepFunction
from scatterpar.splitting.trial import Trial
from scatterpar.tables import Printed, as_text

_SAME = "the same"


@dataclass(frozen=True)
class SplitCell:
    """One check of a grid.

    Attributes:
        parts: micro-batches of each rank.
        ranks: the number of processes.
        report: the check.
    """

    parts: int
    ranks: int
    report: SplitCheck

    def __str__(self) -> str:
        """The cell as ``4 parts on 2 ranks``."""
        return f"{self.parts} parts on {self.ranks} ranks"


@dataclass(frozen=True)
class SplitGrid(Printed):
    """The checks of a grid. It prints as a table, one line per cell.

    Attributes:
        cells: the checks, by the number of ranks and then of parts.
    """

    cells: Sequence[SplitCell]

    @property
    def passed(self) -> bool:
        """Whether there are cells, and only rounding differs in all of them."""
        return bool(self.cells) and all(cell.report.passed for cell in self.cells)

    def assert_passed(self, allow: Mapping[str, str] | None = None) -> None:
        """Raise an ``AssertionError`` with the table, unless all is as it should be.

        Args:
            allow: differences by design: the name of a parameter, or its beginning,
                and the cause. A cell may then differ in these parameters alone, by
                this cause. At least one cell must, for each entry: a difference that
                is gone, or has another cause, fails as well.
        """
        allowed = dict(allow or {})
        problems = []
        seen = set()
        for cell in self.cells:
            report = cell.report
            if report.passed:
                continue  # rounding needs no permission
            for name in report.wrong:
                prefix = _prefix_of(name, allowed)
                cause = allowed.get(prefix)
                if cause == report.cause:
                    seen.add(prefix)
                    continue
                problem = f"{cell}: {name} differs ({report.cause})"
                if cause is not None:
                    problem += f", allowed is {cause}"
                problems.append(problem)
        # A difference that is mended must leave the list, or it could come back.
        for prefix in allowed.keys() - seen:
            problems.append(
                f"no cell differs in {prefix} by {allowed[prefix]}; take it out of "
                f"allow="
            )
        if problems:
            reports = [str(c.report) for c in self.cells if not c.report.passed]
            raise AssertionError("\n".join([str(self), *problems, *reports]))

    def __str__(self) -> str:
        """A table: parts, ranks, sizes, the largest difference, and the verdict."""
        table = [["ranks", "parts", "rows", "difference", "in", "verdict"]]
        for cell in self.cells:
            report = cell.report
            verdict = _SAME if report.passed else f"NOT the same: {report.cause}"
            table.append(
                [
                    str(cell.ranks),
                    str(cell.parts),
                    report.sizes,
                    f"{report.worst:.1e}",
                    report.parameter,
                    verdict,
                ]
            )
        return as_text(table)


def _prefix_of(name: str, allowed: Mapping[str, str]) -> str:
    """The longest key that is the name of a parameter or its beginning, else nothing.

    The longest, so that one layer of a router may have a cause of its own.
    """
    prefixes = [prefix for prefix in allowed if name.startswith(prefix)]
    return max(prefixes, key=len, default="")


def splitgrid(
    step: StepFunction,
    model: nn.Module,
    batch: Any,
    *,
    parts: Sequence[int] = (1, 4),
    ranks: Sequence[int] = (1, 2),
    equal: bool | None = True,
    loss: Loss | None = None,
    timeout: float = 60.0,
) -> SplitGrid:
    """Check each number of parts on each number of ranks, as ``splitcheck`` does.

    The cell of one part on one rank is left out, unless there is ``loss=``: it would
    compare the step with itself. Cells share the runs of the whole batch.

    Args:
        step: as in ``splitcheck``, like ``model``, ``batch``, ``loss``, ``timeout``.
        model: the module.
        batch: rows that each number of parts and ranks divides, if ``equal``.
        parts: numbers of micro-batches of each rank.
        ranks: numbers of processes.
        equal: whether all parts have equally many rows.
        loss: the loss of a whole batch in plain torch.
        timeout: seconds after which the ranks of a run are killed.

    Returns a grid with ``passed`` and ``assert_passed()``.
    """
    shared = SplitArguments(
        step, model, batch, ranks=1, equal=equal, timeout=timeout, loss=loss
    )
    trials = []  # all before the first one runs: arguments may be wrong
    for num_ranks, num_parts in product(ranks, parts):
        if num_ranks == num_parts == 1 and shared.loss is None:
            continue  # the step would be compared with itself
        # A copy shares the runs of the whole batch.
        trials.append(Trial(replace(shared, parts=num_parts, ranks=num_ranks)))
    if not trials:
        raise ValueError(
            "parts=(1,) on ranks=(1,) compares the step with itself; pass numbers of 2 "
            "or more in parts= or ranks=, or loss=function, where "
            "function(model, batch) returns the right loss in plain torch"
        )
    return SplitGrid([SplitCell(t.num_parts, t.ranks, check(t)) for t in trials])
