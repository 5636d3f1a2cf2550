"""Buffers that begin or cease to share memory in a forward pass.

::

    self.old = self.new          two names of one tensor
    self.row = self.bank[1]      a part of another buffer, or of a parameter
    self.old = torch.zeros(3)    apart from ``new`` again

Values of buffers come from a replica, and are written into the user's buffers in place.
If other buffers share memory in the replica than in the user's module, they would stay
apart there, or write over each other. So a buffer that has begun to share memory
becomes the same part of the user's tensor, and one that has ceased gets memory of its
own. The replicas of the next step, which are made again, follow the user's module.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import is_unexpanded
from scatterpar.devices.memory import empty, storage_address
from scatterpar.devices.virtual_devices import HOST

BufferDict = MutableMapping[str, "Tensor | None"]


class MemoryPart(NamedTuple):
    """A part of another tensor's memory, which a buffer is.

    Attributes:
        registry: the user's, which has the other tensor.
        name: its name there.
        tensor: that tensor in the replica.
        buffer: the buffer in the replica.
    """

    registry: BufferDict
    name: str
    tensor: Tensor
    buffer: Tensor

    def of(self, original: Tensor) -> Tensor:
        """The part of the user's own tensor.

        Raises ``ValueError`` if its elements are in other places than the replica's.
        """
        if self.buffer is self.tensor:
            return original
        if _geometry(original)[1:] != _geometry(self.tensor)[1:]:
            raise ValueError(
                f"the forward pass makes a buffer share the memory of {self.name!r}, "
                f"whose elements have gaps between them (strides {original.stride()}): "
                f"nothing was changed; register {self.name!r} as a tensor of its own "
                "(clone()), or write into buffers with copy_"
            )
        offset = self.buffer.storage_offset() - self.tensor.storage_offset()
        return original.detach().as_strided(
            self.buffer.shape,
            self.buffer.stride(),
            original.storage_offset() + offset,
        )


# By the ``id`` of a registry, and the name of a buffer there: the part of another
# tensor that the buffer is now, or ``None`` if its memory is its own.
MemoryChanges = dict[tuple[int, str], MemoryPart | None]


@dataclass(frozen=True, eq=False)
class _RegisteredTensor:
    """A buffer or parameter under one of its names.

    Attributes:
        registry: the user's dictionary of buffers or parameters.
        name: the name there.
        original: the user's tensor, before the step is committed.
        copy: the replica's tensor, after the forward pass.
        is_rebound: whether its memory is another one than before the forward pass.
        number: how many places come before it.
    """

    registry: BufferDict
    name: str
    original: Tensor | None
    copy: Tensor | None
    is_rebound: bool
    number: int


def memory_changes(
    modules: Sequence[nn.Module],
    copies: Sequence[nn.Module],
    copy_of: Callable[[Any], Any],
    exchanged: Collection[int] = (),
) -> MemoryChanges:
    """The buffers that share memory with others in ``copies`` than in ``modules``.

    ``copy_of`` returns the copy of a tensor before the forward pass. ``exchanged`` has
    the ``id`` of copies that have another storage since. Raises ``ValueError`` if
    buffers share memory, and none has that of the other.
    """
    places: list[_RegisteredTensor] = []
    for module, copy in zip(modules, copies, strict=True):
        if module._buffers or copy._buffers:  # most modules have none
            for name, value in copy._buffers.items():
                before = module._buffers[name]
                is_rebound = value is not copy_of(before) or id(value) in exchanged
                registry: BufferDict = module._buffers
                places.append(
                    _RegisteredTensor(
                        registry, name, before, value, is_rebound, len(places)
                    )
                )
    rebound = [place for place in places if place.is_rebound]
    if not rebound:
        return {}
    for module, copy in zip(modules, copies, strict=True):
        for name, value in copy._parameters.items():
            before = module._parameters.get(name)
            registry = cast("BufferDict", module._parameters)
            places.append(
                _RegisteredTensor(registry, name, before, value, False, len(places))
            )
    before_pass = _SharedMemory((place, place.original) for place in places)
    after_pass = _SharedMemory((place, place.copy) for place in places)
    changes: MemoryChanges = {}
    for place in rebound:
        earlier = before_pass.partners(place, place.original)
        partners = after_pass.partners(place, place.copy)
        if _are_as_before(place, partners, earlier):
            continue
        owner = _owner(place, partners)
        if owner is not place:
            assert owner.copy is not None
            assert place.copy is not None
            part = MemoryPart(owner.registry, owner.name, owner.copy, place.copy)
            changes[id(place.registry), place.name] = part
        elif earlier:
            changes[id(place.registry), place.name] = None
    return changes


class _SharedMemory:
    """Returns the groups of tensors that share memory."""

    def __init__(
        self, tensors: Iterable[tuple[_RegisteredTensor, Tensor | None]]
    ) -> None:
        self._by_address: defaultdict[int, list[tuple[_RegisteredTensor, Tensor]]]
        self._by_address = defaultdict(list)
        for place, tensor in tensors:
            if tensor is not None and _has_memory(tensor):
                self._by_address[storage_address(tensor)].append((place, tensor))

    def partners(
        self, place: _RegisteredTensor, tensor: Tensor | None
    ) -> list[_RegisteredTensor]:
        """The other places whose tensors have elements of this one's memory."""
        if tensor is None or not _has_memory(tensor):
            return []
        return [
            other_place
            for other_place, other in self._by_address[storage_address(tensor)]
            if other_place is not place and _overlap(other, tensor)
        ]


def _has_memory(tensor: Tensor) -> bool:
    """Whether a dense tensor of torch has elements."""
    if not (type(tensor) is Tensor or isinstance(tensor, nn.Parameter)):
        return False
    return tensor.layout == torch.strided and tensor.numel() > 0


def _reading_of_bits(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _are_as_before(
    place: _RegisteredTensor,
    partners: Sequence[_RegisteredTensor],
    earlier: Sequence[_RegisteredTensor],
) -> bool:
    """Whether the user's tensors share memory as the replica's do.

    Then values that are written in place are those of all names.
    """
    if set(partners) != set(earlier):
        return False
    return all(
        _relation(place.copy, other.copy) == _relation(place.original, other.original)
        for other in partners
    )


def _relation(first: Tensor | None, second: Tensor | None) -> tuple[Any, ...]:
    """Where two tensors are in the memory that they share."""
    assert first is not None
    assert second is not None
    offset, *geometry = _geometry(first)
    other_offset, *other_geometry = _geometry(second)
    return offset - other_offset, geometry, other_geometry


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    """Where the elements of a tensor are in its storage, and how they are read."""
    offset = tensor.storage_offset() * tensor.element_size()
    return offset, tensor.shape, tensor.stride(), *_reading_of_bits(tensor)


def _owner(
    place: _RegisteredTensor, partners: Sequence[_RegisteredTensor]
) -> _RegisteredTensor:
    """The place that has the memory of ``place`` and all ``partners``.

    Of several the first, of those that have kept their memory if there are any. Raises
    ``ValueError`` if there is none.
    """
    all_places = [place, *partners]
    owners = [
        owner
        for owner in all_places
        if all(_has_all_of(owner.copy, other.copy) for other in all_places)
    ]
    if owners:
        owner = min(owners, key=lambda place: (place.is_rebound, place.number))
        # Else those that have kept their memory would not be parts of the owner's.
        if not owner.is_rebound or all(other.is_rebound for other in partners):
            return owner
    names = ", ".join(sorted(repr(other.name) for other in all_places))
    raise ValueError(
        f"the forward pass makes the buffers {names} views of one tensor, which is "
        "no buffer itself: nothing was changed; give each buffer a tensor "
        "of its own (clone()), or write into buffers with copy_"
    )


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors in one storage have an element in common."""
    start, stop = _span(first)
    other_start, other_stop = _span(second)
    if stop <= other_start or other_stop <= start:
        return False
    if _fills_its_span(first) and _fills_its_span(second):
        return True
    marks = _marks(first, max(stop, other_stop))
    return bool((marks & _marks(second, len(marks))).any())


def _has_all_of(owner: Tensor | None, tensor: Tensor | None) -> bool:
    """Whether ``tensor`` can be a part of ``owner``, in the same storage."""
    if owner is None or tensor is None or owner is tensor:
        return owner is tensor
    if _reading_of_bits(owner) != _reading_of_bits(tensor):
        return False
    start, stop = _span(owner)
    inner_start, inner_stop = _span(tensor)
    if inner_start < start or stop < inner_stop:
        return False
    if _fills_its_span(owner):
        return True
    return not bool((_marks(tensor, stop) & ~_marks(owner, stop)).any())


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the byte behind its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in steps)
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    return start, start + (int(last) + 1) * size


def _fills_its_span(tensor: Tensor) -> bool:
    """Whether a tensor has each byte of its span, once."""
    start, stop = _span(tensor)
    return is_unexpanded(tensor) and stop - start == tensor.nbytes


def _marks(tensor: Tensor, num_bytes: int) -> Tensor:
    """Which of the first bytes of its storage a tensor has."""
    marks = empty(num_bytes, torch.bool, HOST).zero_()
    size = tensor.element_size()
    # Dimensions that repeat the same memory are marked once: torch refuses the others.
    shape = [
        length if stride else 1
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ]
    strides = [stride * size for stride in tensor.stride()]
    offset = tensor.storage_offset() * size
    marks.as_strided((*shape, size), (*strides, 1), offset).fill_(True)
    return marks
