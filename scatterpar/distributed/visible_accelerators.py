"""Which of the accelerators that a process sees are its own, if several see them.

::

    rank   sees      has
    0      a b c d   a b        both see the same ones: each has an even part
    1      a b c d   c d
    2      e         e          nobody else sees them, as with CUDA_VISIBLE_DEVICES
    3      f         f          per process, or torchrun --virtual-local-rank
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from scatterpar.devices.device_ids import DeviceLike, even_part, visible_identities
from scatterpar.devices.virtual_devices import HOST
from scatterpar.distributed.collectives import Collectives


def accelerators_of_rank(
    group: dist.ProcessGroup | None, device_ids: Sequence[DeviceLike] | None
) -> Sequence[DeviceLike] | None:
    """``device_ids``, or this rank's accelerators if it is ``None``.

    All ranks of ``group`` call this together. It stays ``None`` if accelerators have no
    names, if the group has no backend for the host, which exchanges them, or if ranks
    see some in common and others not: then the launcher's variables say which part.

    Raises ``ValueError`` if more ranks see the same accelerators than there are.
    """
    if not isinstance(group, dist.ProcessGroup):
        return device_ids
    # Another backend would need the device that is looked for.
    if "cpu:" not in str(dist.get_backend_config(group)):
        return device_ids
    # Nobody asks for accelerators who has named devices: see ``device_ids.py``.
    own = visible_identities() if device_ids is None else []
    collectives = Collectives(group, HOST)
    texts = collectives.texts(" ".join(own), "the other ranks' accelerators")
    if device_ids is not None or not own:
        return device_ids
    sharing: list[int] = []
    for rank, text in enumerate(texts):
        names = text.split()
        if set(names) == set(own):
            sharing.append(rank)
        elif not set(names).isdisjoint(own):
            return None
    return even_part(len(own), sharing.index(collectives.rank), len(sharing))
