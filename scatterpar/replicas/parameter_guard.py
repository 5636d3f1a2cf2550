"""Refuse forward passes that write parameters that replicas share.

If a forward pass writes parameters, the result for the whole batch is not defined, and
replicas in one memory may read half-written values. The error names the parameter.
If the user's parameter has another storage, it gets its own one back. Values that were
overwritten in the user's module are lost: a copy of all parameters would cost more than
forward passes that write them are worth.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import compress

import torch
from torch import Tensor

from scatterpar.devices.bits import same_bits
from scatterpar.devices.written_tensors import WrittenTensors
from scatterpar.errors import add_note, restore_after
from scatterpar.replicas.broadcast import Broadcast
from scatterpar.replicas.refused_modules import parameters_of

# The numbers of written parameters among a replica's tensors, by the memory in which
# they were written: ``None`` if a storage was exchanged for one with other values.
_WrittenNumbers = dict[torch.device | None, set[int]]
# The device and the tensors of a copy.
_Copy = tuple[torch.device, Sequence[Tensor]]


class ParameterGuard:
    """Detects and refuses writes to the parameters that replicas share.

    Args:
        broadcast: has the parameters in each memory.
        copies: each replica's device and tensors.
        were_called: returns for each replica whether it was called since its ``reset``.

    Attributes:
        checked_modes: the modes in which a forward pass has written no parameter.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        copies: Iterable[_Copy],
        were_called: Callable[[], list[bool]],
    ) -> None:
        self._broadcast = broadcast
        self.checked_modes: set[Hashable] = set()
        # The mode whose first pass is to come, once its values are remembered.
        self._begun_mode: Hashable = None
        self._master, *_ = broadcast.memories
        # The user's own, too: an object that replicas share may lead to them, and in a
        # call the first replica is the user's module.
        of_user = self._master, broadcast.at(self._master)
        self._copies: list[_Copy] = [of_user, *copies]
        self._were_called = were_called
        self._places: Sequence[Tensor] = ()
        self._follow_places()

    def _follow_places(self) -> None:
        """Watch the memory where the user's tensors are stored now."""
        broadcast = self._broadcast
        if self._places is broadcast.places:
            return
        self._places = broadcast.places
        self._begun_mode = None
        # Aliases of the user's tensors, which may be stored elsewhere after a pass.
        at_master = WrittenTensors(_parameters(broadcast, self._places), self._master)
        self._values = {self._master: at_master}
        for device in broadcast.memories[1:]:
            tensors = _parameters(broadcast, broadcast.at(device))
            self._values[device] = WrittenTensors(tensors, device)
        self._watched: list[WrittenTensors] = []
        for device, of_copy in self._copies:
            stored_as = self._values[device].tensors
            parameters = _parameters(broadcast, of_copy)
            self._watched.append(WrittenTensors(parameters, stored_as=stored_as))

    def invalidate(self) -> None:
        """Forget which modes are checked and which values were sent: a parameter was
        written.
        """
        self.checked_modes.clear()
        self._broadcast.invalidate()

    def remember_values(self, mode: Hashable) -> None:
        """Remember the values before a look, if the first pass of a mode is to come.

        A look calls the module before that pass. What it writes through ``.data`` would
        be what the pass finds.
        """
        if mode not in self.checked_modes:
            self._follow_places()
            self._begin_values()
            self._begun_mode = mode

    def forget_values(self) -> None:
        """Forget the values: the look has failed, so no pass follows."""
        self._begun_mode = None

    def _begin_values(self) -> None:
        for of_memory in self._values.values():
            of_memory.begin(compares_bits=True)

    @contextlib.contextmanager
    def read_only(
        self,
        mode: Hashable,
        check_once: Callable[[], object] = lambda: None,
    ) -> Iterator[None]:
        """Raise ``RuntimeError`` if a forward pass in the body writes a parameter.

        Versions and storages are compared in every pass. In the first pass of each
        ``mode`` the fingerprints of the parameters in every memory are compared, too,
        because writes through ``.data`` change no version. ``check_once`` is called
        after the first pass.
        """
        self._follow_places()
        is_first = mode not in self.checked_modes
        # To read all values is too much for each step.
        if is_first and self._begun_mode != mode:
            self._begin_values()
        self._begun_mode = None
        for watched in self._watched:
            watched.begin(compares_bits=False)
        try:
            yield
        except BaseException as error:
            refusals: list[RuntimeError] = []
            # With the error, so that a broken device does not replace it.
            restore_after(
                error, lambda: refusals.extend(self._refusals(is_first=is_first))
            )
            for refusal in refusals:
                # Not its subclasses, such as OutOfMemoryError.
                if type(error) is RuntimeError:  # torch raises it because of the write
                    raise refusal from error
                add_note(error, f"before that, {refusal}")
            raise
        for refusal in self._refusals(is_first=is_first):
            raise refusal
        if is_first:
            check_once()
        # Last: a refused pass is checked again.
        self.checked_modes.add(mode)

    def _refusals(self, *, is_first: bool) -> Iterator[RuntimeError]:
        """Yield an error if parameters were written since the pass began.

        The remedies depend on whether this was the first pass of its mode.
        """
        writes = self._writes(is_first=is_first)
        written = set().union(*writes.values())
        if not written:
            return
        # Values in other memories may have been written, too.
        self.invalidate()
        self._restore_places(written)
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
                "call the module once under torch.no_grad() before the first step. "
                "Otherwise, "
            )
        yield RuntimeError(
            f"the forward pass writes the parameter {name}, which all replicas read: "
            f"{outcome}; {remedy}write the parameter after the optimizer's step, or "
            "make it a buffer (register_buffer)"
        )

    def _restore_places(self, numbers: Iterable[int]) -> None:
        """Store those of the user's tensors where they were when the pass began."""
        tensors = self._broadcast.at(self._master)
        for number in numbers:
            if not tensors[number].is_set_to(self._places[number]):
                tensors[number].data = self._places[number]

    def _name_of(self, original: Tensor) -> str:
        for name, parameter in parameters_of(*self._broadcast.contents.roots):
            if parameter is original:
                return repr(name)
        return f"of shape {tuple(original.shape)}"

    def _writes(self, *, is_first: bool) -> _WrittenNumbers:
        """The writes since the pass began.

        A storage may be exchanged for one with the same values, as by
        ``flatten_parameters``, also if the version changes. So may one with the values
        in another dtype, for a parameter that is not trained.
        """
        writes: _WrittenNumbers = defaultdict(set)
        numbers = self._broadcast.parameters
        exchanged: list[tuple[int, int]] = []
        were_called = [True, *self._were_called()]
        for copy in compress(range(len(self._copies)), were_called):
            device, _ = self._copies[copy]
            written = self._watched[copy].written()
            for position in written.counted:
                writes[device].add(numbers[position])
            for position in written.exchanged:
                exchanged.append((copy, position))
        for copy, position in exchanged:
            # Tensors of one memory count their versions together. If one of them has
            # another storage, as by ``set_``, the version of the others says nothing.
            device, _ = self._copies[copy]
            writes[device].discard(numbers[position])
            if not self._has_sent_values(copy, position):
                # Nothing is lost: the parameter still has its own storage.
                writes[None].add(numbers[position])
        for of_memory in self._values.values() if is_first else ():
            for parameter in of_memory.written().differing:
                writes[of_memory.device].add(numbers[parameter])
        return writes

    def _has_sent_values(self, copy: int, parameter: int) -> bool:
        """Whether a copy's parameter, in another storage, has the values it was sent.

        A frozen parameter that a forward pass casts loses nothing.
        """
        device, _ = self._copies[copy]
        sent = self._values[device].tensors[parameter]
        tensor = self._watched[copy].tensors[parameter]
        of_user = self._watched[0].tensors[parameter]
        if not of_user.requires_grad:
            sent = sent.to(tensor.dtype)
        return same_bits(tensor, sent)


def _parameters(broadcast: Broadcast, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[number] for number in broadcast.parameters]
