"""Check that copies between devices arrive intact."""

from __future__ import annotations

import functools
from itertools import permutations

import torch

from scatterpar.devices.copies import VIA_HOST, to_device
from scatterpar.devices.transfers import Transfers
from scatterpar.devices.virtual_devices import physical
from scatterpar.errors import warn
from scatterpar.log import logger

# The end of messages, which the doctor leaves out of its own page.
TO_THE_DOCTOR = "; to find the reason, run: python -m scatterpar doctor"
_BYTES = 2**20  # of which a copy is checked
# Torch uses one thread for this size, as a forked child must.
_BYTES_IN_THE_HOST = 2**14


@functools.cache  # once per set of devices
def check_links(device_ids: tuple[torch.device, ...]) -> None:
    """Check once whether copies between these devices arrive intact; they are not
    counted.

    Copies between two GPUs bypass the host. With an IOMMU, PCIe's access control (ACS)
    or a faulty driver they may arrive corrupted without any error
    (https://github.com/pytorch/pytorch/issues/84803,
    https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1257). Later copies from
    that device to the other one then go through host memory, and a warning says so.
    Raises ``RuntimeError`` if bytes change on the way through host memory, too.
    """
    with torch.inference_mode(False), torch.no_grad():
        for source, target in permutations(dict.fromkeys(device_ids), 2):
            _check_link(source, target)


def _check_link(source: torch.device, target: torch.device) -> None:
    link = physical(source), physical(target)
    is_within_host = all(device.type == "cpu" for device in link)
    size = _BYTES_IN_THE_HOST if is_within_host else _BYTES
    # Copies are checked as they are, not around the link.
    VIA_HOST.discard(link)
    if _arrives(source, target, size):
        logger.info(
            "a copy of %d bytes from %s to %s arrived intact", size, source, target
        )
        return
    VIA_HOST.add(link)
    problem = f"a copy of {size} bytes from {source} to {target} arrived corrupted"
    if not _arrives(source, target, size):
        VIA_HOST.discard(link)
        raise RuntimeError(
            f"{problem}, also through the host's memory; do not trust any result of "
            f"this machine{TO_THE_DOCTOR}"
        )
    warn(
        f"{problem}: copies from {source} to {target} go through host memory from now "
        f"on. They are slower, and exact{TO_THE_DOCTOR}"
    )


def _arrives(source: torch.device, target: torch.device, size: int) -> bool:
    """Whether ``copy_into`` delivers pseudo-random bytes.

    ``copy`` is assumed to do the same.
    """
    sent = (torch.arange(size, device="cpu") * 0x9E3779B1 >> 13).to(torch.uint8)
    # Other bytes at first, so that a copy that does nothing is noticed.
    arrived = to_device(~sent, target)
    Transfers().copy_into(arrived, to_device(sent, source), "replicate")
    return torch.equal(arrived, to_device(sent, target))
