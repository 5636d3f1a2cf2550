"""Whole batches of another library's loop, each computed by a replica of its own.

::

    batch       0   1   2   3   4
    replica     0   1   0   1   0
    group       0   0   1   1   2

The batches of a group are computed at the same time. Between groups nothing runs. No
batch is divided, and nothing is joined. If a call writes a buffer, the next batch may
depend on it, so no group is computed: ``BuffersWritten``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.transfers import Prefetcher
from scatterpar.devices.write_counters import version, versions
from scatterpar.errors import warn
from scatterpar.plan import Plan, make_plan
from scatterpar.replicas.buffers import written_unseen
from scatterpar.replicas.replicas import Replica, parameter_writes_refused
from scatterpar.step.attempt import WHOLE_STEP, Attempt, Extent
from scatterpar.step.replica_threads import Proceed
from scatterpar.step.request import Request
from scatterpar.step.scatter import moved_together
from scatterpar.threads.workers import Workers

_CHANGED = (
    "the module has changed in the middle of an evaluation, such as by a callback; "
    "batches that replicas had computed together were computed with earlier values"
)


class BuffersWritten(Exception):
    """A call for a batch has written buffers, so batches depend on each other.

    Nothing of the group is committed.

    Attributes:
        names: those of the buffers.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class BatchGroups:
    """Calls ``function(replica, batch)`` for the batches of one evaluation.

    Within it, the user's values are compared with those of the replicas once. Later
    they are sent again if a version has changed. Calls write nothing of the user's.

    Args:
        function: it runs in the replicas' threads, without gradients.
        begin_attempt: makes the record of a try, whose body is undone if it raises.
        module: the user's.
        device_ids: one entry per replica.
        workers: the threads.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        begin_attempt: Callable[
            [Request, Plan, Extent], contextlib.AbstractContextManager[Attempt]
        ],
        module: nn.Module,
        device_ids: Sequence[torch.device],
        workers: Workers,
    ) -> None:
        self._function = function
        self._begin_attempt = begin_attempt
        self._module = module
        self._device_ids = device_ids
        self._workers = workers
        self._copies: list[Prefetcher] = []  # of the last group's batches
        self._are_replicas_fresh = False  # whether they have had the user's values
        # By replica, where its parameters and buffers are stored.
        self._addresses: dict[int, set[int | None]] = {}

    def results(self, batches: Sequence[Any]) -> list[Any]:
        """The function's results for a group, each on its replica's device.

        Their memory is none that later calls write. If calls fail, nothing of the group
        is committed, and the error of the first batch that failed is raised.

        Args:
            batches: one for each of the first replicas.

        Raises:
            BuffersWritten: a call has written buffers.
        """
        plan = make_plan(len(batches), self._device_ids)
        request = Request([], 0, backward=False)
        with (
            self._workers.exclusive(),
            self._begin_attempt(request, plan, WHOLE_STEP) as attempt,
        ):
            with self._refreshed(attempt):
                calls = [*enumerate(batches)]
                outcomes = attempt.threads.run(partial(self._call, attempt), calls)
            names = [name for _, written in outcomes for name in written]
            if names:
                raise BuffersWritten(sorted(set(names)))
            attempt.generators.commit()
            return [result for result, _ in outcomes]

    def synchronize(self) -> None:
        """Wait until the last group's batches are copied. They may change then."""
        for copies in self._copies:
            copies.synchronize()
        self._copies = []

    def _refreshed(self, attempt: Attempt) -> contextlib.AbstractContextManager[None]:
        """Give replicas the user's values, if they may have others.

        Returns a context for the calls, in which the first ones with these values may
        write no parameter.
        """
        replicas = attempt.replicas
        # Versions are cheap to ask for, and enough: in a loop's evaluation nobody
        # writes through ``.data``.
        if self._are_replicas_fresh:
            if replicas.of_model.is_current():
                return contextlib.nullcontext()
            warn(_CHANGED)
        replicas.refresh(self._module, None, attempt.transfers)
        self._are_replicas_fresh = True
        self._addresses = {
            number: set(map(_address, replica.tensors))
            for number, replica in enumerate(replicas.of_model.replicas)
        }
        return parameter_writes_refused(replicas.replica_sets)

    def _call(
        self, attempt: Attempt, call: tuple[int, Any], _: Proceed
    ) -> tuple[Any, list[str]]:
        """Call the function for a batch, in the thread of its replica.

        Returns its result, and the names of the buffers that the call has written.
        """
        number, batch = call
        replica: Replica = attempt.replicas.of_model.replicas[number]
        # What its last call has written, such as buffers, is none of this call's.
        with torch.inference_mode(False), torch.no_grad():
            replica.refresh()
        sources = {tensor.device for tensor in nested.tensors(batch)}
        copies = Prefetcher(replica.device, sources)
        self._copies.append(copies)
        arrived = moved_together(copies, replica.device, batch, copies_all=True)
        copies.issue(0)
        copies.wait_on_stream(0)
        before = dict(replica.root.named_buffers())
        counts = versions([*before.values()])
        with torch.no_grad():
            result = self._function(replica.root, arrived)
        names = _written(replica, before, counts)
        written = self._addresses[number]

        def kept(tensor: Tensor) -> Tensor:
            tensor = tensor.detach()
            # The module's next call may write an output that is its buffer.
            return tensor.clone() if _address(tensor) in written else tensor

        return nested.map_tensors(kept, result), names


def _written(
    replica: Replica, before: Mapping[str, Tensor], counts: Sequence[int]
) -> list[str]:
    """The names of the buffers that a call has written, or bound to other tensors."""
    after = dict(replica.root.named_buffers())
    names = [*(before.keys() ^ after.keys())]
    for (name, buffer), count in zip(before.items(), counts, strict=True):
        if name in after and (after[name] is not buffer or version(buffer) != count):
            names.append(name)
    # Batch normalisation may record moments in the place of writing them.
    if written_unseen(replica.modules) or any(replica.records.values()):
        names.append("running statistics")
    return names


def _address(tensor: Tensor) -> int | None:
    """Where a tensor is stored; ``None`` for kinds of tensors that do not say so."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None
