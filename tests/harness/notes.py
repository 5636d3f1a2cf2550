"""The note on a user's error. Its words are in ``step/test_replica_threads.py`` and on
pages alone.
"""

import torch

from scatterpar.plan import Share
from scatterpar.step.replica_threads import ReplicaNote


def note_of(replica, device, sub_step=None, sub_steps=1, rows=(0,)):
    """The note on an error of a replica, in a sub-step of ``sub_steps``, with these
    ``rows``.
    """
    span = rows[0], rows[-1] + 1
    share = Share(replica, torch.device(device), (span,) * sub_steps)
    # Not raised: it would keep the error that is handled at the moment.
    error = Exception()
    ReplicaNote(share, sub_step).__exit__(None, error, None)
    (note,) = error.__notes__
    return note


def beginning_of_note(replica, device, sub_step=None, sub_steps=1):
    """What all notes on errors of this replica, and of this sub-step, begin with."""
    note, _, _ = note_of(replica, device, sub_step, sub_steps).partition(" (")
    num_parts = 1 if sub_step is None else 2
    parts = note.split(", ")
    return ", ".join(parts[:num_parts])
