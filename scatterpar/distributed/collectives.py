"""The collectives of a process group.

They compare modules, exchange the status of each step, and add tensors. Nothing is
pickled: texts are sent as UTF-8 bytes, tensors as the bytes of their elements.
"""

from __future__ import annotations

import time
import weakref
import zlib
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scatterpar.devices.bits import as_bytes
from scatterpar.devices.copies import to_device, to_numbers, write
from scatterpar.objects.quantised import is_quantised

# A status is ``number << 18 | checksum``; float64 is exact up to 53 bits.
_CHECKSUM_BITS = 18
# Numbers that a criterion may return beside its loss: with 8 bytes each, the small
# collective stays below 1 KiB.
MAX_LOGGED = 32
_NO_SUMMANDS = (0.0,) * (2 + MAX_LOGGED)  # of a rank that adds nothing
_FAILED = -1  # the status of a failed rank


class RankError(RuntimeError):
    """Another rank has failed in this step, or is lost."""


class _ModuleTensor(NamedTuple):
    """A parameter or buffer of the user's module.

    Attributes:
        kind: ``"parameter"`` or ``"buffer"``.
        name: as in the module's ``state_dict``.
        tensor: the parameter or buffer.
        has_sparse_gradients: whether it is the weight of a sparse embedding.
    """

    kind: str
    name: str
    tensor: Tensor
    has_sparse_gradients: bool

    def __str__(self) -> str:
        """The line that all ranks compare."""
        if is_lazy(self.tensor):  # first: it has no shape
            shape = "not initialised yet"
        else:
            shape = f"of shape {tuple(self.tensor.shape)}"
        sparse = ", sparse" if self.has_sparse_gradients else ""
        return f"{self.kind} {self.name!r} {shape}, {self.tensor.dtype}{sparse}"

    def refuse_what_ranks_lack(self) -> None:
        """Raise ``ValueError`` if ranks cannot add or copy this tensor."""
        if self.has_sparse_gradients:
            problem = "has sparse gradients, which ranks do not add"
            remedy = "make the embedding with sparse=False"
        elif is_lazy(self.tensor):
            problem = "is not initialised yet"
            remedy = "call the module once before you pass a process_group"
        elif is_quantised(self.tensor):
            kind = type(self.tensor).__name__
            problem = f"is quantised, a {kind}, and ranks cannot copy it"
            remedy = "train without a process_group"
        else:
            return
        raise ValueError(f"{self.name!r} {problem}; {remedy}")


class Collectives:
    """The collectives of a group; every rank must call each.

    Args:
        group: the process group.
        control: the device of small tensors, such as counts and texts.

    Attributes:
        rank: the number of this process.
        size: the number of processes.
    """

    def __init__(self, group: dist.ProcessGroup, control: torch.device) -> None:
        # A weak reference: a strong one would keep gloo's threads running after
        # destroy_process_group, and these can abort an interpreter that exits:
        # https://github.com/pytorch/pytorch/issues/190489
        self._group = weakref.ref(group)
        self._control = control
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def require_same(
        self, module: nn.Module, options: str, accelerators: Sequence[str]
    ) -> None:
        """Raise the same ``ValueError`` on all ranks if modules or options differ, or
        if two ranks have one of their ``accelerators`` in common.
        """
        tensors = _tensors_of_module(module)
        description = "\n".join([" ".join(accelerators), options, *map(str, tensors)])
        subject = "the other ranks' description of the module"
        by_rank = [text.split("\n") for text in self.texts(description, subject)]
        _refuse_common_accelerators([lines.pop(0).split() for lines in by_rank])
        first, *later = by_rank
        for rank, lines in enumerate(later, 1):
            # A module may have more tensors than the other.
            for expected, line in zip_longest(first, lines, fillvalue="nothing more"):
                if line != expected:
                    raise ValueError(
                        f"the ranks' modules differ: rank 0 has {expected}, rank "
                        f"{rank} has {line}; make the same module on every rank"
                    )
        # After the comparison, so that all ranks find the same.
        for tensor in tensors:
            tensor.refuse_what_ranks_lack()

    def texts(self, text: str, subject: str) -> list[str]:
        """Every rank's text."""
        content = torch.tensor([*text.encode()], dtype=torch.uint8)
        content = to_device(content, self._control)
        size = torch.tensor([len(content)], device=self._control)
        gathered = self.all_gather(size, [1] * self.size, subject)
        sizes = to_numbers(torch.cat(gathered))
        contents = self.all_gather(content, sizes, subject)
        return [bytes(to_numbers(content)).decode() for content in contents]

    def broadcast_from_rank_0(self, module: nn.Module) -> None:
        """Copy rank 0's parameters and buffers to ``module``, as bytes."""
        for tensor in chain(module.parameters(), module.buffers()):
            if tensor.numel() == 0:
                continue
            values = as_bytes(tensor)
            if self.rank:
                values = torch.zeros_like(values)  # the sum is rank 0's
            self.all_reduce(values, "rank 0's parameters and buffers", still="")
            if self.rank:
                _write_bytes(tensor, values)

    def exchange_status(
        self,
        kind: str,
        disagreement: str,
        *,
        number: int = 0,
        summands: Sequence[float] = _NO_SUMMANDS,
    ) -> tuple[list[float], list[int]]:
        """Exchange the status of this step.

        Returns the sums of ``summands`` over all ranks, and every rank's non-negative
        ``number``. Raises the same ``RuntimeError`` on every rank if one failed, or if
        ``kind`` differs between ranks: they disagree on ``disagreement``.
        """
        checksum = zlib.crc32(kind.encode()) % 2**_CHECKSUM_BITS
        status = number << _CHECKSUM_BITS | checksum
        sums, statuses = self._exchange(summands, status)
        failed = _failed(statuses)
        if failed:
            raise RankError(
                f"rank {', '.join(map(str, failed))} of {self.size} failed in this "
                "step, so that nothing was changed on any rank; see the error of that "
                "rank"
            )
        # Two kinds have the same checksum in one case of 2**18.
        checksums = {status % 2**_CHECKSUM_BITS for status in statuses}
        if len(checksums) > 1:
            raise RuntimeError(
                f"the ranks disagree on {disagreement}; make the same changes and the "
                f"same calls on every rank"
            )
        return sums, [status >> _CHECKSUM_BITS for status in statuses]

    def report_failure(self) -> list[int]:
        """Exchange this rank's failure as its status.

        Returns the other ranks that failed.
        """
        _, statuses = self._exchange(_NO_SUMMANDS, _FAILED)
        return [rank for rank in _failed(statuses) if rank != self.rank]

    def all_reduce(
        self,
        tensor: Tensor,
        subject: str,
        still: str = "; nothing was changed on this rank",
    ) -> None:
        """Add ``tensor`` over all ranks, in place.

        ``subject`` and ``still`` describe it in errors.
        """
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the engine's process group no longer exists, perhaps because of "
                "dist.destroy_process_group(); make a new group and a new engine"
            )
        start = time.perf_counter()
        try:
            dist.all_reduce(tensor, group=group)
        # Of gloo and NCCL alike: torch's own errors derive from it.
        except RuntimeError as error:
            seconds = time.perf_counter() - start
            raise RankError(
                f"rank {self.rank} of {self.size} waited {seconds:.1f} s for "
                f"{subject}, and another rank was lost, or did not come within the "
                f"process group's timeout{still}. The group cannot be used any more; "
                "start all ranks again"
            ) from error

    def all_gather(
        self, tensor: Tensor, sizes: Sequence[int], subject: str
    ) -> tuple[Tensor, ...]:
        """Every rank's 1-D tensor. ``sizes`` has their lengths."""
        # By a sum: not every backend gathers tensors of different lengths.
        everything = tensor.new_zeros(sum(sizes))
        parts: tuple[Tensor, ...] = everything.split(list(sizes))
        write(parts[self.rank], tensor)
        self.all_reduce(everything, subject)
        return parts

    def _exchange(
        self, summands: Sequence[float], status: int
    ) -> tuple[list[float], list[int]]:
        """Exchange numbers with all ranks. Returns the sums of ``summands``, and each
        rank's ``status``.

        One collective: a rank adds zeros to the places of the other ranks' statuses.
        """
        statuses = [0] * self.size
        # The others add zeros.
        statuses[self.rank] = status
        flat = torch.tensor(
            [*summands, *statuses], dtype=torch.float64, device=self._control
        )
        self.all_reduce(flat, "the flags and counts of all ranks")
        values = to_numbers(flat)
        sums = values[: len(summands)]
        return sums, [int(value) for value in values[len(summands) :]]


def _refuse_common_accelerators(by_rank: Sequence[Sequence[str]]) -> None:
    """Raise ``ValueError`` if two ranks have the same accelerator."""
    rank_of: dict[str, int] = {}
    for rank, accelerators in enumerate(by_rank):
        for accelerator in accelerators:
            other = rank_of.setdefault(accelerator, rank)
            if other != rank:
                raise ValueError(
                    f"device_ids: ranks {other} and {rank} have the same accelerator, "
                    f"{accelerator}; leave device_ids out, so that each process of "
                    "torchrun takes its part of the accelerators, or pass other "
                    "device_ids in each process"
                )


def _failed(statuses: Sequence[int]) -> list[int]:
    """The ranks that failed."""
    return [rank for rank, status in enumerate(statuses) if status == _FAILED]


def _tensors_of_module(module: nn.Module) -> list[_ModuleTensor]:
    """The parameters of a module, then its buffers."""
    sparse = set()
    for layer in module.modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.sparse:
            sparse.add(id(layer.weight))
    tensors: list[_ModuleTensor] = []
    parameters = module.named_parameters()
    for kind, named in ("parameter", parameters), ("buffer", module.named_buffers()):
        for name, tensor in named:
            tensors.append(_ModuleTensor(kind, name, tensor, id(tensor) in sparse))
    return tensors


def _write_bytes(tensor: Tensor, values: Tensor) -> None:
    """Write the elements that ``values`` has as bytes to ``tensor``."""
    # Each place of an expanded tensor once, as torch requires.
    place = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    elements = values.view(tensor.dtype).view(tensor.shape)
    with torch.no_grad():
        write(tensor[place], elements[place])
