"""The note on a user's error. Its words are in ``step/test_attempt.py`` and on pages alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import torch

from scatterpar.plan import Share
from scatterpar.step.attempt import note_replica


def note_of(
    replica: int,
    device: torch.device | str,
    sub_step: int | None = None,
    of: int = 1,
    rows: Sequence[int] = (0,),
) -> str:
    """The note on an error of a replica, in a sub-step ``of`` so many, with these ``rows``.

    Rows that are no ``range`` are those of a plan by cost.
    """
    spans = ((rows[0], rows[-1] + 1),) * of
    error = Exception()  # not raised: it would keep the error that is handled at the moment
    by_cost = () if isinstance(rows, range) else (tuple(rows),) * of
    share = Share(replica, torch.device(device), 0, 0, spans, by_cost)
    note_replica(share, sub_step).__exit__(None, error, None)
    (note,) = error.__notes__
    return note


def beginning_of_note(
    replica: int, device: torch.device | str, sub_step: int | None = None, of: int = 1
) -> str:
    """What all notes on errors of this replica, and of this sub-step, begin with."""
    first = 0 if sub_step is None else sub_step
    notes = [note_of(replica, device, first, of, rows) for rows in ((0,), (1, 2))]
    if sub_step is None:
        notes.append(note_of(replica, device))
    alike = takewhile(lambda letters: len({*letters}) == 1, zip(*notes, strict=False))
    return "".join(letters[0] for letters in alike)
