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
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.batch.joining import join_rows
from scatterpar.batch.markers import unwrap_markers
from scatterpar.devices.bits import as_bytes
from scatterpar.devices.copies import to_device, to_numbers, write
from scatterpar.devices.device_ids import identity_of_accelerator
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.virtual_devices import physical
from scatterpar.distributed.collectives import MAX_LOGGED, Collectives
from scatterpar.errors import add_note, warn
from scatterpar.log import logger
from scatterpar.replicas.buffers import BufferValue
from scatterpar.replicas.slots import sum_dtype
from scatterpar.step.reduce import Outcome
from scatterpar.step.substeps import Gradient, detached_output
from scatterpar.torch_private.tensors import unflatten

_OTHER_TENSORS = (
    "which tensors are trained, on their shapes, on the values of those that the "
    "criterion trains or the module has got since, on reduction=, on the scale of "
    "scaler=, or on the names of the numbers that the criterion returns"
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
        # True while every rank raises what this rank raises. Then it reports nothing:
        # from the exchange of a step's sums on until the next step begins, and
        # while outputs are exchanged.
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
                f"the process group has {backend} only, and {backend} ends this "
                "process if another rank is lost; add gloo for the host's memory, "
                "which raises an error instead: "
                f'init_process_group("cpu:gloo,{device.type}:{backend}")'
            )
        options = f"buffers={buffers!r}\naccumulate_dtype={accumulate_dtype}"
        identities = map(identity_of_accelerator, dict.fromkeys(devices))
        accelerators = [identity for identity in identities if identity is not None]
        self._collectives.require_same(module, options, accelerators)
        self._collectives.broadcast_from_rank_0(module)
        # Tensors with the same values on all ranks, by ``id``.
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._remember(module.parameters())
        self._remember(module.buffers())
        logger.info("rank %d of %d has the values of rank 0", self.rank, self.size)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "an engine with a process_group cannot be copied or pickled, since the "
            "group belongs to this process; copy engine.module, or save "
            "engine.state_dict()"
        )

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """In the body, an error of one rank is raised on every rank.

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
        """Add up the outcomes of all ranks. Returns that of all, the same bits on each.

        Call it in the body of ``failing_together``.
        """
        with outcome.attempt.phase("reduce"):
            return self._exchange(outcome)

    def _exchange(self, outcome: Outcome) -> Outcome:
        is_mean = outcome.request.is_mean
        # First: an allocation that fails here is a failure that others can be told.
        statistics = [] if outcome.statistics is None else outcome.statistics.to_pool()
        flats, sums = _packed_by_dtype(self._parts_of(outcome, statistics))
        names = _names_to_log(outcome)
        kind = f"{self._kind_of_sums(outcome, sums)} {names}"
        weights = outcome.attempt.weights
        # Of this rank's loss. A sum of terms counts even if they have no weight.
        weight = weights.divisor if weights.sums else outcome.terms
        summands = [outcome.terms, outcome.loss * weight]
        summands += [outcome.logged[name] * weight for name in names]
        # A rank that fails adds as many, and does not know the names.
        summands += [0.0] * (MAX_LOGGED - len(names))
        self._error_is_common = True  # what is raised from here on, every rank raises
        (terms, loss, *numbers), _ = self._collectives.exchange_status(
            kind, _OTHER_TENSORS, summands=summands
        )
        self._remember(leaf for leaf, _ in outcome.gradients)
        total = terms if is_mean else 1.0
        # Without terms nobody has a loss, and gradients count as zero.
        # Before the sum: rounding is that of one sum, and no second pass over it is
        # needed.
        if sums.gradients:
            share = weight / total if total else 0.0
            torch._foreach_mul_(sums.gradients, share)
        for flat in flats:
            subject = f"the sum of all gradients in {flat.dtype}"
            self._collectives.all_reduce(flat, subject)
        return replace(
            _with_sums(outcome, statistics, sums),
            loss=loss / total if total else 0.0,
            logged={
                name: number / total if total else 0.0
                for name, number in zip(names, numbers, strict=False)
            },
            terms=terms,
        )

    def _kind_of_sums(self, outcome: Outcome, sums: _SumParts) -> str:
        """What this rank adds up, as text that all ranks compare: else they would add
        tensors of different parameters, or wait for each other for ever.
        """
        parameters = enumerate(self._module.parameters())
        positions = {id(parameter): position for position, parameter in parameters}
        # Leaves of the criterion have no position.
        trained = [positions.get(id(leaf)) for leaf, _ in outcome.gradients]
        request = outcome.request
        tensors = _kind_of_outcome(outcome, sums)
        # Rank 0's values were copied at construction, and these were not there.
        new_leaves = {
            number: leaf
            for number, (leaf, _) in enumerate(outcome.gradients)
            if not self._is_known(leaf)
        }
        if new_leaves:
            tensors += _values_as_text(new_leaves)
        return f"{request.is_mean} {trained} {request.scale} {tensors}"

    def _is_known(self, leaf: Tensor) -> bool:
        """Whether all ranks had the same values of ``leaf`` in an earlier step."""
        reference = self._known.get(id(leaf))
        return reference is not None and reference() is leaf

    def _remember(self, tensors: Iterable[Tensor]) -> None:
        """Note that all ranks have the same values of these tensors."""
        new = [tensor for tensor in tensors if not self._is_known(tensor)]
        if new:
            live = self._known.items()
            self._known = {key: ref for key, ref in live if ref() is not None}
            self._known.update((id(tensor), weakref.ref(tensor)) for tensor in new)

    def _parts_of(self, outcome: Outcome, pooled: Sequence[Tensor]) -> _SumParts:
        """The tensors that this rank adds to the step's all-reduce.

        ``pooled`` are the statistics of batch normalisations.
        """
        parts = _SumParts([], [], [], [])
        for leaf, gradient in outcome.gradients:
            if gradient is None:  # this rank did not use the leaf
                gradient = torch.zeros_like(leaf)
            dense = gradient.to_dense().detach()
            dtype = sum_dtype(leaf, self._accumulate_dtype)
            parts.gradients.append(dense.to(dtype))
        if parts.gradients:
            is_used = [gradient is not None for _, gradient in outcome.gradients]
            like = parts.gradients[0]  # its dtype, to be sent together
            flags = torch.tensor(is_used, dtype=like.dtype, device=like.device)
            parts.flags.append(flags)
        dtypes = {gradient.dtype for gradient in parts.gradients}
        for *_, value in outcome.buffers:
            if value is not None:
                sent = _sendable(value, dtypes)
                # Buffers are those of rank 0: the sum of its values and zeros.
                parts.buffers.append(torch.zeros_like(sent) if self.rank else sent)
        for value in pooled:
            sent = _sendable(value, dtypes)
            rows = sent.new_zeros(self.size, *sent.shape)
            write(rows[self.rank], sent)
            parts.statistics.append(rows)
        return parts

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
        # Gradients of other ranks' rows go back through no collective: each rank
        # computes the criterion for all rows, and keeps the gradient of its own.
        detached = [detached_output(piece, True) for piece in pieces]
        values_here = (
            join_rows(detached, dim, rows, rows),
            unwrap_markers(targets),
        )
        bytes_here = pack_payload(nested.tensors(values_here), seed, sum(rows))
        kind = f"outputs {kind_of(values_here, dim)}"
        self._error_is_common = True
        _, sizes = self._collectives.exchange_status(
            kind, _OTHER_OUTPUTS, number=bytes_here.numel()
        )
        subject = "the outputs and targets of all ranks"
        bytes_by_rank = self._collectives.all_gather(bytes_here, sizes, subject)
        self._error_is_common = False
        payloads = [unpack_payload(content, values_here) for content in bytes_by_rank]
        # In rank order, so that the criterion sees the same batch everywhere.
        outputs_by_rank = [[payload.values[0]] for payload in payloads]
        rows_by_rank = [[payload.rows] for payload in payloads]
        # These have gradients, and the copies have none.
        outputs_by_rank[self.rank] = list(pieces)
        rows_by_rank[self.rank] = list(rows)
        targets_by_rank = [payload.values[1] for payload in payloads]

        def join(leaves: list[Any]) -> Any:
            local, *of_ranks = leaves
            if isinstance(local, Tensor) and local.ndim:
                return torch.cat(of_ranks, dim)
            return of_ranks[0]  # what has no rows is rank 0's

        joined_targets = nested.merge(join, [targets, *targets_by_rank])
        outputs = list(chain.from_iterable(outputs_by_rank))
        rows_of_outputs = list(chain.from_iterable(rows_by_rank))
        return outputs, rows_of_outputs, joined_targets, payloads[0].seed


class _SumParts(NamedTuple):
    """The parts of one rank in the step's all-reduce, or the sums of all ranks.

    ::

        part          of rank 0           of each other rank
        gradients     its gradients, or zeros for a leaf that it did not use
        flags         one tensor: per gradient, 1 if the rank has it, else 0
        buffers       its buffers         zeros
        statistics    one row per rank; zeros but for its own row

    What has no gradient's dtype is sent as bytes.
    """

    gradients: list[Tensor]
    flags: list[Tensor]
    buffers: list[Tensor]
    statistics: list[Tensor]


def _values_as_text(tensors: Mapping[int, Tensor]) -> str:
    """A text that ranks with other values of these tensors have otherwise."""
    by_device: defaultdict[torch.device, dict[int, Tensor]] = defaultdict(dict)
    for number, tensor in tensors.items():
        by_device[tensor.device][number] = tensor.detach()
    values: list[int] = []
    for device, of_device in by_device.items():
        values += to_numbers(Fingerprints(of_device, device).values)
    return str(values)


def _names_to_log(outcome: Outcome) -> list[str]:
    """The names of the numbers that the criterion has returned, in one order."""
    names = sorted(outcome.logged)
    if len(names) > MAX_LOGGED:
        raise ValueError(
            f"the criterion returned {len(names)} numbers to log. With several "
            f"processes at most {MAX_LOGGED} are possible; return fewer numbers"
        )
    return names


def _kind_of_outcome(outcome: Outcome, parts: _SumParts) -> str:
    """The names and dtypes of buffers, the dtypes and shapes of parts."""
    kinds: list[tuple[Any, ...]] = []
    for _, name, buffer in outcome.buffers:
        kinds.append((name, None if buffer is None else buffer.dtype))
    for part in nested.tensors(parts):
        kinds.append((part.dtype, part.shape))
    return str(kinds)


def _with_sums(outcome: Outcome, pooled: Sequence[Tensor], sums: _SumParts) -> Outcome:
    """The outcome with the gradients, buffers and statistics of all ranks."""
    gradients: list[Gradient] = []
    flags = to_numbers(sums.flags[0]) if sums.flags else []
    pairs = zip(sums.gradients, flags, strict=True)
    for (leaf, _), (total, flag) in zip(outcome.gradients, pairs, strict=True):
        gradients.append((leaf, total if flag else None))
    buffers: list[BufferValue] = []
    sums_of_buffers = iter(sums.buffers)
    for container, name, value in outcome.buffers:
        if value is not None:
            value = _as_it_was_sent(next(sums_of_buffers), value)
        buffers.append((container, name, value))
    statistics = outcome.statistics
    if statistics is not None:
        by_tensor: list[list[Tensor]] = []
        for rows, value in zip(sums.statistics, pooled, strict=True):
            by_tensor.append([_as_it_was_sent(row, value) for row in rows])
        statistics = statistics.pooled(by_tensor)
    return replace(
        outcome,
        gradients=gradients,
        buffers=buffers,
        statistics=statistics,
        prepared=None,
    )


def _sendable(value: Tensor, dtypes: set[torch.dtype]) -> Tensor:
    """A value as it is sent: as bytes if no gradient has its dtype."""
    return value.detach() if value.dtype in dtypes else as_bytes(value)


def _packed_by_dtype(parts: _SumParts) -> tuple[list[Tensor], _SumParts]:
    """Pack ``parts`` into a 1-D tensor per dtype. Returns these, and views of them for
    the parts.
    """
    by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for part in nested.tensors(parts):
        by_dtype[part.dtype].append(part)
    flats: list[Tensor] = []
    views: dict[torch.dtype, Iterator[Tensor]] = {}
    for dtype, parts_of_dtype in by_dtype.items():
        flat = torch.cat([part.flatten() for part in parts_of_dtype])
        flats.append(flat)
        views[dtype] = iter(unflatten(flat, parts_of_dtype))

    def view_of(part: Tensor) -> Tensor:
        return next(views[part.dtype])

    return flats, nested.map_tensors(view_of, parts)


class Payload(NamedTuple):
    """The message of one rank to all others.

    Attributes:
        values: the outputs and targets.
        seed: that of the criterion's random numbers.
        rows: the number of rows.
    """

    values: Any
    seed: int
    rows: int


def pack_payload(tensors: Sequence[Tensor], seed: int, rows: int) -> Tensor:
    """Pack a rank's message: bytes of the tensors, then of the numbers and sizes."""
    sizes: list[int] = []
    for tensor in tensors:
        sizes += tensor.shape
    # At the end, where its place is known from its length.
    header = torch.tensor([seed, rows, *sizes])
    parts = [as_bytes(tensor) for tensor in (*tensors, header)]
    # One message: each collective waits for the slowest rank.
    return torch.cat([to_device(part, parts[0].device) for part in parts])


def unpack_payload(payload: Tensor, like: Any) -> Payload:
    """Unpack a rank's message, with the tensors in the structure of ``like``."""
    num_numbers = 2 + sum(atom.ndim for atom in nested.tensors(like))
    # A copy is aligned for any dtype.
    header = payload[-8 * num_numbers :].clone().view(torch.int64)
    seed, rows, *sizes = to_numbers(header)
    remaining_sizes = iter(sizes)

    def read(atom: Tensor) -> Tensor:
        nonlocal payload
        shape = [next(remaining_sizes) for _ in atom.shape]
        num_bytes = math.prod(shape) * atom.itemsize
        values = payload[:num_bytes].clone().view(atom.dtype).view(shape)
        payload = payload[num_bytes:]
        return to_device(values, atom.device)

    return Payload(nested.map_tensors(read, like), seed, rows)


def kind_of(value: Any, dim: int) -> str:
    """A description of a nested value without the number of rows.

    It must be equal on all ranks.
    """
    return ";".join(_kind_of_value(atom, dim) for atom in nested.atoms(value))


def _kind_of_value(atom: Any, dim: int) -> str:
    if isinstance(atom, Tensor):
        sizes = atom.shape[:dim] + atom.shape[dim:][1:]  # all but that along ``dim``
        return f"{atom.dtype} {atom.ndim} {sizes}"
    return repr(atom) if isinstance(atom, nested.PLAIN_CLASSES) else type(atom).__name__


def _as_it_was_sent(total: Tensor, value: Tensor) -> Tensor:
    """``total`` in the dtype and shape of ``value``, perhaps sent as bytes."""
    if total.dtype != value.dtype:
        total = total.clone().view(value.dtype)  # a copy is aligned for any dtype
    return total.view(value.shape)
