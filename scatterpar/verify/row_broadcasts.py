"""Find rows that broadcast within a micro-batch, and not in all rows.

::

    rows                  outputs    targets    output - target
    a micro-batch of 8    (8, 8)     (8,)       (8, 8): rows beside columns
    two in one piece      (16, 8)    (16,)      an error

The criterion is called with the outputs of two micro-batches, one after the other, and
in one piece. If it fails in one piece alone, the operator that has failed tells why. A
criterion for a fixed number of rows fails, too, but not because two tensors that have
these rows do not broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.spans import Part
from scatterpar.step.loss import loss_of
from scatterpar.verify.measurements import outputs_of
from scatterpar.verify.rows import Parts
from scatterpar.verify.runs import Runs, copy_of_leaf

Shapes = Sequence[torch.Size]


@dataclass(frozen=True)
class RowBroadcast:
    """Two shapes that broadcast within a micro-batch, and do not for more rows.

    Attributes:
        num_rows: the number of rows of a micro-batch.
        within: the shapes for these rows.
        more_rows: the number of rows of several micro-batches.
        beyond: the shapes of the same tensors for those.
    """

    num_rows: int
    within: Shapes
    more_rows: int
    beyond: Shapes


class _Operators(TorchFunctionMode):
    """Records the shapes of the tensors that torch's functions get in its body.

    Attributes:
        shapes: of each call, in order.
        error: that of the last call that has failed.
        failed: the position of this call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Shapes] = []
        self.error: Exception | None = None
        self.failed = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = nested.tensors([*args, *kwargs.values()])
        position = len(self.shapes)
        self.shapes.append([tensor.shape for tensor in tensors])
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.error = error
            self.failed = position
            raise


def broadcast_of_rows(runs: Runs, micro_batches: Parts) -> RowBroadcast | None:
    """The tensors that broadcast in each micro-batch by itself, and not in one piece.

    ``None`` if the criterion fails for one of them by itself, if it does not fail in
    one piece, or if it fails there for another reason.
    """
    task = runs.replica_task
    outputs = outputs_of(runs, micro_batches)
    sizes = [len(rows) for rows in micro_batches]
    all_rows = list(chain(*micro_batches))
    in_one_piece = join_rows(outputs, runs.request.dim, sizes, sizes)

    def failure(output: Any, rows: Part, operators: _Operators) -> Exception | None:
        copied = nested.map_tensors(copy_of_leaf, output)
        targets = runs.targets_of(rows)
        try:
            with runs.surroundings(task), torch.no_grad(), operators:
                loss_of(copied, targets, task.criterion)
        except Exception as error:
            return error
        return None

    for output, rows in zip(outputs, micro_batches, strict=True):
        within = _Operators()
        if failure(output, rows, within) is not None:
            return None
    beyond = _Operators()
    error = failure(in_one_piece, all_rows, beyond)
    # The error of a criterion's own says nothing, nor does one of another operator.
    if error is None or error is not beyond.error:
        return None
    return _broadcast_in(within, beyond, sizes[-1], len(all_rows))


def _broadcast_in(
    within: _Operators, beyond: _Operators, num_rows: int, all_rows: int
) -> RowBroadcast | None:
    """The tensors of the call that failed ``beyond`` a micro-batch, if two of them have
    rows, and do not broadcast.
    """
    position = beyond.failed
    if position >= len(within.shapes):  # the criterion takes another way
        return None
    pairs: list[tuple[torch.Size, torch.Size]] = []
    shapes = zip(within.shapes[position], beyond.shapes[position], strict=False)
    for one, several in shapes:
        if _has_rows(one, several, num_rows, all_rows):
            pairs.append((one, several))
    for (one, several), (other, others) in combinations(pairs, 2):
        if _do_broadcast(one, other) and not _do_broadcast(several, others):
            return RowBroadcast(num_rows, [one, other], all_rows, [several, others])
    return None


def _has_rows(
    one: torch.Size, several: torch.Size, num_rows: int, all_rows: int
) -> bool:
    """Whether a tensor has an entry for each row, along one of its dimensions."""
    if len(one) != len(several):
        return False
    changed = [pair for pair in zip(one, several, strict=True) if len(set(pair)) > 1]
    return changed == [(num_rows, all_rows)]


def _do_broadcast(first: torch.Size, second: torch.Size) -> bool:
    try:
        torch.broadcast_shapes(first, second)
    except RuntimeError:
        return False
    return True
