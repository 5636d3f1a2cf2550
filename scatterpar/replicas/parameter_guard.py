"""Refuse forward passes that write parameters that replicas share.

If a forward pass writes parameters, the result for the whole batch is not defined, and
replicas in one memory may read half-written values. The error names the parameter.
Values that were overwritten in the user's module are lost: a copy of all parameters
would cost more than forward passes that write them are worth.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)

import torch
from torch import Tensor

from scatterpar.devices.bits import same_bits
from scatterpar.devices.fingerprints import Fingerprints
from scatterpar.devices.write_counters import versions
from scatterpar.errors import add_note, restore_after
from scatterpar.replicas.broadcast import Broadcast
from scatterpar.replicas.handed_on import HandedOn
from scatterpar.replicas.refused_modules import parameters_of

# The numbers of written parameters among a replica's tensors, by the memory in which
# they were written: ``None`` if a storage was exchanged for one with other values.
_WrittenNumbers = dict[torch.device | None, set[int]]


class ParameterGuard:
    """Detects and refuses writes to the parameters that replicas share.

    Args:
        broadcast: has the parameters in each memory.
        copies: each replica's device and tensors.

    Attributes:
        checked_modes: the modes in which a forward pass has written no parameter.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        copies: Iterable[tuple[torch.device, Sequence[Tensor]]],
    ) -> None:
        self._broadcast = broadcast
        self.checked_modes: set[Hashable] = set()
        self._memories = {
            device: _parameters(broadcast, broadcast.at(device))
            for device in broadcast.memories
        }
        self._master, *_ = broadcast.memories
        # The user's own, too: an object that replicas share may lead to them.
        self._watched = [(self._master, self._memories[self._master])]
        for device, tensors in copies:
            self._watched.append((device, _parameters(broadcast, tensors)))

    def invalidate(self) -> None:
        """A parameter was written: forget which modes are checked, which values were
        sent.
        """
        self.checked_modes.clear()
        self._broadcast.invalidate()

    @contextlib.contextmanager
    def read_only(
        self,
        mode: Hashable,
        check_once: Callable[[], object] = lambda: None,
        handed_on: HandedOn | None = None,
    ) -> Iterator[None]:
        """Raise ``RuntimeError`` if a forward pass in the body writes a parameter.

        Versions and storages are compared in every pass. In the first pass of each
        ``mode`` the fingerprints of the parameters in every memory are compared, too,
        because writes through ``.data`` change no version. ``check_once`` is called
        after the first pass. Calls in turn may write what is ``handed_on``.
        """
        is_first = mode not in self.checked_modes
        # They read all parameters, which is too much for each step.
        fingerprints = self._fingerprints() if is_first else {}
        before = [versions(tensors) for _, tensors in self._watched]
        try:
            yield
        except BaseException as error:
            refusals: list[RuntimeError] = []
            # With the error, so that a broken device does not replace it.
            # Also of what is handed on: its values before this step are lost.
            restore_after(
                error,
                lambda: refusals.extend(
                    self._refusals(before, fingerprints, is_first=is_first)
                ),
            )
            for refusal in refusals:
                # Not its subclasses, such as OutOfMemoryError.
                if type(error) is RuntimeError:  # torch raises it because of the write
                    raise refusal from error
                add_note(error, f"before that, {refusal}")
            raise
        allowed: Set[int] = frozenset()
        is_in_turn = handed_on is not None and handed_on.was_lent
        if handed_on is not None and is_in_turn:
            allowed = handed_on.begun
        for refusal in self._refusals(
            before, fingerprints, allowed, is_in_turn=is_in_turn, is_first=is_first
        ):
            raise refusal
        if is_first:
            check_once()
        # Last: a refused pass is checked again.
        self.checked_modes.add(mode)

    def _fingerprints(self) -> dict[torch.device, Fingerprints]:
        """Fingerprints of the parameters in each memory."""
        with torch.inference_mode(False), torch.no_grad():
            return {
                device: Fingerprints(self._by_number(tensors), device)
                for device, tensors in self._memories.items()
            }

    def _by_number(self, parameters: Sequence[Tensor]) -> dict[int, Tensor]:
        return dict(zip(self._broadcast.parameters, parameters, strict=True))

    def _refusals(
        self,
        before: Sequence[list[int]],
        fingerprints: Mapping[torch.device, Fingerprints],
        allowed: Set[int] = frozenset(),
        *,
        is_in_turn: bool = False,
        is_first: bool,
    ) -> Iterator[RuntimeError]:
        """Yield an error if parameters were written since then.

        ``allowed`` has the numbers of those that may be. The remedies depend on whether
        calls were in turn, and on whether this was the first pass of its mode.
        """
        writes = self._writes(before, fingerprints, allowed)
        written = set().union(*writes.values())
        if not written:
            return
        # Values in other memories may have been written, too.
        self.invalidate()
        # Only what was written in the master's memory cannot be restored.
        lost = writes[self._master]
        # The error names one that is lost, if there is one: the user has to restore it.
        first, *later = sorted(lost or written)
        parameter = self._broadcast.at(self._master)[first]
        name = self._name_of(parameter)
        if later:
            name += f" (and {len(later)} more)"
        outcome = "nothing was changed"
        if lost:
            outcome = (
                "no gradient was added, but the parameter's earlier values are lost"
            )
        remedy = ""
        if is_first:
            remedy = (
                "if only the module's first call writes it (initialisation by data), "
                "call the module once under torch.no_grad() before the first step; "
                "otherwise "
            )
        if is_in_turn:
            remedy += (
                "freeze it (requires_grad_(False)) if no optimizer trains it, "
                if parameter.requires_grad
                else "write its values in place (copy_), "
            )
        yield RuntimeError(
            f"the forward pass writes the parameter {name}, which all replicas read: "
            f"{outcome}; {remedy}write it after the optimizer's step, or keep what "
            "forward passes write in a buffer (register_buffer)"
        )

    def _name_of(self, original: Tensor) -> str:
        for name, parameter in parameters_of(*self._broadcast.contents.roots):
            if parameter is original:
                return repr(name)
        return f"of shape {tuple(original.shape)}"

    def _writes(
        self,
        before: Sequence[list[int]],
        fingerprints: Mapping[torch.device, Fingerprints],
        allowed: Set[int],
    ) -> _WrittenNumbers:
        """The writes since then.

        A storage may be exchanged for one with the same values, as by
        ``flatten_parameters``, also if the version changes. So may one with the values
        in another dtype, for a parameter that is not trained.
        """
        writes: _WrittenNumbers = defaultdict(set)
        exchanged: _WrittenNumbers = defaultdict(set)
        originals = self._broadcast.at(self._master)
        for (device, tensors), earlier in zip(self._watched, before, strict=True):
            present = versions(tensors)
            canonical = self._memories[device]
            # First the questions that need no Python call per tensor.
            is_in_place = tensors is canonical or all(
                map(Tensor.is_set_to, tensors, canonical)
            )
            if is_in_place and present == earlier:
                continue
            for number, tensor, storage, was, now in zip(
                *(self._broadcast.parameters, tensors, canonical, earlier, present),
                strict=True,
            ):
                if not tensor.is_set_to(storage):
                    exchanged[device].add(number)
                    if not originals[number].requires_grad:
                        # A frozen parameter that a forward pass casts loses nothing.
                        storage = storage.to(tensor.dtype)
                    if not same_bits(tensor, storage):
                        # Nothing is lost: the parameter still has its own storage.
                        writes[None].add(number)
                elif now != was:
                    writes[device].add(number)
        # Tensors of one memory count their versions together. If one of them has
        # another storage, as by ``set_``, the version of the others says nothing.
        for memory, numbers in exchanged.items():
            writes[memory] -= numbers
        if fingerprints:
            for device, present_values in self._fingerprints().items():
                writes[device] |= present_values.differing_from(fingerprints[device])
        for numbers in writes.values():
            numbers.difference_update(allowed)
        return writes


def _parameters(broadcast: Broadcast, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[number] for number in broadcast.parameters]
