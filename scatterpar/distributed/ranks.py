"""Data parallelism between processes: one gradient collective per step and dtype.

All ranks take part in the collectives of every step, also if they failed. A small one
exchanges which ranks failed and how many rows each has, and adds losses and numbers of
terms. It uses host memory if the group has a backend for it, such as
``"cpu:gloo,cuda:nccl"``: then a lost rank is an error within the group's timeout, where
NCCL would end the process.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.markers import unwrap_markers
from scatterpar.batch.nested import join_rows
from scatterpar.devices.device_ids import physical
from scatterpar.devices.transfers import as_bytes, to_device, to_numbers, write
from scatterpar.distributed.collectives import Collectives
from scatterpar.errors import add_note, warn
from scatterpar.replicas.replicas import sum_dtype
from scatterpar.step.reduce import Outcome
from scatterpar.step.substeps import detached_output
from scatterpar.torch_private import unflatten

_OTHER_TENSORS = (
    "which tensors are trained, on their shapes, on reduction=, or on "
    "the scale of scaler="
)
_OTHER_OUTPUTS = "whole_batch=, or on the kinds and shapes of the outputs or targets"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Ranks:
    """The processes that train one module together.

    At construction all ranks check that they have the same module and options, which
    else raise the same ``ValueError`` on every rank, and copy rank 0's parameters and
    buffers.
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
                "process_group must be a torch.distributed process group that this "
                "process "
                f"belongs to, such as torch.distributed.group.WORLD, got {group!r}"
            )
        self._module, self._accumulate_dtype = module, accumulate_dtype
        on_host = "cpu:" in str(dist.get_backend_config(group))
        control = torch.device("cpu") if on_host else physical(device)
        self._collectives = Collectives(group, control)
        self.rank, self.size = self._collectives.rank, self._collectives.size
        if not on_host:
            backend = dist.get_backend(group)
            warn(
                f"the process group has {backend} alone, which ends this process "
                "where another "
                "rank is lost; with gloo for the host's memory too that is an error "
                "you can "
                f'catch: init_process_group("cpu:gloo,{device.type}:{backend}")'
            )
        options = f"buffers={buffers!r}\naccumulate_dtype={accumulate_dtype}"
        self._collectives.require_same(module, options)
        self._collectives.broadcast_from_rank_0(module)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an engine with a process_group cannot be copied or pickled, since the "
            "group belongs "
            "to this process; copy engine.module, or save engine.state_dict()"
        )

    def reduce_outcome(self, compute: Callable[[], Outcome]) -> Outcome:
        """The outcome of all ranks together, the same bits on each. If one raises, all
        raise.
        """
        self._error_is_common = False
        try:
            outcome = compute()
            with outcome.attempt as attempt, attempt.phase("reduce"):
                return self._exchange(outcome)
        except BaseException as error:
            with contextlib.suppress(Exception):
                if not self._error_is_common and (
                    others := self._collectives.report_failure()
                ):
                    add_note(
                        error,
                        f"rank {', '.join(map(str, others))} failed in this step too",
                    )
            raise

    def _exchange(self, outcome: Outcome) -> Outcome:
        is_mean, rows = outcome.request.is_mean, outcome.attempt.plan.rows
        buckets = Buckets(outcome, self.rank, self.size, self._accumulate_dtype)
        positions = {
            id(parameter): n for n, parameter in enumerate(self._module.parameters())
        }
        trained = [positions.get(id(leaf)) for leaf, _ in outcome.gradients]
        kind = f"{is_mean} {trained} {outcome.request.scale} {buckets.kind}"
        own = outcome.terms if is_mean else 1.0  # the weight of this rank's loss
        mine = [outcome.terms, outcome.loss * own, *outcome.observed]
        self._error_is_common = True  # what is raised from here on, every rank raises
        numbers, each = self._collectives.exchange_status(
            kind, rows, _OTHER_TENSORS, mine
        )
        terms, loss, squares, replicas = numbers
        total = terms if is_mean else 1.0
        loss = loss / total if total else 0.0
        buckets.weigh(own / total if total else 0.0)
        for flat in buckets.flats:
            self._collectives.all_reduce(
                flat, f"the sum of all gradients in {flat.dtype}"
            )
        outcome = replace(buckets.of_all(), loss=loss, terms=terms, rows=sum(each))
        return replace(outcome, observed=(squares, replicas))

    def outputs_of_all(
        self,
        pieces: Sequence[Any],
        rows: Sequence[int],
        targets: Any,
        dim: int,
        seed: int,
    ) -> tuple[list[Any], list[int], Any, int]:
        """The outputs and targets of all ranks, for a criterion with
        ``whole_batch=True``.

        Returns outputs, row counts, targets and rank 0's ``seed`` for the criterion.
        The outputs are this rank's ``pieces`` and one piece of every other rank, in
        rank order. Targets without rows are rank 0's. Raises the same ``RuntimeError``
        on every rank if one failed, or has outputs or targets of another kind.
        """
        output = join_rows(
            [detached_output(piece, True) for piece in pieces], dim, rows, rows
        )
        own_data = output, unwrap_markers(targets)
        payload = pack(nested.tensors(own_data), seed, sum(rows))
        kind = f"outputs {kind_of(own_data, dim)}"
        self._error_is_common = True  # up to the end of the exchange
        _, sizes = self._collectives.exchange_status(
            kind, payload.numel(), _OTHER_OUTPUTS
        )
        what = "the outputs and targets of all ranks"
        payloads = self._collectives.all_gather(payload, sizes, what)
        self._error_is_common = False
        values, seeds, counts = zip(
            *(unpack(one, own_data) for one in payloads), strict=True
        )
        outputs, rows_of_all = [output for output, _ in values], [*counts]
        # its pieces have gradients, the copies have none
        own = slice(self.rank, self.rank + 1)
        outputs[own], rows_of_all[own] = pieces, rows

        def join(leaves: list[Any]) -> Any:  # what has no rows is rank 0's
            mine, *of_ranks = leaves
            has_rows = isinstance(mine, Tensor) and mine.ndim
            return torch.cat(of_ranks, dim) if has_rows else of_ranks[0]

        joined = nested.merge(join, [targets, *(of_rank for _, of_rank in values)])
        return outputs, rows_of_all, joined, seeds[0]


class Buckets:
    """The part of this rank in the step's all-reduce: ``flats`` has one 1-D tensor per
    dtype.

    They contain the gradients, zero if this rank has none; a flag per gradient, whether
    this rank has one; buffers, from rank 0 only; and, in one row per rank, the
    statistics that are pooled. What has no gradient's dtype is sent as bytes. An
    allocation fails here, while the other ranks can still be informed. ``kind`` must be
    equal on all ranks.
    """

    def __init__(
        self,
        outcome: Outcome,
        rank: int,
        size: int,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self._outcome, statistics = outcome, outcome.statistics
        buffers = [value.detach() for *_, value in outcome.buffers if value is not None]
        self._rows = statistics.to_pool() if statistics else []
        parts: list[Tensor] = []
        for leaf, gradient in outcome.gradients:
            dtype = sum_dtype(leaf, accumulate_dtype)
            dense = torch.zeros_like(leaf) if gradient is None else gradient.to_dense()
            parts.append(dense.detach().to(dtype))
        if parts:
            flags = [gradient is not None for _, gradient in outcome.gradients]
            parts.append(
                torch.tensor(flags, dtype=parts[0].dtype, device=parts[0].device)
            )
        dtypes = {part.dtype for part in parts}
        sent = [
            v if v.dtype in dtypes else as_bytes(v) for v in (*buffers, *self._rows)
        ]
        parts += [torch.zeros_like(v) if rank else v for v in sent[: len(buffers)]]
        for value in sent[len(buffers) :]:
            parts.append(value.new_zeros(size, *value.shape))
            write(parts[-1][rank], value)
        names = [
            (name, value is None or value.dtype) for _, name, value in outcome.buffers
        ]
        self.kind = str([names, *((part.dtype, part.shape) for part in parts)])
        self.flats, self._views = list[Tensor](), parts
        for dtype in dict.fromkeys(part.dtype for part in parts):
            mine = {i: part for i, part in enumerate(parts) if part.dtype == dtype}
            self.flats.append(torch.cat([part.flatten() for part in mine.values()]))
            for i, view in zip(
                mine, unflatten(self.flats[-1], [*mine.values()]), strict=True
            ):
                self._views[i] = view

    def weigh(self, factor: float) -> None:
        """Scale this rank's gradients; called when the counts of the other ranks are
        known.
        """
        if self._outcome.gradients and factor != 1:
            torch._foreach_mul_(self._views[: len(self._outcome.gradients)], factor)

    def of_all(self) -> Outcome:
        """The outcome with the gradients, buffers and statistics of all ranks'
        all-reduce.
        """
        outcome, views = self._outcome, iter(self._views)
        totals = [(leaf, next(views)) for leaf, _ in outcome.gradients]
        flags = to_numbers(next(views)) if totals else []
        found = zip(totals, flags, strict=True)
        gradients = [(leaf, total if flag else None) for (leaf, total), flag in found]
        buffers = [
            (at, name, None if value is None else _like(next(views), value))
            for at, name, value in outcome.buffers
        ]
        rows = [[_like(row, value) for row in next(views)] for value in self._rows]
        statistics = outcome.statistics.pooled(rows) if outcome.statistics else None
        return replace(
            outcome, gradients=gradients, buffers=buffers, statistics=statistics
        )


def pack(tensors: Sequence[Tensor], *numbers: int) -> Tensor:
    """A 1-D byte tensor: the bytes of the tensors, then of the numbers and the tensors'
    sizes.
    """
    header = torch.tensor(
        [*numbers, *(size for tensor in tensors for size in tensor.shape)]
    )
    flat = list(map(as_bytes, (*tensors, header)))
    return torch.cat([to_device(each, flat[0].device) for each in flat])


def unpack(payload: Tensor, like: Any) -> tuple[Any, int, int]:
    """The tensors that a rank packed, in the structure of ``like``, and its two
    numbers.
    """
    num_sizes = sum(leaf.ndim for leaf in nested.tensors(like))
    header = payload[-8 * (2 + num_sizes) :].clone().view(torch.int64)
    first, second, *sizes = to_numbers(header)
    remaining = iter(sizes)

    def read(leaf: Tensor) -> Tensor:
        nonlocal payload
        shape = [next(remaining) for _ in leaf.shape]
        part, payload = payload.tensor_split([math.prod(shape) * leaf.itemsize])
        return to_device(part.clone().view(leaf.dtype).view(shape), leaf.device)

    return nested.map_tensors(read, like), first, second


def kind_of(value: Any, dim: int) -> str:
    """A description of a nested value without the number of rows; must be equal on all
    ranks.
    """

    def kind(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__name__
        return f"{leaf.dtype} {leaf.ndim} {leaf.shape[:dim] + leaf.shape[dim:][1:]}"

    return ";".join(map(kind, nested.leaves(value)))


def _like(total: Tensor, value: Tensor) -> Tensor:
    """``total`` in the dtype and shape of ``value``, which may have been
    sent as bytes.
    """
    if total.dtype != value.dtype:
        total = total.clone().view(value.dtype)  # a copy is aligned for any dtype
    return total.view(value.shape)
