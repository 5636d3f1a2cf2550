"""Which devices the replicas live on."""

from __future__ import annotations

import torch

from scatterpar.train.errors import UsageError

DEFAULT_CPU_REPLICAS = 4


def choose_devices(names: str | None, replicas: int | None) -> list[torch.device]:
    """Turn `--devices` and `--replicas` into a device for each replica, the master's first.

    Without names: every accelerator, else four CPU replicas with a memory of their own each
    (`cpu:0` and so on), so that what crosses is copied and counted as between GPUs. With a
    number of replicas: that many, in turn over the accelerators.

    Raises:
        UsageError: a name is no device, or the device is not there.

    >>> choose_devices("cpu:0,cpu:1", replicas=None)
    [device(type='cpu', index=0), device(type='cpu', index=1)]
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if names is not None:
        return [_device(name.strip(), accelerator) for name in names.split(",")]
    if accelerator is None:
        return [torch.device("cpu", i) for i in range(replicas or DEFAULT_CPU_REPLICAS)]
    count = torch.accelerator.device_count()
    return [torch.device(accelerator.type, i % count) for i in range(replicas or count)]


def _device(name: str, accelerator: torch.device | None) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(
            f"--devices: {name!r} is not a device; name them like cuda:0,cuda:1 or cpu:0,cpu:1"
        ) from error
    if device.type == "cpu":
        return device
    count = torch.accelerator.device_count() if accelerator is not None else 0
    here = accelerator is not None and accelerator.type == device.type
    if not here or (device.index or 0) >= count:
        present = f"{count} of type {accelerator.type}" if accelerator is not None else "none"
        raise UsageError(f"--devices: {name} is not there; accelerators on this machine: {present}")
    return torch.device(device.type, device.index or 0)
