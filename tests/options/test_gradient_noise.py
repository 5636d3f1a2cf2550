"""The gradient's noise scale, from the replicas' gradients (McCandlish et al. 2018,
A.1).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from harness.models import Of
from harness.oracle import build, randint, randn
from harness.rank_processes import run_on_ranks
from torch import nn

from scatterpar import GradientNoise, NoiseScale, ScatterOnceParallel

pytestmark = pytest.mark.draws

ROWS, IGNORED = 23, -100
INPUTS, TARGETS = randn(ROWS, 6), randint(3, ROWS)


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def gradient_of(loss, parameters):
    """In one vector."""
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(loss, parameters)]
    ).double()


def by_hand(model, pieces, criterion, counts, rows):
    """The formula as the design states it, from plain gradients of each
    replica's rows.
    """
    parts = [part for part in (model, criterion) if isinstance(part, nn.Module)]
    parameters = [p for part in parts for p in part.parameters()]
    means = [gradient_of(criterion(model(x), y), parameters) for x, y in pieces]
    terms, n = sum(counts), len(counts)
    whole = sum(c * g for c, g in zip(counts, means, strict=True)) / terms
    spread = sum(c * g.dot(g) for c, g in zip(counts, means, strict=True))
    variance = ((spread - terms * whole.dot(whole)) / (n - 1)).item()
    return whole.dot(whole).item() - variance / terms, variance * rows / terms


def step(model, inputs, targets, criterion, options=None, **call):
    options = {"accum": 2, "measure_noise": True, **(options or {})}
    with ScatterOnceParallel(
        model, device_ids=["cpu:0", "cpu:1", "cpu:0"], **options
    ) as engine:
        engine.forward_backward(inputs, targets, criterion, **call)
        return engine.last_step


def scaled():
    """A criterion whose own parameter belongs to the gradient."""
    factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    return Of(
        lambda m, outputs, targets: CE()(m.factor * outputs, targets), factor=factor
    )


CE = nn.CrossEntropyLoss
SCALED = {
    "options": {"accumulate_dtype": torch.float64},
    "scaler": torch.amp.GradScaler("cpu"),
}
WEIGHTS = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
SMOOTHED = CE(WEIGHTS, label_smoothing=0.1)


# the model, the criterion, the criterion of the formula, ignored labels, options
CASES = {
    "rows": (mlp, CE(), CE(), 0, {}),
    "ignored labels are no terms": (mlp, CE(), CE(), 5, {}),
    "a sum is taken per row": (mlp, CE(reduction="sum"), CE(), 0, {}),
    "the criterion's own parameters": (mlp, own := scaled(), own, 0, {}),
    "a scaler and a wide sum": (mlp, CE(), CE(), 0, SCALED),
}


@pytest.mark.parametrize("shares", [None, [1, 4, 2]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_noise_equals_the_formula(shares, case):
    """A gradient that is there already does not count."""
    make, criterion, mean, ignored, call = CASES[case]
    model, targets = build(make), TARGETS.clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    targets[ROWS - ignored :] = IGNORED
    call = call | {"options": {"shares": shares, **call.get("options", {})}}
    report = step(model, INPUTS, targets, criterion, **call)
    sizes = [share.rows for share in report.plan.shares]
    pieces = list(zip(INPUTS.split(sizes), targets.split(sizes), strict=True))
    counts = [(y != IGNORED).sum().item() for _, y in pieces]
    expected = by_hand(model, pieces, mean, counts, ROWS)
    assert (report.noise.signal, report.noise.noise) == pytest.approx(
        expected, rel=1e-9
    )
    scale = expected[1] / expected[0] if expected[0] > 0 else math.inf
    assert report.noise.scale == pytest.approx(scale, rel=1e-9)


@pytest.mark.parametrize(
    "case", ["one row", "overflow", "all ignored", "one loss of all rows"]
)
def test_step_without_comparison_has_nan(case):
    inputs, targets = INPUTS.clone(), TARGETS.clone()
    if case == "one row":
        inputs, targets = inputs[:1], targets[:1]
    elif case == "overflow":
        inputs[3] = math.inf
    elif case == "all ignored":
        targets[:] = IGNORED
    is_one = case == "one loss of all rows"
    noise = step(build(mlp), inputs, targets, CE(), whole_batch=is_one).noise
    assert all(map(math.isnan, (noise.signal, noise.noise, noise.scale)))


def _ranks(group):
    rows = slice(0, 9) if group.rank() == 0 else slice(9, ROWS)
    with ScatterOnceParallel(
        build(mlp), process_group=group, measure_noise=True
    ) as engine:
        engine.forward_backward(INPUTS[rows], TARGETS[rows], CE())
        return engine.last_step.noise.signal, engine.last_step.noise.noise


def test_ranks_count_as_replicas():
    pieces = list(zip(INPUTS.split([9, 14]), TARGETS.split([9, 14]), strict=True))
    first, second = run_on_ranks(2, _ranks)
    assert (
        first
        == second
        == pytest.approx(by_hand(build(mlp), pieces, CE(), [9, 14], ROWS))
    )


def report_of(signal, noise):
    return SimpleNamespace(noise=GradientNoise(signal, noise))


def test_average_skips_nan_and_is_restored():
    average, other = NoiseScale(decay=0.5), NoiseScale()
    assert math.isnan(average.scale)
    average.update(report_of(1.0, 8.0))
    average.update(report_of(math.nan, math.nan))
    assert average.scale == 8.0
    other.load_state_dict(average.state_dict())
    for one in (average, other):
        # averages, with decay 0.5: 0.25 * 1 + 0.5 * 3, 0.75 * 8
        one.update(report_of(3.0, 8.0))
        assert one.scale == pytest.approx((0.25 * 8 + 0.5 * 8) / (0.25 * 1 + 0.5 * 3))
    assert other.state_dict() == average.state_dict()


def test_unmeasured_step_refused():
    report = step(build(mlp), INPUTS, TARGETS, CE(), {"measure_noise": False})
    assert report.noise is None
    with pytest.raises(ValueError, match="with measure_noise=True"):
        NoiseScale().update(report)


@pytest.mark.parametrize(
    ("signal", "noise", "scale"),
    [
        (2.0, 8.0, 4.0),
        (-1.0, 8.0, math.inf),
        (0.0, 8.0, math.inf),
        (0.0, 0.0, math.nan),
    ],
)
def test_scale_equals_average_of_one_step(signal, noise, scale):
    """Noise over a negative signal was a negative number of rows."""
    one, average = GradientNoise(signal, noise), NoiseScale(0)
    average.load_state_dict({"decay": 0.0, "signal": signal, "noise": noise})
    assert one.scale == pytest.approx(scale, nan_ok=True)
    assert average.scale == pytest.approx(scale, nan_ok=True)


def test_micro_batch_without_terms():
    """A smoothed label of a class without weight has a loss, and is no term."""
    model = mlp().double()
    inputs = randn(24, 6)
    targets = torch.tensor(
        [1, 1, 2, 1, 2, 1, 0, 0, 0, 0, 0, 0, *[1, 1, 0, 0, 0, 0] * 2]
    )
    pieces = [(inputs[:12], targets[:12]), (inputs[12:], targets[12:])]
    counts = [WEIGHTS[labels].sum().item() for _, labels in pieces]
    expected = by_hand(model, pieces, SMOOTHED, counts, 24)
    with ScatterOnceParallel(model, 2, ["cpu"] * 2, measure_noise=True) as engine:
        engine.forward_backward(inputs, targets, SMOOTHED)
        noise = engine.last_step.noise
    assert (noise.signal, noise.noise) == pytest.approx(expected, rel=1e-8)
