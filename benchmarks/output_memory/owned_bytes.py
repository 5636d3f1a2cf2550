"""Live bytes of tensors, memory by memory, on virtual devices."""

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from scatterpar.devices import runtime
from scatterpar.devices.transfers import Transfers


class Memories:
    """Which memory every storage belongs to, and the bytes that are alive in each.

    What is made on a replica's worker belongs to the replica's memory, what the transfers copies to
    where it was sent. The backward pass of CPU replicas runs in the caller's thread: there a
    result belongs to the memory of its largest operand, as a GPU's would.
    """

    def __init__(self, master: torch.device) -> None:
        self.master = master
        self.now: Counter[torch.device] = Counter()
        self.peak: dict[torch.device, int] = {}
        self._owners: dict[int, torch.device] = {}
        self._lock = threading.RLock()  # a finalizer may run while it is held

    def claim(self, values: Any, memory: torch.device) -> None:
        """Count the storages among ``values`` that nobody has claimed yet as ``memory``'s."""
        with self._lock:
            for tensor in _tensors(values):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._owners:
                    self._owners[key] = memory
                    self.now[memory] += storage.nbytes()
                    self.peak[memory] = max(self.peak.get(memory, 0), self.now[memory])
                    weakref.finalize(storage, self._free, key, memory, storage.nbytes())

    def owner(self, values: Any) -> torch.device:
        """The memory of the largest tensor among ``values``; the master's, if nobody knows."""
        largest = max(_tensors(values), key=Tensor.numel, default=None)
        if largest is None:
            return self.master
        return self._owners.get(largest.untyped_storage()._cdata, self.master)

    def _free(self, key: int, memory: torch.device, size: int) -> None:
        with self._lock:
            del self._owners[key]
            self.now[memory] -= size


class Meter(TorchDispatchMode):
    """Claims what the operators of one thread make: for ``here``, or where their operands are."""

    def __init__(self, memories: Memories, here: torch.device | None = None) -> None:
        super().__init__()
        self.memories, self.here = memories, here

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        memory = self.here or self.memories.owner((args, kwargs))
        result = function(*args, **kwargs)
        self.memories.claim(result, memory)
        return result


@contextlib.contextmanager
def metered(master: torch.device) -> Iterator[Memories]:
    """Count what is made in the body, in the caller's thread and in every worker's."""
    memories = Memories(master)
    on, empty, copy = runtime.use_device, runtime.empty, Transfers.copy

    @contextlib.contextmanager
    def metered_on(device: torch.device, stream: Any) -> Iterator[None]:
        with on(device, stream), Meter(memories, device):
            yield

    def claimed_empty(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        with Meter(memories, device):
            return empty(size, dtype, device)

    def claimed_copy(self: Transfers, tensor: Tensor, device: torch.device, phase: str) -> Tensor:
        with torch._C._DisableTorchDispatch():  # the caller's meter would claim it
            result = copy(self, tensor, device, phase)
        memories.claim(result, device)
        return result

    with (
        mock.patch.object(runtime, "use_device", metered_on),
        mock.patch.object(runtime, "empty", claimed_empty),
        mock.patch.object(Transfers, "copy", claimed_copy),
        Meter(memories),
    ):
        yield memories


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
