"""Very large batches on all the GPUs of one machine, in one process, exactly and fast."""

from scatterpar.engine import ScatterOnceParallel
from scatterpar.plan import Plan, Share
from scatterpar.report import StepReport

__all__ = ["Plan", "ScatterOnceParallel", "Share", "StepReport"]

__version__ = "0.1.0"
