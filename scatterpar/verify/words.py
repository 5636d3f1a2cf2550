"""What the user hears of two micro-batches whose losses do not combine as the engine's do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from torch import Tensor

from scatterpar.step.request import Request
from scatterpar.verify.evidence import Finding
from scatterpar.verify.kinds import is_integer

__all__ = ["Words"]

_ALIKE = 1e-3  # so near are weights that are called the same
_PADDING = -100  # the label that torch's losses leave out by default
_LEFT_OUT = (_PADDING, 255, -1)  # 255 where labels are pictures


@dataclass(frozen=True)
class Words:
    """What there is to say of two micro-batches.

    Attributes:
        request: the step's.
        spans: where each of them starts and stops in the batch.
        labels: what may hold labels in each of them.
        weights: the factors of their losses.
    """

    request: Request
    spans: Sequence[tuple[int, int]]
    labels: Sequence[Sequence[Tensor]]
    weights: Sequence[float]

    def of(self, finding: Finding) -> str:
        """What the criterion seems to do instead, and what to pass."""
        pieces = " and ".join(f"{start}:{stop}" for start, stop in self.spans)
        adds = not self.request.is_mean
        a, b = self.weights
        total = 1.0 if adds else a + b
        its = _pair(finding.weights) if finding.weights else "no two numbers"
        by_losses = self.request.criterion is None or finding.seems == "more than a sum"
        what = "loss" if by_losses else "gradient"
        return (
            f"{self._criterion()} does not combine micro-batches as the engine was about to "
            f"combine them. The engine {'adds up' if adds else 'averages'} their losses: those of "
            f"rows {pieces} (of {self.request.rows}) times {_pair((a / total, b / total))}; but "
            f"the loss of these rows together is theirs times {its}. The {what} would be off by "
            f"{100 * finding.off:.2g} % of its size. {self._advice(finding)} Nothing was changed; "
            f"verify=False switches this check off."
        )

    def of_attribute(self, name: str) -> str:
        """That the criterion reads an attribute of a module whose forward pass never ran."""
        return (
            f"{self._criterion()} reads {name!r} of a module that it closes over, and the forward "
            f"pass sets it, on each replica alone: what the criterion finds is old. Return it from "
            f"forward, and take it from the output that the criterion is given. Nothing was "
            f"changed; verify=False switches this check off."
        )

    def of_shared(self, name: str) -> str:
        """That replicas write and read one container at the same time."""
        return (
            f"{self._criterion()} and a hook of the module share {name!r}: replicas compute at the "
            f"same time, so what the criterion finds there may be another replica's. Return it "
            f"from forward, and take it from the output that the criterion is given; verify=False "
            f"silences this"
        )

    def padding_matters(self) -> bool:
        """Whether labels are padded, and the criterion may leave those out that rows count."""
        if self.request.count is not None or not self.request.is_mean:
            return False
        return any(is_integer(t) and (t == _PADDING).any() for own in self.labels for t in own)

    def of_padding(self) -> str:
        """That nobody could tell, and that nobody should rely on it."""
        return (
            f"labels hold -100, and whether {self._criterion()} leaves them out could "
            f"not be checked; the engine weights micro-batches by their rows. If it averages "
            f"over the other labels, pass count=scatterpar.count_labels() (with shifted=True "
            f"for a causal language model); verify=False silences this"
        )

    def _advice(self, finding: Finding) -> str:
        if finding.seems == "sum":
            return 'It seems to be a sum: pass reduction="sum" (for a mean, count= says of what).'
        if finding.seems == "mean":
            return 'It seems to be a mean over rows: pass reduction="mean", without count=.'
        if finding.seems == "coupled":
            return (
                "It seems to compare rows with each other, and is neither a mean nor a sum of what "
                "it is of parts: no count= or reduction= can say that, whole_batch=True does."
            )
        if finding.seems == "more than a sum":
            return (
                "It seems to add something that does not depend on the rows, such as a penalty on "
                "weights, which every micro-batch would add once more: multiply that by "
                f"len(output) / {self.request.rows}, the micro-batch's part of the rows (no count= "
                f"or reduction= says that)."
            )
        return (
            "It seems to be a mean over something else than what was counted: pass "
            "count=, a function of (inputs, targets) that gives the number of its terms "
            f'(for a sum, reduction="sum").{self._hint(finding) or self._doubt(finding)}'
        )

    def _hint(self, finding: Finding) -> str:
        """Whether it is the labels that are not ignored, shifted or not."""
        assert finding.weights is not None
        for value, (one, other) in product(_LEFT_OUT, zip(*self.labels, strict=True)):
            for shifted in (False, True):
                if not is_integer(one) or (shifted and one.ndim < 2):
                    continue
                a, b = (
                    int((labels[:, 1:] if shifted else labels).ne(value).sum())
                    for labels in (one, other)
                )
                if a + b and abs(a / (a + b) - finding.weights[0]) < _ALIKE:
                    which = [] if value == _PADDING else [str(value)]
                    arguments = ", ".join(which + ["shifted=True"] * shifted)
                    return (
                        f" That is what labels give that are not {value}, here {a} and {b}: "
                        f"count=scatterpar.count_labels({arguments})."
                    )
        return ""

    def _doubt(self, finding: Finding) -> str:
        """Two losses alone do not tell another mean from a comparison of rows."""
        if finding.slopes is not None:
            return ""
        return (
            " Or a part of it compares rows with each other, such as a router's load balance, "
            "which no count= can say: whole_batch=True can, with a criterion that computes it from "
            "what the module returns."
        )

    def _criterion(self) -> str:
        criterion = self.request.criterion
        if criterion is None:
            return "the module's own loss"
        while isinstance(criterion, partial):
            criterion = criterion.func
        name = getattr(criterion, "__qualname__", None)
        return f"the criterion {name if isinstance(name, str) else type(criterion).__name__}"


def _pair(numbers: Sequence[float]) -> str:
    return f"{numbers[0]:.4g} and {numbers[1]:.4g}"
