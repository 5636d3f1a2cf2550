"""How the 0-dim outputs of replicas combine: as the loss of all rows does.

::

    mean by rows               of a loss that is a mean over rows
    mean by labels             of one over labels that are not -100
    mean by shifted labels     the same without the first label of each row
    sum                        of a sum

A look tells which of them hold (``call_look``). Several may, as the first two do where
no label is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.joining import NumberWeights
from scatterpar.devices.copies import to_numbers

IGNORED_LABEL = -100


@dataclass(frozen=True)
class NumberRule:
    """A way in which numbers of parts combine.

    Attributes:
        words: the way, as texts name it.
        is_sum: whether they are added; else their mean is weighted.
        labels: the position of the labels among the tensors of the arguments that are
            in no marker; ``None`` for weights by rows.
        is_shifted: whether the first label of each row does not count.
    """

    words: str
    is_sum: bool = False
    labels: int | None = None
    is_shifted: bool = False


BY_ROWS = NumberRule("a mean over rows")
SUM = NumberRule("a sum", is_sum=True)


def rules_for(arguments: object, dim: int) -> list[NumberRule]:
    """The rules that are possible for these arguments, the likeliest first."""
    rules = [BY_ROWS]
    # With rows in another dimension labels are not flattened row by row.
    for position, tensor in enumerate(_tensors_of_call(arguments)):
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        if is_integer and tensor.dtype is not torch.bool and tensor.ndim and not dim:
            words = f"a mean over labels that are not -100 (tensor {position})"
            rules.append(NumberRule(words, labels=position))
            if tensor.ndim > 1:
                words = f"{words}, shifted by one"
                rules.append(NumberRule(words, labels=position, is_shifted=True))
    return [*rules, SUM]


def weights_of(
    rule: NumberRule, arguments: object, parts: Sequence[Sequence[int]]
) -> NumberWeights:
    """The weights of parts, which are numbers of rows of the ``arguments``."""
    if rule.is_sum or rule.labels is None:
        return NumberWeights([float(len(rows)) for rows in parts], rule.is_sum)
    labels = _tensors_of_call(arguments)[rule.labels]
    if rule.is_shifted:
        labels = labels[:, 1:]
    # In one copy: a label on a device is waited for.
    counts = (
        labels.detach().ne(IGNORED_LABEL).flatten(1).sum(1)
        if labels.ndim > 1
        else (labels.detach().ne(IGNORED_LABEL))
    )
    by_row: list[float] = to_numbers(counts)
    return NumberWeights([float(sum(by_row[row] for row in rows)) for rows in parts])


def _tensors_of_call(arguments: object) -> list[Tensor]:
    return nested.tensors(arguments)
