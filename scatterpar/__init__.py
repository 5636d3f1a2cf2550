"""Very large batches on all the GPUs of one machine, in one process,
exactly and fast.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from scatterpar.version import __version__ as __version__

if TYPE_CHECKING:  # ``as``: type checkers take the names as exported
    from scatterpar.batch.markers import Replicated as Replicated
    from scatterpar.batch.markers import Rows as Rows
    from scatterpar.checkup.doctor import doctor as doctor
    from scatterpar.engine import ScatterOnceParallel as ScatterOnceParallel
    from scatterpar.pair.pair import DataParallelCriterion as DataParallelCriterion
    from scatterpar.pair.pair import DataParallelModel as DataParallelModel
    from scatterpar.pair.pair import gather as gather
    from scatterpar.plan import Plan as Plan
    from scatterpar.plan import Share as Share
    from scatterpar.recipe import NoiseScale as NoiseScale
    from scatterpar.recipe import gradual_warmup as gradual_warmup
    from scatterpar.recipe import linear_scaled_lr as linear_scaled_lr
    from scatterpar.recipe import weight_decay_groups as weight_decay_groups
    from scatterpar.recipe import zero_init_residual as zero_init_residual
    from scatterpar.report import GradientNoise as GradientNoise
    from scatterpar.report import StepReport as StepReport
    from scatterpar.sharded import ShardedOptimizer as ShardedOptimizer
    from scatterpar.step.loss_weights import count_labels as count_labels

# A name is imported when it is first used, so that each capability can be deleted with
# its file and the other names still work.
_DEFINED_IN = {
    "batch.markers": "Replicated Rows",
    "checkup.doctor": "doctor",
    "engine": "ScatterOnceParallel",
    "pair.pair": "DataParallelCriterion DataParallelModel gather",
    "plan": "Plan Share",
    "recipe": "NoiseScale gradual_warmup linear_scaled_lr weight_decay_groups "
    "zero_init_residual",
    "report": "GradientNoise StepReport",
    "sharded": "ShardedOptimizer",
    "step.loss_weights": "count_labels",
}
_MODULES = {
    name: module for module, names in _DEFINED_IN.items() for name in names.split()
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        if importlib.util.find_spec(f"{__name__}.{name}"):
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
