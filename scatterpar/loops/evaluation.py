"""Evaluation on all devices: each computes whole batches of the stock loop.

A stock loop computes one batch after the other::

    for batch in loader:
        result = prediction_step(model, batch)

A function of a library computes a group of batches, one per replica, at the same time.
The loop gets their results one by one::

    0 1 2 | 3 4 5 | 6        7 batches on 3 replicas: 3 groups
    ^       ^       ^        replicas compute when the loop asks for these results

A function of the user's takes turns, batch *i* on device *i* mod N, in the order of the
loop. Kernels of different devices overlap, because the function returns when they are
launched. So does a library's if calls write state, such as a buffer or a counter, which
the next batch may read. What calls write once, such as a table that they make, goes to
the user's module with the first batch, and groups begin again.

No batch is divided. So the results are those of the stock loop, whatever it computes:
losses that compare rows, outputs without rows, generated texts.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.batch import nested
from scatterpar.devices.device_ids import physical
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.streams import use_device
from scatterpar.devices.transfers import Prefetcher, to_device, write
from scatterpar.devices.write_counters import version, versions
from scatterpar.engine import ScatterOnceParallel
from scatterpar.log import logger
from scatterpar.loops.lending import Lending, LentCopies, Loan, Parts
from scatterpar.options.batch_groups import BatchGroups, StateWritten
from scatterpar.replicas.buffers import written_unseen
from scatterpar.threads.generators import drawing_as


class BatchesAhead:
    """A loader that reads batches ahead, if the loop asks for the results of a group.
    It has the loader's attributes.

    Args:
        loader: the stock loader, for example accelerate's.
        devices: those of the replicas.
        prepare: is applied to each batch that is read.

    Attributes:
        batches: those that were read. The loop is at the first one.
        groups: computes groups of them.
        turns: those of the user's function, in the place of groups. Both are ``None``
            before the loop asks for its first result.
    """

    def __init__(
        self,
        loader: Any,
        devices: Sequence[torch.device],
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        self.loader = loader
        self._devices = devices
        self._prepare = prepare
        self._unread: Iterator[Any] = iter(())
        self.batches: deque[Any] = deque()
        self.groups: BatchGroups | None = None
        self.turns: Turns | None = None
        # Of the first batches: results, and the devices of these.
        self._ready_results: deque[tuple[Any, torch.device]] = deque()
        self._has_result = False  # of the batch at which the loop is
        self._has_written = False  # whether a group has written state
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
        if self.groups is not None and len(self.batches) < number:
            # A loader may write the memory of earlier batches.
            self.groups.synchronize()
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
        """The result of the batch at which the loop is, on the first device.

        If it is the first batch of a group, all of the group's are computed.

        Args:
            inputs: what replicas get for a group, in the place of its batches.

        Raises:
            StateWritten: a call has written state, and the batch has no result. The
                second time there are no groups any more.
        """
        if not self._ready_results:
            assert self.groups is not None
            group = self.read(len(self._devices)) if inputs is None else inputs
            try:
                results = self.groups.results(group)
            except StateWritten as error:
                self.groups.synchronize()
                until = "this batch is"
                if self._has_written:
                    self.groups = None
                    until = "batches are"
                self._has_written = True
                logger.info(
                    "the model writes state in an evaluation (%s): the next batch may "
                    "read it, so %s computed alone",
                    error,
                    until,
                )
                raise
            self._ready_results.extend(zip(results, self._devices, strict=False))
        self._has_result = True
        # Results are large: each is dropped once the loop has it.
        result, device = self._ready_results.popleft()
        return brought_home(result, device, self._devices[0])

    def begin_groups(self, groups: BatchGroups) -> None:
        """From the batch on at which the loop is, ``groups`` computes the results."""
        self.groups = groups
        self._ready_results.clear()

    @property
    def is_at_group(self) -> bool:
        """Whether the batch at which the loop is begins a group."""
        return not self._ready_results


class Turns:
    """Turns of a user's function in an evaluation: batch *i* on device *i* mod N.

    In a turn, the user's own modules have the tensors of the replica on its device.
    Modules stay the user's, because calls may write them. Replicas get all values
    before the first turn, and later those whose versions have changed.

    Args:
        engine: has the replicas.
        modules: the user's, in the order of the replicas' modules.
        roots: returns what else calls may write.
        excluded: names of attributes of roots that stay as they are.

    Attributes:
        devices: those of the turns. Two replicas on one device would only wait for each
            other.
    """

    def __init__(
        self,
        engine: ScatterOnceParallel[Any],
        modules: Sequence[nn.Module],
        roots: Callable[[], Iterable[Any]],
        excluded: Collection[str],
    ) -> None:
        self._engine = engine
        self._modules = modules
        self._roots = roots
        self._excluded = excluded
        # Searches what calls may write once, and later what they have changed.
        self._lending: Lending | None = None
        self._parts: list[nn.Module] = []
        self._copies = LentCopies()
        self._number = 0  # of the next batch
        self.devices = list(dict.fromkeys(engine.device_ids))
        self._replicas: dict[torch.device, nn.Module] = {}
        self._tensors: list[Tensor] = []  # the user's, of which replicas were made
        # By device, the versions of these tensors whose values it has.
        self._sent: dict[torch.device, list[int]] = {}
        # Those that calls write without a version, by ``id``; whether this was asked.
        self._unseen: set[int] = set()
        self._is_compared = False

    def next_device(self) -> torch.device:
        """The device of the next batch."""
        device = self.devices[self._number % len(self.devices)]
        self._number += 1
        return device

    def turn(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        """In the body of the returned context, it is the turn of a batch on ``device``.

        On the first device the user's modules have their own tensors.
        """
        # Before the first batch, for which the host would wait when it reads values.
        if not self._replicas and len(self.devices) > 1:
            self._refresh()
        if device == self.devices[0]:
            is_first = self._replicas and not self._is_compared
            return self._compared() if is_first else contextlib.nullcontext()
        return self._lent(self._refreshed(device), device)

    @contextlib.contextmanager
    def _lent(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        device: torch.device,
    ) -> Iterator[None]:
        """In the body, the modules have the copies in ``pairs``."""
        home = physical(self.devices[0])
        away = physical(device)
        lending = self._present_lending(home)
        copies = [copied for _, copied in pairs]
        before = versions(copies)
        flags = [copied.requires_grad for copied in copies]
        try:
            with (
                use_device(away, ()),
                drawing_as(home, away),
                _gradients_lent(pairs, away, home),
                lending.lent(Loan(pairs), away),
            ):
                yield
        finally:
            lending.forget_variables()
            unseen = self._written_unseen()
            with torch.no_grad():
                for (tensor, copied), earlier in zip(pairs, before, strict=True):
                    if version(copied) != earlier or id(tensor) in unseen:
                        write(tensor, copied)
            for (tensor, copied), flag in zip(pairs, flags, strict=True):
                if copied.requires_grad is not flag:
                    _set_trained(tensor, copied.requires_grad)
            self._sent[device] = versions(self._tensors)

    @contextlib.contextmanager
    def _compared(self) -> Iterator[None]:
        """In the body, the first call of the evaluation may write the user's tensors.

        Their bits are compared. What is written without a version, as through
        ``.data``, is so in later calls, too.
        """
        # Once: the host waits for the device.
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
            return Fingerprints(compared, self.devices[0])

    def _present_lending(self, home: torch.device) -> Lending:
        """Lends what the modules lead to; other modules may have come since."""
        parts = [part for module in self._modules for part in module.modules()]
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

    def _refresh(self) -> None:
        """Give all replicas the values of the user's tensors."""
        replicas = zip(self._engine.device_ids, self._engine.replicas, strict=True)
        self._replicas = dict(reversed([*replicas]))  # the first of each device
        self._tensors = [tensor for tensor, _ in self._pairs_on(self.devices[-1])]
        self._sent = dict.fromkeys(self.devices, versions(self._tensors))

    def _refreshed(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Pairs of the user's tensors, and those of the replica on ``device``, which
        has their values afterwards.
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

    def _written_unseen(self) -> set[int]:
        """The ``id`` of the user's tensors that calls write without a version."""
        parts = [part for module in self._modules for part in module.modules()]
        return self._unseen.union(map(id, written_unseen(parts)))

    def _pairs_on(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Pairs of the user's tensors, and those of the replica on ``device``."""
        modules = self._replicas[device].children()
        return Parts(zip(self._modules, modules, strict=True)).tensors

    def _are_current(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Whether replicas were made of the tensors that the user's modules have."""
        if len(pairs) != len(self._tensors):
            return False
        return all(
            tensor is known and tensor.shape == copied.shape
            for (tensor, copied), known in zip(pairs, self._tensors, strict=True)
        )


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

    def moved(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        # A tensor that a function has left on the host, or on another device, stays.
        is_moved = tensor.device == physical(device)
        return copies.copy(tensor, home, "compute") if is_moved else tensor

    value = nested.map_tensors(moved, value)
    copies.issue(0)
    copies.wait_on_stream(0)
    return value
