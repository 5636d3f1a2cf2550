"""Whole batches of another library's loop, each computed by a replica of its own.

::

    batch       0   1 | 2   3   4   5 | 6
    replica     0   1 | 0   0   1   1 | 0
    group       0   0 | 1   1   1   1 | 2

Replicas compute a group at the same time. Between groups nothing runs, so a replica has
several batches of a group if they are small: ``size``. No batch is divided, and nothing
is joined. If a call writes state, such as a buffer or a counter, the next batch may
depend on it, so no group is computed: ``StateWritten``.

A group with several batches per replica gives what groups with one give. If it fails,
runs out of memory, writes state, or draws random numbers, it is undone, and its first
batches are computed as a group with one per replica::

    batch       0   1 | 2   3   4   5 |       4 draws
    batch       0   1 | 2   3 | 4   5 | 6     what is computed and returned
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.transfers import Prefetcher
from scatterpar.devices.write_counters import versions
from scatterpar.errors import warn
from scatterpar.log import logger
from scatterpar.objects.journal import Journal, host_generators
from scatterpar.objects.savers import Saved, saver_of
from scatterpar.objects.walk import Walk
from scatterpar.plan import make_plan
from scatterpar.replicas.buffers import written_unseen
from scatterpar.replicas.replicas import Replica, parameter_writes_refused
from scatterpar.step.attempt import Attempt
from scatterpar.step.replica_threads import Proceed
from scatterpar.step.request import Request
from scatterpar.step.scatter import copied_together
from scatterpar.step.tries import Try
from scatterpar.threads.workers import Workers

# Between groups replicas wait for each other and for the loop, which takes about 2 ms.
_MAX_BATCHES = 4  # of a replica in a group
_MAX_BYTES = 2**23  # of a replica's batches and results: one large one is enough

_CHANGED = (
    "the module has changed in the middle of an evaluation, such as by a callback; "
    "batches that replicas had computed together were computed with earlier values"
)


class StateWritten(Exception):
    """A call for a batch has written state, so batches depend on each other.

    Nothing of the group is committed.

    Attributes:
        names: those of buffers, and words for what has no name.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


class _Drawn(Exception):
    """A group with several batches per replica has drawn random numbers.

    Nothing of the group is committed.
    """

    def __init__(self) -> None:
        super().__init__("the model draws random numbers")


class BatchGroups:
    """Calls ``function(replica, batch)`` for the batches of one evaluation.

    Within it, the user's values are compared with those of the replicas once. Later
    they are sent again if a version has changed. Calls write nothing of the user's.

    What a call has rebound in its replica, and the versions of tensors, are asked after
    each call, and the random generators of Python and NumPy around each group. Bits of
    buffers, and what replicas share, such as a global list or an object, are compared
    around the first group, and the first one after the module has changed.

    Args:
        function: it runs in the replicas' threads, without gradients.
        begin_attempt: makes the record of a try, whose body is undone if it raises.
        module: the user's.
        device_ids: one entry per replica.
        workers: the threads.

    Attributes:
        devices: those of the last group's results.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        begin_attempt: Callable[[Try], contextlib.AbstractContextManager[Attempt]],
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
        self._states: list[_ReplicaState] = []  # those of the replicas
        # Of what replicas share: before the first group, in which it is compared.
        self._journal: Journal | None = None
        self._is_first = True
        # Whether replicas may have several batches: until a group has drawn, or failed.
        self._may_be_several = True
        self._largest_batch = 0  # in bytes, of all groups
        self._largest_call = 0  # of the last group, a batch with its result
        self.devices: list[torch.device] = []

    @property
    def size(self) -> int:
        """How many batches the next group may have.

        Never by time: what a callback writes to the module counts from the next group
        on.
        """
        number = len(self._device_ids)
        if self._is_first or not self._may_be_several:
            return number
        of_replica = _MAX_BYTES // max(1, self._largest_call)
        return number * max(1, min(_MAX_BATCHES, of_replica))

    def results(self, batches: Sequence[Any]) -> list[Any]:
        """The function's results for the first batches, each on its replica's device.

        They are those of all ``batches``, or of as many as there are replicas. Their
        memory is none that later calls write. If calls fail, nothing of the group is
        committed, and the error of the first batch that failed is raised.

        Args:
            batches: in their order, at most ``size``.

        Raises:
            StateWritten: a call has written state. The next group is a first one.
        """
        first_batches = batches[: len(self._device_ids)]
        # Results of larger batches may be larger than any that was measured.
        if max(map(_bytes_of_batch, batches)) > self._largest_batch:
            batches = first_batches
        if len(batches) > len(first_batches):
            try:
                return self._results_of_all(batches)
            except Exception as error:
                self._may_be_several = False
                logger.info(
                    "several batches per replica: %s; from now on one per replica",
                    error,
                )
        return self._results_of_all(first_batches)

    def _results_of_all(self, batches: Sequence[Any]) -> list[Any]:
        """The results of a group, which has all of ``batches``."""
        plan = make_plan(len(batches), self._device_ids)
        request = Request([], 0, backward=False)
        with (
            self._workers.exclusive(),
            self._begin_attempt(Try(request, plan)) as attempt,
        ):
            with self._refreshed(attempt):
                if self._is_first:
                    self._begin_watch()
                # Those of torch are the replicas' own.
                generators = [*map(_saved, host_generators().values())]
                shares = [batches[each.start : each.stop] for each in plan.shares]
                calls = [*enumerate(shares)]
                work = partial(self._calls, attempt)
                try:
                    of_replicas = attempt.threads.run(work, calls)
                except BaseException:
                    for generator in generators:
                        generator.restore()
                    raise
                outcomes = [*chain.from_iterable(of_replicas)]
            names = {name for outcome in outcomes for name in outcome.written}
            names.update(self._written_by_all())
            for generator in generators:
                if not generator.is_same():
                    names.add(type(generator.value).__name__)
                    generator.restore()
            if names:
                # The user's module gets what the batch writes when it is called.
                self._are_replicas_fresh = False
                self._is_first = True
                raise StateWritten(sorted(names))
            if attempt.generators.drawn:
                if len(batches) > len(self._device_ids):
                    raise _Drawn
                self._may_be_several = False
            self._is_first = False
            attempt.writes.tell()
            attempt.generators.commit()
            results = [outcome.result for outcome in outcomes]
            sizes = [*map(_bytes_of_batch, batches)]
            self._largest_batch = max(self._largest_batch, *sizes)
            of_results = map(_bytes_of_result, results)
            self._largest_call = max(map(sum, zip(sizes, of_results, strict=True)))
            self.devices = []
            for share in plan.shares:
                self.devices += [share.device] * share.rows
            return results

    def _begin_watch(self) -> None:
        """Save what replicas share. Raises ``StateWritten`` if it cannot be saved."""
        # Without the values of parameters, whose writes are refused.
        self._journal = Journal(Walk([self._module]))
        if self._journal.unsaved:
            raise StateWritten(self._journal.unsaved)

    def _written_by_all(self) -> list[str]:
        """What calls of the first group have written of what replicas share, in words.

        It is as before the group afterwards.
        """
        journal = self._journal
        self._journal = None
        if journal is None or journal.is_same():
            return []
        words = journal.moved() or "a tensor"
        journal.restore()
        return [words]

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
            # A hook, for example, may write from now on.
            self._is_first = True
        replicas.refresh(self._module, None, attempt.transfers)
        self._are_replicas_fresh = True
        self._states = [*map(_ReplicaState, replicas.of_model.replicas)]
        return parameter_writes_refused(replicas.replica_sets)

    def _calls(
        self, attempt: Attempt, calls: tuple[int, Sequence[Any]], proceed: Proceed
    ) -> list[_Called]:
        """Call the function for a replica's batches, in its thread.

        Ends at a call that has written state.
        """
        number, batches = calls
        called: list[_Called] = []
        for position, batch in enumerate(batches):
            # A note on an error would call the only batch a sub-step.
            if len(batches) > 1:
                proceed(position)  # raises after an interrupt
            called.append(self._call(attempt, number, batch))
            if called[-1].written:
                break
        return called

    def _call(self, attempt: Attempt, number: int, batch: Any) -> _Called:
        """Call the function for a batch on the replica with this number."""
        replica: Replica = attempt.replicas.of_model.replicas[number]
        # What its last call has written, such as buffers, is none of this call's.
        with torch.inference_mode(False), torch.no_grad():
            replica.refresh()
        sources = {tensor.device for tensor in nested.tensors(batch)}
        copies = Prefetcher(replica.device, sources)
        self._copies.append(copies)
        arrived = copied_together(copies, replica.device, batch, copies_all=True)
        copies.issue(0)
        copies.wait_on_stream(0)
        state = self._states[number]
        state.begin(compares_bits=self._is_first)
        with (
            torch.no_grad(),
            attempt.writes.watched("forward", "inputs", arrived) as watch,
        ):
            result = self._function(replica.root, arrived)
            watch.result = result
        result = nested.map_tensors(state.kept, result)
        return _Called(result, state.written())


class _Called(NamedTuple):
    """What a call for a batch has returned, and left.

    Attributes:
        result: without graphs, in memory that no later call writes.
        written: the names of what it has written, such as buffers.
    """

    result: Any
    written: Sequence[str]


def _saved(generator: Any) -> Saved:
    """A generator with its present state."""
    kind: Any = type(generator)
    saver = saver_of(kind)
    assert saver is not None
    return saver(generator)


def _bytes_of_batch(batch: Any) -> int:
    """The bytes of what is copied of a batch."""
    return sum(tensor.nbytes for tensor in nested.tensors(batch))


def _bytes_of_result(result: Any) -> int:
    """The bytes that a result keeps: of a view, those of the whole storage."""
    sizes: dict[Any, int] = {}  # by the address of the storage
    for number, atom in enumerate(nested.atoms(result)):
        if isinstance(atom, Tensor):
            size = atom.nbytes
            address = _address(atom)
            if address is not None:
                size = atom.untyped_storage().nbytes()
            sizes["address", address or number] = size
        elif type(atom).__module__ == "numpy":
            sizes["number", number] = atom.nbytes
    return sum(sizes.values())


class _ReplicaState:
    """The state of a replica, and what a call has written of it.

    Made when the replica is as refreshed, as it is before each call.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._buffers = dict(replica.root.named_buffers())
        # Replicas in one memory share parameters, and others refuse writes to them.
        self._own = replica.own_tensors()
        self._addresses = set(map(_address, replica.tensors))
        # Before the present call.
        self._versions: list[int] = []
        self._bits: Fingerprints | None = None

    def begin(self, *, compares_bits: bool) -> None:
        """A call begins.

        With ``compares_bits``, tensors are compared by their bits, too, which shows
        writes through ``.data``. The host waits for the device.
        """
        self._versions = versions([*self._own.values()])
        self._bits = None
        if compares_bits:
            self._bits = Fingerprints(self._own, self._replica.device)

    def written(self) -> list[str]:
        """The names of what the call has written."""
        replica = self._replica
        # Mostly nothing was rebound. Then buffers are those of before.
        is_as_refreshed = replica.is_as_refreshed()
        names: list[str] = []
        if not is_as_refreshed:
            names += self._rebound_buffers()
        present = versions([*self._own.values()])
        written: set[int] = set()
        if present != self._versions:
            triples = zip(self._own, present, self._versions, strict=True)
            written = {number for number, now, earlier in triples if now != earlier}
        if self._bits is not None:
            bits = Fingerprints(self._own, replica.device)
            written |= bits.differing_from(self._bits)
        if written:
            names_by_id = {id(buffer): name for name, buffer in self._buffers.items()}
            for number in written:
                names.append(names_by_id.get(id(self._own[number]), "a tensor"))
        # Batch normalisation may record moments in the place of writing them.
        if written_unseen(replica.modules) or any(replica.records.values()):
            names.append("running statistics")
        if not (names or is_as_refreshed or replica.has_equal_values()):
            names.append("an attribute of a module")
        return names

    def _rebound_buffers(self) -> list[str]:
        """The names of buffers that the call has registered, deleted or replaced."""
        after = dict(self._replica.root.named_buffers())
        names = [*(self._buffers.keys() ^ after.keys())]
        for name, buffer in self._buffers.items():
            if name in after and after[name] is not buffer:
                names.append(name)
        return names

    def kept(self, tensor: Tensor) -> Tensor:
        """A tensor of a result, without its graph, in memory that no call writes."""
        tensor = tensor.detach()
        # The module's next call may write an output that is its buffer.
        return tensor.clone() if _address(tensor) in self._addresses else tensor


def _address(tensor: Tensor) -> int | None:
    """Where a tensor is stored; ``None`` for kinds of tensors that do not say so."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None
