"""Find the modules that a backward pass calls, as activation checkpoints do.

Replicas that take turns call the user's function one at a time, and their backward
passes overlap. A backward pass that calls modules again may disturb the call of another
replica, in two cases:

- the module is the user's own: it was reached by an object that has a replica's modules
  during calls, and has them no longer, or another replica's;
- it has hooks, which may write what a call reads.

So may one that writes the replica's buffers or attributes: calls hand these on.

A function of the user's that autograd calls, such as a hook on a tensor, may read what
the next call writes, or write what it reads. ``backward`` of an ``autograd.Function``
may if its ``ctx`` has an object of the user's.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.autograd import function, graph
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils import hooks

from scatterpar.devices.write_counters import versions
from scatterpar.libraries import is_library_file
from scatterpar.objects.snapshot import Snapshot
from scatterpar.objects.whose import is_user_class
from scatterpar.replicas.replicas import Replica

# Where torch calls hooks on tensors and on nodes, and those of modules.
_CALLERS = {graph.__file__, hooks.__file__}


class BackwardCalls:
    """In the body, a backward pass runs; notes the modules that it calls.

    Autograd may call them in threads of its own.

    Attributes:
        calls_modules: whether it has called any module.
        disturbs: whether it has called one in a way that may disturb another replica,
            or a function of the user's.
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

    def _note_frame(self, frame: types.FrameType, event: str, _: Any) -> None:
        """Note a function of the user's that autograd, or torch's hook, calls."""
        caller = frame.f_back
        if event != "call" or caller is None:
            return
        file = caller.f_code.co_filename
        is_of_user = not is_library_file(frame.f_code.co_filename)
        if is_of_user and file in _CALLERS:
            self.disturbs = True
        if is_of_user and file == function.__file__:
            context = next(iter(frame.f_locals.values()), None)
            self.disturbs |= _leads_to_objects(context)

    def __enter__(self) -> None:
        # A global hook, because checkpoints call modules that nobody has listed.
        self._handle = register_module_forward_pre_hook(self._note)
        # A profiler of the user's is left alone.
        self._profiles = sys.getprofile() is None
        if self._profiles:
            sys.setprofile(self._note_frame)
        containers = [each for replica in self._replicas for each in replica.containers]
        self._contents = Snapshot(containers)
        self._versions = self._versions_now()

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        if self._profiles:
            sys.setprofile(None)
        is_same = self._contents.unchanged() and self._versions == self._versions_now()
        self.disturbs |= self.calls_modules and not is_same

    def _versions_now(self) -> list[int]:
        return [v for replica in self._replicas for v in versions(replica.tensors)]


def _leads_to_objects(context: Any) -> bool:
    """Whether the ``ctx`` of an ``autograd.Function`` has modules, or objects of the
    user's.
    """
    values = getattr(context, "__dict__", {}).values()
    return any(isinstance(v, nn.Module) or is_user_class(type(v)) for v in values)
