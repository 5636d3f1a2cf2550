"""Where the rows of the page run, and the data that they share."""

import functools
import gc
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor


class Setting(NamedTuple):
    """Where rows run, and with what sizes."""

    devices: tuple[torch.device, ...]
    small: bool
    is_real: bool  # GPUs that compute
    under: str  # a module whose `install` prepares a process for null GPUs
    folder: Path  # of the data, and of what the rows print
    scale: float  # of the numbers of steps and rounds; 1.0 for five minutes

    def rounds(self, most: int, least: int = 1) -> int:
        """So many steps or rounds as this run has time for: ``most`` in five minutes."""
        return min(most, max(least, round(most * self.scale)))

    def as_json(self) -> dict[str, Any]:
        """For another process; ``from_json`` reads it."""
        devices = [str(device) for device in self.devices]
        return self._asdict() | {"devices": devices, "folder": str(self.folder)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """The setting of which ``values`` were made."""
        devices = tuple(map(torch.device, values["devices"]))
        return cls(**values | {"devices": devices, "folder": Path(values["folder"])})


class NotRun(Exception):
    """This machine lacks what a row or a part of it needs."""


def draw(folder: Path) -> None:
    """Write the random bytes of which all batches consist."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(256, (2**25,), dtype=torch.uint8, generator=generator)
    torch.save(data, folder / "data.pt")


@functools.cache
def random_bytes(folder: Path) -> Tensor:
    """The bytes that ``draw`` has written."""
    data: Tensor = torch.load(folder / "data.pt")
    return data


def free_memory() -> None:
    """Return the memory of GPUs that this process does not use."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
