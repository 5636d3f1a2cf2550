"""What calls in turn hand on to each other: registered buffers, frozen parameters that
they write, and ``requires_grad``.

::

    replica 0    call 0 writes center     backward 0
    replica 1                  center ->  call 1 writes center     backward 1
    replica 0                                           center ->  call 2

A call finds the buffers as the call before has left them, as with gradient
accumulation on one device. Each replica has memory of its own for them, so that the
backward pass of an earlier call still finds what it has saved.

Replicas in one memory share parameters, since calls read them. A frozen one that a call
writes, such as that of a momentum encoder, is replicated as a buffer once a look, or a
call, has shown it. In the step in which calls begin to write it, unseen by a look, the
other replicas get memory of their own for the rest of the step.

Versions tell which buffers and frozen parameters a call has written. They do not count
what kernels of normalisations write, nor writes through ``.data``. So the layers that
keep running statistics are known by their class, and in a part of the steps all of them
are compared by their bits; what was written unseen is then handed on in each call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import messages, pack
from scatterpar.devices.copies import write
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.streams import has_streams, stream_for
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.write_counters import versions
from scatterpar.look_steps import is_look_step
from scatterpar.replicas.buffers import RUNNING, BufferValue
from scatterpar.replicas.shared_buffers import BufferDict
from scatterpar.replicas.slots import Slot
from scatterpar.torch_private.tensors import unflatten

_REQUIRES_GRAD = attrgetter("requires_grad")
_kind_of = attrgetter("shape", "dtype", "layout")


def _memory_of(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


class _Value(NamedTuple):
    """The latest value of a buffer.

    Attributes:
        tensor: it has the value.
        device: where it is.
        written: an event of the device after the call; ``None`` without streams.
    """

    tensor: Tensor
    device: torch.device
    written: torch.Event | None


class HandedOn:
    """The buffers of a set of replicas that take turns, from call to call of a step.

    Only the replica whose turn it is calls ``begin`` and ``end``.

    Args:
        modules: the user's.
        slots: those of the user's tensors.
        written: the ``id`` of frozen parameters that calls of earlier steps have
            written. Replicas have memory of their own for them.

    Attributes:
        lent: the numbers of the tensors that calls in turn get: parameters, and
            registered buffers.
        calls: the number of calls of this step that were in turn.
        begun: the numbers of frozen parameters that calls have begun to write.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        slots: Sequence[Slot],
        written: Collection[int] = (),
    ) -> None:
        self._tensors = [slot.tensor for slot in slots]
        by_id = {id(slot.tensor): slot for slot in slots}
        # The numbers of parameters, which replicas in one memory share.
        self._weights = [slot.number for slot in slots if slot.is_parameter]
        # By number of the buffer: the registries that have it, and its names there.
        self._places: dict[int, list[tuple[BufferDict, str]]] = {}
        self.begun: set[int] = set()
        for key in written:
            self._hand_on(by_id[key].number)
        self._of_normalisations: list[tuple[nn.Module, list[int]]] = []
        for module in modules:
            of_module: list[int] = []
            for name, buffer in module._buffers.items():
                slot = by_id.get(id(buffer))
                if slot is None or slot.is_parameter:
                    continue
                places = self._places.setdefault(slot.number, [])
                places.append((module._buffers, name))
                if name in RUNNING:
                    of_module.append(slot.number)
            # Their kernels write running statistics without a version.
            if of_module and isinstance(module, nn.modules.batchnorm._NormBase):
                self._of_normalisations.append((module, of_module))
        lent = [s for s in slots if s.is_parameter or s.number in self._places]
        self.lent = [slot.number for slot in lent]
        self._leaves = [slot.number for slot in lent if slot.is_leaf]
        self._unseen: set[int] = set()  # written without a version
        self._checked: set[Hashable] = set()
        self._steps = 0
        self._compares = False
        self._shared: list[int] = []  # weights that are not handed on in this call
        self.begin_step(None, Transfers())

    def begin_step(self, mode: Hashable, transfers: Transfers) -> None:
        """Forget what calls of the last step have left.

        In the first step of each ``mode`` all buffers are compared by their bits.
        """
        self._latest: dict[int, _Value] = {}
        # By ``id`` of a replica's tensors: those of ``begun`` in memory of its own.
        self._separated: dict[int, set[int]] = {}
        self.calls = 0
        self._mode = mode
        self._transfers = transfers
        self._comparison: Fingerprints | None = None

    @property
    def was_lent(self) -> bool:
        """Whether a call of this step was in turn."""
        return self.calls > 0

    # --- frozen parameters ---

    def expect_write(self, tensor: Tensor) -> None:
        """Calls write ``tensor``, as a look has seen: note it if it is frozen."""
        for number in self._weights:
            if self._tensors[number] is tensor and self._is_frozen(number):
                self.begun.add(number)

    def _is_frozen(self, number: int) -> bool:
        """Whether a parameter is not trained, and no trained one has its memory."""
        tensor = self._tensors[number]
        if tensor.requires_grad:
            return False
        memory = _memory_of(tensor)
        return not any(
            other.requires_grad and _memory_of(other) == memory
            for other in (self._tensors[each] for each in self._weights)
        )

    def _hand_on(self, number: int) -> None:
        # No module's registry, where a call may put another parameter.
        registry: BufferDict = {"parameter": self._tensors[number]}
        self._places[number] = [(registry, "parameter")]

    def _separate(self, tensors: Sequence[Tensor]) -> None:
        """Give a replica memory of its own for what calls have begun to write."""
        separated = self._separated.setdefault(id(tensors), set())
        for number in self.begun - separated:
            separated.add(number)
            tensors[number].data = tensors[number].detach().clone()

    # --- one call ---

    def begin(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """A call begins: the replica's ``tensors`` get the latest values and flags."""
        self.calls += 1
        if self.calls == 1:
            self._steps += 1
            is_new = self._mode not in self._checked
            self._compares = is_new or is_look_step(self._steps)
        if self.begun:
            with torch.inference_mode(False):
                self._separate(tensors)
        stale: dict[int, _Value] = {}
        for number, latest in self._latest.items():
            if latest.tensor is not tensors[number]:
                stale[number] = latest
        if stale:
            with torch.inference_mode(False), torch.no_grad():
                self._copy(stale, tensors, device)
        for number in self._leaves:
            flag = self._tensors[number].requires_grad
            copied = tensors[number]
            if copied.requires_grad is not flag and copied.is_leaf:
                copied.requires_grad_(flag)
        # Trained ones, too: a call may freeze a parameter before it writes it.
        self._shared = [each for each in self._weights if each not in self._places]
        self._watched = [*self._places, *self._shared]
        self._versions = versions([tensors[number] for number in self._watched])
        if self._compares:
            self._comparison = self._fingerprints(tensors, device)

    def end(
        self,
        tensors: Sequence[Tensor],
        device: torch.device,
        rebound: Mapping[int, Tensor],
    ) -> list[int]:
        """A call has ended: note the buffers that it has written, and flags.

        ``rebound`` are the new tensors, from ``put_back``. Returns the numbers of
        tensors that require grad from now on.
        """
        written = set(self._unseen)
        present = versions([tensors[number] for number in self._watched])
        for number, before, now in zip(
            self._watched, self._versions, present, strict=True
        ):
            if before != now:
                written.add(number)
        for module, numbers in self._of_normalisations:
            if module.training:
                written.update(numbers)
        if self._comparison is not None:
            after = self._fingerprints(tensors, device)
            unseen = after.differing_from(self._comparison) - written
            self._unseen |= unseen
            written |= unseen
            self._comparison = None
        trained = self._trained(tensors)
        for number in written.intersection(self._shared):
            if self._is_frozen(number):
                self.begun.add(number)
                self._hand_on(number)
                # The call's value stays in the memory where it was written, which its
                # backward pass may read.
                self._separated.setdefault(id(tensors), set()).add(number)
            else:  # ``ParameterGuard`` refuses it
                written.discard(number)
                self._unseen.discard(number)
        event = None
        if has_streams(device) and (written or rebound):
            # Not ``record_event``, whose event a ``torch.Stream`` does not wait for.
            event = torch.accelerator.current_stream(device).record_event()
        for number in written:
            self._latest[number] = _Value(tensors[number], device, event)
        for number, value in rebound.items():
            self._latest[number] = _Value(value, device, event)
        if self._compares:
            self._checked.add(self._mode)
        return trained

    def put_back(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Put buffers back where a call has put new tensors of the same kind.

        Returns these by number of the buffer. Else replicas would be made again in the
        next step.
        """
        rebound: dict[int, Tensor] = {}
        for number, places in self._places.items():
            buffer = self._tensors[number]
            found = [registry.get(name) for registry, name in places]
            value = found[0]
            if value is buffer or value is tensors[number] or value is None:
                continue
            is_same_kind = _kind_of(value) == _kind_of(buffer)
            # Under other names the buffer may stay as it was.
            if not is_same_kind or any(other is not value for other in found):
                continue
            rebound[number] = value.detach()
            for registry, name in places:
                registry[name] = buffer
        return rebound

    def _trained(self, tensors: Sequence[Tensor]) -> list[int]:
        """Set on the user's tensors what the call has set on the replica's."""
        begun: list[int] = []
        for number in self._leaves:
            original = self._tensors[number]
            flag = tensors[number].requires_grad
            if flag is not original.requires_grad and tensors[number].is_leaf:
                original.requires_grad_(flag)
                if flag:
                    begun.append(number)
        return begun

    def _fingerprints(
        self, tensors: Sequence[Tensor], device: torch.device
    ) -> Fingerprints:
        with torch.inference_mode(False), torch.no_grad():
            compared = {number: tensors[number] for number in self._places}
            for number in self._shared:
                if not self._tensors[number].requires_grad:
                    compared[number] = tensors[number]
            return Fingerprints(compared, device)

    # --- copies ---

    def _copy(
        self,
        stale: dict[int, _Value],
        tensors: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        """Copy the latest values into the replica's tensors, message by message."""
        by_device: dict[torch.device, dict[int, _Value]] = {}
        for number, latest in stale.items():
            by_device.setdefault(latest.device, {})[number] = latest
        for source, values in by_device.items():
            with self._on_streams(source, device, values) as staged:
                for message in messages({n: v.tensor for n, v in values.items()}):
                    parts = [values[number].tensor for number in message]
                    if source != device:
                        packed = pack(parts)
                        arrived = self._transfers.copy(packed, device, "replicate")
                        parts = [arrived]
                        if len(message) > 1:
                            shapes = [tensors[number] for number in message]
                            parts = list(unflatten(arrived, shapes))
                    staged += zip(message, parts, strict=True)
            # On the replica's own stream, after the copies between devices.
            for number, part in staged:
                write(tensors[number], part)

    @contextlib.contextmanager
    def _on_streams(
        self, source: torch.device, device: torch.device, values: dict[int, _Value]
    ) -> Iterator[list[tuple[int, Tensor]]]:
        """In the body copies run beside what both devices compute.

        They wait for the calls that have written the values, and for nothing else:
        torch would let a copy wait for all that the source has been given.
        """
        staged: list[tuple[int, Tensor]] = []
        # All replicas of a device compute on one stream.
        if source == device or not has_streams(device):
            yield staged
            return
        computing = torch.accelerator.current_stream(device)
        events = {id(value.written): value.written for value in values.values()}
        sending = stream_for("handing on", source)
        arriving = stream_for("handed on", device)
        assert sending is not None
        assert arriving is not None
        for event in events.values():
            if event is not None:
                sending.wait_event(event)
        with sending, arriving:
            yield staged
            # The source is written in the next step at the earliest: a replica's calls
            # follow each other.
            arrived = arriving.record_event()
        computing.wait_event(arrived)
        for _, tensor in staged:
            tensor.record_stream(computing)

    # --- the step ---

    def values(
        self, device: torch.device, transfers: Transfers
    ) -> Iterator[BufferValue]:
        """Yield the buffers that calls of the step have written.

        Their values are on the master's ``device``.
        """
        for number, latest in self._latest.items():
            value = latest.tensor
            if latest.device != device:
                value = transfers.copy(value, device, "reduce")
            for registry, name in self._places[number]:
                yield registry, name, value
