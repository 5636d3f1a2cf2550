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
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.batch.markers import unwrap_markers
from scatterpar.devices.device_ids import identity_of, physical
from scatterpar.devices.transfers import as_bytes, to_device, to_numbers, write
from scatterpar.distributed.collectives import Collectives
from scatterpar.errors import add_note, warn
from scatterpar.log import logger
from scatterpar.replicas.batch_statistics import StepStatistics
from scatterpar.replicas.buffers import BufferValue
from scatterpar.replicas.replicas import sum_dtype
from scatterpar.step.reduce import Outcome, ReplicaNorms
from scatterpar.step.substeps import Gradient, detached_output
from scatterpar.torch_private import unflatten

_OTHER_TENSORS = (
    "which tensors are trained, on their shapes, on reduction=, or on the scale of "
    "scaler="
)
_OTHER_OUTPUTS = "whole_batch=, or on the kinds and shapes of the outputs or targets"


class Ranks:
    """The processes that train one module together.

    At construction all ranks check that they have the same module and options, and no
    accelerator in common, which else raise the same ``ValueError`` on every rank. They
    copy rank 0's parameters and buffers.

    Attributes:
        rank: the number of this process.
        size: the number of processes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        module: nn.Module,
        devices: Sequence[torch.device],
        buffers: str,
        accumulate_dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "process_group must be a torch.distributed process group that this "
                "process belongs to, such as torch.distributed.group.WORLD, got "
                f"{group!r}"
            )
        self._module = module
        self._accumulate_dtype = accumulate_dtype
        # Whether all ranks raise what this rank raises, so that it needs no report.
        self._error_is_common = False
        # As in "cpu:gloo,cuda:nccl".
        has_host_backend = "cpu:" in str(dist.get_backend_config(group))
        device = devices[0]
        control = torch.device("cpu") if has_host_backend else physical(device)
        self._collectives = Collectives(group, control)
        self.rank = self._collectives.rank
        self.size = self._collectives.size
        if not has_host_backend:
            backend = dist.get_backend(group)
            warn(
                f"the process group has {backend} alone, which ends this process where "
                "another rank is lost; with gloo for the host's memory too that is an "
                "error you can catch: "
                f'init_process_group("cpu:gloo,{device.type}:{backend}")'
            )
        options = f"buffers={buffers!r}\naccumulate_dtype={accumulate_dtype}"
        identities = map(identity_of, dict.fromkeys(devices))
        accelerators = [identity for identity in identities if identity is not None]
        self._collectives.require_same(module, options, accelerators)
        self._collectives.broadcast_from_rank_0(module)
        logger.info("rank %d of %d has the values of rank 0", self.rank, self.size)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an engine with a process_group cannot be copied or pickled, since the "
            "group belongs to this process; copy engine.module, or save "
            "engine.state_dict()"
        )

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """What one rank raises in the body, every rank raises.

        A rank that fails alone sends its failure in the place of its status, for which
        the others wait in the next exchange.
        """
        self._error_is_common = False
        try:
            yield
        except BaseException as error:
            if not self._error_is_common:
                with contextlib.suppress(Exception):  # the group may be lost
                    failed = self._collectives.report_failure()
                    if failed:
                        ranks = ", ".join(map(str, failed))
                        add_note(error, f"rank {ranks} failed in this step too")
            raise

    def sum_of_all(self, outcome: Outcome) -> Outcome:
        """The outcome of all ranks together, the same bits on each.

        Call it in the body of ``failing_together``.
        """
        with outcome.attempt.phase("reduce"):
            return self._exchange(outcome)

    def _exchange(self, outcome: Outcome) -> Outcome:
        is_mean = outcome.request.is_mean
        # First: an allocation that fails here is a failure that others can be told.
        buckets = Buckets(outcome, self.rank, self.size, self._accumulate_dtype)
        parameters = enumerate(self._module.parameters())
        positions = {id(parameter): position for position, parameter in parameters}
        # Leaves of the criterion have no position.
        trained = [positions.get(id(leaf)) for leaf, _ in outcome.gradients]
        # As text, compared by all ranks: else they would add tensors of different
        # parameters, or wait for each other for ever.
        kind = f"{is_mean} {trained} {outcome.request.scale} {buckets.kind}"
        rows = outcome.attempt.plan.rows
        weight = outcome.terms if is_mean else 1.0  # of this rank's loss
        summands = [outcome.terms, outcome.loss * weight, *outcome.norms]
        self._error_is_common = True  # what is raised from here on, every rank raises
        sums, rows_by_rank = self._collectives.exchange_status(
            kind, rows, _OTHER_TENSORS, summands
        )
        terms, loss, squares, replicas = sums
        total = terms if is_mean else 1.0
        # Without terms nobody has a loss, and gradients count as zero.
        # Before the sum: rounding is that of one sum, and no second pass over it is
        # needed.
        buckets.weigh(weight / total if total else 0.0)
        for flat in buckets.flats:
            subject = f"the sum of all gradients in {flat.dtype}"
            self._collectives.all_reduce(flat, subject)
        return replace(
            buckets.of_all(),
            loss=loss / total if total else 0.0,
            terms=terms,
            rows=sum(rows_by_rank),
            norms=ReplicaNorms(squares, replicas),
        )

    def outputs_of_all(
        self,
        pieces: Sequence[Any],
        rows: Sequence[int],
        targets: Any,
        dim: int,
        seed: int,
        constants: frozenset[int],
    ) -> tuple[list[Any], list[int], Any, int]:
        """The outputs and targets of all ranks, for a criterion with
        ``whole_batch=True``.

        Returns outputs, row counts, targets and rank 0's ``seed`` for the criterion.
        The outputs are this rank's ``pieces`` and one piece of every other rank, in
        rank order. Targets without rows are rank 0's. Raises the same ``RuntimeError``
        on every rank if one failed, or has outputs or targets of another kind.
        """
        # Gradients of other ranks' rows go back through no collective: each rank
        # computes the criterion for all rows, and keeps the gradient of its own.
        detached = [detached_output(piece, True) for piece in pieces]
        values_here = (
            join_rows(detached, dim, rows, rows, constants=constants),
            unwrap_markers(targets),
        )
        bytes_here = pack(nested.tensors(values_here), seed, sum(rows))
        kind = f"outputs {kind_of(values_here, dim)}"
        self._error_is_common = True  # up to the end of the exchange
        _, sizes = self._collectives.exchange_status(
            kind, bytes_here.numel(), _OTHER_OUTPUTS
        )
        subject = "the outputs and targets of all ranks"
        bytes_by_rank = self._collectives.all_gather(bytes_here, sizes, subject)
        self._error_is_common = False
        payloads = [unpack(content, values_here) for content in bytes_by_rank]
        outputs: list[Any] = []
        rows_of_outputs: list[int] = []
        # In rank order, so that the criterion sees the same batch everywhere.
        for rank, payload in enumerate(payloads):
            if rank == self.rank:  # its pieces have gradients, the copies have none
                outputs += pieces
                rows_of_outputs += rows
            else:
                output, _ = payload.values
                outputs.append(output)
                rows_of_outputs.append(payload.rows)
        targets_by_rank = [payload.values[1] for payload in payloads]

        def join(leaves: list[Any]) -> Any:
            local, *of_ranks = leaves
            if isinstance(local, Tensor) and local.ndim:
                return torch.cat(of_ranks, dim)
            return of_ranks[0]  # what has no rows is rank 0's

        joined_targets = nested.merge(join, [targets, *targets_by_rank])
        return outputs, rows_of_outputs, joined_targets, payloads[0].seed


class Buckets:
    """The part of this rank in the step's all-reduce.

    ::

        part          of rank 0           of each other rank
        gradients     its gradients, or zeros for a leaf that it did not use
        flags         per gradient, 1 if it has one, else 0
        buffers       its buffers         zeros
        statistics    one row per rank; zeros but for its own row

    What has no gradient's dtype is sent as bytes. An allocation fails here, while the
    other ranks can still be informed.

    Attributes:
        flats: one 1-D tensor per dtype, with all parts of this dtype.
        kind: a description of the parts, which must be equal on all ranks.
    """

    def __init__(
        self,
        outcome: Outcome,
        rank: int,
        size: int,
        accumulate_dtype: torch.dtype | None,
    ) -> None:
        self._outcome = outcome
        values = [value for *_, value in outcome.buffers]
        self._buffers = [value.detach() for value in values if value is not None]
        self._statistics: list[Tensor] = []
        if outcome.statistics:
            self._statistics = outcome.statistics.to_pool()
        gradients: list[Tensor] = []
        for leaf, gradient in outcome.gradients:
            gradients.append(_dense(leaf, gradient, accumulate_dtype))
        flags = _flags(outcome.gradients, gradients)
        dtypes = {gradient.dtype for gradient in gradients}
        buffers = [_sendable(value, dtypes) for value in self._buffers]
        # Buffers are those of rank 0: the sum of its values and zeros.
        if rank:
            buffers = [torch.zeros_like(value) for value in buffers]
        statistics: list[Tensor] = []
        for value in self._statistics:
            statistics.append(_row_of(rank, size, _sendable(value, dtypes)))
        parts = [gradients, flags, buffers, statistics]
        tensors = nested.tensors(parts)
        self.kind = _kind_of_parts(outcome.buffers, tensors)
        self.flats, views = _packed_by_dtype(tensors)
        # In these views of ``flats`` the sums of all ranks arrive.
        remaining = iter(views)
        (
            self._gradient_views,
            self._flag_views,
            self._buffer_views,
            self._statistics_views,
        ) = [[next(remaining) for _ in part] for part in parts]

    def weigh(self, factor: float) -> None:
        """Scale this rank's gradients.

        Called when the counts of the other ranks are known.
        """
        if self._gradient_views and factor != 1:
            torch._foreach_mul_(self._gradient_views, factor)

    def of_all(self) -> Outcome:
        """The outcome with the gradients, buffers and statistics of all ranks."""
        outcome = self._outcome
        return replace(
            outcome,
            gradients=self._gradients_of_all(),
            buffers=self._buffers_of_all(),
            statistics=self._statistics_of_all(),
        )

    def _gradients_of_all(self) -> list[Gradient]:
        flags = to_numbers(self._flag_views[0]) if self._flag_views else []
        leaves = [leaf for leaf, _ in self._outcome.gradients]
        gradients: list[Gradient] = []
        for leaf, total, flag in zip(leaves, self._gradient_views, flags, strict=True):
            gradients.append((leaf, total if flag else None))
        return gradients

    def _buffers_of_all(self) -> list[BufferValue]:
        views = zip(self._buffer_views, self._buffers, strict=True)
        buffers: list[BufferValue] = []
        for container, name, value in self._outcome.buffers:
            if value is not None:
                value = _like(*next(views))
            buffers.append((container, name, value))
        return buffers

    def _statistics_of_all(self) -> StepStatistics | None:
        statistics = self._outcome.statistics
        if statistics is None:
            return None
        by_tensor: list[list[Tensor]] = []
        for rows, value in zip(self._statistics_views, self._statistics, strict=True):
            by_tensor.append([_like(row, value) for row in rows])
        return statistics.pooled(by_tensor)


def _kind_of_parts(buffers: Sequence[BufferValue], parts: Sequence[Tensor]) -> str:
    """The names and dtypes of buffers, the dtypes and shapes of parts."""
    kinds: list[tuple[Any, ...]] = []
    for _, name, buffer in buffers:
        kinds.append((name, None if buffer is None else buffer.dtype))
    for part in parts:
        kinds.append((part.dtype, part.shape))
    return str(kinds)


def _dense(
    leaf: Tensor, gradient: Tensor | None, accumulate_dtype: torch.dtype | None
) -> Tensor:
    """The gradient of a leaf as ranks add it: dense, in the dtype of the sum.

    Zeros for a leaf without a gradient.
    """
    dtype = sum_dtype(leaf, accumulate_dtype)
    dense = torch.zeros_like(leaf) if gradient is None else gradient.to_dense()
    return dense.detach().to(dtype)


def _flags(gradients: Sequence[Gradient], dense: Sequence[Tensor]) -> list[Tensor]:
    """For each gradient whether there is one: one tensor, or none without gradients."""
    if not gradients:
        return []
    has_gradient = [gradient is not None for _, gradient in gradients]
    like = dense[0]  # in the dtype of a gradient, to be sent together
    return [torch.tensor(has_gradient, dtype=like.dtype, device=like.device)]


def _row_of(rank: int, size: int, value: Tensor) -> Tensor:
    """Zeros with one row per rank, in which the row of ``rank`` is ``value``."""
    rows = value.new_zeros(size, *value.shape)
    write(rows[rank], value)
    return rows


def _sendable(value: Tensor, dtypes: set[torch.dtype]) -> Tensor:
    """A value as it is sent: as bytes if no gradient has its dtype."""
    return value if value.dtype in dtypes else as_bytes(value)


def _packed_by_dtype(parts: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """One 1-D tensor per dtype with all ``parts``, and a view of it for each part."""
    flats: list[Tensor] = []
    views = list(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        positions = [i for i, part in enumerate(parts) if part.dtype == dtype]
        parts_of_dtype = [parts[i] for i in positions]
        flat = torch.cat([part.flatten() for part in parts_of_dtype])
        flats.append(flat)
        views_of_flat = unflatten(flat, parts_of_dtype)
        for i, view in zip(positions, views_of_flat, strict=True):
            views[i] = view
    return flats, views


class Payload(NamedTuple):
    """What one rank sends to all others.

    Attributes:
        values: the outputs and targets.
        seed: that of the criterion's random numbers.
        rows: the number of rows.
    """

    values: Any
    seed: int
    rows: int


def pack(tensors: Sequence[Tensor], seed: int, rows: int) -> Tensor:
    """A 1-D byte tensor: the bytes of the tensors, then of the numbers and sizes."""
    sizes = [size for tensor in tensors for size in tensor.shape]
    # At the end, where its place is known from its length.
    header = torch.tensor([seed, rows, *sizes])
    parts = [as_bytes(tensor) for tensor in (*tensors, header)]
    # One message: each collective waits for the slowest rank.
    return torch.cat([to_device(part, parts[0].device) for part in parts])


def unpack(payload: Tensor, like: Any) -> Payload:
    """What a rank packed, with the tensors in the structure of ``like``."""
    num_numbers = 2 + sum(atom.ndim for atom in nested.tensors(like))
    # A copy is aligned for any dtype.
    header = payload[-8 * num_numbers :].clone().view(torch.int64)
    seed, rows, *sizes = to_numbers(header)
    remaining_sizes = iter(sizes)
    start = 0

    def read(atom: Tensor) -> Tensor:
        nonlocal start
        shape = [next(remaining_sizes) for _ in atom.shape]
        stop = start + math.prod(shape) * atom.itemsize
        values = payload[start:stop].clone().view(atom.dtype).view(shape)
        start = stop
        return to_device(values, atom.device)

    return Payload(nested.map_tensors(read, like), seed, rows)


def kind_of(value: Any, dim: int) -> str:
    """A description of a nested value without the number of rows.

    It must be equal on all ranks.
    """
    return ";".join(_kind_of_atom(atom, dim) for atom in nested.atoms(value))


def _kind_of_atom(atom: Any, dim: int) -> str:
    if isinstance(atom, Tensor):
        sizes = atom.shape[:dim] + atom.shape[dim:][1:]  # all but that along ``dim``
        return f"{atom.dtype} {atom.ndim} {sizes}"
    return repr(atom) if isinstance(atom, nested.PLAIN_CLASSES) else type(atom).__name__


def _like(total: Tensor, value: Tensor) -> Tensor:
    """``total`` in the dtype and shape of ``value``, perhaps sent as bytes."""
    if total.dtype != value.dtype:
        total = total.clone().view(value.dtype)  # a copy is aligned for any dtype
    return total.view(value.shape)
