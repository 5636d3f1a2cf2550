"""Check that entries of outputs, several per row, are in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

import torch

from scatterpar.batch import nested
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.memory import no_kernel_search
from scatterpar.step.attempt import Attempt
from scatterpar.step.request import Request
from scatterpar.step.task import ReplicaTask
from scatterpar.verify.causes import refused_order
from scatterpar.verify.measurements import computed_with_constants
from scatterpar.verify.output_differences import compare_outputs, entries_per_row
from scatterpar.verify.rows import Parts
from scatterpar.verify.runs import Runs
from scatterpar.verify.schedule import names_and_numbers

_DRAWN = (
    "the function draws random numbers and returns several entries per row, whose "
    "order cannot be compared with that of one call: return .view(rows, k, -1) of k "
    "entries per row"
)

Compute = Callable[[ReplicaTask, Any], Any]  # the output for inputs and targets


class JoinCheck:
    """Remembers the kinds of outputs whose order of entries is known."""

    def __init__(self) -> None:
        self._known: set[Hashable] = set()

    def check(
        self,
        attempt: Attempt,
        request: Request,
        task: ReplicaTask,
        outputs: Sequence[Sequence[Any]],
        compute: Compute,
        function: Callable[..., Any] | None,
    ) -> None:
        """Compare outputs of a few rows with one output, until values show the order.

        Only outputs that may have several entries per row are compared. ``request`` is
        that of the largest batch, and ``function`` what the user passed to
        ``engine.map``.

        Raises:
            ValueError: the outputs of parts, joined, are not the output of one call; a
                tensor without rows looks as if it had some; or the outputs are of a
                function for ``engine.map`` that drew random numbers: how many it draws
                may depend on the rows.
        """
        pieces = list(chain(*outputs))
        sizes = attempt.plan.substep_rows
        dim = request.dim
        entries = _common_entries(pieces, sizes, dim)
        if max(entries, default=0) < 2:
            return
        if function is not None and attempt.generators.drawn:
            raise ValueError(_DRAWN)
        key = self._key_of(attempt, request, function, pieces[0], sizes[0])
        if key in self._known:
            return
        rows = [0, request.rows // 2, request.rows - 1]
        parts = [rows[:-1], rows[-1:]]
        whole, backwards, *computed = _outputs_of(
            attempt, request, task, [rows, rows[::-1], *parts], compute
        )
        if _joins(attempt):
            _refuse_constants(pieces[0], sizes[0], entries, [whole, *computed])
        differences = compare_outputs(whole, backwards, computed, parts, dim)
        if differences.misplaced:
            raise ValueError(refused_order(differences.misplaced, len(rows)).text)
        several = [
            tensor
            for tensor in nested.tensors(whole)
            if entries_per_row(tensor, len(rows), dim) > 1
        ]
        # Equal entries show no order.
        if not any(same_bits(tensor, tensor.flip(dim)) for tensor in several):
            self._known.add(key)

    def _key_of(
        self, attempt: Attempt, request: Request, function: Any, output: Any, size: int
    ) -> Hashable:
        """What an order of entries may depend on.

        Not the model's ``changes``, nor numbers: one that moves in each step would
        cause a comparison.
        """
        model = attempt.replicas.of_model
        entries = [
            [length / size for length in tensor.shape]
            for tensor in nested.tensors(output)
        ]
        names, _ = names_and_numbers((function, request.return_outputs))
        return str(entries), model.flags, model.builds, request.whole_batch, names


def _common_entries(pieces: Sequence[Any], sizes: Sequence[int], dim: int) -> list[int]:
    """The entries per row of each tensor of the outputs.

    It is 0 for a tensor that has not as many entries per row in all pieces: the join
    does not take them for entries of rows. A single piece is not joined.
    """
    if len(pieces) < 2:
        return []
    common: list[int] = []
    for tensors in zip(*map(nested.tensors, pieces), strict=False):
        numbers = {
            entries_per_row(tensor, size, dim)
            for tensor, size in zip(tensors, sizes, strict=False)
        }
        common.append(min(numbers) if len(numbers) == 1 else 0)
    return common


def _joins(attempt: Attempt) -> bool:
    """Whether outputs of several micro-batches become one."""
    request = attempt.request
    plan = attempt.plan
    has_several = len(plan.substep_rows) > len(plan.shares)
    returns_shares = request.return_outputs and not (plan.order or plan.is_dealt)
    return has_several or request.whole_batch or not returns_shares


def _refuse_constants(
    piece: Any, num_rows: int, entries: Sequence[int], computed: Sequence[Any]
) -> None:
    """Refuse a tensor that has k > 1 entries per row by chance.

    ``piece`` is the output for a micro-batch of ``num_rows``, and ``entries`` has k for
    each of its tensors. ``computed`` are outputs for other numbers of rows, in which a
    tensor without rows is the same.

    Raises:
        ValueError: the join would take it for entries of rows.
    """
    tensors = zip(*map(nested.tensors, (piece, *computed)), strict=False)
    for number, (of_piece, first, *others) in zip(entries, tensors, strict=False):
        if number > 1 and all(same_bits(first, other) for other in others):
            raise ValueError(
                f"the module returns a tensor of shape {tuple(of_piece.shape)} for any "
                f"number of rows, which looks like {number} entries for each of the "
                f"{num_rows} rows of a micro-batch; read it from the module in the "
                "place of returning it, or change the number of rows per micro-batch. "
                "Nothing was changed"
            )


def _outputs_of(
    attempt: Attempt,
    request: Request,
    task: ReplicaTask,
    parts: Parts,
    compute: Compute,
) -> list[Any]:
    """The replica's output for each part, from one state, in the replica's thread."""
    runs = Runs(attempt, request, task)

    def outputs() -> list[Any]:
        isolated = task.isolated(attempt.generators)
        with isolated, runs.user_code.isolated(), torch.no_grad():
            return [computed_with_constants(runs, rows, compute) for rows in parts]

    with no_kernel_search():  # a look has other sizes
        return attempt.threads.call(task.share.device, outputs)
