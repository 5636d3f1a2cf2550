"""Refuse forward passes that write parameters that replicas share; the error names the parameter.

If a forward pass writes parameters, the result for the whole batch is not defined, and replicas in
one memory may read half-written values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.fingerprints import same_bits
from scatterpar.devices.runtime import HOST
from scatterpar.devices.transfers import to_device, write
from scatterpar.replicas.broadcast import Broadcast, versions

_INSTEAD = (
    "write it after the optimizer's step, or keep what forward passes write in a buffer "
    "(register_buffer)"
)


class ParameterGuard:
    """Detects and refuses writes to the parameters that replicas share.

    ``broadcast`` has the tensors of ``roots`` in each memory, ``copies`` each replica's device and
    tensors. In ``checked_modes`` a forward pass has written no parameter.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        broadcast: Broadcast,
        copies: Sequence[tuple[torch.device, Sequence[Tensor]]],
    ) -> None:
        self._roots, self._broadcast = roots, broadcast
        self.checked_modes: set[Hashable] = set()
        at = broadcast.parameters
        self.memories = {  # the master's first
            device: [broadcast.at(device)[i] for i in at] for device in broadcast.memories
        }
        self._master = broadcast.memories[0]
        self.originals = self.memories[self._master]
        self._watched = [(device, [tensors[i] for i in at]) for device, tensors in copies]
        self._watched.insert(0, (self._master, self.originals))

    def invalidate(self) -> None:
        """A parameter was written: forget which modes are checked and which values were sent."""
        self.checked_modes.clear()
        self._broadcast.invalidate()

    def _name_of(self, position: int) -> str:
        """The parameter's name in the user's modules, or its shape."""
        original = self.originals[position]
        modules = [root for root in self._roots if isinstance(root, nn.Module)]
        named = (item for module in modules for item in module.named_parameters())
        names = (repr(name) for name, tensor in named if tensor is original)
        return next(names, f"of shape {tuple(original.shape)}")

    @contextlib.contextmanager
    def read_only(
        self, mode: Hashable, check_once: Callable[[], object] = lambda: None
    ) -> Iterator[None]:
        """Refuse forward passes in the body that write a parameter, and restore it if possible.

        In the first pass of each ``mode`` the host keeps a copy of the parameters and compares it
        with the values in every memory, because writes through ``.data`` change no version. Later
        passes compare versions and storages only; then a parameter that was written in place in the
        master's memory cannot be restored. ``check_once`` is called after the first pass.

        Raises:
            ValueError: a parameter was written; all have their earlier values.
            RuntimeError: a parameter was written, and its earlier values are lost.
        """
        is_first = mode not in self.checked_modes
        before = [versions(tensors) for _, tensors in self._watched]
        saved = [_on_host(tensor) for tensor in self.originals] if is_first else []
        try:
            yield
        except BaseException as error:
            refusal = self._refusal(before, saved)
            # Torch raises a RuntimeError because of the write.
            if type(error) is RuntimeError and refusal is not None:
                raise refusal from error
            if refusal is not None:
                with contextlib.suppress(Exception):
                    error.add_note(f"before that, {refusal}")
            raise
        refusal = self._refusal(before, saved)
        if refusal is not None:
            raise refusal
        if is_first:
            check_once()
        self.checked_modes.add(mode)

    def _refusal(
        self, before: Sequence[list[int]], saved: Sequence[Tensor]
    ) -> ValueError | RuntimeError | None:
        """Restore written parameters. Returns the error for them, or ``None``."""
        places = self._written(before, saved)
        if not places:
            return None
        self.invalidate()
        lost = {i for i, memory in places if memory == self._master}
        if lost and not saved:
            return RuntimeError(
                f"the forward pass wrote the parameter {self._name_of(min(lost))}, which it had "
                f"not done before: no gradient was added, but the parameter's earlier values are "
                f"lost; {_INSTEAD}"
            )
        with torch.no_grad():
            for i in lost:
                write(self.originals[i], saved[i])
        name = self._name_of(min(i for i, _ in places))
        return ValueError(
            f"the forward pass writes the parameter {name}, which all replicas read: nothing was "
            f"changed; {_INSTEAD}"
        )

    def _written(
        self, before: Sequence[list[int]], saved: Sequence[Tensor]
    ) -> set[tuple[int, torch.device | None]]:
        """The position and device of each written parameter.

        The device is ``None`` if a storage was exchanged for another with other values. One with
        the same values is allowed, as by ``flatten_parameters``, also if the version changes.
        """
        version_changed: set[tuple[int, torch.device | None]] = set()
        exchanged: set[tuple[int, torch.device | None]] = set()
        written: set[tuple[int, torch.device | None]] = set()
        for (device, tensors), earlier in zip(self._watched, before, strict=True):
            now, canonical = versions(tensors), self.memories[device]
            if now == earlier and (
                tensors is canonical or all(map(Tensor.is_set_to, tensors, canonical))
            ):
                continue
            for i, (tensor, storage) in enumerate(zip(tensors, canonical, strict=True)):
                if not tensor.is_set_to(storage):
                    exchanged.add((i, device))
                    written |= set() if same_bits(tensor, storage) else {(i, None)}
                elif now[i] != earlier[i]:
                    version_changed.add((i, device))
        for device, values in self.memories.items():
            for i, before_pass in enumerate(saved):  # on the host: a device has no memory to spare
                if not same_bits(_on_host(values[i]), before_pass):
                    written.add((i, device))
        return written | (version_changed - exchanged)


def _on_host(tensor: Tensor) -> Tensor:
    return to_device(tensor.detach(), HOST, copy=True)
