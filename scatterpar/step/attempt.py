"""The record of one try at a step: what is computed, and what it has cost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scatterpar.devices.transfers import PHASES, Transfers
from scatterpar.plan import Plan
from scatterpar.replicas.replicas import Replicas
from scatterpar.step.loss_weights import LossWeights
from scatterpar.step.replica_threads import ReplicaThreads
from scatterpar.step.request import Request
from scatterpar.step.row_writes import KnownWrites, RowWrites
from scatterpar.step.undo import Undo
from scatterpar.threads.generators import Generators
from scatterpar.threads.workers import Workers
from scatterpar.torch_private.thread_modes import profiler_is_on

NO_BLOCK = contextlib.nullcontext()  # where nobody profiles


def profiler_block(
    name: str, sub_step: int | None = None
) -> contextlib.AbstractContextManager[object]:
    """Show the body as a block in torch's profilers, such as ``scatterpar forward 3``.

    There each thread has a line of its own, so the replica need not be named.
    """
    number = "" if sub_step is None else f" {sub_step}"
    return torch.profiler.record_function(f"scatterpar {name}{number}")


@dataclass(frozen=True)
class Extent:
    """The extent of an attempt: a whole step, or a part of one.

    Attributes:
        is_trial: whether nobody commits the attempt. No look, no graphs, no other rank
            is part of it.
        max_substeps: sub-steps that each replica runs at most; ``None`` for all.
        retain_rows: whether rows that have arrived stay for a second pass.
    """

    is_trial: bool = False
    max_substeps: int | None = None
    retain_rows: bool = True


WHOLE_STEP = Extent()


class Attempt:
    """The record of one try at a request, or at a part of one.

    Attributes:
        request: what the user asked for.
        plan: which rows each replica computes, and in which sub-steps.
        extent: how much of the step is run.
        replicas: the copies of the module and of the criterion.
        generators: the random streams of the replicas.
        threads: run work in the replicas' threads.
        transfers: the copies between memories, counted by phase.
        undo: restores the state before the attempt if it fails.
        is_profiled: whether a profiler of torch is to show the parts of the step.
        seconds: wall time by phase.
        check_seconds: the part of ``compute`` that the check before the step takes.
        weights: the factors of the micro-batches' losses, as soon as they are known.
        user_leaves: leaves that user code reaches, where no gradient may arrive.
        retries: earlier tries of the same step that ran out of memory.
        writes: what user code has written into the rows.
        garbage_is_collected: true from the attempt's first capture of a graph on.
    """

    def __init__(
        self,
        request: Request,
        plan: Plan,
        replicas: Replicas,
        workers: Workers,
        *,
        extent: Extent = WHOLE_STEP,
        replica_offset: int | None = None,
        known_writes: KnownWrites | None = None,
    ) -> None:
        """``replica_offset``: the first replica's number among those of all ranks."""
        self.request = request
        self.plan = plan
        self.extent = extent
        self.replicas = replicas
        devices = [share.device for share in plan.shares]
        self.generators = Generators(devices, replica_offset)
        self.threads = ReplicaThreads(
            workers, plan.shares, self.generators, replicas.end_substep
        )
        self.transfers = Transfers()
        self.undo = Undo(self.generators, self.transfers)
        # Asked once: a step has a hundred parts, and a profiler starts between steps.
        self.is_profiled = profiler_is_on()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.check_seconds = 0.0
        self.weights: LossWeights
        self.user_leaves: Sequence[Tensor] = ()
        self.retries = 0
        self.writes = RowWrites(known_writes or KnownWrites())
        self.garbage_is_collected = False
        self._replicas_are_clear = False

    def clear_replicas(self) -> None:
        """Drop what the replicas keep of this attempt; later calls do nothing."""
        if not self._replicas_are_clear:
            self._replicas_are_clear = True
            self.replicas.clear_step_state()

    def span(self, name: str) -> contextlib.AbstractContextManager[object]:
        """In a profiler the body, in the caller's thread, is a part of the step."""
        return profiler_block(name) if self.is_profiled else NO_BLOCK

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the body as phase ``name``, whose seconds the report has."""
        start = time.perf_counter()
        try:
            # Not ``span``: one call less in each phase.
            with profiler_block(name) if self.is_profiled else NO_BLOCK:
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start
