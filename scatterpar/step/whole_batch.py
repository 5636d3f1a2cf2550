"""The outputs and targets of all rows on the master, where one criterion sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from scatterpar.devices.ledger import Ledger
from scatterpar.plan import Share
from scatterpar.step import nested
from scatterpar.step.join import join, join_rows
from scatterpar.step.markers import Batches, all_tensors
from scatterpar.step.scatter import Delivery
from scatterpar.step.slices import copied, opened, take
from scatterpar.step.substeps import pull, scalar_loss
from scatterpar.threads.context import autocast_types
from scatterpar.threads.workers import note
from scatterpar.torch_private import nodes_of

__all__ = ["Peers", "WholeBatch"]


class Peers(Protocol):
    """Other processes, whose outputs the criterion sees too."""

    @property
    def rank(self) -> int:
        """The number of this process."""

    def outputs_of_all(
        self, pieces: Sequence[Any], rows: Sequence[int], targets: Any, dim: int, seed: int
    ) -> tuple[tuple[list[Any], list[int], Any], int]:
        """All ranks' outputs, their rows and targets, this rank's as they are; rank 0's seed."""


class WholeBatch:
    """The outputs and targets of all rows, in row order, in the master's memory.

    Outputs cross once to the master, their gradients once back, counted under ``compute``.

    Args:
        joined: for each share, its outputs joined, one value for each of its spans.
        shares: the shares.
        targets: the whole batch's, as the caller gave them.
        dim: the dimension that holds the rows.
        lists: an output that is a list with one entry per row is joined as such.
        ledger: copies, and counts what it copied.
    """

    def __init__(
        self,
        joined: Sequence[Sequence[Any]],
        shares: Sequence[Share],
        targets: Any,
        dim: int,
        lists: bool,
        ledger: Ledger,
    ) -> None:
        self._shares, self._dim, self._lists, self._ledger = shares, dim, lists, ledger
        self._own = [
            [self._leaf(value, share) for value in values]
            for values, share in zip(joined, shares, strict=True)
        ]
        spans = [
            (start, stop - start, value)
            for values, share in zip(self._own, shares, strict=True)
            for (start, stop), value in zip(share.spans, values, strict=True)
        ]
        spans.sort(key=lambda span: span[0])
        self._pieces = [piece for _, _, piece in spans]
        self._rows = [rows for _, rows, _ in spans]
        self._targets = self._whole(targets)

    def join_peers(self, peers: Peers, seed: int) -> int:
        """Take in the other processes' rows; the seed that all of them got."""
        everyones, seed = peers.outputs_of_all(
            self._pieces, self._rows, self._targets, self._dim, seed
        )
        self._pieces, self._rows, self._targets = everyones
        return seed

    def judge(
        self,
        criterion: Callable[[Any, Any], Any],
        reach: Callable[[Tensor, Sequence[Any]], None],
        scale: float,
        check_finite: bool,
    ) -> Tensor:
        """The loss; its gradients are then in the outputs and in what the criterion has.

        Args:
            criterion: called once.
            reach: sets aside the leaves that the loss comes from, beside the outputs' nodes.
            scale: the gradient scaler's factor.
            check_finite: refuse a loss that is NaN or infinite.
        """
        try:
            joined = self._joined()
            nodes = nodes_of(nested.tensors(joined))
            loss = scalar_loss(criterion(joined, self._targets), "the criterion")
            reach(loss, nodes)
            if check_finite and not torch.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss.item()}; nothing was changed")
            pull([loss], [torch.full_like(loss, scale, requires_grad=False)], autocast_types())
        except BaseException as error:
            note(error, f"in the criterion, with the outputs of all {sum(self._rows)} rows")
            raise
        return loss.detach()

    def gradients(self) -> list[list[Tensor | None]]:
        """For each share, the gradients of its outputs, where its replica is."""
        return [
            [self._sent_back(tensor.grad, share) for tensor in nested.tensors(values)]
            for values, share in zip(self._own, self._shares, strict=True)
        ]

    def _leaf(self, joined: Any, share: Share) -> Any:
        """A share's outputs in the master's memory, ready to take gradients."""
        master = self._shares[0].device

        def one(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            here = leaf.detach()
            if share.device != master:
                here = self._ledger.copy(here, master, "compute")
            return here.requires_grad_(leaf.requires_grad)

        return nested.transform(one, joined)

    def _joined(self) -> Any:
        """A criterion may work in place, as on a module's outputs, and so it gets no leaves."""
        rows = self._rows
        joined = join_rows(self._pieces, self._dim, rows, rows, lists=self._lists)
        return nested.transform(_no_leaf, joined)

    def _whole(self, targets: Any) -> Any:
        """All targets, for the criterion to write to if it likes."""
        master = self._shares[0].device
        here = nested.transform(partial(Delivery(self._ledger).bring, master), targets)

        def one(leaf: Any) -> Any:
            if isinstance(leaf, Batches) and leaf.sizes is not None:
                return join([*map(opened, leaf.entries)], self._dim, leaf.sizes)
            return opened(leaf)

        is_home = master in [tensor.device for tensor in all_tensors(targets)]
        rows = take(here, 0, sum(self._rows), self._dim)
        return nested.transform(one, copied(rows) if is_home else rows)

    def _sent_back(self, gradient: Tensor | None, share: Share) -> Tensor | None:
        if gradient is None or share.device == self._shares[0].device:
            return gradient
        return self._ledger.copy(gradient, share.device, "compute")


def _no_leaf(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_leaf else value
