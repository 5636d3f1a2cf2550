"""Copies of the master's tensors in the other memories.

Each memory gets a changed tensor once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import compress
from operator import attrgetter, eq, not_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scatterpar.devices.coalescing import (
    empty_like_on,
    messages,
    shareable_storage,
    tree_pairs,
    unpack_converted,
)
from scatterpar.devices.copies import to_numbers
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.memory import empty
from scatterpar.devices.pieces import flat_view, in_words, needs_pieces, unpack
from scatterpar.devices.relay import Relay
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import HOST
from scatterpar.devices.write_counters import versions
from scatterpar.look_steps import is_look_step
from scatterpar.replicas.fused_writes import CopiedParameters
from scatterpar.replicas.large_tensors import Freshness, Reading, is_large, sample
from scatterpar.replicas.module_contents import ModuleContents
from scatterpar.replicas.refused_modules import refuse_uncopied
from scatterpar.torch_private.tensors import Forms, flatten_dense

# A buffer that differed in so many comparisons in a row changes in each step. In one of
# so many comparisons it is asked again.
_DIFFERENCES_IN_A_ROW = 2
_COMPARISONS_PER_READING = 16
# By number of the tensors that are compared: all of their words, or samples.
_Compared = dict[int, Reading]
_NBYTES = attrgetter("nbytes")
_DTYPE_OF_TENSOR = attrgetter("dtype")


class CopyComparison(NamedTuple):
    """The tensors that may have changed since they were sent, beside their copies.

    Attributes:
        versions: of all tensors, before values were read.
        compared: which tensors were read, and how.
        fingerprints: of the master's values of these; ``None`` if nothing was read.
        differences: whether each of them differs, on a device or on the host.
    """

    versions: Sequence[int]
    compared: _Compared
    fingerprints: Fingerprints | None
    differences: Tensor


class Broadcast:
    """Copies of the dense tensors in ``contents`` on every device except the first.

    ::

        version changed since it was sent     send it
        version as it was, or a buffer        compare fingerprints, send what differs
        a buffer that differs in each step    send it, and compare it in each 16th
        the same, of a large tensor           fingerprints of a sample, see
                                              ``large_tensors``; of all of it if an
                                              owner updates it

    An optimizer step changes the version, for fused ones with a hook
    (``fused_writes``). Writes through ``.data``, a NumPy view or
    another storage do not. So the fingerprints of the other parameters are compared
    with those of the copies on another device. So are the fingerprints of buffers,
    whose versions every commit changes. Running statistics differ in each step: the
    host would wait for an answer that it knows.

    The owner of a tensor, in ``send_changed`` the master, sends it message by message.
    Every device that has a message sends it on, in the reverse order of ``tree_pairs``.
    If there is much to send, it goes along a chain instead (``Relay``).

    Attributes:
        contents: the module's contents that were sent.
        memories: the devices, each once; the master is the first.
        parameters: the numbers of the tensors that are parameters.
        places: aliases of the tensors as they were stored when they were adopted.
        adoptions: how often that was.
        forms: those of the tensors when replicas last followed them.
    """

    def __init__(
        self, contents: ModuleContents, device_ids: Sequence[torch.device]
    ) -> None:
        self.contents = contents
        self._tensors = contents.tensor_list
        for tensor in self._tensors:
            refuse_uncopied("a value in a module or criterion", tensor)
        self.memories = list(dict.fromkeys(device_ids))
        self.parameters = [
            number
            for number, key in enumerate(contents.tensors)
            if key in contents.weights
        ]
        if len(self.memories) > 1:
            parameters = [self._tensors[number] for number in self.parameters]
            self._copied = CopiedParameters(parameters)
        self._layout = _layout(contents)
        # To see later whether a tensor's storage, layout or dtype was exchanged.
        self.places = list(map(Tensor.detach, self._tensors))
        self._kinds = _kinds(self._tensors)
        self._addresses = addresses(self._tensors)
        self._sharing = sharing_storages(self._tensors)
        self.adoptions = 0
        self.forms: Forms | None = None
        self._copies = {
            device: empty_like_on(self._tensors, device) for device in self.memories[1:]
        }
        # Flat views of the tensors on each device, as soon as they are needed.
        self._flat: dict[torch.device, Mapping[int, Tensor]] = {}
        # The latest relay from each owner, with the numbers that were asked for, and
        # those of its tensors.
        self._relays: dict[torch.device, tuple[Set[int], Set[int], Relay[int]]] = {}
        self._messages = messages(dict(enumerate(self._tensors)))
        self._large = {
            number: Freshness()
            for number, tensor in enumerate(self._tensors)
            if is_large(tensor)
        }
        self._numbers = frozenset(range(len(self._tensors)))
        self._small_buffers = self._numbers.difference(self.parameters, self._large)
        # Those that owners update. A write that a sample does not show would be lost:
        # an owner's next values come from its copy.
        self._owned: set[int] = set()
        self._comparisons = 0
        # In how many comparisons in a row a buffer differed, by its number.
        self._differences: dict[int, int] = {}
        self.invalidate()

    def adopt(
        self, contents: ModuleContents, device_ids: Sequence[torch.device]
    ) -> bool:
        """Send these contents from now on.

        Returns ``False``, and changes nothing, if they are other tensors, or if kinds
        or devices differ.
        """
        if list(dict.fromkeys(device_ids)) != self.memories:
            return False
        if _layout(contents) != self._layout:
            return False
        self.contents = contents  # another root may hold the same tensors
        self._forget_flat()
        self.places = list(map(Tensor.detach, self._tensors))
        self._kinds = _kinds(self._tensors)
        self._addresses = addresses(self._tensors)
        self._sharing = sharing_storages(self._tensors)
        self.adoptions += 1
        self.forms = None
        return True

    def adopt_storages(self, *, have_same_forms: bool = False) -> bool:
        """Send the tensors as they are stored now: users may exchange a storage.

        Returns ``False``, and changes nothing, if a kind or a shape is another.
        ``have_same_forms`` says that their forms are known to be the same.
        """
        present = addresses(self._tensors)
        # ``share_memory_`` and ``resize_`` move a storage, and all that refers to it.
        if present != self._addresses:
            return self.adopt(self.contents, self.memories)
        # Of thousands of small tensors: ``is_set_to`` takes longer. No other storage
        # can have the address that a place has now; one that it had before it can.
        if have_same_forms and present and present == addresses(self.places):
            return True
        return self.are_in_place() or self.adopt(self.contents, self.memories)

    def _forget_moved(self) -> None:
        """Forget flat views of the user's tensors, if one is stored elsewhere since
        ``adopt_storages``.
        """
        if self.memories[0] in self._flat and not self.are_in_place():
            self._forget_flat()

    def _forget_flat(self) -> None:
        """Forget flat views of the user's tensors."""
        self._flat.pop(self.memories[0], None)
        self._relays.clear()

    def at(self, device: torch.device) -> Sequence[Tensor]:
        """The tensors in the memory of ``device``."""
        is_master = device == self.memories[0]
        return self._tensors if is_master else self._copies[device]

    def storages(self, device: torch.device) -> list[Tensor]:
        """Where a new replica's tensors are stored.

        ``at(device)``, but new memory for buffers.
        """
        storages = list(self.at(device))
        buffers = sorted(set(range(len(storages))).difference(self.parameters))
        private = empty_like_on([self._tensors[i] for i in buffers], device)
        for number, tensor in zip(buffers, private, strict=True):
            storages[number] = tensor
        return storages

    def invalidate(self) -> None:
        """Send all tensors the next time, also unchanged ones."""
        self._sent: dict[int, int] = {}  # the versions of the sent values
        self._last: CopyComparison | None = (
            None  # its fingerprints are those of the copies
        )

    def expect_no_change(self) -> None:
        """Compare all buffers again: forward passes in another mode write others."""
        self._differences.clear()

    def compare(self) -> CopyComparison:
        """Compare tensors that may have changed with their copies.

        The caller may bring the ``differences`` of several objects to the host
        together, so that it waits once.
        """
        present = versions(self._tensors)  # before the values are read
        self._comparisons += 1
        reads_all = is_look_step(self._comparisons)
        asks_all = not self._comparisons % _COMPARISONS_PER_READING
        # Without a line of Python per tensor: there may be thousands of small ones.
        sent = self._sent
        present_of_sent = map(present.__getitem__, sent)
        are_as_sent = list(map(eq, sent.values(), present_of_sent))
        # A small one is cheap to read, so its version need not be believed.
        compared: _Compared = dict.fromkeys(compress(sent, are_as_sent), Reading.ALL)
        written = compress(sent, map(not_, are_as_sent))
        # Without small parameters, because an optimizer has written all of them.
        for number in self._small_buffers.intersection(written):
            in_a_row = self._differences.get(number, 0)
            if asks_all or in_a_row < _DIFFERENCES_IN_A_ROW:
                compared[number] = Reading.ALL
        for number in self._large.keys() & sent.keys():
            freshness = self._large[number]
            reads_tensor = reads_all or number in self._owned
            reading = freshness.reading(number in compared, reads_tensor)
            if reading is not Reading.NOTHING:
                compared[number] = reading
        if not compared:  # an optimizer has updated all, and there are no buffers
            nothing = empty(0, torch.bool, HOST)
            return CopyComparison(present, compared, None, nothing)
        # Those of the copies are known from the last step, unless other tensors are
        # doubtful.
        copies = None
        if self._last is not None and self._last.compared == compared:
            copies = self._last.fingerprints
        master = self._fingerprints(self.memories[0], compared, copies)
        if copies is None:
            copies = self._fingerprints(self.memories[1], compared)
        differences = master.differences(copies)
        return CopyComparison(present, compared, master, differences)

    def send_changed(
        self, transfers: Transfers, comparison: CopyComparison
    ) -> Set[int] | None:
        """Send the master's values of changed tensors, after ``compare``.

        The tensors are where ``adopt_storages`` has found them. Returns the numbers of
        those that were sent. Returns ``None`` if there is no other memory: then nothing
        was compared.
        """
        if not self._copies:
            return None
        present = comparison.versions
        unchanged: set[int] = set()
        if comparison.fingerprints is not None:
            owners = comparison.fingerprints.owners
            differing = set(compress(owners, to_numbers(comparison.differences)))
            unchanged = comparison.compared.keys() - differing
            for number in self._differences.keys() & unchanged:
                del self._differences[number]
            for number in differing.difference(self.parameters):
                in_a_row = self._differences.get(number, 0) + 1
                self._differences[number] = in_a_row
            for number in differing.intersection(self._large):
                if self._sent[number] == present[number]:
                    self._large[number].is_silent = True
        # Whatever was not found unchanged is sent: also what was not compared, because
        # its version says that it was written.
        changed = self._numbers - unchanged
        self.invalidate()  # until all are sent
        self._send_from(self.memories[0], changed, transfers)
        # Last: if a copy failed, all are sent again.
        self._sent = dict(enumerate(present))
        self._last = comparison
        return changed

    def send_written(
        self, present: Sequence[int], unseen: Set[int], transfers: Transfers
    ) -> None:
        """Send the tensors that were sent with another version than the ``present``
        one, and those of ``unseen``, whose versions do not tell.

        No value is read, as ``compare`` does. After a first ``send_changed``. The
        tensors are where ``adopt_storages`` has found them.
        """
        if not self._copies:
            return
        written = {n for n, sent in self._sent.items() if sent != present[n]}
        changed = self.with_sharing(written.union(unseen))
        if len(self._sent) < len(present):
            changed = set(range(len(present)))
        if not changed:
            return
        sent = self._sent
        self.invalidate()  # until all are sent
        self._send_from(self.memories[0], changed, transfers)
        self._sent = sent | {number: present[number] for number in changed}

    def with_sharing(self, written: Set[int]) -> Set[int]:
        """The numbers of ``written`` tensors, and of all that share memory with one.

        Torch may count the write for one of them only, as for a weight and
        ``weight.data``.
        """
        numbers = set(written)
        for number in self._sharing.keys() & written:
            numbers |= self._sharing[number]
        return numbers

    def _fingerprints(
        self,
        device: torch.device,
        compared: _Compared,
        like: Fingerprints | None = None,
    ) -> Fingerprints:
        tensors = self.at(device)
        words = dict(zip(compared, map(tensors.__getitem__, compared), strict=True))
        for number in self._large.keys() & compared.keys():
            if compared[number] is Reading.SAMPLE:
                words[number] = sample(tensors[number])
        return Fingerprints(words, device, like)

    def own(self, numbers: Set[int], transfers: Transfers) -> None:
        """From now on owners update the tensors with these ``numbers``.

        Sends those that differ from their copies, of which ``compare`` may have read a
        sample.
        """
        if not self._owned.issuperset(numbers):
            self._owned |= numbers
            self.send_changed(transfers, self.compare())

    def send_owned(
        self, owners: Mapping[int, torch.device], transfers: Transfers
    ) -> None:
        """Copy new values from their owner's memory to all others, also to the
        master's.

        If it fails, the next ``send_changed`` sends the master's values of all tensors.
        """
        sent = self._sent
        self.invalidate()
        # The optimizer may have exchanged storages of the user's parameters.
        self._forget_moved()
        try:
            for memory in self.memories:
                owned = {number for number, owner in owners.items() if owner == memory}
                self._send_from(memory, owned, transfers)
        finally:
            # The user may put the former storages back, which are in place then.
            self._forget_moved()
        present = versions(self._tensors)
        self._sent = sent | {number: present[number] for number in owners}

    def _send_from(
        self, owner: torch.device, numbers: Set[int], transfers: Transfers
    ) -> None:
        """Send the owner's tensors with these numbers, each message to all before the
        next.
        """
        if not numbers:
            return
        start = self.memories.index(owner)
        devices = [*self.memories[start:], *self.memories[:start]]
        if len(devices) > 2:
            numbers = numbers - self._relay(devices, numbers, transfers)
        for message in self._messages:
            keys = [number for number in message if number in numbers]
            if len(keys) == 1:
                self._send_alone(devices, keys[0], transfers)
            elif keys:
                self._send_packed(devices, keys, transfers)

    def _send_alone(
        self, devices: Sequence[torch.device], number: int, transfers: Transfers
    ) -> None:
        """Send one tensor from the first device to all others."""
        for sender, receiver in reversed(tree_pairs(len(devices))):
            source = self.at(devices[sender])[number]
            target = self.at(devices[receiver])[number]
            transfers.copy_into(target, source, "replicate")

    def _send_packed(
        self,
        devices: Sequence[torch.device],
        numbers: Sequence[int],
        transfers: Transfers,
    ) -> None:
        """Send the tensors of a message from the first device to all others."""
        of_owner = self.at(devices[0])
        packed = {0: flatten_dense([of_owner[number] for number in numbers])}
        for sender, receiver in reversed(tree_pairs(len(devices))):
            device = devices[receiver]
            packed[receiver] = transfers.copy(packed[sender], device, "replicate")
            self._unpack(packed[receiver], numbers, device)

    def _unpack(
        self, packed: Tensor, numbers: Sequence[int], device: torch.device
    ) -> None:
        """Copy a message that has arrived to the tensors of ``device``."""
        of_device = self.at(device)
        targets = [of_device[number] for number in numbers]
        # An optimizer of ``ShardedOptimizer`` may have exchanged storages of the user's
        # tensors for some of another layout or dtype. Copies keep theirs.
        if device == self.memories[0] or packed.dtype != targets[0].dtype:
            unpack_converted(packed, targets)
            return
        flat = self._flat_at(device)
        parts = [flat[number] for number in numbers]
        unpack(in_words(packed), list(map(Tensor.numel, parts)), parts)

    def _relay(
        self, devices: Sequence[torch.device], numbers: Set[int], transfers: Transfers
    ) -> Set[int]:
        """Send those tensors of these that can be cut. Returns their numbers."""
        owner = devices[0]
        if owner in self._relays:
            of_relay, common, relay = self._relays[owner]
            if numbers == of_relay:  # mostly: those of the last step
                relay.send(transfers, "replicate")
                return common
        if not needs_pieces(self._bytes_of(numbers), len(devices)):
            return set()
        of_devices = [self._flat_at(device) for device in devices]
        # Of a subclass the copies can be flat, and the user's tensor cannot.
        common = set(numbers).intersection(*of_devices)
        if not needs_pieces(self._bytes_of(common), len(devices)):
            return set()
        of_owner, *of_others = of_devices
        sent = {number: of_owner[number] for number in sorted(common)}
        relay = Relay([sent, *of_others], devices)
        self._relays[owner] = frozenset(numbers), common, relay
        relay.send(transfers, "replicate")
        return common

    def _bytes_of(self, numbers: Set[int]) -> int:
        return sum(map(_NBYTES, map(self._tensors.__getitem__, numbers)))

    def _flat_at(self, device: torch.device) -> Mapping[int, Tensor]:
        """Flat views of the tensors of a device that have one, by number: as words, if
        their elements consist of words.
        """
        if device not in self._flat:
            flat: dict[int, Tensor] = {}
            copies = self._copies[self.memories[1]]
            pairs = zip(self.at(device), copies, strict=True)
            for number, (tensor, like) in enumerate(pairs):
                view = flat_view(tensor)
                # The user may have exchanged a storage for one of another layout.
                has_same_layout = tensor.stride() == like.stride()
                if view is not None and has_same_layout and tensor.dtype == like.dtype:
                    flat[number] = in_words(view)
            self._flat[device] = flat
        return self._flat[device]

    def remember_forms(self) -> None:
        """Remember ``forms``: only after all that depends on ``requires_grad`` has
        followed the tensors.
        """
        self.forms = Forms(self._tensors)

    def are_in_place(self) -> bool:
        """Whether the storage, shape, strides and dtype of all tensors are as they
        were, and whether they are conjugated or negated lazily.
        """
        are_set = all(map(Tensor.is_set_to, self._tensors, self.places))
        return are_set and _kinds(self._tensors) == self._kinds


def _kinds(tensors: Sequence[Tensor]) -> list[Any]:
    """How to read the bits of tensors, which ``is_set_to`` does not compare."""
    # Without a line of Python per tensor.
    kinds: list[Any] = list(map(_DTYPE_OF_TENSOR, tensors))
    kinds += map(Tensor.is_conj, tensors)
    kinds += map(Tensor.is_neg, tensors)
    return kinds


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where tensors begin in memory; empty unless each has memory."""
    try:
        present = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:  # of a subclass that consists of other tensors
        return []
    return present if all(present) else []


def sharing_storages(tensors: Sequence[Tensor]) -> Mapping[int, Set[int]]:
    """By number of each tensor that shares its storage: the numbers of all in it."""
    by_storage: dict[int, set[int]] = {}
    for number, tensor in enumerate(tensors):
        address = shareable_storage(tensor)
        if address is not None:
            by_storage.setdefault(address, set()).add(number)
    sharing: dict[int, Set[int]] = {}
    for numbers in by_storage.values():
        if len(numbers) > 1:
            sharing.update(dict.fromkeys(numbers, numbers))
    return sharing


def _layout(contents: ModuleContents) -> list[Any]:
    """Per tensor: what copies depend on, and whether it is a parameter.

    Of tensors that share memory also where they are in it, as copies share it, too.
    """
    layout: list[Any] = []
    first_in_storage: dict[int, int] = {}  # its number, by the storage's address
    for number, (key, tensor) in enumerate(contents.tensors.items()):
        is_weight = key in contents.weights
        address = shareable_storage(tensor)
        place = None
        if address is not None:
            first = first_in_storage.setdefault(address, number)
            place = (first, tensor.storage_offset()) if first != number else None
        layout.append(
            (
                *(key, is_weight, type(tensor), tensor.dtype, tensor.device),
                *(tensor.shape, tensor.stride(), place),
            )
        )
    return layout
