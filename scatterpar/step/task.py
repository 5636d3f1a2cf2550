"""What one replica is given to do: its share of the batch, and what it does with it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from scatterpar.plan import Plan, Share
from scatterpar.replicas.replicas import Replicas
from scatterpar.step.request import Request
from scatterpar.step.scatter import Arrival
from scatterpar.step.slices import opened
from scatterpar.threads.sharing import Aside
from scatterpar.threads.workers import note

__all__ = ["Task", "as_call", "hand_out", "noted"]


@dataclass(frozen=True)
class Task:
    """What one replica is given to do.

    Attributes:
        share: which rows these are, and how they are cut into micro-batches.
        module: the replica.
        arrival: brings the share's rows of inputs and targets to the replica's device.
        criterion: the replica's own; ``None`` where the module computes the loss.
        weights: the factor of each micro-batch's loss in the loss of the whole batch.
        dim: the dimension that holds the rows.
        keeps_rows: those that have arrived stay, for another forward pass of the same ones.
        leaves: what backward passes give gradients.
        aside: what a step takes off the user's leaves, and whose turn it is; inference has none.
    """

    share: Share
    module: Callable[..., Any]
    arrival: Arrival
    criterion: Callable[[Any, Any], Any] | None = None
    weights: Sequence[float] = ()
    dim: int = 0
    keeps_rows: bool = False
    leaves: Sequence[Tensor] = ()
    aside: Aside | None = None

    def rows_of(self, number: int) -> tuple[Any, Any]:
        """Inputs and targets of one micro-batch, on the replica's device: the sub-step's own."""
        inputs, targets = self.arrival.rows_of(number, keep=self.keeps_rows)
        return inputs, targets

    def glimpse(self, number: int) -> Any:
        """Inputs and targets of one micro-batch, wherever they are, to look at and not to keep."""
        return opened(self.arrival.at_home(number))

    def output_of(self, inputs: Any) -> Any:
        """The module's output for the inputs of one micro-batch."""
        args, kwargs = as_call(inputs)
        return self.module(*args, **kwargs)

    def launching(self) -> contextlib.AbstractContextManager[None]:
        """What is around the Python of a forward pass and its loss: the replica's turn."""
        aside = self.aside
        return contextlib.nullcontext() if aside is None else aside.launching(self.share.device)

    def substep(self, number: int) -> noted:
        """What is around every sub-step: errors say where they happened."""
        return noted(self.share, number)


def as_call(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How ``inputs`` reach a module: a mapping by name, a tuple by position, all else as one."""
    if isinstance(inputs, tuple):
        return inputs, {}
    if not isinstance(inputs, Tensor) and isinstance(inputs, Mapping):  # which takes longer to tell
        return (), dict(inputs)
    return (inputs,), {}


class noted:
    """Note on whatever is raised in the body where it happened.

    Args:
        share: the replica's share.
        number: the sub-step, where there are any.
    """

    def __init__(self, share: Share, number: int | None = None) -> None:
        self._share = share
        self._number = number

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is not None:
            where = f"in replica {self._share.replica} on {self._share.device}"
            if self._number is not None:
                where += f", sub-step {self._number} of {len(self._share.micro_batches)}"
            note(error, f"{where}, counted from 0")


def hand_out(
    request: Request,
    plan: Plan,
    parts: Sequence[Replicas],
    arrivals: Sequence[Arrival],
    criteria: Sequence[Any],
    weights: Sequence[Sequence[float]] | None = None,
    aside: Aside | None = None,
) -> list[Task]:
    """What each replica is given to do; with fewer rows than replicas, the last ones rest.

    Args:
        request: what the user asked for.
        plan: the shares.
        parts: the replicas of the model, and those of the criterion.
        arrivals: bring the rows of each share.
        criteria: the criterion of each replica; that of a whole batch is called elsewhere.
        weights: those of each share's micro-batches.
        aside: what a step takes off the user's leaves.
    """
    seen_twice = request.whole_batch and request.keeps_rows
    tasks = []
    for i, share in enumerate(plan.shares):
        own = [(part, part.replicas[i]) for part in parts if i < len(part.replicas)]
        replicas = [replica for _, replica in own]
        tasks.append(
            Task(
                share,
                module=replicas[0].roots[0],
                arrival=arrivals[i],
                criterion=None if request.whole_batch else criteria[i],
                weights=weights[i] if weights else (),
                dim=request.dim,
                keeps_rows=seen_twice and len(share.micro_batches) > 1,
                leaves=[replica.tensors[n] for part, replica in own for n in part.trained],
                aside=aside,
            )
        )
    return tasks
