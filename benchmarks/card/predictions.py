"""What the page's figures should be. README.md shows this table."""

from typing import NamedTuple

from benchmarks.card.page import FAILED


class Prediction(NamedTuple):
    """A figure, and the values between which it is predicted."""

    figure: str
    low: float
    high: float

    def verdict(self, value):
        """Names the figure and what it was compared with."""
        span = f"{self.low:g} to {self.high:g}"
        if self.low <= value <= self.high:
            return f"as predicted: {value:.2f} is in {span}"
        if value < self.low:
            return f"below the prediction: {value:.2f}, predicted {span}"
        return f"MISSED: {value:.2f}, predicted {span}"


ENGINE = {
    "ResNet-50": Prediction("engine / plain loop, ResNet-50", 1.0, 1.02),
    "GPT": Prediction("engine / plain loop, GPT", 1.01, 1.04),
}
TWICE = Prediction("[0, 0] / [0]", 1.0, 1.02)
GRAPHS = Prediction("graphs / plain loop", 0.93, 1.0)
HOST = Prediction("host per sub-step over the plain loop, ms", 0.0, 0.3)
HIDDEN = Prediction("part of the copies that is hidden", 0.9, 1.0)
LOOK = Prediction("difference of a look / allowed, without TF32", 0.0, 0.1)
ALL = (*ENGINE.values(), TWICE, GRAPHS, HOST, HIDDEN, LOOK)

# The engine's promise: never slower than nn.DataParallel used for accumulation.
_LIMIT = 1.1


def of_data_parallel(ratio):
    """The verdict on the engine's time divided by that of nn.DataParallel."""
    words = f"{ratio:.2f} of nn.DataParallel's time, {_LIMIT} is allowed"
    return words if ratio <= _LIMIT else f"{FAILED}: {words}"
