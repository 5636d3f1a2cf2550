"""The values of buffers after a step: those of replica 0, written in
place if possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from scatterpar.devices.coalescing import copy_each, is_unexpanded
from scatterpar.devices.fingerprints import same_bits

Buffers = MutableMapping[str, "Tensor | None"]
BufferValue = tuple[Buffers, str, "Tensor | None"]  # where it is, its name, its value

_KIND = attrgetter("shape", "dtype", "layout")
RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def values_after(
    modules: Sequence[nn.Module],
    copies: Sequence[nn.Module],
    copy_of: Callable[[Any], Any],
) -> Iterator[tuple[int, str, Tensor | None]]:
    """Yield (module's number, name, value in the copy) for each buffer.

    ``copy_of`` returns the copy of a tensor before the forward pass. Raises
    ``ValueError`` if a forward pass registered or deleted buffers.
    """
    yielded: set[int] = set()  # one tensor may be a buffer under several names
    for m, (module, copy) in enumerate(zip(modules, copies, strict=True)):
        if not module._buffers and not copy._buffers:
            continue
        names = module._buffers.keys() ^ copy._buffers.keys()
        names |= module._non_persistent_buffers_set ^ copy._non_persistent_buffers_set
        if names:
            raise ValueError(
                "the forward pass registers or deletes buffers "
                f"({', '.join(sorted(names))}), on "
                "each replica separately: nothing was changed; register them in "
                "__init__, or call "
                f"the module once on one micro-batch before the first step"
            )
        for name, value in copy._buffers.items():
            before = module._buffers[name]
            if value is None or value is not copy_of(before):
                yield m, name, value
            elif id(before) not in yielded:
                yielded.add(id(before))
                yield m, name, value


def buffer_writer(buffers: Iterable[BufferValue]) -> Callable[[], None]:
    """Returns a function that writes the buffers, in place if possible; it allocates
    nothing.

    Buffers that cannot be written in place are replaced if they have changed.
    """
    # also what was made in inference mode
    can_write = torch.is_inference_mode_enabled()
    targets, values = dict[int, Tensor](), dict[int, Tensor]()
    replacements: list[BufferValue] = []
    for place, name, value in buffers:
        target = place.get(name)
        if value is None or target is None or _KIND(target) != _KIND(value):
            if value is not target:
                replacements.append(
                    (place, name, value if value is None else value.detach())
                )
        # One tensor under two names that got two values.
        elif values.get(id(target), value) is not value:
            replacements.append((place, name, value.detach()))
        elif (can_write or not target.is_inference()) and is_unexpanded(target):
            targets[id(target)], values[id(target)] = target, value
        elif not same_bits(target, value):
            replacements.append((place, name, value.detach().clone()))

    def write() -> None:
        with torch.no_grad():
            copy_each([*targets.values()], [*values.values()])
        for place, name, value in replacements:
            place[name] = value

    return write
