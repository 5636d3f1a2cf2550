"""The user's ``.grad`` and hooks during a step, and the locks of its criteria and launches."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from scatterpar.devices.coalescing import plus
from scatterpar.devices.runtime import is_async, physical
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.threads.locks import Claims, make_criterion_lock, make_launch_lock
from scatterpar.torch_private import HAS_GIL, edges_to_leaves, hooks_taken_off

_UNTIMED = contextlib.nullcontext()


class Stash:
    """Stashes ``.grad`` and hooks of the user's leaves in the body, and restores them after it.

    A criterion that closes over the user's own parameters writes their ``.grad`` from the workers,
    at every sub-step. These gradients become part of the step, and are dropped if it fails. The
    graph of the loss shows which leaves they are, before a backward pass reaches them.

    With ranks ``named`` are the leaves that it may reach, in an order that is every rank's: without
    it none could tell which gradient is whose.
    """

    def __init__(
        self, claims: Claims, parts: Sequence[ReplicaSet], named: Sequence[Tensor] | None
    ) -> None:
        self._claims, self._parts, self._named = claims, parts, named
        self._kept: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._trained: set[int] = set()
        self._sums: dict[int, dict[int, Tensor]] = {}  # by leaf and replica
        self._hooks = contextlib.ExitStack()
        self._taking = threading.Lock()
        self._turns = {physical(device): make_criterion_lock() for device in parts[0].device_ids}
        self._is_serial = False
        self._launching = make_launch_lock()

    def __enter__(self) -> Self:
        trained = [leaf for part in self._parts for leaf in part.trained_tensors]
        self._trained = set(map(id, trained))
        self._take([*trained, *(self._named or ())])
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        for leaf, gradient in self._kept.values():
            leaf.grad = gradient

    def run_serially(self) -> None:
        """From now on one replica at a time runs a forward pass and its loss."""
        self._is_serial, self._launching = True, make_criterion_lock()

    def criterion_lock(
        self, device: torch.device, waiting: contextlib.AbstractContextManager[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """The turn of a replica on ``device``; virtual devices share the host's memory."""
        return self._turns[physical(device)].held(waiting)

    def launch_lock(
        self, device: torch.device, waiting: contextlib.AbstractContextManager[Any] = _UNTIMED
    ) -> contextlib.AbstractContextManager[None]:
        """The turn of replicas on ``device`` to run the Python of a forward pass and its loss.

        Threads that launch at the same time take the interpreter's lock from each other in every
        operator. Where operators compute before they return, where there is no such lock, and
        where there is one replica, all go at once.
        """
        if self._is_serial or (HAS_GIL and is_async(device) and len(self._parts[0].device_ids) > 1):
            return self._launching.held(waiting)
        return _UNTIMED

    def stash_reachable(self, loss: Tensor, nodes: Sequence[Any], replica: int = 0) -> None:
        """Stash what a backward pass from ``loss`` comes to without passing ``nodes``.

        What it gives there is the replica's until ``gradients``: else the order of arrival would
        decide how the sum is rounded.
        """
        own = self._of_replicas
        found = [edge for edge in edges_to_leaves(loss, nodes) if id(edge[0]) not in own]
        if not found:
            return
        with self._taking:
            leaves = {id(leaf): leaf for leaf, _, _ in found}
            new = [leaf for key, leaf in leaves.items() if key not in self._kept]
            if new and self._named is not None:
                raise ValueError(
                    f"the criterion reaches a parameter of shape {tuple(new[0].shape)} in a way "
                    f"that cannot be seen from outside, so that ranks cannot tell whose gradient "
                    f"is whose; bind its module with functools.partial(criterion, net=net), or "
                    f"make the criterion an nn.Module that has it"
                )
            self._take(new)
        for leaf, node, position in found:
            if node is not None:
                sums = self._sums.setdefault(id(leaf), {})
                node.register_hook(functools.partial(_divert, sums, replica, position))

    def has_external_gradients(self, replica: int) -> bool:
        """Whether a replica's backward passes came to leaves beside its own."""
        return any(replica in sums for sums in list(self._sums.values()))

    def drop_external_gradients(self, replica: int) -> None:
        """Let go of what a replica gave to leaves beside its own."""
        for sums in list(self._sums.values()):
            sums.pop(replica, None)

    def gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """What came to the user's leaves past the replicas, which have no copies of some.

        To each what the replicas gave, added up in their order.
        """
        for key, sums in self._sums.items():
            leaf, _ = self._kept[key]
            found = [] if leaf.grad is None else [leaf.grad]
            found += [sums[replica] for replica in sorted(sums)]
            if found:
                total = functools.reduce(plus, found)
                is_dense = total.layout == torch.strided
                leaf.grad = torch.empty_like(leaf).copy_(total) if is_dense else total
        self._sums.clear()
        kept = self._kept.items()
        return [(t, t.grad) for i, (t, _) in kept if t.grad is not None or i not in self._trained]

    def drop_gradients(self) -> None:
        """Let go of the gradients that came so far."""
        for leaf, _ in self._kept.values():
            leaf.grad = None
        self._sums.clear()

    @functools.cached_property
    def _of_replicas(self) -> set[int]:
        pairs = [(part, replica) for part in self._parts for replica in part.replicas]
        return {id(replica.tensors[i]) for part, replica in pairs for i in part.trained_indices}

    def _take(self, leaves: Sequence[Tensor]) -> None:
        self._claims.take(*leaves)
        self._kept = {id(leaf): (leaf, leaf.grad) for leaf in leaves} | self._kept
        self._hooks.enter_context(hooks_taken_off(leaves))
        for leaf in leaves:  # last: from here on nothing can fail
            leaf.grad = None


def _divert(
    sums: dict[int, Tensor],
    replica: int,
    position: int,
    gradients: Sequence[Tensor | None],
    _: object,
) -> tuple[Tensor | None, ...]:
    """Take one of a node's gradients before it comes to a leaf that all replicas share."""
    mine = gradients[position]
    if mine is not None:
        sums[replica] = plus(sums[replica], mine) if replica in sums else mine
    return (*gradients[:position], None, *gradients[position + 1 :])
