"""The rows of the table, as they are trained, and what Goyal et al. 2017 found for theirs."""

from dataclasses import replace
from typing import Any

from benchmarks.large_batch.training import BASE_BATCH, Recipe

BASELINE = Recipe("256, baseline", BASE_BATCH)
UP_TO_4096 = [
    BASELINE,
    Recipe("4096, rate scaled, gradual warm-up", 4096, warmup=True),
    Recipe("4096, rate scaled, no warm-up", 4096),
    Recipe("4096, rate as at 256", 4096, scaled=False),
]
BEYOND = [
    Recipe("8192, rate scaled, gradual warm-up", 8192, warmup=True),
    Recipe("16384, rate scaled, gradual warm-up", 16384, warmup=True),
]
RECIPES = [*UP_TO_4096, *BEYOND]


def _pair(change: str, **options: Any) -> tuple[Recipe, Recipe]:
    """The baseline and the scaled batch of 4096 with warm-up, both with the same change."""
    baseline, large = UP_TO_4096[:2]
    return (
        replace(baseline, name=f"{baseline.name}, {change}", **options),
        replace(large, name=f"{large.name}, {change}", **options),
    )


VARIATIONS = {
    "10 epochs": _pair("10 epochs", epochs=10),
    "base rate 0.02": _pair("base rate 0.02", base_lr=0.02),
    "base rate 0.1": _pair("base rate 0.1", base_lr=0.1),
}
# arXiv:1706.02677, tables 1 and 2a: top-1 validation error of ResNet-50 on ImageNet at 256 and
# 8192 images, mean and standard deviation of five runs.
PUBLISHED = {
    BASELINE.name: "23.60 ± 0.12",
    "4096, rate as at 256": "41.67 ± 0.10",
    "4096, rate scaled, no warm-up": "24.84 ± 0.37",
    "4096, rate scaled, gradual warm-up": "23.74 ± 0.09",
}
