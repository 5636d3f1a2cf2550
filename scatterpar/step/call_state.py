"""What user code of one call may move: the roots of a journal are all that it gets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.batch import Batch
from scatterpar.batch.markers import Marker
from scatterpar.objects.journal import Journal
from scatterpar.objects.references import module_of
from scatterpar.objects.walk import Walk
from scatterpar.step.request import Request


def roots_of_batches(batches: Iterable[Batch]) -> list[Any]:
    """Functions and objects among inputs and targets: ``collate=``, a schedule that is
    an argument, a random generator.
    """
    roots: list[Any] = []
    objects: list[Any] = []
    for batch in batches:
        for atom in batch.atoms:
            atoms = [atom]
            if isinstance(atom, Marker):
                roots.append(atom.collate)
                # Entries of rows are data.
                atoms = [] if atom.num_rows is not None else atom.atoms()
            objects += [value for value in atoms if not _needs_no_walk(value)]
    # No roots themselves: of these, attributes of a library's objects are followed.
    return [*roots, objects]


def _needs_no_walk(value: Any) -> bool:
    return isinstance(value, (Tensor, Marker, *nested.WITHOUT_PARTS))


def journal_of_call(
    module: nn.Module,
    request: Request,
    devices: Sequence[torch.device],
    function: Any = None,
    *,
    saves_weights: bool = False,
) -> Journal:
    """Saves what a call moves: the module, what it calls, and what is passed to it.

    ``function`` is what ``engine.map`` calls. Weights are saved if a plain call may
    write them; a step refuses that.
    """
    criterion = request.criterion
    walk = Walk(
        [
            module,
            module_of(criterion),
            criterion,
            request.count,
            function,
            *roots_of_batches(request.batches),
        ]
    )
    if saves_weights:
        return Journal(walk, devices, guarded=(), max_bytes=math.inf)
    return Journal(walk, devices)
