"""The user's ``.grad`` and hooks in a step; the locks for criteria and for launching kernels."""

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
from scatterpar.devices.transfers import write
from scatterpar.replicas.replicas import ReplicaSet
from scatterpar.threads.locks import Claims, make_criterion_lock, make_launch_lock
from scatterpar.torch_private import HAS_GIL, edges_to_leaves, hooks_taken_off

_UNTIMED = contextlib.nullcontext()


class Stash:
    """In the body, ``.grad`` and hooks of the user's leaves are set aside; then they are restored.

    A criterion that closes over the user's own parameters writes their ``.grad`` from the workers,
    at every sub-step. These gradients become part of the step, and are dropped if it fails. The
    graph of the loss shows which leaves they are, before a backward pass reaches them.

    With several ranks, ``named`` has the leaves that the criterion may reach, in the same order on
    every rank: otherwise gradients of different ranks could not be matched. ``shared`` has the
    leaves that the model reaches in objects that replicas share.
    """

    def __init__(
        self,
        claims: Claims,
        replica_sets: Sequence[ReplicaSet],
        named: Sequence[Tensor] | None,
        shared: Sequence[Tensor],
    ) -> None:
        self._claims, self._replica_sets = claims, replica_sets
        self._named, self._shared = named, shared
        self._saved: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._trained: set[int] = set()
        self._sums: dict[int, dict[int, Tensor]] = {}  # by leaf and replica
        self._hooks = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._devices = devices = replica_sets[0].device_ids
        self._criterion_locks = {physical(device): make_criterion_lock() for device in devices}
        self._locked = set(filter(is_async, devices)) if HAS_GIL and len(devices) > 1 else set()
        self._launch_lock = make_launch_lock()

    def __enter__(self) -> Self:
        trained = [leaf for each in self._replica_sets for leaf in each.trained_tensors]
        self._trained = set(map(id, trained))
        self._set_aside([*trained, *self._shared, *(self._named or ())])
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        for leaf, gradient in self._saved.values():
            leaf.grad = gradient

    def run_serially(self) -> None:
        """From now on one replica at a time runs a forward pass and its loss."""
        self._locked, self._launch_lock = set(self._devices), make_criterion_lock()

    def criterion_lock(
        self, device: torch.device, waiting: contextlib.AbstractContextManager[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """The lock for criteria of replicas on ``device``; virtual devices share one."""
        return self._criterion_locks[physical(device)].held(waiting)

    def launch_lock(
        self, device: torch.device, waiting: contextlib.AbstractContextManager[Any] = _UNTIMED
    ) -> contextlib.AbstractContextManager[None]:
        """The lock for the Python of a forward pass and its loss, for replicas on ``device``.

        Threads that launch kernels at the same time take the GIL from each other in every operator.
        No lock is needed on synchronous devices, without a GIL, and with a single replica.
        """
        return self._launch_lock.held(waiting) if device in self._locked else _UNTIMED

    def stash_reachable(self, loss: Tensor, nodes: Sequence[Any], replica: int = 0) -> None:
        """Stash the leaves that a backward pass from ``loss`` reaches without passing ``nodes``.

        Leaves of replicas are left alone. Gradients of the others are stored per replica and added
        in ``gradients``: else the order of arrival would determine the rounding of the sum.
        """
        replica_leaves = self._of_replicas
        edges = [edge for edge in edges_to_leaves(loss, nodes) if id(edge[0]) not in replica_leaves]
        if not edges:
            return
        with self._lock:
            leaves = {id(leaf): leaf for leaf, _, _ in edges}
            new = [leaf for key, leaf in leaves.items() if key not in self._saved]
            if new and self._named is not None:
                raise ValueError(
                    f"the criterion reaches a parameter of shape {tuple(new[0].shape)} in a way "
                    f"that cannot be seen from outside, so that ranks cannot tell whose gradient "
                    f"is whose; bind its module with functools.partial(criterion, net=net), or "
                    f"make the criterion an nn.Module that has it"
                )
            self._set_aside(new)
        for leaf, node, position in edges:
            if node is not None:
                sums = self._sums.setdefault(id(leaf), {})
                node.register_hook(functools.partial(_divert, sums, replica, position))

    def has_external_gradients(self, replica: int) -> bool:
        """Whether a replica's backward passes reached leaves without a copy in the replica."""
        return any(replica in sums for sums in list(self._sums.values()))

    def drop_external_gradients(self, replica: int) -> None:
        """Drop the gradients that a replica computed for leaves without a copy in the replica."""
        for sums in list(self._sums.values()):
            sums.pop(replica, None)

    def gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        """The gradients that reached the user's own leaves directly, not through a replica's copy.

        The sum starts with ``.grad``, then come the replicas in order.
        """
        for key, sums in self._sums.items():
            leaf, _ = self._saved[key]
            gradients = [] if leaf.grad is None else [leaf.grad]
            gradients += [sums[replica] for replica in sorted(sums)]
            if gradients:
                total = functools.reduce(plus, gradients)
                is_dense = total.layout == torch.strided
                leaf.grad = total
                if is_dense:
                    leaf.grad = torch.empty_like(leaf)
                    write(leaf.grad, total)
        self._sums.clear()
        return [
            (leaf, leaf.grad)
            for key, (leaf, _) in self._saved.items()
            if leaf.grad is not None or key not in self._trained
        ]

    def drop_gradients(self) -> None:
        """Drop all gradients of the user's own leaves that have arrived so far."""
        for leaf, _ in self._saved.values():
            leaf.grad = None
        self._sums.clear()

    @functools.cached_property
    def _of_replicas(self) -> set[int]:
        pairs = [(each, replica) for each in self._replica_sets for replica in each.replicas]
        return {id(replica.tensors[i]) for each, replica in pairs for i in each.trained_indices}

    def _set_aside(self, leaves: Sequence[Tensor]) -> None:
        self._claims.take(*leaves)
        self._saved = {id(leaf): (leaf, leaf.grad) for leaf in leaves} | self._saved
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
    """Node hook: store one of a node's gradients before it reaches a leaf that replicas share."""
    gradient = gradients[position]
    if gradient is not None:
        sums[replica] = plus(sums[replica], gradient) if replica in sums else gradient
    return (*gradients[:position], None, *gradients[position + 1 :])
