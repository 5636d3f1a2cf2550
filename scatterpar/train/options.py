"""What the command line says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_DECISIVE = (
    *("data", "image_size", "model", "batch", "epochs", "base_lr", "warmup_epochs"),
    *("momentum", "weight_decay", "seed"),
)


@dataclass(frozen=True)
class Options:
    """The command line's options, one field each."""

    data: str
    image_size: int
    model: str
    batch: int
    accum: int
    micro_batch_size: int | None
    replicas: int | None
    devices: str | None
    epochs: int
    base_lr: float
    warmup_epochs: int
    momentum: float
    weight_decay: float
    seed: int
    out: Path
    checkpoint_every: int
    resume: bool
    check: bool

    def settings(self) -> dict[str, Any]:
        """Return the options that decide the run, which must be the same when it goes on.

        How the work is divided is not among them: that may differ, and changes no more than
        rounding.
        """
        return {name: value for name, value in asdict(self).items() if name in _DECISIVE}
