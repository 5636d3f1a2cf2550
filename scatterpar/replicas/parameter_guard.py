"""Refuse forward passes that write parameters that replicas share; the error names the
parameter.

If a forward pass writes parameters, the result for the whole batch is not defined, and
replicas in one memory may read half-written values. Values that were overwritten in the
user's module are lost: a copy of all parameters would cost more than forward passes
that write them are worth.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from scatterpar.devices.fingerprints import Fingerprints, same_bits
from scatterpar.errors import add_note, restore_after
from scatterpar.replicas.broadcast import Broadcast, versions
from scatterpar.replicas.checks import parameters_of


class ParameterGuard:
    """Detects and refuses writes to the parameters that replicas share.

    ``broadcast`` has the parameters in each memory, ``copies`` each replica's device
    and tensors. In ``checked_modes`` a forward pass has written no parameter.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        copies: Iterable[tuple[torch.device, Sequence[Tensor]]],
    ) -> None:
        self._broadcast, at = broadcast, broadcast.parameters
        self.checked_modes: set[Hashable] = set()
        self._memories = {
            device: [broadcast.at(device)[i] for i in at]
            for device in broadcast.memories
        }
        self._master, self._originals = next(iter(self._memories.items()))
        of_replicas = [(device, [tensors[i] for i in at]) for device, tensors in copies]
        self._watched = [(self._master, self._originals), *of_replicas]

    def invalidate(self) -> None:
        """A parameter was written: forget which modes are checked and which values were
        sent.
        """
        self.checked_modes.clear()
        self._broadcast.invalidate()

    @contextlib.contextmanager
    def read_only(
        self, mode: Hashable, check_once: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Raise ``RuntimeError`` if a forward pass in the body writes a parameter.

        Versions and storages are compared in every pass. In the first pass of each
        ``mode`` the fingerprints of the parameters in every memory are compared, too,
        because writes through ``.data`` change no version. ``check_once`` is called
        after the first pass.
        """
        is_first = mode not in self.checked_modes
        values = self._fingerprints() if is_first else {}
        before = [versions(tensors) for _, tensors in self._watched]
        try:
            yield
        except BaseException as error:
            refusals: list[RuntimeError] = []
            restore_after(
                error, lambda: refusals.extend(self._refusals(before, values))
            )
            for refusal in refusals:
                if type(error) is RuntimeError:  # torch raises it because of the write
                    raise refusal from error
                add_note(error, f"before that, {refusal}")
            raise
        for refusal in self._refusals(before, values):
            raise refusal
        if is_first:
            check_once()
        self.checked_modes.add(mode)

    def _fingerprints(self) -> dict[torch.device, Fingerprints]:
        """Fingerprints of the parameters in each memory."""
        with torch.inference_mode(False), torch.no_grad():
            return {
                device: Fingerprints(dict(enumerate(tensors)), device)
                for device, tensors in self._memories.items()
            }

    def _refusals(
        self,
        earlier: Sequence[list[int]],
        fingerprints: Mapping[torch.device, Fingerprints],
    ) -> Iterator[RuntimeError]:
        """Yield an error if parameters were written since then."""
        places = self._written(earlier, fingerprints)
        if not places:
            return
        self.invalidate()
        lost = {i for i, memory in places if memory == self._master}
        first, *others = sorted(lost or {i for i, _ in places})
        original = self._originals[first]
        named = parameters_of(*self._broadcast.contents.roots)
        names = (repr(name) for name, tensor in named if tensor is original)
        name = next(names, f"of shape {tuple(original.shape)}")
        if others:
            name += f" (and {len(others)} more)"
        outcome = "nothing was changed"
        if lost:
            outcome = (
                "no gradient was added, but the parameter's earlier values are lost"
            )
        yield RuntimeError(
            f"the forward pass writes the parameter {name}, which all replicas read: "
            f"{outcome}; "
            "write it after the optimizer's step, or keep what forward passes write "
            "in a buffer "
            f"(register_buffer)"
        )

    def _written(
        self,
        earlier: Sequence[list[int]],
        fingerprints: Mapping[torch.device, Fingerprints],
    ) -> set[tuple[int, torch.device | None]]:
        """The position and device of each written parameter.

        The device is ``None`` if a storage was exchanged for another with other values.
        One with the same values is allowed, as by ``flatten_parameters``, also if the
        version changes. So is one with the values in another dtype, for a parameter
        that is not trained.
        """
        written: set[tuple[int, torch.device | None]] = set()
        version_changed, exchanged = set(), set()
        for (device, tensors), before in zip(self._watched, earlier, strict=True):
            now, canonical = versions(tensors), self._memories[device]
            is_in_place = tensors is canonical or all(
                map(Tensor.is_set_to, tensors, canonical)
            )
            if is_in_place and now == before:
                continue
            for i, (tensor, storage) in enumerate(zip(tensors, canonical, strict=True)):
                if not tensor.is_set_to(storage):
                    exchanged.add((i, device))
                    if not self._originals[i].requires_grad:
                        storage = storage.to(tensor.dtype)
                    if not same_bits(tensor, storage):
                        written.add((i, None))
                elif now[i] != before[i]:
                    version_changed.add((i, device))
        for device, new in self._fingerprints().items() if fingerprints else ():
            written |= {(i, device) for i in new.differing_from(fingerprints[device])}
        return written | (version_changed - exchanged)
