"""The state of this process that a step may change; restored after each run."""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from scatterpar.objects.journal import Journal
from scatterpar.objects.reach import reachable
from scatterpar.objects.walk import Walk
from scatterpar.threads.interrupts import Interrupts
from scatterpar.threads.process_settings import read_settings, restore_settings

_SINGLETONS = ("PartialState", "AcceleratorState", "GradientState")


class ProcessState:
    """The state of a user's model and step, and of this process.

    - what a ``Journal`` saves: parameters, buffers, attributes, closures, random state;
    - of tensors among these, ``.grad``, hooks, and whether they require grad;
    - optimizers, schedulers and gradient scalers that ``step`` refers to;
    - settings of the process, such as torch's and the environment;
    - accelerate's singletons;
    - a process group that the step has made is destroyed.
    """

    def __init__(self, model: nn.Module, step: Any) -> None:
        if "numpy" in sys.modules:
            # NumPy imports it at its first use, which may be in the step.
            importlib.import_module("numpy.random")
        shared = _singletons()
        of_helpers = [vars(helper) for helper in _training_helpers(step)]
        # A scripted module has them outside of Python.
        tensors = [*model.parameters(), *model.buffers()]
        devices = {tensor.device for tensor in tensors}
        walk = Walk([model, tensors, step, *of_helpers, *shared.values()])
        # All that a step may write, of any size; a look of the engine saves less.
        self._user = Journal(walk, list(devices), guarded=(), max_bytes=math.inf)
        self.tensors = list(walk.tensors.values())
        self._leaves = [_saved_leaf(leaf) for leaf in self.tensors if leaf.is_leaf]
        self._settings = read_settings()
        self._num_threads = torch.get_num_threads()
        self._known_singletons = set(shared)
        # A group that the user has made before is not ours to destroy.
        self._has_group = dist.is_available() and dist.is_initialized()

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Restore everything after the body. Ctrl-C waits until this is done."""
        # The mode is of this thread alone, so it is no setting of the process.
        with torch.set_grad_enabled(torch.is_grad_enabled()):
            try:
                yield
            finally:
                with Interrupts():
                    self._restore()

    def _restore(self) -> None:
        restore_settings(self._settings)
        if torch.get_num_threads() != self._num_threads:
            torch.set_num_threads(self._num_threads)
        for tensor in self.tensors:
            tensor.grad = None  # of another dtype than the restored values
        self._user.restore()
        for leaf, gradient, requires_grad, saved_hooks in self._leaves:
            leaf.requires_grad_(requires_grad)
            pairs = zip(_hook_dictionaries(leaf), saved_hooks, strict=True)
            for hooks, saved in pairs:
                if hooks is not None:
                    hooks.clear()  # torch keeps the dictionary
                    hooks.update(saved or {})
            leaf.grad = gradient
        for name, contents in _singletons().items():
            if name not in self._known_singletons:
                contents.clear()  # the step has imported accelerate
        if dist.is_available() and dist.is_initialized() and not self._has_group:
            dist.destroy_process_group()


class _SavedLeaf(NamedTuple):
    """A leaf tensor, and what it has beside its values."""

    leaf: Tensor
    gradient: Tensor | None
    requires_grad: bool
    hooks: list[Any]


def _saved_leaf(leaf: Tensor) -> _SavedLeaf:
    hooks = [copy.copy(hooks) for hooks in _hook_dictionaries(leaf)]
    return _SavedLeaf(leaf, leaf.grad, leaf.requires_grad, hooks)


def _hook_dictionaries(tensor: Any) -> tuple[Any, Any]:
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def _training_helpers(step: Any) -> list[Any]:
    """The optimizers, schedulers, scalers and accelerators that ``step`` refers to.

    A step may set a rate, or step a schedule, before its optimizer would step. An
    ``Accelerator`` counts micro-batches, and so says when gradients are complete.
    """
    kinds = (Optimizer, LRScheduler, GradScaler, *_accelerator_classes())
    values = reachable(step)
    return [value for value in values if isinstance(value, kinds)]


# --- accelerate ---


def refers_to_accelerator(step: Any) -> bool:
    """Whether ``step`` refers to an ``Accelerator``, which belongs to one process."""
    kinds = _accelerator_classes()
    return any(isinstance(value, kinds) for value in reachable(step))


def _accelerator_classes() -> tuple[type, ...]:
    """``accelerate.Accelerator``; nothing if accelerate is not imported."""
    module = sys.modules.get("accelerate.accelerator")
    return () if module is None else (module.Accelerator,)


def reset_accelerate() -> None:
    """Make accelerate forget which processes there are, after a fork."""
    for shared in _singletons().values():
        shared.clear()


def _singletons() -> dict[str, Any]:
    """The dictionaries that instances of accelerate's singletons share, by class."""
    states = sys.modules.get("accelerate.state")
    if states is None:
        return {}
    return {name: getattr(states, name)._shared_state for name in _SINGLETONS}
