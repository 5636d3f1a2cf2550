"""Between machines: one process each, one gradient collective per step and dtype.

All ranks take part in the collectives of every step, whatever happens to them: in a small
one that says who failed and how much each rank's loss counts, and, if nobody failed, in one
per dtype with the gradients and buffers. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from scatterpar.devices import physical
from scatterpar.outcome import BufferValue, Outcome
from scatterpar.workers import note

__all__ = ["Ranks"]

_FIELDS = 5  # terms, loss, rows, layout, layout squared; then one flag a rank: failed


class Ranks:
    """The processes that train one module together.

    At construction all ranks check that they have the same module, and take over rank 0's
    parameters and buffers.

    Args:
        group: a ``torch.distributed`` process group.
        module: this rank's module.
        device: where it lives.
        mean_buffers: average floating-point buffers over the ranks, instead of taking rank 0's.

    Raises:
        ValueError: on every rank alike, where modules differ in names, number, shapes or
            dtypes.
    """

    def __init__(
        self, group: dist.ProcessGroup, module: nn.Module, device: torch.device, mean_buffers: bool
    ) -> None:
        self._group = group
        self._module = module
        self._mean = mean_buffers
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        host_only = "nccl" not in str(dist.get_backend(group))
        self._control = torch.device("cpu") if host_only else physical(device)
        self._agree(_description(module))
        self._take_over()

    def check(self, outcome: Outcome) -> None:
        """Refuse, before any collective, what would not fit into one.

        Raises:
            ValueError: a buffer that changed its shape.
        """
        _require_same_shapes(outcome.buffers)

    def exchange(self, outcome: Outcome) -> Outcome:
        """The outcome of all ranks' batches together, the same bits on every rank.

        Raises:
            RuntimeError: another rank failed, or has other tensors; nothing was changed on any.
        """
        try:
            return self._exchange(outcome)
        except BaseException:
            outcome.streams.rollback()
            raise

    def _exchange(self, outcome: Outcome) -> Outcome:
        sparse_ids = _sparse_weights(self._module)
        dense = [(t, _to_dense(g)) for t, g in outcome.gradients if id(t) not in sparse_ids]
        sparse = [(t, _to_sparse(g)) for t, g in outcome.gradients if id(t) in sparse_ids]
        terms, loss, rows = self._talk(outcome, _layout(dense, sparse, outcome.buffers))
        factor = 1.0
        if outcome.is_mean:
            factor = outcome.terms / terms if terms else 0.0
            loss = loss / terms if terms else 0.0
        gradients, buffers = self._reduce(dense, outcome.buffers, factor, outcome.plan.rows / rows)
        gradients += [(t, self._sum_sparse(t, g, factor)) for t, g in sparse]
        return replace(outcome, loss=loss, gradients=gradients, buffers=buffers)

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed; they raise in this step too."""
        with contextlib.suppress(Exception):
            _, failed = self._exchange_words(torch.zeros(_FIELDS, dtype=torch.float64), True)
            others = [str(rank) for rank in failed if rank != self.rank]
            if others:
                note(error, f"rank {', '.join(others)} failed in this step too")

    def _talk(self, outcome: Outcome, layout: int) -> tuple[float, float, float]:
        """All ranks' terms, weighted losses and rows, once it is sure that nobody failed."""
        loss = outcome.loss * outcome.terms if outcome.is_mean and outcome.terms else outcome.loss
        mine = [outcome.terms, loss, outcome.plan.rows, layout, layout**2]
        words, failed = self._exchange_words(torch.tensor(mine, dtype=torch.float64), False)
        if failed:
            raise RuntimeError(
                f"rank {', '.join(map(str, failed))} of {self.size} failed in this step, so that "
                f"nothing was changed on any rank; see what it raised there"
            )
        terms, total, rows, layouts, squares = words
        if self.size * squares != layouts**2:
            raise RuntimeError(
                "the ranks disagree on which tensors are trained, or on their shapes; make the "
                "same changes to the module on every rank"
            )
        return terms, total, rows

    def _exchange_words(self, mine: Tensor, failed: bool) -> tuple[list[float], list[int]]:
        flags = torch.zeros(self.size, dtype=torch.float64)
        flags[self.rank] = failed
        words = torch.cat([mine, flags]).to(self._control)
        try:
            dist.all_reduce(words, group=self._group)
        except RuntimeError as error:
            note(error, "another rank was lost in this step; nothing was changed on this one")
            raise
        values: list[float] = words.tolist()
        return values[:_FIELDS], [i for i, flag in enumerate(values[_FIELDS:]) if flag]

    def _reduce(
        self,
        gradients: Sequence[tuple[Tensor, Tensor | None]],
        buffers: Sequence[BufferValue],
        factor: float,
        weight: float,
    ) -> tuple[list[tuple[Tensor, Tensor | None]], list[BufferValue]]:
        """Gradients and buffers of all ranks, in one collective per dtype."""
        by_dtype: dict[torch.dtype, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for i, (tensor, _) in enumerate(gradients):
            by_dtype[tensor.dtype][0].append(i)
        for i, (_, _, value) in enumerate(buffers):
            if value is not None:
                by_dtype[value.dtype][1].append(i)
        summed, settled = list(gradients), list(buffers)
        for of_gradients, of_buffers in by_dtype.values():
            mine = [_or_zero(*gradients[i]) * factor for i in of_gradients]
            mine += [self._contribution(buffers[i], weight) for i in of_buffers]
            used = [gradients[i][1] is not None for i in of_gradients]
            flags = torch.tensor(used, dtype=mine[0].dtype, device=mine[0].device)
            flat = _flatten_dense_tensors([*mine, flags])
            dist.all_reduce(flat, group=self._group)
            *parts, flags = _unflatten_dense_tensors(flat, [*mine, flags])
            for i, part, flag in zip(of_gradients, parts, flags.tolist(), strict=False):
                summed[i] = (gradients[i][0], part if flag else None)
            for i, part in zip(of_buffers, parts[len(of_gradients) :], strict=True):
                settled[i] = (*buffers[i][:2], self._settle(buffers[i], part))
        return summed, settled

    def _contribution(self, buffer: BufferValue, weight: float) -> Tensor:
        """What this rank adds to the sum that the buffer comes out of."""
        holder, name, value = buffer
        assert value is not None
        value = value.detach()
        if self._mean and value.is_floating_point():
            before = holder[name]
            assert before is not None
            return torch.where(value == before, 0, value - before) * weight
        value = value.to(torch.uint8) if value.dtype == torch.bool else value
        return value if self.rank == 0 else torch.zeros_like(value)

    def _settle(self, buffer: BufferValue, total: Tensor) -> Tensor:
        holder, name, value = buffer
        before = holder[name]
        assert value is not None
        assert before is not None
        if self._mean and value.is_floating_point():
            return torch.where(total == 0, before.detach(), before.detach() + total)
        return total.to(value.dtype)

    def _sum_sparse(self, tensor: Tensor, gradient: Tensor | None, factor: float) -> Tensor | None:
        mine = torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.long, device=tensor.device),
            tensor.new_zeros(0, *tensor.shape[1:]),
            tensor.shape,
            check_invariants=False,
        )
        total = (mine if gradient is None else gradient.detach() * factor).coalesce()
        dist.all_reduce(total, group=self._group)
        return total if total._nnz() else None

    def _agree(self, mine: str) -> None:
        """Compare the modules; fingerprints first, words only if these differ."""
        prints = self._gather(hashlib.sha256(mine.encode()).digest())
        if len(set(prints)) == 1:
            return
        size = torch.tensor([len(mine.encode())], device=self._control)
        dist.all_reduce(size, dist.ReduceOp.MAX, group=self._group)
        texts = self._gather(mine.encode().ljust(int(size), b" "))
        described = [text.decode().rstrip().split("\n") for text in texts]
        for rank, lines in enumerate(described):
            for first, other in zip_longest(described[0], lines):
                if first != other:
                    raise ValueError(
                        f"the ranks' modules differ: rank 0 has {first or 'nothing more'}, "
                        f"rank {rank} has {other or 'nothing more'}; make the same module on "
                        f"every rank"
                    )

    def _gather(self, data: bytes) -> list[bytes]:
        """Every rank's ``data``, of the same length on all."""
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._control)
        all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(all_of_them, mine, group=self._group)
        return [bytes(tensor.tolist()) for tensor in all_of_them]

    def _take_over(self) -> None:
        """Rank 0's parameters and buffers, one broadcast per dtype."""
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for _, _, tensor in _named_tensors(self._module):
            by_dtype[tensor.dtype].append(tensor)
        with torch.no_grad():
            for tensors in by_dtype.values():
                flat = _flatten_dense_tensors([tensor.detach() for tensor in tensors])
                dist.broadcast(flat, group=self._group, group_src=0)
                torch._foreach_copy_(tensors, list(_unflatten_dense_tensors(flat, tensors)))


def _named_tensors(module: nn.Module) -> Iterable[tuple[str, str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield "parameter", name, parameter
    for name, buffer in module.named_buffers():
        yield "buffer", name, buffer


def _description(module: nn.Module) -> str:
    """A line a tensor, such as ``parameter 'fc.weight' of shape (3, 5), torch.float32``."""
    return "\n".join(
        f"{kind} {name!r} of shape {tuple(tensor.shape)}, {tensor.dtype}"
        for kind, name, tensor in _named_tensors(module)
    )


def _sparse_weights(module: nn.Module) -> set[int]:
    """Weights whose gradient is sparse: of embeddings that say so, which all ranks can tell."""
    return {
        id(child.weight)
        for child in module.modules()
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.sparse
    }


def _to_dense(gradient: Tensor | None) -> Tensor | None:
    return gradient.to_dense() if gradient is not None and gradient.is_sparse else gradient


def _to_sparse(gradient: Tensor | None) -> Tensor | None:
    return gradient if gradient is None or gradient.is_sparse else gradient.to_sparse(1)


def _or_zero(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    return torch.zeros_like(tensor) if gradient is None else gradient.detach()


def _require_same_shapes(buffers: Sequence[BufferValue]) -> None:
    for holder, name, value in buffers:
        before = holder.get(name)
        if (before is None) != (value is None) or (
            before is not None and value is not None and before.shape != value.shape
        ):
            raise ValueError(
                f"buffer {name!r} changed its shape during the step, which is not possible "
                f"between ranks; keep buffers of one shape"
            )


def _layout(
    dense: Sequence[tuple[Tensor, Tensor | None]],
    sparse: Sequence[tuple[Tensor, Tensor | None]],
    buffers: Sequence[BufferValue],
) -> int:
    """A 16-bit checksum of what goes into the collectives; small, so that its square is exact."""
    tensors = [t for t, _ in [*dense, *sparse]]
    tensors += [value for _, _, value in buffers if value is not None]
    text = ";".join(f"{tuple(tensor.shape)}{tensor.dtype}" for tensor in tensors)
    return zlib.crc32(text.encode()) & 0xFFFF
