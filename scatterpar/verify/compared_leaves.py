"""The leaves whose gradients a look compares, with their copies in one replica."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate, chain, islice

import torch
from torch import Tensor

from scatterpar.step.attempt import Attempt
from scatterpar.step.task import ReplicaTask

# Of parameters that are compared: gradients of all might not fit into memory.
MAX_ELEMENTS = 2**20


class ComparedLeaves:
    """The user's smallest leaves, each with its copies in the replica."""

    def __init__(self, attempt: Attempt, task: ReplicaTask) -> None:
        copies: dict[int, list[Tensor]] = {}
        # Model and criterion may share a leaf: each of the two has a copy of it.
        pairs = zip(attempt.replicas.replica_sets, task.replicas, strict=False)
        for replica_set, replica in pairs:
            for slot in replica_set.trained:
                if slot.is_leaf:
                    leaves = copies.setdefault(id(slot.tensor), [slot.tensor])
                    leaves.append(replica.tensors[slot.number])
        # The smallest first, so that most layers have one within the limit.
        by_size = sorted(copies.values(), key=lambda leaves: leaves[0].numel())
        sizes = list(accumulate(leaves[0].numel() for leaves in by_size))
        # One at least, because losses alone hide wrong weights of equal losses.
        self._by_leaf = by_size[: max(1, bisect(sizes, MAX_ELEMENTS))]

    def all(self) -> list[Tensor]:
        """The user's leaves and all copies."""
        return list(chain(*self._by_leaf))

    def copies(self) -> list[Tensor]:
        """The replica's copies, each once."""
        copies = chain(*(leaves[1:] for leaves in self._by_leaf))
        return list({id(copy): copy for copy in copies}.values())

    def clear(self) -> None:
        """From now on no gradients are compared."""
        self._by_leaf = []

    def sums(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """For each of the user's leaves the sum of its own gradient and its copies'.

        ``gradients`` are those of ``all()``; zeros if there are none.
        """
        sums: list[Tensor] = []
        remaining = iter(gradients or [None] * len(self.all()))
        for leaves in self._by_leaf:
            terms = islice(remaining, len(leaves))
            # Sparse gradients of an embedding are compared as dense ones.
            dense = [term.detach().to_dense() for term in terms if term is not None]
            # Not in place: autograd may give one gradient to several tensors.
            sums.append(sum(dense, torch.zeros_like(leaves[0])))
        return sums
