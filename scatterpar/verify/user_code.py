"""The user's code in one look: all that its calls change is restored.

::

    with user_code.isolated():
        …                      # calls
        user_code.restart()    # the state in which the step begins
        …                      # calls

Batch normalisations use their running statistics in the body, because batch statistics
tie rows together.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.causes.batch_normalisation import uses_batch_statistics
from scatterpar.errors import restored
from scatterpar.numerics.comparison import Inconclusive
from scatterpar.numerics.rounding import HALF_PRECISION
from scatterpar.numerics.wider_precision import Precision, WiderLayers
from scatterpar.objects.journal import Journal
from scatterpar.objects.references import module_of
from scatterpar.objects.walk import Walk
from scatterpar.step.call_state import roots_of_batches
from scatterpar.step.criterion_closure import closure_contents
from scatterpar.step.replica_threads import ReplicaNote
from scatterpar.step.request import Request
from scatterpar.step.task import ReplicaTask
from scatterpar.torch_private.compiler import uncompiled
from scatterpar.verify.dropped_messages import records_dropped

_UNSAVED = (
    "Such code is not looked at: use it outside of forward and the criterion, and pass "
    "its values. verify=False does not check."
)


class UserCode:
    """The user's module and criterion, and one replica of them.

    Attributes:
        journals: what user code may change, except in replicas; none before the first
            call.
        has_half_precision: whether a module or the batch is in half precision.
        is_widened: whether calls compute in a wider format than the step.
    """

    def __init__(
        self,
        request: Request,
        own_module: Any,
        task: ReplicaTask,
        guarded: Container[int],
        deadline: float,
        precision: Precision,
    ) -> None:
        """``guarded`` has the ``id`` of parameters that journals do not save.

        After ``deadline``, a time of ``time.monotonic``, calls are inconclusive.
        """
        self._request = request
        self._own_module = own_module
        self._task = task
        self._guarded = guarded
        self._deadline = deadline
        # A refusal needs runs of its own: the second half of the time is for these.
        self._halfway = (time.monotonic() + deadline) / 2
        self._fixed_layers: list[nn.Module] = []
        # Which of the user's parameters require grad.
        self._flags: list[tuple[Tensor, bool]] = []
        halves = WiderLayers(self._layers(), Precision.SINGLE.formats)
        dtypes = {tensor.dtype for tensor in request.batches[0].tensors()}
        has_half_inputs = not dtypes.isdisjoint(HALF_PRECISION)
        self.has_half_precision = halves.size > 0 or has_half_inputs
        wider = WiderLayers(self._layers(), precision.formats)
        self.is_widened = 0 < wider.size <= precision.max_bytes
        self._wider = wider if self.is_widened else WiderLayers((), {})
        # A stack, because a look may end in any of its stages, and in another thread.
        self._undo = contextlib.ExitStack()
        self.journals: list[Journal] = []

    @contextlib.contextmanager
    def isolated(self) -> Iterator[None]:
        """In the body user code may run; afterwards all that it changed is restored.

        Raises:
            Inconclusive: calls may move what cannot be restored.
        """
        with_graph = torch.inference_mode(False)  # also within no_grad
        # Uncompiled, because the sizes of a look would be compiled for it alone.
        where = ReplicaNote(self._task.share)
        with (
            where,
            restored(self.end),
            uncompiled(),
            with_graph,
            records_dropped(),
        ):
            layers = filter(uses_batch_statistics, self._layers())
            self._fixed_layers = [
                layer for layer in layers if layer.running_mean is not None
            ]
            # Before state is saved: the switch is no change of the user's.
            self._undo.callback(self._switch_layers, True)
            self._switch_layers(False)
            # Before state is saved, too, and put back after it.
            self._undo.callback(self._wider.narrow)
            self._wider.widen()
            self._undo.callback(self.reset_replicas)  # after the user's values are back
            self._flags = [
                (leaf, leaf.requires_grad)
                for leaf in self._own_leaves()
                if leaf.is_leaf
            ]
            self._undo.callback(self._restore_flags)
            self._save()
            yield

    def _save(self) -> None:
        request = self._request
        criteria = self._task.criterion, request.criterion, request.count
        modules = [self._own_module, *roots_of_batches(request.batches)]
        device = self._task.share.device
        for roots, devices in ((criteria, [device]), (modules, [])):
            journal = Journal(Walk(roots), devices, guarded=self._guarded)
            self.journals.append(journal)
            self._undo.callback(journal.restore)
            if journal.unsaved:
                why = f"the check could not put back {', '.join(journal.unsaved)}"
                raise Inconclusive(why, patience=1, is_final=True, remedy=_UNSAVED)

    @property
    def of_criterion(self) -> Journal:
        """The state that the criterion may change, and all random generators."""
        return self.journals[0]

    @property
    def has_drawn(self) -> bool:
        """Whether calls have drawn from a generator, until the last ``restart``."""
        return self.of_criterion.drawn

    def _layers(self) -> Iterator[nn.Module]:
        """Yield all layers of the user's modules and of the replica's.

        The user's are the module itself, and those of the criterion.
        """
        criterion = self._request.criterion
        roots = [self._own_module, module_of(criterion), *closure_contents(criterion)]
        roots += [replica.root for replica in self._task.replicas]
        for root in roots:
            if isinstance(root, nn.Module):  # else a partial that binds tensors
                yield from root.modules()

    def _switch_layers(self, is_training: bool) -> None:
        for layer in self._fixed_layers:
            layer.training = is_training

    @contextlib.contextmanager
    def in_evaluation(self) -> Iterator[None]:
        """In the body, calls are those of modules in evaluation mode."""
        layers = self._fixed_layers
        in_training = [layer for layer in self._layers() if layer.training]
        self._fixed_layers = [*layers, *in_training]
        try:
            yield
        finally:
            for layer in in_training:
                layer.training = True
            self._fixed_layers = layers

    def end(self) -> None:
        """Undo everything, once. Calls that still run change nothing any more."""
        # First: a call in another thread must not begin while values go back.
        self._deadline = -math.inf
        self._undo.pop_all().close()

    def lost(self) -> list[tuple[int, ...]]:
        """The shapes of large tensors that user code has written."""
        return [shape for journal in self.journals for shape in journal.lost()]

    def _own_leaves(self) -> Iterator[Tensor]:
        """Yield the parameters of the user's module."""
        if isinstance(self._own_module, nn.Module):
            yield from self._own_module.parameters()

    def _restore_flags(self) -> None:
        """Set which of the user's parameters require grad."""
        for leaf, flag in self._flags:
            if leaf.requires_grad is not flag:
                leaf.requires_grad_(flag)

    def restart(self) -> None:
        """Undo what user code has changed, in replicas, too."""
        for journal in self.journals:
            journal.restore()
        self._restore_flags()
        self.reset_replicas()

    @torch.no_grad()
    def reset_replicas(self) -> None:
        """Undo what user code has changed in replicas."""
        for replica in self._task.replicas:
            replica.reset()
        self._wider.widen()  # a reset puts a replica's tensors back
        self._switch_layers(False)  # a reset copies the user's switches
        torch.clear_autocast_cache()  # it may hold parameters without a graph

    def restore_generators(self) -> None:
        """Let random generators draw the same numbers again."""
        for journal in self.journals:
            journal.rewind()

    def require_time(self) -> None:
        """Raise ``Inconclusive`` after the deadline."""
        if time.monotonic() > self._deadline:
            raise Inconclusive("it takes too long", 2)

    def is_late(self) -> bool:
        """Whether half of the time is over: a refusal needs the other half."""
        return time.monotonic() > self._halfway
