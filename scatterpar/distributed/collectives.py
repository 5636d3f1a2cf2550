"""The collectives of a process group: comparison of modules, one status exchange per
step, sums.

Nothing is pickled: texts are sent as UTF-8 bytes, tensors as the bytes of their
elements.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Sequence
from itertools import chain, zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices.transfers import as_bytes, to_device, to_numbers, write
from scatterpar.replicas.checks import is_quantised

# a status is ``number << 18 | checksum``; float64 is exact up to 53 bits
_CHECKSUM_BITS = 18
_NO_SUMMANDS = (0.0,) * 4  # of a rank that adds nothing
_FAILED = -1  # the status of a failed rank


class Collectives:
    """The collectives of a group; every rank must call each. Small tensors are on
    ``control``.
    """

    def __init__(self, group: dist.ProcessGroup, control: torch.device) -> None:
        # A weak reference: a strong one would keep gloo's threads running after
        # destroy_process_group, and these can abort an interpreter that exits:
        # https://github.com/pytorch/pytorch/issues/190489
        self._group = weakref.ref(group)
        self._control = control
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def require_same(self, module: nn.Module, options: str) -> None:
        """Raise the same ``ValueError`` on all ranks if their modules or options
        differ.
        """
        embeddings = [
            m
            for m in module.modules()
            if isinstance(m, (nn.Embedding, nn.EmbeddingBag))
        ]
        sparse = {id(embedding.weight) for embedding in embeddings if embedding.sparse}
        named = {
            "parameter": module.named_parameters(),
            "buffer": module.named_buffers(),
        }
        tensors = [(kind, *each) for kind, of_kind in named.items() for each in of_kind]
        lines = [options]
        for kind, name, tensor in tensors:
            shape = (
                "not initialised yet"
                if is_lazy(tensor)
                else f"of shape {tuple(tensor.shape)}"
            )
            more = ", sparse" if id(tensor) in sparse else ""
            lines.append(f"{kind} {name!r} {shape}, {tensor.dtype}{more}")
        first, *others = (text.split("\n") for text in self._texts("\n".join(lines)))
        for rank, rank_lines in enumerate(others, 1):
            for line, other in zip_longest(first, rank_lines, fillvalue="nothing more"):
                if line != other:
                    raise ValueError(
                        f"the ranks' modules differ: rank 0 has {line}, rank {rank} "
                        f"has {other}; "
                        f"make the same module on every rank"
                    )
        for _, name, tensor in tensors:
            if id(tensor) in sparse:
                problem = "has sparse gradients, which ranks do not add"
                remedy = "make the embedding with sparse=False"
            elif is_lazy(tensor):
                problem = "is not initialised yet"
                remedy = "call the module once before you pass a process_group"
            elif is_quantised(tensor):
                problem = (
                    f"is quantised, a {type(tensor).__name__}, and ranks cannot copy it"
                )
                remedy = "train without a process_group"
            else:
                continue
            raise ValueError(f"{name!r} {problem}; {remedy}")

    def broadcast_from_rank_0(self, module: nn.Module) -> None:
        """Copy rank 0's parameters and buffers to ``module``, as bytes."""
        for tensor in (
            t for t in chain(module.parameters(), module.buffers()) if t.numel()
        ):
            values = (
                torch.zeros_like(as_bytes(tensor)) if self.rank else as_bytes(tensor)
            )
            self.all_reduce(values, "rank 0's parameters and buffers", still="")
            if self.rank:
                place = tuple(
                    slice(None) if stride else slice(1) for stride in tensor.stride()
                )
                # each place of an expanded tensor once, as torch requires
                with torch.no_grad():
                    write(
                        tensor[place],
                        values.view(tensor.dtype).view(tensor.shape)[place],
                    )

    def exchange_status(
        self,
        kind: str,
        number: int,
        disagreement: str,
        summands: Sequence[float] = _NO_SUMMANDS,
    ) -> tuple[list[float], list[int]]:
        """Exchange the status of this step.

        Returns the sums of ``summands`` over all ranks, and every rank's non-negative
        ``number``. Raises the same ``RuntimeError`` on every rank if one failed, or if
        ``kind`` differs between ranks: they disagree on ``disagreement``.
        """
        checksum = zlib.crc32(kind.encode()) % 2**_CHECKSUM_BITS
        sums, statuses, failed = self._exchange(
            summands, number << _CHECKSUM_BITS | checksum
        )
        if failed:
            raise RuntimeError(
                f"rank {', '.join(map(str, failed))} of {self.size} failed in this "
                "step, so that "
                f"nothing was changed on any rank; see what it raised there"
            )
        if len({status % 2**_CHECKSUM_BITS for status in statuses}) > 1:
            raise RuntimeError(
                f"the ranks disagree on {disagreement}; make the same changes and the "
                "same calls "
                f"on every rank"
            )
        return sums, [status >> _CHECKSUM_BITS for status in statuses]

    def report_failure(self) -> list[int]:
        """Exchange this rank's failure as its status. Returns the other ranks that
        failed.
        """
        *_, failed = self._exchange(_NO_SUMMANDS, _FAILED)
        return [rank for rank in failed if rank != self.rank]

    def all_reduce(
        self,
        tensor: Tensor,
        what: str,
        still: str = "; nothing was changed on this rank",
    ) -> None:
        """Add ``tensor`` over all ranks, in place; ``what`` and ``still`` describe it
        in errors.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the engine's process group is gone, by dist.destroy_process_group() "
                "perhaps; make "
                "a new group and a new engine"
            )
        start = time.perf_counter()
        try:
            dist.all_reduce(tensor, group=group)
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            raise RuntimeError(
                f"rank {self.rank} of {self.size} waited {seconds:.1f} s for {what}, "
                "and another "
                "rank was lost, or did not come within the process group's "
                f"timeout{still}. The "
                f"group cannot be used any more: start all ranks again"
            ) from error

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int], what: str
    ) -> tuple[Tensor, ...]:
        """Every rank's 1-D tensor. ``sizes`` has their lengths."""
        everything = tensor.new_zeros(sum(sizes))
        parts: tuple[Tensor, ...] = everything.split(list(sizes))
        write(parts[self.rank], tensor)
        self.all_reduce(everything, what)
        return parts

    def _texts(self, text: str) -> list[str]:
        what = "the other ranks' description of the module"
        data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        data = to_device(data, self._control)
        size = torch.tensor([len(data)], device=self._control)
        sizes = to_numbers(torch.cat(self.all_gather(size, [1] * self.size, what)))
        return [
            bytes(to_numbers(part)).decode()
            for part in self.all_gather(data, sizes, what)
        ]

    def _exchange(
        self, summands: Sequence[float], status: int
    ) -> tuple[list[float], list[int], list[int]]:
        """The sums of ``summands`` over all ranks, each rank's ``status``, and who
        failed.
        """
        statuses = [0] * self.size
        statuses[self.rank] = status
        flat = torch.tensor(
            [*summands, *statuses], dtype=torch.float64, device=self._control
        )
        self.all_reduce(flat, "the flags and counts of all ranks")
        values = to_numbers(flat)
        statuses = [int(value) for value in values[len(summands) :]]
        failed = [rank for rank, each in enumerate(statuses) if each == _FAILED]
        return values[: len(summands)], statuses, failed
