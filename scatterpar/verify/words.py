"""What the user hears of rows whose losses do not combine as the engine's do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product

from torch import Tensor

from scatterpar.step.request import Request
from scatterpar.verify.rehearsal import Finding
from scatterpar.verify.rows import is_label

__all__ = ["Words"]

_OFF = "Nothing was changed; verify=False switches this check off."


class Words:
    """What there is to say of some rows, in parts.

    Args:
        request: the step's.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    def of(self, found: Finding, tensors: Sequence[Tensor], ignored: Iterable[int]) -> str:
        """What the criterion seems to do instead, and what to pass."""
        sizes = " + ".join(str(len(part)) for part in found.parts)
        what = "mean" if self._request.is_mean else "sum"
        rows = " + ".join(", ".join(map(str, part)) for part in found.parts)
        off = f"off by {100 * found.off:.2g} %" if math.isfinite(found.off) else "NaN or infinite"
        its = f"; your loss weights them with {_listed(found.weights)}" if found.weights else ""
        doubt = (
            "For this look every row had the same random numbers, and batch normalisation its "
            "running statistics, so the step goes on; verify=False silences this."
        )
        total = sum(map(len, found.parts))
        return (
            f"{self._criterion()}: your loss of {total} rows is not the {what} "
            f"of the losses of {sizes} rows, and the engine takes it for that. The engine would "
            f"weight these with {_listed(found.factors)}{its}: the "
            f"{'loss' if found.of_losses else 'gradient'} would be {off}. "
            f"{self._advice(found, tensors, ignored)} (Rows {rows} of {self._request.rows}.) "
            f"{_OFF if found.certain else doubt}"
        )

    def of_attribute(self, name: str) -> str:
        """That the criterion reads an attribute of a module whose forward pass never ran."""
        return (
            f"{self._criterion()} reads {name!r} of a module that it closes over, and the forward "
            f"pass sets it, on each replica alone: what the criterion finds is old. Return it from "
            f"forward, and take it from the output that the criterion is given. {_OFF}"
        )

    def of_shared(self, name: str) -> str:
        """That replicas write and read one container at the same time."""
        return (
            f"{self._criterion()} and a hook of the module share {name!r}: replicas compute at the "
            f"same time, so what the criterion finds there may be another replica's. Return it "
            f"from forward, and take it from the output that the criterion is given; verify=False "
            f"silences this"
        )

    def unsure(self, error: Exception) -> str:
        """That nobody could tell, and what to do if it is something else."""
        terms = "what count= gives" if self._request.count else "rows"
        taken = f"a mean over {terms}" if self._request.is_mean else "a sum"
        return (
            f"whether {self._criterion()} combines micro-batches as the engine does could not be "
            f"checked ({str(error)[:120]}). The engine takes it for {taken}. If it is a mean over "
            f"something else, such as labels that are not ignored, pass count=, for instance "
            f'scatterpar.count_labels(); if it is a sum, reduction="sum"; if it compares rows '
            f"with each other, whole_batch=True. verify=False silences this"
        )

    def _advice(self, found: Finding, tensors: Sequence[Tensor], ignored: Iterable[int]) -> str:
        its, near = found.weights, partial(_near, tolerance=max(1e-3, 10 * found.tolerance))
        rows = sum(map(len, found.parts))
        if found.of_losses:
            return (
                "It seems to add something that does not depend on the rows, such as a penalty on "
                "weights, which every micro-batch would add once more: multiply that by "
                f"len(output) / {self._request.rows}, the micro-batch's part of the rows (no "
                f"count= or reduction= says that, and whole_batch=True needs none)."
            )
        if its and near(its, [1.0] * len(its)):
            return (
                'It seems to be a sum: pass reduction="sum" (for a mean, count= says of what; '
                "whole_batch=True for a loss that compares rows)."
            )
        if its and near(its, [len(part) / rows for part in found.parts]):
            return (
                'It seems to be a mean over rows: pass reduction="mean", without count= '
                "(whole_batch=True for a loss that compares rows)."
            )
        if not its and math.isfinite(found.off):
            return (
                "It seems to compare rows with each other, or to be a ratio of sums: pass "
                "whole_batch=True, which calls it once with all rows; or make it a mean of one "
                "loss per row (per image). No count= or reduction= can say what it is now."
            )
        its_own = "" if self._request.is_mean else 'reduction="mean" and '
        return (
            "It seems to be a mean over something else than what was counted: pass "
            f"{its_own}count=, a function of (inputs, targets) that gives the number of its terms"
            f"{self._hint(found, tensors, ignored)}; or make it a mean of one loss per row (per "
            'image). For a sum, reduction="sum"; if it compares rows with each other, such as a '
            "router's load balance, whole_batch=True."
        )

    def _hint(self, found: Finding, tensors: Sequence[Tensor], ignored: Iterable[int]) -> str:
        """Whether it is the labels that are not ignored, shifted or not."""
        values = dict.fromkeys([-100, 255, -1, *ignored])
        for tensor, value, shifted in product(tensors, values, (False, True)):
            if not is_label(tensor) or (shifted and tensor.ndim < 2):
                continue
            labels = tensor[:, 1:] if shifted else tensor
            first = self._first(tensor)
            terms = [
                sum(int((labels[row - first] != value).sum()) for row in part)
                for part in found.parts
            ]
            total = sum(terms)
            if found.weights and total and _near(found.weights, [n / total for n in terms], 1e-3):
                said = ", ".join([str(value)] * (value != -100) + ["shifted=True"] * shifted)
                return (
                    f", here the labels that are not {value}, of which these rows have "
                    f"{_listed(terms)}: count=scatterpar.count_labels({said})"
                )
        return ""

    def _first(self, tensor: Tensor) -> int:
        """Where the tensor's first row is in the batch: of several batches it has one's."""
        sizes = self._request.sizes
        return 0 if len(sizes) < 2 else sum(sizes[: sizes.index(len(tensor))])

    def _criterion(self) -> str:
        criterion = self._request.criterion
        if criterion is None:
            return "the module's own loss"
        while isinstance(criterion, partial):
            criterion = criterion.func
        name = getattr(criterion, "__qualname__", None)
        return f"the criterion {name if isinstance(name, str) else type(criterion).__name__}"


def _near(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < tolerance


def _listed(numbers: Sequence[float] | None) -> str:
    *most, last = (f"{number:.4g}" for number in numbers or (0.0,))
    return f"{', '.join(most)} and {last}" if most else last
