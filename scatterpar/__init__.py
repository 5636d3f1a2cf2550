"""Train on very large batches with all the GPUs of one machine, in one process::

    from scatterpar import ScatterOnceParallel

    engine = ScatterOnceParallel(model, accum=16)
    for images, labels in loader:  # 4096 images
        optimizer.zero_grad()
        loss = engine.forward_backward(images, labels, criterion)
        optimizer.step()

You get the gradient of the whole batch, up to rounding. If the losses of parts do not
combine into the loss of the batch, the step raises ``ValueError`` before anything
changes.

``python -m scatterpar doctor`` examines this machine. ``splitcheck`` checks whether any
training loop gets the gradient of the whole batch from a batch in parts.
"""

from scatterpar.batch.markers import Replicated, Rows
from scatterpar.checkup.doctor import doctor
from scatterpar.engine import ScatterOnceParallel
from scatterpar.pair.pair import DataParallelCriterion, DataParallelModel, gather
from scatterpar.plan import Plan, Share
from scatterpar.recipe import (
    gradual_warmup,
    linear_scaled_lr,
    weight_decay_groups,
    zero_init_residual,
)
from scatterpar.report import StepReport
from scatterpar.sharded import ShardedOptimizer
from scatterpar.splitting.check import splitcheck
from scatterpar.splitting.check_report import SplitCheck
from scatterpar.step.loss_weights import count_labels
from scatterpar.verify.gradient_check import GradientCheck
from scatterpar.version import __version__ as __version__

__all__ = [
    "DataParallelCriterion",
    "DataParallelModel",
    "GradientCheck",
    "Plan",
    "Replicated",
    "Rows",
    "ScatterOnceParallel",
    "ShardedOptimizer",
    "Share",
    "SplitCheck",
    "StepReport",
    "count_labels",
    "doctor",
    "gather",
    "gradual_warmup",
    "linear_scaled_lr",
    "splitcheck",
    "weight_decay_groups",
    "zero_init_residual",
]


def __dir__() -> list[str]:
    """The public names, and not the packages that have them."""
    return [*__all__, "__version__"]
