"""Live bytes of tensors, thread by thread, while operators run."""

import weakref
from typing import Any

from torch import UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operators create in the thread that entered it.

    Attributes:
        live: bytes of the storages that are still alive.
        peak: the most that they were.

    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # Storages of arguments were not created by an operator here.
        for tensor in _tensors((args, kwargs)):
            self._know(tensor.untyped_storage(), created=False)
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._know(tensor.untyped_storage(), created=True)
        return result

    def _know(self, storage: UntypedStorage, *, created: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if created else 0
        self.live += size
        self.peak = max(self.peak, self.live)
        self._known[key] = weakref.ref(storage, lambda _: self._forget(key, size))

    def _forget(self, key: int, size: int) -> None:
        del self._known[key]
        self.live -= size


def _tensors(value: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(value) if hasattr(leaf, "untyped_storage")]
