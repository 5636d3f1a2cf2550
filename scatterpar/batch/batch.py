"""A batch as a flat list of atoms: taken apart once, and put together for each call.

::

    inputs {"ids": a, "mask": b}, targets c      what the user passes
    atoms [a, b, c]                              what is selected, moved and copied
    inputs {"ids": a', "mask": b'}, targets c'   what module and criterion get

Which atoms have rows is asked once, when a batch is taken apart. So a sub-step passes
plain values over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scatterpar.batch import nested
from scatterpar.batch.classes import copy_of, like
from scatterpar.batch.markers import Marker, unwrapped_atom


@dataclass(frozen=True)
class Structure:
    """The nesting of a batch's atoms, and which of them have rows.

    The atoms at other positions are plain values.

    Attributes:
        dim: the dimension along which tensors have their rows.
        build: puts the atoms together, to a pair of inputs and targets.
        rows: the positions of tensors, and of markers with rows, such as ``Rows``.
        values: the positions of 0-dim tensors, and of other markers, such as
            ``Replicated``.
    """

    dim: int
    build: nested.Build
    rows: tuple[int, ...]
    values: tuple[int, ...]


@dataclass(eq=False, slots=True)  # a step makes one object per share and micro-batch
class Batch:
    """The inputs and targets of some rows, as a flat list of their atoms.

    An atom is a tensor, a marker, or anything else that is no container.

    Attributes:
        atoms: those of the inputs, then those of the targets.
        structure: how they are put together, and what they are.
        rows: the number of rows.
        first_row: the number of the first row, if several batches make a step.
    """

    atoms: list[Any]
    structure: Structure
    rows: int
    first_row: int = 0

    @property
    def inputs(self) -> Any:
        """The inputs, nested as the user nested them."""
        inputs, _ = self.structure.build(iter(self.atoms))
        return inputs

    @property
    def targets(self) -> Any:
        """The targets, nested as the user nested them."""
        _, targets = self.structure.build(iter(self.atoms))
        return targets

    def unwrapped(self, *, copy: bool = False) -> tuple[Any, Any]:
        """Inputs and targets as a module and a criterion see them, without markers.

        With ``copy``, tensors are copied.
        """
        atoms = [unwrapped_atom(atom, copy=copy) for atom in self.atoms]
        inputs, targets = self.structure.build(iter(atoms))
        return inputs, targets

    def select(self, rows: Sequence[int]) -> Batch:
        """The batch with these rows, in this order.

        If they are a ``range``, tensors become views, otherwise copies.
        """
        structure = self.structure
        atoms = self.atoms.copy()
        for position in structure.rows:
            atoms[position] = _select(atoms[position], rows, structure.dim)
        for position in structure.values:
            # Replicas must not share a number: a module may write it. Markers without
            # rows go to every share as they are.
            if isinstance(atoms[position], Tensor):
                atoms[position] = copy_of(atoms[position])
        return Batch(atoms, structure, len(rows))

    def map_rows(self, function: Callable[[Any], Any]) -> Batch:
        """The batch with ``function`` of each tensor and marker that has rows."""
        return self._mapped(self.structure.rows, function)

    def map_values(self, function: Callable[[Any], Any]) -> Batch:
        """The batch with ``function`` of each 0-dim tensor and marker without rows."""
        return self._mapped(self.structure.values, function)

    def _mapped(
        self, positions: Iterable[int], function: Callable[[Any], Any]
    ) -> Batch:
        atoms = self.atoms.copy()
        for position in positions:
            atoms[position] = function(atoms[position])
        return Batch(atoms, self.structure, self.rows, self.first_row)

    def without_targets(self) -> Batch:
        """The batch with its inputs alone."""
        dim = self.structure.dim
        return batch_of(self.inputs, None, self.rows, dim, self.first_row)

    def without_inputs(self) -> Batch:
        """The batch with its targets alone."""
        dim = self.structure.dim
        return batch_of(None, self.targets, self.rows, dim, self.first_row)

    @property
    def markers(self) -> list[Marker]:
        """The atoms that are markers."""
        return [atom for atom in self.atoms if isinstance(atom, Marker)]

    @property
    def has_marked_rows(self) -> bool:
        """Whether a marker has rows, as ``Rows`` has."""
        return any(marker.num_rows is not None for marker in self.markers)

    def tensors(self) -> list[Tensor]:
        """Every tensor, also inside markers."""
        atoms = list(self.atoms)
        # A transfer must wait for these, too.
        for marker in self.markers:
            atoms += marker.atoms()
        return [atom for atom in atoms if isinstance(atom, Tensor)]

    def devices(self) -> set[torch.device]:
        """The devices of the tensors."""
        return {tensor.device for tensor in self.tensors()}


def _select(atom: Any, rows: Sequence[int], dim: int) -> Any:
    if isinstance(atom, Marker):
        return atom.select(rows)
    if type(rows) is range:
        # A view: the transfer to the device is the one copy of these bytes.
        return like(atom, atom.narrow(dim, rows.start, rows.stop - rows.start))
    places = torch.tensor(rows, device=atom.device)
    if atom.ndim == 1:  # where ``index_select`` lacks unsigned integers
        return like(atom, atom[places])
    return like(atom, atom.index_select(dim, places))


def batch_of(
    inputs: Any, targets: Any, rows: int, dim: int, first_row: int = 0
) -> Batch:
    """The batch of ``rows`` rows that a user passes as inputs and targets."""
    # Together, so that one loop moves both.
    atoms, build = nested.flatten((inputs, targets))
    with_rows: list[int] = []
    without_rows: list[int] = []
    for position, atom in enumerate(atoms):
        if isinstance(atom, Tensor):
            # A 0-dim tensor has no rows, and goes whole to every share.
            has_rows = atom.ndim > 0
        elif isinstance(atom, Marker):
            has_rows = atom.num_rows is not None
        else:
            continue
        (with_rows if has_rows else without_rows).append(position)
    structure = Structure(dim, build, tuple(with_rows), tuple(without_rows))
    return Batch(atoms, structure, rows, first_row)
