"""Ready counts for labels of which some are ignored, so that nobody has to write the wrong one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from scatterpar.step.request import Count


def count_labels(ignore_index: int = -100, *, shifted: bool = False, key: str = "labels") -> Count:
    """A ``count=`` for losses that average over the labels that are not ``ignore_index``.

    Args:
        ignore_index: the value of labels that are left out, such as padding.
        shifted: the first position of each row is no label, as in causal language models:
            a position predicts the label of the next one, and none predicts the first.
        key: where the labels are, if the targets are no tensor: ``targets[key]``, else
            ``inputs[key]``.

    Returns:
        ``count(inputs, targets)``, the number of labels as a 0-dim tensor. It can be pickled.

    The counter raises ``TypeError`` where there are no labels, and ``ValueError`` where they
    are to be shifted and have no dimension 1.

    Example:
        >>> import torch
        >>> labels = torch.tensor([[5, 6, 7], [5, -100, -100]])
        >>> count_labels()({}, labels)
        tensor(4)
        >>> count_labels(shifted=True)({"labels": labels}, None)
        tensor(2)
    """
    return partial(_count, ignore_index=ignore_index, shifted=shifted, key=key)


def _count(inputs: Any, targets: Any, *, ignore_index: int, shifted: bool, key: str) -> Tensor:
    labels = _labels(inputs, targets, key)
    if shifted:
        if labels.ndim < 2:
            raise ValueError(
                f"shifted=True leaves out the first position of dimension 1, but the labels have "
                f"shape {tuple(labels.shape)}"
            )
        labels = labels[:, 1:]
    return (labels != ignore_index).sum()


def _labels(inputs: Any, targets: Any, key: str) -> Tensor:
    if isinstance(targets, Tensor):
        return targets
    for part in (targets, inputs):
        if isinstance(part, Mapping) and isinstance(part.get(key), Tensor):
            labels: Tensor = part[key]
            return labels
    raise TypeError(
        f"count_labels found no labels: targets is {type(targets).__name__}, and neither it nor "
        f"inputs ({type(inputs).__name__}) has a tensor {key!r}; say where they are with key="
    )
