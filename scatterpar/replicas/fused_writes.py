"""Count the writes of torch's fused optimizers, which raise no version.

``Adam``, ``AdamW``, ``SGD`` and ``Adagrad`` with ``fused=True`` write parameters in one
kernel, after which ``_version`` is as it was. So copies in other memories would look
current. A hook after each optimizer step raises the versions of the parameters that a
fused group has written, as other optimizers do::

    optimizer.step()                    values are new, versions are not
    hook of all optimizers              versions are new

The hook is process-wide: torch registers none for one class. It acts on parameters that
a live ``Broadcast`` copies to other memories, and on nothing else. It stays registered,
because torch iterates over the hooks while it calls them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class CopiedParameters:
    """The parameters that somebody copies, by ``id``, as long as this object lives."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.ids = frozenset(map(id, parameters))
        _watch_optimizers()
        _copied_parameters.add(self)


_copied_parameters: weakref.WeakSet[CopiedParameters] = weakref.WeakSet()


@functools.cache
def _watch_optimizers() -> RemovableHandle:
    """Register the one hook; later calls do nothing."""
    return register_optimizer_step_post_hook(_count_writes)


def _count_writes(optimizer: Optimizer, *_: Any) -> None:
    copied = list(_copied_parameters)
    # A sharded optimizer has sent the new values to all memories.
    if not copied or getattr(optimizer, "sends_new_values", False):
        return
    written: list[Tensor] = []
    for group in optimizer.param_groups:
        if not group.get("fused"):
            continue
        for parameter in group["params"]:
            # Without a gradient it was not written. Inference tensors count nothing.
            if parameter.grad is None or parameter.is_inference():
                continue
            if any(id(parameter) in of_one.ids for of_one in copied):
                written.append(parameter)
    increment_version(written)
