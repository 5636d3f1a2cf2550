"""What the command line says."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scatterpar.train.opening import Reading
from scatterpar.train.transforms import Augmentation

LARGE_BATCH = 4096
_DECISIVE = (
    *("data", "image_size", "augment", "smallest_crop", "erase", "mixup", "cutmix", "skip_broken"),
    *("model", "batch", "epochs", "base_lr", "warmup_epochs", "drop_at", "optimizer"),
    *("optimizer_options", "momentum", "weight_decay", "label_smoothing", "clip", "ema"),
    *("autocast", "seed"),
)


@dataclass(frozen=True)
class Options:
    """The command line's options, one field each."""

    data: str
    data_root: Path
    download: bool
    image_size: int | None
    augment: str | None
    smallest_crop: float
    erase: float
    mixup: float
    cutmix: float
    workers: int | None
    skip_broken: bool
    model: str
    init: Path | None
    zero_init_residual: bool
    batch: int | Literal["auto"]
    accum: int
    micro_batch_size: int | None
    replicas: int | None
    devices: str | None
    epochs: int
    base_lr: float
    warmup_epochs: int
    drop_at: tuple[int, ...]
    optimizer: str
    optimizer_options: dict[str, Any]
    momentum: float
    weight_decay: float
    label_smoothing: float
    clip: float | None
    ema: float | None
    shares: tuple[float, ...] | Literal["auto"] | None
    measure_noise: bool
    compile: bool
    autocast: str | None
    channels_last: bool
    seed: int
    eval_every: int
    out: Path
    checkpoint_every: int
    resume: bool
    check: bool

    def settings(self) -> dict[str, Any]:
        """Return the options that decide the run, which must be the same when it goes on.

        How the work is divided is not among them: that may differ, and changes no more than
        rounding.
        """
        return {name: value for name, value in self.record().items() if name in _DECISIVE}

    def record(self) -> dict[str, Any]:
        """Return all options as values that JSON has."""
        values = asdict(self)
        return {
            name: str(value) if isinstance(value, Path) else value for name, value in values.items()
        }

    @property
    def tested_together(self) -> int:
        """How many images are tested at once."""
        return LARGE_BATCH if self.batch == "auto" else self.batch

    @property
    def reading(self) -> Reading:
        """How pictures in files are read."""
        varied = self.augment is not None or max(self.erase, self.mixup, self.cutmix) > 0
        augmentation = Augmentation(
            self.augment or "crop", self.smallest_crop, self.erase, self.mixup, self.cutmix
        )
        return Reading(
            self.image_size,
            augmentation if varied or self.smallest_crop != Augmentation.smallest_crop else None,
            self.seed,
            self.data_root,
            self.download,
        )
