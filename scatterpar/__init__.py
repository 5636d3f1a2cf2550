"""Very large batches on all the GPUs of one machine, in one process, exactly and fast."""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from scatterpar.batch.markers import Replicated, Rows
    from scatterpar.checkup.doctor import doctor
    from scatterpar.engine import ScatterOnceParallel
    from scatterpar.pair.pair import DataParallelCriterion, DataParallelModel, gather
    from scatterpar.plan import Plan, Share
    from scatterpar.recipe import (
        NoiseScale,
        gradual_warmup,
        linear_scaled_lr,
        weight_decay_groups,
        zero_init_residual,
    )
    from scatterpar.report import GradientNoise, StepReport
    from scatterpar.sharded import ShardedOptimizer
    from scatterpar.step.loss_weights import count_labels

__all__ = [
    "DataParallelCriterion",
    "DataParallelModel",
    "GradientNoise",
    "NoiseScale",
    "Plan",
    "Replicated",
    "Rows",
    "ScatterOnceParallel",
    "ShardedOptimizer",
    "Share",
    "StepReport",
    "count_labels",
    "doctor",
    "gather",
    "gradual_warmup",
    "linear_scaled_lr",
    "weight_decay_groups",
    "zero_init_residual",
]

__version__ = "0.3.0"

# A name is imported when it is first used, so that each capability can be deleted with its file
# and the other names still work.
_DEFINED_IN = {
    "scatterpar.batch.markers": ("Replicated", "Rows"),
    "scatterpar.checkup.doctor": ("doctor",),
    "scatterpar.engine": ("ScatterOnceParallel",),
    "scatterpar.pair.pair": ("DataParallelCriterion", "DataParallelModel", "gather"),
    "scatterpar.plan": ("Plan", "Share"),
    "scatterpar.recipe": (
        "NoiseScale",
        "gradual_warmup",
        "linear_scaled_lr",
        "weight_decay_groups",
        "zero_init_residual",
    ),
    "scatterpar.report": ("GradientNoise", "StepReport"),
    "scatterpar.sharded": ("ShardedOptimizer",),
    "scatterpar.step.loss_weights": ("count_labels",),
}
_MODULES = {name: module for module, names in _DEFINED_IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "Trace":
        raise AttributeError("scatterpar.Trace was removed in 0.3.0; engine.trace() yields a trace")
    if name not in _MODULES:
        if importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
