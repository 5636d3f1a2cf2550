"""Which modules a backward pass calls, such as activation checkpoints do.

Replicas that take turns call the user's function one at a time, and their backward
passes overlap. A backward pass that calls modules again may disturb the call of another
replica, in two cases:

- the module is the user's own: it was reached by an object that has a replica's modules
  during calls, and has them no longer, or another replica's;
- it has hooks, which may write what a call reads.

So may one that writes the replica's buffers or attributes: calls hand these on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from scatterpar.devices.write_counters import versions
from scatterpar.objects.snapshot import Snapshot
from scatterpar.replicas.replicas import Replica


class BackwardCalls:
    """In the body, a backward pass runs; notes the modules that it calls.

    Autograd may call them in threads of its own.

    Attributes:
        calls_modules: whether it has called any module.
        disturbs: whether it has called one in a way that may disturb another replica.
    """

    def __init__(
        self, modules_of_user: Iterable[nn.Module], replicas: Sequence[Replica] = ()
    ) -> None:
        self._replicas = replicas
        self.calls_modules = False
        self.disturbs = False
        # By id: the class of a module may define what is equal.
        self._modules_of_user = {*map(id, modules_of_user)}

    def note_unknown(self) -> None:
        """A backward pass cannot be looked at: it may call anything."""
        self.calls_modules = True
        self.disturbs = True

    def _note(self, module: nn.Module, _: Any) -> None:
        self.calls_modules = True
        # A hook may write an object that all replicas share.
        has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
        # A kernel writes running statistics, and no version counts it.
        writes = False
        if isinstance(module, nn.modules.batchnorm._NormBase):
            writes = bool(module.track_running_stats)
        self.disturbs |= has_hooks or writes or id(module) in self._modules_of_user

    def __enter__(self) -> None:
        # A global hook, because checkpoints call modules that nobody has listed.
        self._handle = register_module_forward_pre_hook(self._note)
        containers = [each for replica in self._replicas for each in replica.containers]
        self._contents = Snapshot(containers)
        self._versions = self._versions_now()

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        is_same = self._contents.unchanged() and self._versions == self._versions_now()
        self.disturbs |= self.calls_modules and not is_same

    def _versions_now(self) -> list[int]:
        return [v for replica in self._replicas for v in versions(replica.tensors)]
