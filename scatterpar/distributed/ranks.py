"""Data parallelism between processes: one gradient collective per step and dtype.

All ranks take part in the collectives of every step, also if they failed. A small one exchanges
which ranks failed and how many rows each has, and adds losses and numbers of terms. It uses host
memory if the group has a backend for it, such as ``"cpu:gloo,cuda:nccl"``: then a lost rank is an
error within the group's timeout, where NCCL would end the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import unwrap_markers
from scatterpar.batch.nested import join_rows
from scatterpar.devices.runtime import physical
from scatterpar.distributed.buckets import Buckets, kind_of, pack, unpack
from scatterpar.distributed.collectives import Collectives
from scatterpar.report import warn
from scatterpar.step.reduce import Outcome
from scatterpar.step.substeps import detached_output
from scatterpar.threads.workers import add_note

_OTHER_TENSORS = (
    "which tensors are trained, on their shapes, on reduction=, or on the scale of scaler="
)
_OTHER_OUTPUTS = "whole_batch=, or on the kinds and shapes of the outputs or targets"


class Ranks:
    """The processes that train one module together.

    At construction all ranks check that they have the same module and options, which else raise the
    same ``ValueError`` on every rank, and copy rank 0's parameters and buffers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        module: nn.Module,
        device: torch.device,
        buffers: str,
        accumulate_dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_group must be a torch.distributed process group that this process "
                f"belongs to, such as torch.distributed.group.WORLD, got {group!r}"
            )
        self._module = module
        self._accumulate_dtype = accumulate_dtype
        self._error_is_common = False
        on_host = "cpu:" in str(dist.get_backend_config(group))
        control = torch.device("cpu") if on_host else physical(device)
        self._collectives = Collectives(group, control)
        self.rank, self.size = self._collectives.rank, self._collectives.size
        if not on_host:
            backend = dist.get_backend(group)
            warn(
                f"the process group has {backend} alone, which ends this process where another "
                f"rank is lost; with gloo for the host's memory too that is an error you can "
                f'catch: init_process_group("cpu:gloo,{device.type}:{backend}")'
            )
        options = f"buffers={buffers!r}\naccumulate_dtype={accumulate_dtype}"
        self._collectives.require_same(module, options)
        self._collectives.broadcast_from_rank_0(module)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an engine with a process_group cannot be copied or pickled, since the group belongs "
            "to this process; copy engine.module, or save engine.state_dict()"
        )

    def reduce_outcome(self, compute: Callable[[], Outcome]) -> Outcome:
        """The outcome of all ranks together, the same bits on each. If one raises, all raise."""
        try:
            outcome = compute()
            with outcome.attempt as attempt, attempt.phase("reduce"):
                buckets, kind = self._prepare(outcome)  # before any collective
        except BaseException as error:
            is_common, self._error_is_common = self._error_is_common, False
            with contextlib.suppress(Exception):
                if not is_common and (others := self._collectives.report_failure()):
                    add_note(error, f"rank {', '.join(map(str, others))} failed in this step too")
            raise
        with outcome.attempt as attempt, attempt.phase("reduce"):
            return self._exchange(outcome, buckets, kind)

    def _exchange(self, outcome: Outcome, buckets: Buckets, kind: str) -> Outcome:
        is_mean, rows = outcome.request.is_mean, outcome.attempt.plan.rows
        own = outcome.terms if is_mean else 1.0  # the weight of this rank's loss
        mine = [outcome.terms, outcome.loss * own, *outcome.observed]
        numbers, each = self._collectives.exchange_status(kind, rows, _OTHER_TENSORS, mine)
        terms, loss, *observed = numbers
        total = terms if is_mean else 1.0
        loss = loss / total if total else 0.0
        buckets.weigh(own / total if total else 0.0)
        for flat in buckets.flats:
            self._collectives.all_reduce(flat, f"the sum of all gradients in {flat.dtype}")
        sums = observed[0], observed[1]
        all_rows = sum(each)
        return replace(buckets.of_all(), loss=loss, terms=terms, rows=all_rows, observed=sums)

    def _prepare(self, outcome: Outcome) -> tuple[Buckets, str]:
        """The tensors that ranks add, and a text that must be equal on all ranks."""
        buckets = Buckets(outcome, self.rank, self.size, self._accumulate_dtype)
        numbers = {id(parameter): n for n, parameter in enumerate(self._module.parameters())}
        trained = [numbers.get(id(leaf)) for leaf, _ in outcome.gradients]
        request = outcome.request
        return buckets, f"{request.is_mean} {trained} {request.scale} {buckets.kind}"

    def outputs_of_all(
        self, pieces: Sequence[Any], rows: Sequence[int], targets: Any, dim: int, seed: int
    ) -> tuple[list[Any], list[int], Any, int]:
        """The outputs and targets of all ranks, for a criterion with ``whole_batch=True``.

        Returns outputs, row counts, targets and rank 0's ``seed`` for the criterion. The outputs
        are this rank's ``pieces`` and one piece of every other rank, in rank order. Targets without
        rows are rank 0's. Raises the same ``RuntimeError`` on every rank if one failed, or has
        outputs or targets of another kind.
        """
        output = join_rows([detached_output(piece, True) for piece in pieces], dim, rows, rows)
        own_data = output, unwrap_markers(targets)
        payload = pack(nested.tensors(own_data), seed, sum(rows))
        kind = f"outputs {kind_of(own_data, dim)}"
        self._error_is_common = True  # what is raised from here on, every rank raises
        _, sizes = self._collectives.exchange_status(kind, payload.numel(), _OTHER_OUTPUTS)
        what = "the outputs and targets of all ranks"
        payloads = self._collectives.all_gather(payload, sizes, what)
        self._error_is_common = False
        outputs, counts = list[Any](), list[int]()
        values, seeds, rows_of_each = zip(*(unpack(one, own_data) for one in payloads), strict=True)
        for rank, ((output, _), count) in enumerate(zip(values, rows_of_each, strict=True)):
            outputs += pieces if rank == self.rank else [output]
            counts += rows if rank == self.rank else [count]

        def join(leaves: list[Any]) -> Any:  # what has no rows is rank 0's
            mine, *of_ranks = leaves
            has_rows = isinstance(mine, Tensor) and mine.ndim
            return torch.cat(of_ranks, dim) if has_rows else of_ranks[0]

        joined = nested.merge(join, [targets, *(of_rank for _, of_rank in values)])
        return outputs, counts, joined, seeds[0]
