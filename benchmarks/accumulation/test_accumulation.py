"""Gradient accumulation, DistributedDataParallel and the engine on the published example."""

from benchmarks.accumulation.example import PUBLISHED, WAYS
from benchmarks.tables import Table

DIGITS = 4
TOLERANCE = 1e-6


def test_the_published_weights(benchmark, publish):
    weights = benchmark.pedantic(train_all, rounds=1)
    plain = weights["plain loop, 2 micro-batches"]
    errors = {who: largest_difference(found, plain) for who, found in weights.items()}
    rows = [["published", *written(PUBLISHED), ""]]
    rows += [[who, *written(found), f"{errors[who]:.1e}"] for who, found in weights.items()]
    columns = ["way", *[f"weight {i}" for i in range(len(PUBLISHED))], "from the plain loop"]
    data = {"published": PUBLISHED, "weights": weights}
    publish("weights", Table(columns, rows), data, draw(weights))
    for who, found in weights.items():
        assert written(found) == written(PUBLISHED), who
        assert errors[who] < TOLERANCE, who


def train_all():
    return {who: train() for who, train in WAYS.items()}


def largest_difference(found, expected):
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def written(weights):
    return [f"{weight:.{DIGITS}f}" for weight in weights]


def draw(weights):
    """Everyone's weights: rings around the published points, the wider the later in the table."""

    def on(axes):
        axes.plot(PUBLISHED, "k.", label="published")
        for size, (who, found) in enumerate(weights.items(), start=2):
            ring = {"marker": "o", "markersize": 4 * size, "markerfacecolor": "none"}
            axes.plot(found, linestyle="none", label=who.replace("`", ""), **ring)
        axes.set_xlabel("weight")
        axes.set_ylabel("value after two updates")
        axes.margins(0.1)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), labelspacing=1.5)

    return on
