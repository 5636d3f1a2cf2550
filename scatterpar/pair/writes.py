"""Parameters of the pair's module that a forward pass writes: as one device has them, or told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from scatterpar.devices import bits
from scatterpar.devices.verbs import physical
from scatterpar.pair.crossing import PassingReplica
from scatterpar.replicas.writes import FirstWrite, Written, renormalised

__all__ = ["Writers"]


class Writers:
    """Which parameters of a module its forward passes write.

    The first pass in each mode shows it: values are kept, put back where a pass turns out to
    write them, and the pass is taken again, with copies for every replica.

    Attributes:
        found: the parameters that the last pass wrote, with what one device would have in them.
    """

    def __init__(self) -> None:
        self.found: list[tuple[Tensor, Tensor]] = []
        self._known: list[Tensor] = []
        self._trusted: set[bool] = set()

    def known(self, module: nn.Module) -> set[int]:
        """The ``id`` of each parameter that every replica needs for itself."""
        held = {id(parameter) for parameter in module.parameters()}
        self._known = [parameter for parameter in self._known if id(parameter) in held]
        return {id(t) for t in [*self._known, *renormalised(list(module.modules()))]}

    @contextlib.contextmanager
    def watching(
        self,
        module: nn.Module,
        replicas: Sequence[PassingReplica],
        devices: Sequence[torch.device],
    ) -> Iterator[None]:
        """Leave the module's parameters as they are, whatever the body's pass does to copies.

        Raises:
            FirstWrite: it wrote parameters that the replicas share.
            RuntimeError: likewise, where such passes did not before.
            ValueError: replicas wrote different values to the same elements.
        """
        shared = {i: t for i, t in replicas[0].parameters().items() if i not in self.known(module)}
        originals = {id(t): t for t in module.parameters() if id(t) in shared}
        kept: dict[torch.device, Mapping[int, Tensor]] = {}
        if module.training not in self._trusted:
            for device, replica in zip(devices, replicas, strict=True):
                if device not in kept:
                    copies = replica.parameters()
                    kept[device] = {i: copies[i].detach().clone() for i in originals}
        try:
            yield
        except RuntimeError as error:  # perhaps torch's, because of the writing
            if self._put_back(originals, replicas, devices, kept) and kept:
                raise FirstWrite from error
            raise
        except BaseException:
            self._put_back(originals, replicas, devices, kept)
            raise
        written = self._put_back(originals, replicas, devices, kept)
        if written and kept:
            raise FirstWrite
        if written:
            names = [name for name, t in module.named_parameters() if id(t) in written]
            raise RuntimeError(
                f"the forward pass wrote the parameter {names[0]!r}, which it had not done "
                f"before: its earlier values may be lost; the next call gives each replica a "
                f"copy of it"
            )
        self._trusted.add(module.training)
        self.found = _merged(module, replicas, self.known(module), devices[0])

    def _put_back(
        self,
        originals: Mapping[int, Tensor],
        replicas: Sequence[PassingReplica],
        devices: Sequence[torch.device],
        kept: Mapping[torch.device, Mapping[int, Tensor]],
    ) -> set[int]:
        """Undo what was written to the master's memory; the ``id`` of all that was written."""
        written: set[int] = set()
        for device, replica in zip(devices, replicas, strict=True):
            values = kept.get(device, {})
            written.update(i for i in originals if replica.wrote(i, values.get(i)))
        with torch.no_grad():
            for i, value in kept.get(devices[0], {}).items():
                if bits.changed([originals[i]], [value])[0]:
                    originals[i].copy_(value)
        self._known += [originals[i] for i in written]
        return written


def _merged(
    module: nn.Module,
    replicas: Sequence[PassingReplica],
    known: set[int],
    master: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """What the replicas' passes made of the parameters that each has for itself."""
    merged: list[tuple[Tensor, Tensor]] = []
    for name, parameter in module.named_parameters():
        if id(parameter) not in known:
            continue
        total = Written(name, parameter.detach())
        for replica in replicas:
            copy = replica.parameters()[id(parameter)].detach()
            if copy.shape != parameter.shape or copy.dtype != parameter.dtype:
                raise ValueError(
                    f"the forward pass turned the parameter {name!r} of shape "
                    f"{tuple(parameter.shape)} and {parameter.dtype} into one of shape "
                    f"{tuple(copy.shape)} and {copy.dtype}, which replicas cannot follow"
                )
            value = copy.to(physical(master), copy=True)
            written = bits.differing(value, parameter)
            total.add(value, written if written.any() else None, None)
        if total.written is not None:
            merged.append((parameter, total.value))
    return merged
