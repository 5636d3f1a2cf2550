"""Calls of the user's modules in backward passes, such as those of activation
checkpoints, while replicas take turns.

::

    replica 0    call 0    backward 0: a checkpoint calls module.layer again
    replica 1              call 1: module.layer has the tensors of replica 1

Backward passes overlap with calls of other replicas, whose tensors the user's modules
have meanwhile. So such a call goes to the copy of the module that belongs to the
replica whose backward pass it is, unless it is this replica's turn still.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Sequence
from typing import Any

from torch import Tensor, nn

from scatterpar.torch_private.autograd import current_graph_task

# ``replica`` is the one whose backward pass this thread has started.
_present = threading.local()
# By number of the backward pass, for autograd's own threads.
_in_backward: dict[int, Any] = {}


class RoutedCall:
    """What runs the calls of a module in the place of torch's compiler."""

    def __init__(self, calls: CallsInBackward, module: nn.Module) -> None:
        self._calls = calls
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, or the copy of it that a backward pass needs."""
        replica = _replica_in_backward()
        if replica is not None and replica is not self._calls.present:
            return replica.copy_of(self._module)(*args, **kwargs)
        return self._module._call_impl(*args, **kwargs)


class CallsInBackward:
    """Sends calls of ``modules`` in backward passes to the replicas' copies.

    Args:
        modules: the user's.
        compiled: those of them that torch's compiler runs, which would follow the call.

    Attributes:
        present: the replica whose turn it is.
    """

    def __init__(
        self, modules: Sequence[nn.Module], compiled: Container[nn.Module]
    ) -> None:
        self.present: Any = None
        # Made once for each module, so that nothing seems to have changed.
        self._calls: list[tuple[nn.Module, RoutedCall]] = []
        for module in modules:
            if module not in compiled:
                self._calls.append((module, RoutedCall(self, module)))

    def begin(self) -> None:
        """From now on these calls are the replicas'."""
        for module, call in self._calls:
            # A look's journal removes it, and a call may compile a module.
            if module._compiled_call_impl is None:
                vars(module)["_compiled_call_impl"] = call

    def end(self) -> None:
        """The modules are called as before."""
        for module, call in self._calls:
            if module._compiled_call_impl is call:
                del vars(module)["_compiled_call_impl"]


class backward_of:
    """In the body, a backward pass from ``roots`` is that of ``replica``.

    Activation checkpoints call modules in it. (A class, not a ``@contextmanager``: a
    tensor may raise ``StopIteration``.)
    """

    def __init__(self, replica: Any, roots: Sequence[Tensor]) -> None:
        self._replica = replica
        self._roots = roots
        self._task: int | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        self._before = getattr(_present, "replica", None)
        _present.replica = self._replica
        # Backward passes of accelerators run in autograd's threads. A root's hook runs
        # before every node below it.
        for root in self._roots:
            if root.requires_grad and root.device.type != "cpu":
                self._handles.append(root.register_hook(self._note))

    def _note(self, _: Tensor) -> None:
        self._task = current_graph_task()
        _in_backward[self._task] = self._replica

    def __exit__(self, *_: object) -> None:
        _present.replica = self._before
        for handle in self._handles:
            handle.remove()
        if self._task is not None:
            del _in_backward[self._task]


def _replica_in_backward() -> Any:
    """The replica whose backward pass this thread runs; ``None`` outside of one."""
    task = current_graph_task()
    if task == -1:
        return None
    replica = getattr(_present, "replica", None)
    return replica or _in_backward.get(task)
