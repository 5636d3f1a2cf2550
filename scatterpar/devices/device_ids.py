"""Devices by the names that users and launchers give them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from scatterpar.errors import warn

DeviceLike = int | str | torch.device
_MOST_NAMED = 16  # accelerators of one machine, in a text


def resolve(device_ids: Sequence[DeviceLike] | None) -> tuple[torch.device, ...]:
    """Turn ``device_ids`` into devices.

    ``None`` means all accelerators, or one CPU replica on a machine without any. In one
    of several processes of a launcher such as ``torchrun --nproc-per-node 2`` it means
    this process's part of them, by the launcher's variables.

    >>> resolve(["cpu:0", "cpu:1"])
    (device(type='cpu', index=0), device(type='cpu', index=1))
    """
    if device_ids is None:
        device_ids = _all_devices()
    # A string is a sequence, too: of letters.
    is_single = isinstance(device_ids, (str, int, torch.device))
    if is_single or not isinstance(device_ids, Sequence):
        raise TypeError(
            "device_ids must be a list with one entry per replica, got "
            f"{device_ids!r}; {_lists_for(device_ids)}"
        )
    if not device_ids:
        raise ValueError(
            "device_ids is empty; pass at least one device, or None for all of them"
        )
    return tuple(map(_resolve_one, device_ids))


def _lists_for(value: object) -> str:
    """The lists that a value may stand for, as a remedy."""
    if type(value) is not int or not 1 < value <= _MOST_NAMED:
        return f"for one replica pass [{value!r}]"
    # A number is a count in torchrun, and an ordinal in torch.device.
    first = list(range(value))
    return f"for the first {value} accelerators pass {first}, for one of them [{value}]"


def _all_devices() -> Sequence[DeviceLike]:
    if _accelerator() is None:
        return ["cpu"]
    return _part_of_process(torch.accelerator.device_count())


def _accelerator() -> torch.device | None:
    """The kind of accelerator that is available here.

    The question initialises the driver, and afterwards a forked child cannot use CUDA.
    So nobody asks who has named devices of the CPU alone.
    """
    return torch.accelerator.current_accelerator(check_available=True)


def _part_of_process(count: int) -> range:
    """The numbers of this process's accelerators, of the ``count`` that are visible.

    Each process that a launcher started on this machine has an even part, in order.
    """
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if processes < 2 or "LOCAL_RANK" not in os.environ:
        return range(count)
    return even_part(count, int(os.environ["LOCAL_RANK"]), processes)


def even_part(count: int, number: int, processes: int) -> range:
    """The part of ``count`` accelerators that one of several processes has, in order.

    Raises ``ValueError`` if there are fewer accelerators than processes.
    """
    if count < processes:
        raise ValueError(
            f"device_ids: {processes} processes run on this machine, and {count} "
            "accelerators are visible here, so that two processes would have the same "
            "one; start fewer processes, or pass device_ids=. If "
            "CUDA_VISIBLE_DEVICES gives each process accelerators of its own, pass "
            "process_group=: the processes then check that no two share one"
        )
    part = range(count * number // processes, count * (number + 1) // processes)
    if count % processes:
        warn(
            f"device_ids: {count} accelerators do not divide evenly among the "
            f"{processes} processes of this machine. Process {number} takes "
            f"{part.start} to {part.stop - 1}, and in each step all wait for the "
            "process with the most rows per accelerator; start as many processes as "
            f"divide {count} without remainder, or give each process rows in "
            "proportion to its number of accelerators"
        )
    return part


def visible_identities() -> list[str]:
    """The names of all accelerators that this process sees; none if one has no name."""
    accelerator = _accelerator()
    names: list[str] = []
    if accelerator is None:
        return names
    for number in range(torch.accelerator.device_count()):
        name = identity_of_accelerator(torch.device(accelerator.type, number))
        if name is None:
            return []
        names.append(name)
    return names


def identity_of_accelerator(device: torch.device) -> str | None:
    """A name for the accelerator that no other one in the world has.

    ``None`` for the host, and for backends that name none.
    """
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device.type)
    properties = getattr(module, "get_device_properties", None)
    if properties is None:
        return None
    uuid = getattr(properties(device), "uuid", None)
    if uuid is None:
        return None
    # A process sees one part of a GPU (MIG) at most, and only by this variable. The
    # driver may tell the GPU's number, which other parts have, too.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{uuid}/{visible}" if visible.startswith("MIG-") else str(uuid)


def _resolve_one(entry: DeviceLike) -> torch.device:
    # A bool is an int in Python, and no ordinal.
    if isinstance(entry, bool) or not isinstance(entry, (int, str, torch.device)):
        raise TypeError(
            f"device_ids: expected an int, a string or a torch.device, got {entry!r}"
        )
    if isinstance(entry, int):
        accelerator = _accelerator()
        if accelerator is None:
            raise ValueError(
                f"device_ids: {entry} is the ordinal of an accelerator, and none is "
                'visible here; for CPU replicas pass strings, such as ["cpu"] * 2 or '
                '["cpu:0", "cpu:1"]'
            )
        entry = torch.device(accelerator.type, entry)
    try:
        device = torch.device(entry)
    except RuntimeError as error:
        raise ValueError(f"device_ids: {entry!r} is not a device: {error}") from error
    if device.type == "cpu":
        return device
    _require_visible(device, _accelerator())
    # A name without a number, such as "cuda", means the current device.
    has_number = device.index is not None
    index = device.index if has_number else torch.accelerator.current_device_index()
    return torch.device(device.type, index)


def _require_visible(device: torch.device, accelerator: torch.device | None) -> None:
    kind = "" if accelerator is None else accelerator.type
    count = torch.accelerator.device_count()
    if device.type != kind or (device.index or 0) >= count:
        visible = f"{count} {kind} devices" if kind else "no accelerator"
        raise ValueError(
            f"device_ids: {device} is not here (visible: {visible}); pass visible "
            "devices"
        )


def parse_devices(words: str | Sequence[str]) -> list[str | int]:
    """The entries of a command's ``--devices``, separated by commas or spaces.

    >>> parse_devices(["cuda:0,cuda:1", "2"])
    ['cuda:0', 'cuda:1', 2]
    """
    text = words if isinstance(words, str) else " ".join(words)
    # Both separators, and any number of them.
    names = text.replace(",", " ").split()
    return [int(name) if name.isdecimal() else name for name in names]
