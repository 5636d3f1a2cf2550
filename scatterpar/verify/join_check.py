"""Check that entries of outputs, several per row, are in the order of the rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.memory import no_kernel_search
from scatterpar.devices.transfers import to_numbers
from scatterpar.errors import warn
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.numerics.wider_precision import Precision
from scatterpar.step.attempt import Attempt
from scatterpar.step.request import Request
from scatterpar.step.task import ReplicaTask
from scatterpar.threads.process_settings import SETTINGS_KEPT
from scatterpar.verify.measurements import Compute, outputs_of
from scatterpar.verify.output_differences import compare_outputs, entries_per_row
from scatterpar.verify.rows import Parts
from scatterpar.verify.runs import Runs
from scatterpar.verify.schedule import names_and_numbers
from scatterpar.verify.verdicts import refused_order

_DRAWN = (
    "the function draws random numbers and returns several entries per row, whose "
    "order cannot be compared with that of one call: return .view(rows, k, -1) of k "
    "entries per row"
)


class JoinCheck:
    """Remembers the kinds of outputs whose order of entries is known."""

    def __init__(self, is_distributed: bool) -> None:
        self._is_distributed = is_distributed
        # With the positions of the tensors that have no rows.
        self._known: dict[Hashable, frozenset[int]] = {}

    def check(
        self,
        attempt: Attempt,
        task: ReplicaTask,
        outputs: Sequence[Sequence[Any]],
        compute: Compute,
        function: Callable[..., Any] | None = None,
    ) -> None:
        """Compare outputs of a few rows with one output, until values show the order.

        The attempt gets the positions of tensors that have no rows, such as a codebook
        of 64 entries beside 16 rows.

        ``compute`` gave the outputs; ``function`` is what the user passed to
        ``engine.map``.

        Raises:
            ValueError: the outputs of parts, joined, are not the output of one call; or
                the outputs are of a function for ``engine.map`` that drew random
                numbers: how many it draws may depend on the rows.
        """
        # Objects, such as a loop's boxes, are joined as a list, and the search for the
        # kind takes a quarter of an evaluation's time.
        if not nested.tensors(outputs[0][0]):
            return
        key = self._key_of(attempt, function, outputs[0][0])
        constants = self._known.get(key)
        if constants is None:
            constants = frozenset()
            is_shown = True
            candidates = self._candidates(attempt, outputs)
            # Outputs without candidates are known, too: comparing bits waits for the
            # device.
            if candidates:
                if function is not None and attempt.generators.drawn:
                    raise ValueError(_DRAWN)
                constants, is_shown = _compared(attempt, task, candidates, compute)
            if is_shown:
                self._known[key] = constants
        attempt.constants = constants

    def _candidates(
        self, attempt: Attempt, outputs: Sequence[Sequence[Any]]
    ) -> set[int]:
        """The positions of tensors that a join takes for several entries per row."""
        request = attempt.request
        remaining = iter(attempt.plan.substep_rows)
        # The pieces of each join, with their numbers of rows.
        by_share = [list(zip(pieces, remaining, strict=False)) for pieces in outputs]
        joins: list[list[tuple[Any, int]]] = []
        joined_by_share = request.return_outputs and not attempt.plan.is_dealt
        if joined_by_share:  # their micro-batches may differ in size
            joins += by_share
        if request.whole_batch or not joined_by_share:
            joins.append(list(chain(*by_share)))
        # Other ranks have pieces, too.
        has_others = request.whole_batch and self._is_distributed
        candidates: set[int] = set()
        for pieces in joins:
            if len(pieces) > 1 or has_others:
                candidates |= _with_several_entries(pieces, request.dim)
        return candidates

    def _key_of(self, attempt: Attempt, function: Any, output: Any) -> Hashable:
        """What an order of entries may depend on.

        Not the model's ``changes``, nor numbers: one that moves in each step would
        cause a comparison.
        """
        model = attempt.replicas.of_model
        request = attempt.request
        shapes = [tensor.shape for tensor in nested.tensors(output)]
        # Whether sizes are multiples of the rows depends on those of all parts.
        sizes = sorted(set(attempt.plan.substep_rows))
        names, _ = names_and_numbers((function, request.return_outputs))
        return (
            str((shapes, sizes)),
            model.flags,
            model.builds,
            request.whole_batch,
            names,
        )


def _with_several_entries(pieces: Sequence[tuple[Any, int]], dim: int) -> set[int]:
    """The positions of tensors that have one k > 1 of entries per row in all pieces.

    Also of those with one entry per row that are the same in all pieces: such a tensor
    may have no rows. ``pieces`` have their numbers of rows beside them.
    """
    positions: set[int] = set()
    outputs, sizes = zip(*pieces, strict=True)
    by_position = zip(*map(nested.tensors, outputs), strict=False)
    for position, tensors in enumerate(by_position):
        pairs = zip(tensors, sizes, strict=True)
        first, *further = {entries_per_row(tensor, size, dim) for tensor, size in pairs}
        if further or not first:
            continue
        if first > 1 or _have_same_numbers(tensors, dim):
            positions.add(position)
    return positions


def _have_same_numbers(tensors: Sequence[Tensor], dim: int) -> bool:
    """Whether the tensors of all pieces have the same numbers.

    The host reads them, because pieces of several replicas are in several memories. If
    the first entries differ, as those of rows do, it reads no more.
    """
    shape = tensors[0].shape
    if {(tensor.shape, tensor.layout) for tensor in tensors} != {
        (shape, torch.strided)
    }:
        return False
    # The first entries, then all.
    for size in (1, shape[dim]):
        entries = [to_numbers(tensor.narrow(dim, 0, size)) for tensor in tensors]
        if any(numbers != entries[0] for numbers in entries):
            return False
    return True


def _compared(
    attempt: Attempt, task: ReplicaTask, candidates: set[int], compute: Compute
) -> tuple[frozenset[int], bool]:
    """The positions of tensors without rows, and whether values show the order.

    Only ``candidates``, which may have several entries per row, are compared.
    """
    request = attempt.request.of_largest_batch()
    dim = request.dim
    # The fewest rows with parts of two sizes: what has no rows differs in none.
    rows = [0, request.rows // 2, request.rows - 1]
    parts = [rows[:-1], rows[-1:]]
    try:
        outputs = _outputs_of(attempt, request, task, [rows, *parts], compute)
    except Inconclusive as why:
        warn(
            "could not check that the entries of outputs, several per row, are in "
            f"the order of the rows: {why}. They are joined as they are; "
            ".view(rows, k, -1) of k entries per row needs no check"
        )
        return frozenset(), True
    whole, *pieces = outputs
    _, misplaced = compare_outputs(whole, pieces, parts, dim)
    # A single piece is joined with those of other ranks, which refuse more.
    if misplaced and len(attempt.plan.substep_rows) > 1:
        raise ValueError(refused_order(misplaced, len(rows)).text)
    constants: set[int] = set()
    is_shown = True
    by_position = zip(*map(nested.tensors, outputs), strict=False)
    for position, (tensor, *of_parts) in enumerate(by_position):
        # A tensor without rows is the same for other numbers of rows.
        if all(same_bits(tensor, of_part) for of_part in of_parts):
            constants.add(position)
        # Equal entries show no order.
        elif entries_per_row(tensor, len(rows), dim) > 1:
            is_shown &= not same_bits(tensor, tensor.flip(dim))
    return frozenset(constants & candidates), is_shown


def _outputs_of(
    attempt: Attempt,
    request: Request,
    task: ReplicaTask,
    parts: Parts,
    compute: Compute,
) -> list[Any]:
    """The replica's output for each part, from one state, in the replica's thread."""
    # Constant numbers: a draw would differ between rows and parts.
    runs = Runs(
        attempt, request, task, precision=Precision.AS_IN_STEP, draws_constants=True
    )

    def outputs() -> list[Any]:
        isolated = task.isolated(attempt.generators)
        with isolated, runs.user_code.isolated(), torch.no_grad():
            return outputs_of(runs, parts, compute)

    with SETTINGS_KEPT, no_kernel_search():  # a look has other sizes
        return attempt.threads.call(task.share.device, outputs)
