"""Evaluation on all devices: each computes whole batches of the stock loop.

A stock loop computes one batch after the other::

    for batch in loader:
        result = prediction_step(model, batch)

A function of a library computes a group of batches, on all replicas at the same time.
The loop gets their results one by one::

    0 1 2 | 3 4 5 6 7 8 | 9        10 batches on 3 replicas: 3 groups
    ^       ^             ^        replicas compute when the loop asks for these results

The first group has one batch per replica, later ones have several if they are small.

A function of the user's takes turns, batch *i* on device *i* mod N, in the order of the
loop. Kernels of different devices overlap, because the function returns when they are
launched. So does a library's if calls write state, such as a buffer or a counter, which
the next batch may read. What calls write once, such as a table that they make, goes to
the user's module with the first batch, and groups begin again.

``Evaluation`` knows which of both it is, and when that changes.

No batch is divided. So the results are those of the stock loop, whatever it computes:
losses that compare rows, outputs without rows, generated texts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.copies import to_device, write
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.streams import use_device
from scatterpar.devices.transfers import Prefetcher
from scatterpar.devices.virtual_devices import physical
from scatterpar.devices.write_counters import version, versions
from scatterpar.engine import ScatterOnceParallel
from scatterpar.log import logger
from scatterpar.loops.lending import Lending, LentCopies, Loan, ModulePairs
from scatterpar.options.batch_groups import BatchGroups, StateWritten
from scatterpar.replicas.buffers import written_unseen
from scatterpar.threads.generators import drawing_as


class Evaluation:
    """Who computes the batches of one evaluation::

        groups    of a library's function, on all replicas
        a turn    of one batch after a group that has written state; then groups again
        turns     after the second such group; of a function of the user's, always

    A loop asks for ``results`` of a group while ``has_groups``. For a batch without a
    result it calls the function itself, in a turn::

        device = evaluation.next_device()
        with evaluation.turn(device):
            result = function(batch on the device)
        result = evaluation.brought_home(result, device)

    Args:
        engine: has the replicas.
        modules: the user's, which calls may write.
        roots: returns what else calls in turns may write.
        excluded: names of attributes of roots that stay as they are.

    Attributes:
        engine: has the replicas.
        home: the device of results.
    """

    def __init__(
        self,
        engine: ScatterOnceParallel[Any],
        modules: Sequence[nn.Module],
        roots: Callable[[], Iterable[Any]] = tuple,
        excluded: Collection[str] = (),
    ) -> None:
        self.engine = engine
        self.home = engine.device_ids[0]
        self._begin_turns = partial(Turns, engine, modules, roots, excluded)
        self._turns: Turns = self._begin_turns()
        self._groups: BatchGroups | None = None
        self._has_written = False  # whether a group has written state

    def begin_groups(self, function: Callable[[Any, Any], Any]) -> None:
        """Replicas compute groups of batches by ``function(replica, batch)``."""
        self._groups = self.engine.batch_groups(function)

    @property
    def has_groups(self) -> bool:
        """Whether the next batches may be a group."""
        return self._groups is not None

    @property
    def group_size(self) -> int:
        """How many batches the next group may have."""
        assert self._groups is not None
        return self._groups.size

    def results(self, batches: Sequence[Any]) -> list[tuple[Any, torch.device]]:
        """The results of a group, with their devices.

        Returns none if a call has written state, which the next one may read. The first
        batch then has to be computed in a turn. The second time there are no groups any
        more.
        """
        assert self._groups is not None
        try:
            results = self._groups.results(batches)
        except StateWritten as error:
            self._groups.synchronize()
            until = "this batch is"
            if self._has_written:
                self._groups = None
                until = "batches are"
            self._has_written = True
            logger.info(
                "the model writes state in an evaluation (%s): the next batch may "
                "read it, so %s computed alone",
                error,
                until,
            )
            # The batch is computed by the user's module as it is, on its own device.
            self._turns = self._begin_turns()
            return []
        return [*zip(results, self._groups.devices, strict=True)]

    def synchronize(self) -> None:
        """Wait until batches of groups are copied: a loader may write their memory."""
        if self._groups is not None:
            self._groups.synchronize()

    def next_device(self) -> torch.device:
        """The device of the next turn."""
        return self._turns.next_device()

    def turn(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """In the body of the returned context, it is the turn of a batch on ``device``.

        The user's modules have the tensors of the replica there.
        """
        return self._turns.turn(device)

    def brought_home(self, value: Any, device: torch.device) -> Any:
        """``value`` without graphs, its tensors of ``device`` copied to ``home``."""
        return brought_home(value, device, self.home)


class BatchesAhead:
    """A loader that reads batches ahead, if the loop asks for the results of a group.
    It has the loader's attributes.

    Args:
        loader: the stock loader, for example accelerate's.
        prepare: is applied to each batch that is read.

    Attributes:
        batches: those that were read. The loop is at the first one.
        evaluation: computes groups of them; ``None`` before the loop asks for its first
            result.
    """

    def __init__(
        self, loader: Any, prepare: Callable[[Any], Any] | None = None
    ) -> None:
        self.loader = loader
        self._prepare = prepare
        self._unread: Iterator[Any] = iter(())
        self.batches: deque[Any] = deque()
        self.evaluation: Evaluation | None = None
        # Of the first batches: results, and the devices of these.
        self._ready_results: deque[tuple[Any, torch.device]] = deque()
        self._has_result = False  # of the batch at which the loop is
        self._is_at_end = False  # of the loader, after these batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches, one by one."""
        self._is_at_end = False
        self._unread = iter(self.loader)
        try:
            while self.read(1):
                self._has_result = False
                yield self.batches[0]
                # Before it reads: each batch is in memory until the loop has left it.
                self.batches.popleft()
                # The loop may have left the batch out.
                if self._ready_results and not self._has_result:
                    self._ready_results.popleft()
        finally:
            self._unread = iter(())
            self.batches.clear()
            self._ready_results.clear()

    def has(self, batch: Any) -> bool:
        """Whether the loop is at this batch, and has not had its result."""
        return bool(self.batches) and self.batches[0] is batch and not self._has_result

    def read(self, number: int) -> Sequence[Any]:
        """The batch at which the loop is, and the next ones: ``number``, or fewer at
        the loader's end.
        """
        if self.evaluation is not None and len(self.batches) < number:
            self.evaluation.synchronize()
        # accelerate's loader says so before its last batch. To ask for one more ends
        # its iteration, which must not be before the loop has had the batch.
        while len(self.batches) < number and not (self._is_at_end and self.batches):
            try:
                batch = next(self._unread)
            except StopIteration:
                break
            if self._prepare is not None:
                batch = self._prepare(batch)
            self.batches.append(batch)
            self._is_at_end = bool(getattr(self.loader, "end_of_dataloader", False))
        if self._is_at_end:  # the loop asks whether it is at the last batch
            self.loader.end_of_dataloader = len(self.batches) == 1
        return list(islice(self.batches, number))

    def result(self, inputs: Sequence[Any] | None = None) -> Any:
        """The result of the batch at which the loop is, on the first device; ``None``
        if it has to be computed in a turn.

        If it is the first batch of a group, all of the group's are computed.

        Args:
            inputs: what replicas get for a group, in the place of its batches.
        """
        evaluation = self.evaluation
        assert evaluation is not None
        if not self._ready_results:
            if not evaluation.has_groups:
                return None
            group = inputs
            if group is None:
                group = self.read(evaluation.group_size)
            self._ready_results.extend(evaluation.results(group))
            if not self._ready_results:
                return None
        self._has_result = True
        # Results are large: each is dropped once the loop has it.
        return evaluation.brought_home(*self._ready_results.popleft())

    def begin(self, evaluation: Evaluation) -> None:
        """From the batch on at which the loop is, ``evaluation`` has its results."""
        self.evaluation = evaluation
        self._ready_results.clear()

    @property
    def is_at_group(self) -> bool:
        """Whether the batch at which the loop is begins a group."""
        return not self._ready_results


class Turns:
    """Turns of a function in an evaluation: batch *i* on device *i* mod N.

    In a turn, the user's own modules have the tensors of the replica on its device.
    Modules stay the user's, because calls may write them.

    Args:
        engine: has the replicas.
        modules: the user's, which calls may write.
        roots: returns what else calls may write.
        excluded: names of attributes of roots that stay as they are.
    """

    def __init__(
        self,
        engine: ScatterOnceParallel[Any],
        modules: Sequence[nn.Module],
        roots: Callable[[], Iterable[Any]],
        excluded: Collection[str],
    ) -> None:
        self._modules = modules
        self._roots = roots
        self._excluded = excluded
        self._values = ReplicaValues(engine, modules)
        # Searches what calls may write once, and later what they have changed.
        self._lending: Lending | None = None
        self._parts: list[nn.Module] = []
        self._copies = LentCopies()
        self._number = 0  # of the next batch
        # Two replicas on one device would only wait for each other.
        self._devices = list(dict.fromkeys(engine.device_ids))

    def next_device(self) -> torch.device:
        """The device of the next batch."""
        device = self._devices[self._number % len(self._devices)]
        self._number += 1
        return device

    def turn(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """In the body of the returned context, it is the turn of a batch on ``device``.

        On the first device the user's modules have their own tensors.
        """
        if len(self._devices) == 1:
            return contextlib.nullcontext()
        self._values.begin()
        if device == self._devices[0]:
            return self._values.watched()
        return self._lent(device)

    @contextlib.contextmanager
    def _lent(self, device: torch.device) -> Iterator[None]:
        """In the body, the modules have the tensors of the replica on ``device``."""
        home = physical(self._devices[0])
        away = physical(device)
        lending = self._present_lending(home)
        try:
            with (
                self._values.lent(device) as pairs,
                use_device(away, ()),
                drawing_as(home, away),
                _gradients_lent(pairs, away, home),
                lending.lent(Loan(pairs), away),
            ):
                yield
        finally:
            lending.forget_variables()

    def _present_lending(self, home: torch.device) -> Lending:
        """Lends what the modules lead to; other modules may have come since."""
        parts = _parts_of(self._modules)
        is_same = len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        if self._lending is None or not is_same:
            self._parts = parts
            self._lending = Lending(
                lambda: [*self._roots(), *parts],
                self._excluded,
                home,
                lambda: _optimizers_of([*self._roots(), *parts]),
                copies=self._copies,
            )
        return self._lending


class ReplicaValues:
    """The values of the user's tensors, on each device of an evaluation in turns.

    Replicas get all values before the first turn, and later those whose versions have
    changed. What is written without a version, as through ``.data``, is compared by its
    bits in the first call, for which the host waits, and copied in all later ones.

    Args:
        engine: has the replicas.
        modules: the user's, which calls may write.
    """

    def __init__(
        self, engine: ScatterOnceParallel[Any], modules: Sequence[nn.Module]
    ) -> None:
        self._engine = engine
        self._modules = modules
        self._home = engine.device_ids[0]
        self._replicas: dict[torch.device, nn.Module] = {}
        self._tensors: list[Tensor] = []  # the user's, of which replicas were made
        # By device, the versions of these tensors whose values it has.
        self._sent: dict[torch.device, list[int]] = {}
        # Those that calls write without a version, by ``id``; whether this was asked.
        self._unseen: set[int] = set()
        self._is_compared = False

    def begin(self) -> None:
        """Before the first batch, for which the host would wait when it reads values,
        replicas get them.
        """
        if not self._replicas:
            self._refresh()

    def _refresh(self) -> None:
        """Give all replicas the values of the user's tensors."""
        device_ids = self._engine.device_ids
        replicas = zip(device_ids, self._engine.replicas, strict=True)
        self._replicas = dict(reversed([*replicas]))  # the first of each device
        self._tensors = [tensor for tensor, _ in self._pairs_on(device_ids[-1])]
        self._sent = dict.fromkeys(device_ids, versions(self._tensors))

    @contextlib.contextmanager
    def lent(self, device: torch.device) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield pairs of the user's tensors, and those of the replica on ``device``.

        These have the user's values and flags in the body, and the user's have theirs
        afterwards.
        """
        pairs = self._sent_to(device)
        copies = [copied for _, copied in pairs]
        before = versions(copies)
        flags = [copied.requires_grad for copied in copies]
        try:
            yield pairs
        finally:
            unseen = self._written_unseen()
            with torch.no_grad():
                for (tensor, copied), earlier in zip(pairs, before, strict=True):
                    if version(copied) != earlier or id(tensor) in unseen:
                        write(tensor, copied)
            for (tensor, copied), flag in zip(pairs, flags, strict=True):
                if copied.requires_grad is not flag:
                    _set_trained(tensor, copied.requires_grad)
            self._sent[device] = versions(self._tensors)

    def _sent_to(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Pairs of the user's tensors, and those of the replica on ``device``, which
        has their values.
        """
        pairs = self._pairs_on(device)
        if not self._are_current(pairs):
            self._refresh()
            return self._pairs_on(device)
        present = versions(self._tensors)
        sent = self._sent[device]
        unseen = self._written_unseen()
        with torch.no_grad():
            for number, (tensor, copied) in enumerate(pairs):
                if present[number] != sent[number] or id(tensor) in unseen:
                    write(copied, tensor)
                if copied.requires_grad is not tensor.requires_grad:
                    _set_trained(copied, tensor.requires_grad)
        return pairs

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In the body, a call may write the user's own tensors.

        In the first call their bits are compared.
        """
        if self._is_compared:
            yield
            return
        self._is_compared = True
        counts = versions(self._tensors)
        before = self._fingerprints()
        try:
            yield
        finally:
            present = versions(self._tensors)
            for number in self._fingerprints().differing_from(before):
                if counts[number] == present[number]:
                    self._unseen.add(id(self._tensors[number]))

    def _fingerprints(self) -> Fingerprints:
        compared: dict[int, Tensor] = {}
        for number, tensor in enumerate(self._tensors):
            if tensor.layout is torch.strided:
                compared[number] = tensor.detach()
        with torch.no_grad():
            return Fingerprints(compared, self._home)

    def _written_unseen(self) -> set[int]:
        """The ``id`` of the user's tensors that calls write without a version."""
        return self._unseen.union(map(id, written_unseen(_parts_of(self._modules))))

    def _pairs_on(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Pairs of the user's tensors, and those of the replica on ``device``."""
        return ModulePairs([(self._engine.module, self._replicas[device])]).tensors

    def _are_current(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether replicas were made of the tensors that the user's modules have."""
        if len(pairs) != len(self._tensors):
            return False
        return all(
            tensor is known and tensor.shape == copied.shape
            for (tensor, copied), known in zip(pairs, self._tensors, strict=True)
        )


def _parts_of(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules in ``modules``, as often as they are there."""
    return [part for module in modules for part in module.modules()]


def _optimizers_of(roots: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers that are attributes of roots, such as of test-time training."""
    optimizers: list[torch.optim.Optimizer] = []
    for root in roots:
        for value in getattr(root, "__dict__", {}).values():
            if isinstance(value, torch.optim.Optimizer):
                optimizers.append(value)
    return optimizers


@contextlib.contextmanager
def _gradients_lent(
    pairs: Sequence[tuple[Tensor, Tensor]], device: torch.device, home: torch.device
) -> Iterator[None]:
    """In the body, copies in ``pairs`` have the gradients of the user's tensors."""
    # Copied in each call, so not where no call has a backward pass.
    if torch.is_inference_mode_enabled():
        yield
        return
    counts: dict[int, int] = {}  # versions of what was lent, by its ``id``
    for tensor, copied in pairs:
        if tensor.is_leaf and tensor.grad is not None:
            copied.grad = to_device(tensor.grad, device, copy=True)
            counts[id(copied.grad)] = version(copied.grad)
    try:
        yield
    finally:
        for tensor, copied in pairs:
            left = copied.grad if copied.is_leaf else None
            if left is not None:
                copied.grad = None  # a step of the engine would add to it
                if counts.get(id(left)) != version(left):
                    tensor.grad = to_device(left, home)
            elif tensor.is_leaf:
                tensor.grad = None


def _set_trained(tensor: Tensor, flag: bool) -> None:
    """Set whether a tensor requires grad, if it can be set."""
    if tensor.is_leaf and not tensor.is_inference():
        tensor.requires_grad_(flag)


def brought_home(value: Any, device: torch.device, home: torch.device) -> Any:
    """``value`` without graphs, its tensors of ``device`` copied to ``home``.

    Copies run on streams of their own, so that no device waits for another one before
    it computes its next batch. Work that is launched on ``home`` later waits for them.
    """
    if device == home:
        return nested.map_tensors(Tensor.detach, value)
    copies = Prefetcher(home, [physical(device)])

    def at_home(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        # A tensor that a function has left on the host, or on another device, stays.
        is_moved = tensor.device == physical(device)
        return copies.copy(tensor, home, "compute") if is_moved else tensor

    value = nested.map_tensors(at_home, value)
    copies.issue(0)
    copies.wait_on_stream(0)
    return value
